"""Compiles every GPU kernel for AMD Instinct on any machine: python -m hybrid_jax.kernels.aot, or `make amd`.

For each named shape (kernels/shapes.py) and architecture the launches of forward and backward are recorded, and
each distinct kernel is compiled as jax-triton would compile it on that GPU. What comes out is read from the
binary, printed, and judged: registers or stack that went to memory, more LDS than a compute unit has, a dot
without matrix instructions, or a row of a tile table that no shape compiles is a failure. Exit code: 0 all fit, 1
something failed, 2 wrong use, 130 stopped by Ctrl-C.
"""

import argparse
import contextlib
import dataclasses
import importlib
import importlib.util
import json
import os
import signal
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from hybrid_jax import signals

if __name__ == "__main__":
    signals.AT_ONCE.listen()

from hybrid_jax.command import Parser
from hybrid_jax.errors import UserError
from hybrid_jax.kernels.compiling import Binary, Job, as_job, compile_all, make_cache, one_line
from hybrid_jax.report import aligned

LDS_BYTES = {"gfx942": 65536, "gfx950": 163840}  # of a compute unit, and the most that one workgroup may take
_TABLES = Path(__file__).parent  # <op>/tiles/<arch>.json
_SIMDS, _MAX_WAVES, _REGISTERS = 4, 8, 512  # SIMDs a compute unit; waves and vector registers of each


@dataclasses.dataclass(frozen=True)
class Case:
    """A program whose launches are compiled: fn(*args) is traced with arrays like args, and never run.

    shape_class: the rows of the op's tile tables that it uses; "" for a program without a table.
    """

    op: str
    name: str
    fn: Callable
    args: tuple
    shape_class: str = ""


# -- what is compiled ------------------------------------------------------------------------------------------


def published_cases() -> list[Case]:
    """Forward and backward of every named shape whose operation has a Triton backend."""
    import jax.numpy as jnp

    from hybrid_jax.kernels import shapes

    cases = []
    for shape in shapes.SHAPES.values():
        if "triton" in importlib.import_module(shapes.OPS[shape.op]).BACKENDS:
            module = importlib.import_module(f"{shapes.OPS[shape.op]}.triton")
            rows = module.shape_class(shape.K, jnp.dtype(shape.dtype))
            cases.append(Case(shape.op, shape.name, *shapes.program(shape, "triton"), rows))
    return cases


def collect(cases: Iterable[Case], arches: Sequence[str]) -> tuple[dict[Job, list[str]], list[tuple[str, str]]]:
    """The distinct jobs with the names of the cases that launch each, and the failures as (where, reason): cases
    that cannot be traced or launch nothing, and rows of the tile tables that no case compiles."""
    import jax

    from hybrid_jax.kernels.launch import recording

    jobs: dict[Job, list[str]] = {}
    failures = []
    launched: dict[tuple[str, str], dict[str, list[Any]]] = {}
    broken = set()
    for case in cases:
        for arch in arches:
            by_class = launched.setdefault((case.op, arch), {}) if case.shape_class else {}
            with recording(arch) as launches:
                try:
                    jax.eval_shape(case.fn, *case.args)
                except Exception as error:
                    failures.append((f"{case.op} {case.name} on {arch}", one_line(error)))
                    broken.add((case.op, arch, case.shape_class))
                    continue
            if not launches:
                failures.append((f"{case.op} {case.name} on {arch}", "launches no Triton kernel"))
            by_class.setdefault(case.shape_class, []).extend(launches)
            for launch in launches:
                names = jobs.setdefault(as_job(case.op, launch), [])
                if case.name not in names:
                    names.append(case.name)
    for (op, arch), by_class in launched.items():
        # What a failed case would have launched is not known.
        known = {key: value for key, value in by_class.items() if (op, arch, key) not in broken}
        failures += unused_rows(op, arch, known, [name for *where, name in broken if where == [op, arch]])
    return jobs, failures


def unused_rows(
    op: str, arch: str, launched: Mapping[str, Sequence[Any]], skipped: Sequence[str] = ()
) -> list[tuple[str, str]]:
    """A failure for each row of the tile table of `op` that none of its shape class's launches was compiled with.

    launched: recorded launches by shape class. Tile sizes count at their full value: what narrow arrays made of a
    row says nothing about it. Of equal rows of a kernel (`scan`, `scan_narrow`) one stands for all.
    """
    from hybrid_jax.kernels import launch

    path = _TABLES / op / "tiles" / f"{arch}.json"
    if not path.exists():
        path = path.with_name("default.json")
    where = f"{op} tiles {path.name}"
    found = []
    try:
        for name in json.loads(path.read_text()):
            for row, tile in launch.tiles(op, name, arch).items():
                if name not in skipped and not any(_is_row(x, row, tile) for x in launched.get(name, ())):
                    found.append((where, f"{name}.{row} is compiled by no named shape"))
    except (OSError, ValueError, UserError) as error:
        found.append((where, one_line(error)))
    return found


def _is_row(launch: Any, row: str, tile: Any) -> bool:
    used = launch.tile
    return (
        launch.kernel.fn.__name__ in (row, row.removesuffix("_narrow"))
        and (used.num_warps, used.num_stages) == (tile.num_warps, tile.num_stages)
        and dict(used.options) == dict(tile.options)
        and dict(tile.constants).items() <= dict(launch.constants).items()
    )


# -- judging ---------------------------------------------------------------------------------------------------


def failures(result: Binary | str, arch: str) -> list[str]:
    """Why a compiled kernel may not ship, one line each. SGPR spills go to vector registers and are allowed."""
    if isinstance(result, str):
        return [f"does not compile: {result}"]
    found = []
    if result.vgpr_spills:
        found.append(f"{result.vgpr_spills} vector registers spilled to memory")
    if result.scratch:
        found.append(f"{result.scratch} bytes of scratch memory a lane")
    if result.lds > LDS_BYTES[arch]:
        found.append(f"{result.lds:,} bytes of LDS, {arch} has {LDS_BYTES[arch]:,}")
    if result.slow_dots or (result.dots and not result.mfma):
        found.append(f"{result.slow_dots or result.dots} of {result.dots} dots without matrix instructions")
    return found


def waves(result: Binary, num_warps: int, arch: str) -> float:
    """Waves that fit on a SIMD at once, by registers (8 at most) and by LDS."""
    registers = result.vgpr if not result.agpr else -(-result.vgpr // 4) * 4 + result.agpr
    by_registers = min(_MAX_WAVES, _REGISTERS // max(-(-registers // 8) * 8, 8))
    workgroups = by_registers * _SIMDS // num_warps
    if result.lds:
        workgroups = min(workgroups, LDS_BYTES[arch] // result.lds)
    return workgroups * num_warps / _SIMDS


_HEAD = (
    "kernel, shape", "arch", "warps", "stages", "VGPR", "AGPR", "spilled", "SGPR spills", "scratch", "LDS", "MFMA",
    "waves/SIMD", "seconds", "verdict",
)  # fmt: skip
_LEGEND = "(NAME +2: two more shapes launch the same kernel; scratch: bytes a lane; LDS: bytes a workgroup)"


def _table(jobs: Mapping[Job, list[str]], results: Mapping[Job, Binary | str]) -> list[str]:
    variants: dict[tuple[str, ...], list[Job]] = {}
    for job, names in jobs.items():
        variants.setdefault((job.op, job.kernel, names[0], job.arch), []).append(job)
    rows: list[tuple[str, ...]] = [_HEAD]
    for job, names in jobs.items():
        alike = variants[job.op, job.kernel, names[0], job.arch]
        # Where a program launches a kernel in two ways, what they differ by.
        own = [f"{k}={v}" for k, v in job.constants if not all((k, v) in other.constants for other in alike)]
        what = " ".join([names[0], *own])
        more = f" +{len(names) - 1}" if len(names) > 1 else ""
        row = [f"{job.op}.{job.kernel}, {what}{more}", job.arch, job.num_warps, job.num_stages]
        result = results[job]
        if isinstance(result, str):
            row += ["-"] * 9
        else:
            row += [result.vgpr, result.agpr, result.vgpr_spills, result.sgpr_spills, result.scratch, result.lds]
            row += [result.mfma, f"{waves(result, job.num_warps, job.arch):g}", f"{result.seconds:.1f}"]
        rows.append(tuple(map(str, [*row, "FAILS" if failures(result, job.arch) else "fits"])))
    return [*aligned(rows), _LEGEND]


def run(cases: Iterable[Case], arches: Sequence[str], workers: int, cache: Path | None) -> int:
    """Compiles all launches of `cases`, prints table and failures, and returns the exit code: 0, 1 on failure, or
    130 when Ctrl-C stopped it.

    `cache` (None for none) is the folder in which results are kept by the hash of all they depend on. Raises
    UserError, before anything compiles, if it cannot be used.
    """
    if cache:
        make_cache(cache)
    jobs, reasons = collect(cases, arches)
    results: dict[Job, Binary | str] = {}
    cached = 0
    signals.AT_ONCE.__exit__()  # from here on Ctrl-C has results to tell of
    try:
        with contextlib.closing(compile_all(list(jobs), workers, cache)) as done:
            for job, result, hit in done:
                results[job] = result
                cached += hit
                if not hit:
                    took = "failed" if isinstance(result, str) else f"{result.seconds:.1f} s"
                    what = f"{job.op}.{job.kernel}, {jobs[job][0]}, {job.arch}"
                    print(f"[{len(results)}/{len(jobs)}] {what}: {took}", flush=True)
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # it is ending: another Ctrl-C changes nothing
        then = "the same command goes on from there" if cache else "nothing is kept with --no-cache"
        print(f"stopped at {len(results)}/{len(jobs)}; {then}", file=sys.stderr)
        return 130
    if results:
        print("\n".join(_table(jobs, results)))
    elif not reasons:
        reasons.append(("", "there is no kernel to compile"))
    for job, names in jobs.items():
        what = f"{job.op}.{job.kernel}, {names[0]}, {job.arch} ({_describe(job)})"
        reasons += [(what, reason) for reason in failures(results[job], job.arch)]
    for line in _folded(reasons):
        print(f"FAILS: {line}")
    print(f"{len(results)} kernels for {', '.join(arches)} ({cached} from the cache): {len(reasons)} failures")
    return 1 if reasons else 0


_ALIKE = 3  # failures of one reason that are all shown


def _folded(reasons: Iterable[tuple[str, str]]) -> list[str]:
    """A line for each (where, reason), but one for all of a reason that many share."""
    places: dict[str, list[str]] = {}
    for where, reason in reasons:
        places.setdefault(reason, []).append(where)
    lines = []
    for reason, found in places.items():
        shown = found if len(found) <= _ALIKE else found[:1]
        lines += [f"{where}: {reason}" if where else reason for where in shown]
        if len(shown) < len(found):
            lines[-1] += f" (and {len(found) - 1} more like it)"
    return lines


def _describe(job: Job) -> str:
    sizes = [f"{name}={value}" for name, value in job.constants]
    return ", ".join([*sizes, *(f"{name}={value}" for name, value in job.options)])


def main(arguments: Sequence[str]) -> int:
    """The command; returns the exit code."""
    parser = Parser("kernels.aot", __doc__)
    parser.add_argument("--arch", default=",".join(LDS_BYTES), help="architectures, by comma (default: %(default)s)")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes (default: %(default)s)")
    parser.add_argument("--cache", type=Path, default=Path(".amd_cache"), help="results (default: %(default)s)")
    parser.add_argument("--no-cache", action="store_true", help="compile everything again")
    os.environ["JAX_PLATFORMS"] = "cpu"  # nothing runs; a GPU here may be busy
    try:
        code = _checked(parser.parse_args(arguments))
        sys.stdout.flush()
        return code
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("stopped before anything was compiled", file=sys.stderr)
        return 130
    except BrokenPipeError:  # `| head` has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE


def _checked(options: argparse.Namespace) -> int:
    from hybrid_jax.kernels.launch import interpreting

    arches = list(dict.fromkeys(filter(None, map(str.strip, options.arch.split(",")))))
    if unknown := sorted(set(arches) - LDS_BYTES.keys()):
        raise UserError(f"--arch: {unknown[0]!r} is not one of {', '.join(LDS_BYTES)}")
    if not arches:
        raise UserError(f"--arch: name one of {', '.join(LDS_BYTES)}")
    if options.jobs < 1:
        raise UserError("--jobs must be at least 1")
    if interpreting():
        raise UserError("TRITON_INTERPRET is set, with which Triton compiles nothing; unset it")
    if importlib.util.find_spec("triton") is None:
        raise UserError("triton is not installed (pip install 'hybrid_jax[triton]')")
    return run(published_cases(), arches, options.jobs, None if options.no_cache else options.cache)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

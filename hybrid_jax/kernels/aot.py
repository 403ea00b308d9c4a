"""Compiles every GPU kernel for AMD Instinct on any machine: python -m hybrid_jax.kernels.aot, or `make amd`.

For each named shape (kernels/shapes.py) and architecture the launches of forward and backward are recorded, and
each distinct kernel is compiled as jax-triton would compile it on that GPU. What comes out is read from the
binary, printed, and judged: registers or stack that went to memory, more LDS than a compute unit has, a dot
without matrix instructions, or a row of a tile table that no shape compiles is a failure. Exit code: 0 all fit, 1
something failed, 2 wrong use, 130 stopped by Ctrl-C.
"""

import argparse
import concurrent.futures
import contextlib
import dataclasses
import hashlib
import importlib
import importlib.util
import json
import multiprocessing
import os
import re
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any

from hybrid_jax.errors import UserError
from hybrid_jax.report import aligned

LDS_BYTES = {"gfx942": 65536, "gfx950": 163840}  # of a compute unit, and the most that one workgroup may take
WAVE = 64
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


@dataclasses.dataclass(frozen=True)
class Job:
    """One compilation, in words that another process understands. `key` names its result in the cache."""

    op: str
    module: str
    kernel: str
    pointers: tuple[str, ...]
    constants: tuple[tuple[str, Any], ...]
    num_warps: int
    num_stages: int
    options: tuple[tuple[str, int], ...]
    arch: str
    key: str


@dataclasses.dataclass(frozen=True)
class Binary:
    """What a compiled kernel needs. vgpr and agpr are architectural and accumulation registers of a lane; scratch
    is in bytes a lane, lds in bytes a workgroup; slow_dots are dots that got no matrix instruction."""

    vgpr: int
    agpr: int
    vgpr_spills: int
    sgpr_spills: int
    scratch: int
    lds: int
    dots: int
    slow_dots: int
    mfma: int
    seconds: float


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
                    failures.append((f"{case.op} {case.name} on {arch}", _one_line(error)))
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
        found.append((where, _one_line(error)))
    return found


def _is_row(launch: Any, row: str, tile: Any) -> bool:
    used = launch.tile
    return (
        launch.kernel.fn.__name__ in (row, row.removesuffix("_narrow"))
        and (used.num_warps, used.num_stages) == (tile.num_warps, tile.num_stages)
        and dict(used.options) == dict(tile.options)
        and dict(tile.constants).items() <= dict(launch.constants).items()
    )


def as_job(op: str, launch: Any) -> Job:
    """The compilation that a recorded launch (kernels.launch.Launch) needs."""
    import triton
    from triton._C.libtriton import get_cache_invalidating_env_vars

    function, tile = launch.kernel.fn, launch.tile
    fields = dict(
        op=op,
        module=function.__module__,
        kernel=function.__name__,
        pointers=launch.pointers,
        constants=launch.constants,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        options=tile.options,
        arch=launch.arch,
    )
    # cache_key: the source of the kernel, of the functions it calls and of the globals it reads.
    source = (launch.kernel.cache_key, Path(__file__).read_text(), triton.__version__)
    text = repr((source, sorted(fields.items()), sorted(get_cache_invalidating_env_vars().items())))
    return Job(**fields, key=hashlib.sha256(text.encode()).hexdigest())


# -- compiling -------------------------------------------------------------------------------------------------


def build(job: Job) -> Any:
    """Triton's compiled kernel, as jax-triton would build it on that GPU; needs neither the GPU nor ROCm."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from hybrid_jax.kernels.launch import FP_FUSION

    kernel = getattr(importlib.import_module(job.module), job.kernel)
    signature = {name: f"*{kind}" for name, kind in zip(kernel.arg_names, job.pointers, strict=False)}
    signature |= {name: "constexpr" for name, _ in job.constants}
    # jax-triton takes every array to be aligned to 16 bytes, and makes no promise about its size.
    aligned_16 = {(i,): [["tt.divisibility", 16]] for i in range(len(job.pointers))}
    options = dict(num_warps=job.num_warps, num_stages=job.num_stages, num_ctas=1, debug=False)
    options |= {"enable_fp_fusion": FP_FUSION, **dict(job.options)}
    source = ASTSource(kernel, signature, dict(job.constants), aligned_16)
    return triton.compile(source, target=GPUTarget("hip", job.arch, WAVE), options=options)


def read(asm: Mapping[str, str], lds: int, seconds: float) -> Binary:
    """Reads a Binary from the compiler's outputs "ttgir" and "amdgcn". Raises ValueError if a field is not there."""

    def field(name: str) -> int:
        found = re.findall(rf"\.{name}:\s+(\d+)\s*$", asm["amdgcn"], re.MULTILINE)
        if len(found) != 1:
            raise ValueError(f"the assembly has {len(found)} fields .{name}")
        return int(found[0])

    dots = re.findall(r"= tt\.dot(?:_scaled)? .*-> tensor<[^#]*#(\w+)", asm["ttgir"])
    if len(dots) != asm["ttgir"].count(" tt.dot"):
        raise ValueError("the ttgir has dots of unknown layout")
    agpr = field("agpr_count")
    return Binary(
        vgpr=field("vgpr_count") - agpr,
        agpr=agpr,
        vgpr_spills=field("vgpr_spill_count"),
        sgpr_spills=field("sgpr_spill_count"),
        scratch=field("private_segment_fixed_size"),
        lds=lds,
        dots=len(dots),
        slow_dots=sum(not layout.startswith("mma") for layout in dots),
        mfma=len(re.findall(r"^\s+v_s?mfmac?_", asm["amdgcn"], re.MULTILINE)),
        seconds=seconds,
    )


def compile_all(
    jobs: Sequence[Job], workers: int, cache: Path | None
) -> Generator[tuple[Job, Binary | str, bool], None, None]:
    """(job, its binary or why there is none, whether it came from the cache) in the order they are done.

    `cache` is a folder that exists. Closing the iterator, or an exception in it, stops the compilers.
    """
    todo = []
    for job in jobs:
        if cache and (kept := _kept(cache / f"{job.key}.json")):
            yield job, kept, True
        else:
            todo.append(job)
    with contextlib.closing(_in_processes(todo, workers)) as done:
        for job, result in done:
            if cache and isinstance(result, Binary):
                _keep(cache / f"{job.key}.json", result)
            yield job, result, False


def _kept(path: Path) -> Binary | None:
    """What the cache has; None for nothing and for what no Binary can be read from."""
    try:
        fields = json.loads(path.read_text())
        found = Binary(**fields)
    except (OSError, ValueError, TypeError):
        return None
    counts = {name: value for name, value in fields.items() if name != "seconds"}
    good = all(type(x) is int and x >= 0 for x in counts.values()) and type(found.seconds) in (int, float)
    return found if good else None


def _keep(path: Path, result: Binary) -> None:
    part = path.with_suffix(f".{os.getpid()}.part")
    try:
        part.write_text(json.dumps(dataclasses.asdict(result)))
        part.replace(path)
    except OSError as error:
        raise _bad_cache(path.parent, error) from None
    finally:
        with contextlib.suppress(OSError):
            part.unlink(missing_ok=True)


def _make_cache(folder: Path) -> None:
    """Raises UserError if results cannot be kept in `folder`, which it makes."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise _bad_cache(folder, error) from None


def _bad_cache(folder: Path, error: OSError) -> UserError:
    why = "not a folder" if isinstance(error, FileExistsError | NotADirectoryError) else error.strerror or str(error)
    return UserError(f"--cache {folder}: results cannot be kept there ({why}); name another folder or use --no-cache")


def _in_processes(jobs: list[Job], workers: int) -> Generator[tuple[Job, Binary | str], None, None]:
    left = dict.fromkeys(jobs)
    with tempfile.TemporaryDirectory() as folder:
        with contextlib.closing(_pool(list(left), workers, folder)) as done:
            for job, result in done:
                if result is not None:
                    del left[job]
                    yield job, result
        # A compiler that crashes takes its pool with it: each of the rest gets a process of its own.
        for job in left:
            with contextlib.closing(_pool([job], 1, folder)) as done:
                for _, result in done:
                    yield job, result or "the compiler crashed"


def _pool(jobs: list[Job], workers: int, folder: str) -> Generator[tuple[Job, Binary | str | None], None, None]:
    if not jobs:
        return
    others = multiprocessing.active_children()
    spawn = multiprocessing.get_context("spawn")
    pool = concurrent.futures.ProcessPoolExecutor(workers, spawn, _start, (folder,))
    try:
        # Ctrl-C reaches every process of the terminal: the workers start with it held back, this process decides.
        with _no_interrupt():
            futures = {pool.submit(_attempt, job): job for job in jobs}
        for future in concurrent.futures.as_completed(futures):
            try:
                yield futures[future], future.result()
            except BrokenProcessPool:
                yield futures[future], None
    except BaseException:
        with _no_interrupt():
            pool.shutdown(wait=False, cancel_futures=True)
            _end([process for process in multiprocessing.active_children() if process not in others])
        raise
    pool.shutdown()


def _end(processes: Sequence[Any]) -> None:
    for process in processes:
        process.terminate()
    deadline = time.monotonic() + 1
    for process in processes:
        process.join(max(0, deadline - time.monotonic()))
        if process.exitcode is None:
            process.kill()


@contextlib.contextmanager
def _no_interrupt() -> Iterator[None]:
    """Holds Ctrl-C back until it ends; processes that start within never see it."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _start(folder: str) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.environ["TRITON_CACHE_DIR"] = folder  # the results here are all that is kept
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _attempt(job: Job) -> Binary | str:
    start = time.perf_counter()
    try:
        compiled = build(job)
        return read(compiled.asm, compiled.metadata.shared, time.perf_counter() - start)
    except Exception as error:
        return _one_line(error)


def _one_line(error: BaseException) -> str:
    while error.__cause__ is not None:
        error = error.__cause__
    text = " ".join(str(getattr(error, "error_message", None) or error).split())
    text = text if len(text) < 400 else text[:200] + " ... " + text[-200:]
    return text if isinstance(error, UserError) else f"{type(error).__name__}: {text}"


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
        _make_cache(cache)
    jobs, reasons = collect(cases, arches)
    results: dict[Job, Binary | str] = {}
    cached = 0
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
    parser = argparse.ArgumentParser("python -m hybrid_jax.kernels.aot", description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--arch", default=",".join(LDS_BYTES), help="architectures, by comma (default: %(default)s)")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes (default: %(default)s)")
    parser.add_argument("--cache", type=Path, default=Path(".amd_cache"), help="results (default: %(default)s)")
    parser.add_argument("--no-cache", action="store_true", help="compile everything again")
    options = parser.parse_args(arguments)
    os.environ["JAX_PLATFORMS"] = "cpu"  # nothing runs; a GPU here may be busy
    try:
        code = _checked(options)
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

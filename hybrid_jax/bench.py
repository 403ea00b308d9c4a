"""Times the sequence operations on this machine: python -m hybrid_jax.bench [--ops gdn] [--shapes gdn_300m]

Forward and forward + backward of each operation, named shape (kernels/shapes.py) and backend, beside the device's
floor: each pass reads each of its inputs once and writes each of its outputs once, or does the FLOPs that the
mathematics needs, at the memory bandwidth and the matmul speed measured when it starts.
"""

import argparse
import dataclasses
import datetime
import difflib
import importlib
import json
import math
import os
import shlex
import sys
import time
from collections.abc import Callable, Sequence
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hybrid_jax import __version__, platform
from hybrid_jax.errors import UserError
from hybrid_jax.report import aligned

if TYPE_CHECKING:
    from hybrid_jax.kernels.shapes import Shape
    from hybrid_jax.kernels.timing import Peaks

BACKENDS = ("reference", "chunked", "triton")
DEFAULT_SHAPES = ("gdn_300m", "qwen3_next", "long", "kda_300m", "mamba2_300m", "mla_300m", "mla_wide")
PASSES = ("forward", "forward+backward")
COLD_BYTES = 2**28  # the inputs in turn are larger than any cache of a GPU
SLOW_SECONDS = 5.0  # on a CPU a shape that nobody named is left out above this


@dataclasses.dataclass
class Row:
    """One line of the table: a program's times in seconds and its sizes in bytes, or `error`, why it has none."""

    op: str
    shape: str
    sizes: str
    dtype: str
    backend: str
    passes: str
    error: str = ""
    compile_seconds: float = 0.0
    median: float = 0.0
    p10: float = 0.0
    p90: float = 0.0
    samples: int = 0
    launches: int = 0
    host: float = 0.0
    bytes_moved: int = 0
    flops: float = 0.0
    floor: float = 0.0
    floor_by: str = ""
    argument_bytes: int = 0
    output_bytes: int = 0
    temporary_bytes: int = 0
    total_bytes: int = 0

    @property
    def host_bound(self) -> bool:
        """The host needs half the time or more to start it, so the time may be the host's."""
        return self.launches > 1 and self.host > 0.5 * self.median


# What is timed.


def select(ops: Sequence[str], names: Sequence[str], on_cpu: bool) -> list["Shape"]:
    """The shapes to time: those named (NAME, NAME_small, or "all"), else the published models', of `ops` ([] = all).

    On a CPU what is not named is small. Raises UserError for an unknown name or where nothing is left.
    """
    from hybrid_jax.kernels.shapes import OPS, SHAPES

    _known("--ops", ops, tuple(OPS))
    table = SHAPES | {small.name: small for small in (shape.small() for shape in SHAPES.values())}
    everything = list(names) == ["all"]
    if names and not everything:
        _known("--shapes", names, tuple(table))
        chosen = [table[name] for name in dict.fromkeys(names)]
    else:
        chosen = [SHAPES[name] for name in (SHAPES if everything else DEFAULT_SHAPES)]
        if on_cpu:
            # Shapes that differ in size only become the same.
            small = {dataclasses.replace(shape.small(), name=""): shape.small() for shape in reversed(chosen)}
            chosen = list(reversed(small.values()))
    found = [shape for shape in chosen if not ops or shape.op in ops]
    if not found:
        raise UserError(f"--shapes: none of {', '.join(names)} is a shape of {', '.join(ops)} (see --list)")
    return found


def plan(shapes: Sequence["Shape"], backends: Sequence[str], named: bool, say: Callable) -> list[tuple["Shape", str]]:
    """(shape, backend) of every pair of programs to time: the named backends, else all but reference that run here.

    Traces them all, so that one that cannot run raises its UserError before anything is timed. Where the user
    `named` no operation or shape, those without one of the backends are left out, and `say` tells.
    """
    import jax

    from hybrid_jax.kernels import launch
    from hybrid_jax.kernels import shapes as shapes_lib

    _known("--backends", backends, BACKENDS)
    interpreted = "TRITON_INTERPRET=1 would run Triton's interpreter, whose time says nothing"
    reason = interpreted if os.environ.get("TRITON_INTERPRET") == "1" else launch.why_not()
    if "triton" in backends and reason == interpreted:
        raise UserError(f"--backends: {reason}")
    if reason and not backends:
        say(f"triton left out: {reason}")
    wanted = backends or [name for name in BACKENDS[1:] if not (name == "triton" and reason)]
    found, missing = [], set()
    for shape in shapes:
        have = importlib.import_module(shapes_lib.OPS[shape.op]).BACKENDS
        for backend in wanted:
            if backend in have or (backends and named):
                found.append((shape, backend))
            else:
                missing.add((shape.op, backend))
    for op, backend in sorted(missing):
        say(f"{op} has no {backend!r} implementation")
    if not found:
        raise UserError(f"--backends: no operation has a {' or '.join(map(repr, wanted))} implementation")
    for shape, backend in found:
        fn, args = shapes_lib.program(shape, backend)
        jax.eval_shape(fn, *args)
    return found


def _known(option: str, names: Sequence[str], choices: Sequence[str]) -> None:
    for name in names:
        if name not in choices:
            close = difflib.get_close_matches(name, choices, 1)
            hint = f"did you mean {close[0]!r}?" if close else f"choose of {', '.join(choices[:8])} (see --list)"
            raise UserError(f"{option}: unknown name {name!r}; {hint}")


def time_shape(shape: "Shape", backend: str, peaks: "Peaks", repeats: int, named: bool, say: Callable) -> list[Row]:
    """Compiles and times both programs of a shape. What fails has `error`; what is too much for this device and was
    not `named` by the user has no row, and `say` tells why."""
    from hybrid_jax.kernels import shapes as shapes_lib

    rows: list[Row] = []
    kernels = 0
    data: tuple = ()
    for backward in (False, True):
        row = Row(shape.op, shape.name, str(shape), shape.dtype, backend, PASSES[backward])
        what = f"{shape.name} {backend} {row.passes}"
        try:
            before = kernels
            compiled, kernels = _compile(row, shape, backward)
            if reason := fell_back(backend, backward, before, kernels):
                raise UserError(reason)
            if not _fits(row, what, named, say):
                continue
            data = data or (shapes_lib.inputs(shape), shapes_lib.cotangents(shape))
            left_out = _time(row, shape, compiled, data[: 1 + backward], peaks, repeats, named)
            if left_out:
                say(f"{what}: left out, {left_out}")
                continue
            say(f"{what}: compiled in {row.compile_seconds:.1f} s, {milliseconds(row.median)} ms")
        except Exception as error:  # a compiler's, the runtime's (memory), a self-test's: the other rows still count
            kind = "" if isinstance(error, UserError) else f"{type(error).__name__}: "
            row.error = (kind + " ".join(str(error).split()))[:300]
            say(f"{what}: {row.error}")
        rows.append(row)
    return rows


def _compile(row: Row, shape: "Shape", backward: bool) -> tuple[Callable, int]:
    """The compiled program and how many Triton kernels it holds; fills in the row's sizes."""
    import jax

    from hybrid_jax.kernels import shapes as shapes_lib

    start = time.perf_counter()
    fn, abstract = shapes_lib.program(shape, row.backend, backward)
    lowered = jax.jit(fn).lower(*abstract)
    compiled = lowered.compile()
    row.compile_seconds = time.perf_counter() - start
    sizes: Any = compiled.memory_analysis()
    row.argument_bytes, row.output_bytes = sizes.argument_size_in_bytes, sizes.output_size_in_bytes
    row.temporary_bytes = sizes.temp_size_in_bytes
    row.total_bytes = row.argument_bytes + row.output_bytes + row.temporary_bytes
    return compiled, lowered.as_text().count("triton_kernel_call")


def _fits(row: Row, what: str, named: bool, say: Callable) -> bool:
    from hybrid_jax.kernels import timing

    limit = timing.memory_limit()
    if not limit or row.total_bytes <= limit:
        return True
    over = f"it needs {row.total_bytes / 2**30:.1f} GiB of this device's {limit / 2**30:.1f} GiB"
    say(f"{what}: {over}; trying all the same" if named else f"{what}: left out, {over}")
    return named


def _time(row: Row, shape: "Shape", compiled: Callable, args: tuple, peaks: "Peaks", repeats: int, named: bool) -> str:
    """Fills in times and floor. Returns why it did not: on a CPU, a run takes long and the shape was not named."""
    import jax

    from hybrid_jax.kernels import timing

    on_cpu, limit = jax.default_backend() == "cpu", timing.memory_limit()
    start = time.perf_counter()
    jax.block_until_ready(compiled(*args))
    first = time.perf_counter() - start
    if on_cpu and first > SLOW_SECONDS and not named:
        return f"one run takes {first:.0f} s (name it in --shapes to time it)"
    # In a model the inputs were written a while ago: copies in turn keep them out of a GPU's caches.
    copies = 1 if on_cpu else min(16, math.ceil(COLD_BYTES / max(row.argument_bytes, 1)))
    sets = [args, *(jax.tree.map(lambda x: x.copy(), args) for _ in range(copies - 1))]
    # Launches that wait may each hold the memory of their results.
    most = max(1, min(1000, (limit or 2**34) // 4 // max(row.output_bytes + row.temporary_bytes, 1)))
    taken = timing.time_program(lambda i: compiled(*sets[i % copies]), repeats, most)
    row.median, row.p10, row.p90 = taken.percentile(50), taken.percentile(10), taken.percentile(90)
    row.samples, row.launches, row.host = len(taken.seconds), taken.launches, taken.host
    backward, ids = row.passes == PASSES[1], args[0].get("segment_ids")
    row.bytes_moved = timing.traffic(shape, backward)
    row.flops = timing.flops(shape, ids) * (3 if backward else 1)
    row.floor, row.floor_by = timing.floor(shape, backward, peaks, ids)
    return ""


def fell_back(backend: str, backward: bool, kernels_forward: int, kernels: int) -> str:
    """Why a program is not of the backend it was asked for, by the Triton calls it holds; "" if it is."""
    if backend != "triton":
        return f"fell back: {kernels} Triton kernels in a {backend} program" if kernels else ""
    if not kernels:
        return "fell back: no Triton kernel in the program"
    if backward and kernels <= kernels_forward:
        return "fell back: no Triton kernel in the backward pass"
    return ""


# What is shown.


def milliseconds(seconds: float) -> str:
    """Three significant digits, without an exponent."""
    value = seconds * 1e3
    if value <= 0:
        return "0"
    return f"{value:.{max(0, 2 - math.floor(math.log10(value)))}f}"


def table(rows: Sequence[Row]) -> str:
    """The aligned table, and a line for each row that failed."""
    head = ("shape", "sizes", "backend", "pass", "median ms", "10-90% ms", "floor ms", "by", "x floor", "temp MiB")
    lines = [(*head, "compile s")]
    for row in rows:
        if row.error:
            continue
        cells = (
            milliseconds(row.median) + ("*" if row.host_bound else ""),
            f"{milliseconds(row.p10)}-{milliseconds(row.p90)}",
            milliseconds(row.floor),
            row.floor_by,
            f"{row.median / row.floor:.1f}",
            f"{row.temporary_bytes / 2**20:,.1f}",
            f"{row.compile_seconds:.1f}",
        )
        passes = "fwd+bwd" if row.passes == PASSES[1] else "fwd"
        lines.append((row.shape, f"{row.sizes} {_short(row.dtype)}", row.backend, passes, *cells))
    text = aligned(lines) if len(lines) > 1 else []
    if any(row.host_bound for row in rows):
        text.append("* starting it takes the host at least half that time, so it may be the host's time")
    text += [f"FAILED {row.shape} {row.backend} {row.passes}: {row.error}" for row in rows if row.error]
    return "\n".join(text)


def as_json(rows: Sequence[Row], peaks: "Peaks", command: str) -> dict[str, Any]:
    """What --json writes: where and how it was taken, and every row (seconds and bytes)."""
    import jax

    from hybrid_jax.kernels import timing

    devices = jax.devices()
    versions = {"python": sys.version.split()[0], "hybrid_jax": __version__}
    for name in ("jax", "jaxlib", "triton", "jax-triton"):
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": command,
        "device": {
            "kind": devices[0].device_kind,
            "platform": devices[0].platform,
            "runtime": " ".join(devices[0].client.platform_version.split()),
            "count": len(devices),
            "memory_bytes": timing.memory_limit(),
        },
        "versions": versions,
        "units": "seconds, bytes, FLOPs",
        "peaks": dataclasses.asdict(peaks),
        "rows": [dataclasses.asdict(row) for row in rows],
    }


def chart(rows: Sequence[Row], path: Path, title: str) -> None:
    """Draws one panel a shape: a bar for each backend and pass from 0, its 10-90% spread, and the floor across it.

    Raises UserError where matplotlib is missing or there is nothing to draw.
    """
    timed = [row for row in rows if not row.error]
    if not timed:
        raise UserError("--chart: nothing was timed, so there is nothing to draw")
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise UserError("--chart: matplotlib is not installed; run: pip install matplotlib") from None

    groups: dict[str, list[Row]] = {}
    for row in timed:
        groups.setdefault(row.shape, []).append(row)
    heights = [0.75 + 0.28 * len(group) for group in groups.values()]
    figure = Figure(figsize=(9, 0.9 + sum(heights)), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(title, fontsize=10)
    panels = figure.subplots(len(groups), 1, squeeze=False, height_ratios=heights)[:, 0]
    colours = dict(zip(BACKENDS, ("tab:gray", "tab:blue", "tab:orange"), strict=True))
    for axes, group in zip(panels, groups.values(), strict=True):
        for i, row in enumerate(group):
            median, ends = row.median * 1e3, (row.p10 * 1e3, row.p90 * 1e3)
            alpha = 0.55 if row.passes == PASSES[0] else 0.95
            axes.barh(i, median, 0.7, color=colours[row.backend], alpha=alpha)
            axes.plot(ends, (i, i), color="0.25", linewidth=1.2, marker="|", markersize=5)
            axes.plot((row.floor * 1e3,) * 2, (i - 0.45, i + 0.45), color="tab:red", linewidth=1.8)
            note = f"  {milliseconds(row.median)} ms, {row.median / row.floor:.1f} x floor"
            axes.text(max(median, *ends, row.floor * 1e3), i, note, va="center", fontsize=8)
        axes.set_yticks(range(len(group)), [f"{row.backend} {row.passes}" for row in group], fontsize=8)
        axes.invert_yaxis()
        axes.set_xlim(0, 1.35 * max(max(row.p90, row.median, row.floor) for row in group) * 1e3)
        axes.tick_params(axis="x", labelsize=8)
        axes.set_title(f"{group[0].shape}  ({group[0].sizes} {_short(group[0].dtype)})", loc="left", fontsize=9)
        axes.spines[["top", "right"]].set_visible(False)
    panels[-1].set_xlabel("milliseconds (bar: median, whisker: 10th to 90th percentile, red: floor)", fontsize=8)
    scratch = path.with_name(path.name + ".tmp")
    figure.savefig(scratch, format="png")
    os.replace(scratch, path)


def listing() -> str:
    """The named shapes, their sizes, and which are timed by default."""
    from hybrid_jax.kernels.shapes import SHAPES

    rows = [("shape", "op", "sizes", "default")]
    rows += [(s.name, s.op, f"{s} {_short(s.dtype)}", "yes" * (s.name in DEFAULT_SHAPES)) for s in SHAPES.values()]
    return "\n".join([*aligned(rows), "NAME_small is the same with B <= 2, T <= 150 and fewer heads, in float32."])


def _short(dtype: str) -> str:
    return {"bfloat16": "bf16", "float32": "fp32"}.get(dtype, dtype)


def _split(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]


def main(arguments: Sequence[str]) -> int:
    """The command; returns the exit code: 1 if a program failed, 2 for a mistake of the user."""
    parser = argparse.ArgumentParser("python -m hybrid_jax.bench", description=__doc__.split("\n", 1)[0])  # type: ignore[union-attr]
    names: dict[str, Any] = dict(
        type=lambda text: [name for name in text.split(",") if name], default=[], metavar="A,B"
    )
    parser.add_argument("--ops", **names, help="operations: gdn, kda, ssd, attention (default: all)")
    parser.add_argument("--shapes", **names, help="named shapes, or all (default: those of published models)")
    parser.add_argument("--backends", **names, help="reference, chunked, triton (default: the last two where they run)")
    parser.add_argument("--repeats", type=int, default=20, metavar="N", help="samples of each program (default: 20)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every number to this file")
    parser.add_argument("--chart", type=Path, metavar="FILE.png", help="draw a bar chart into this file")
    parser.add_argument("--platform", choices=platform.REQUESTS, default="", help="default: JAX_PLATFORMS, else auto")
    parser.add_argument("--list", action="store_true", help="list the named shapes and stop")
    options = parser.parse_args(arguments)
    try:
        return _run(options, shlex.join(["python", "-m", "hybrid_jax.bench", *arguments]))
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def _run(options: argparse.Namespace, command: str) -> int:
    if options.repeats < 1:
        raise UserError(f"--repeats: {options.repeats} is not positive")
    for name, path in (("--json", options.json), ("--chart", options.chart)):
        if path and not path.absolute().parent.is_dir():
            raise UserError(f"{name}: there is no folder {path.parent}")
    if options.list:
        print(listing())
        return 0
    chosen = platform.prepare(options.platform)
    platform.check_backend(chosen)
    if warning := platform.unused_gpu(chosen, platform.installed_plugins(), platform.visible_hardware()):
        print(f"warning: {warning}", file=sys.stderr)
    import jax

    from hybrid_jax.kernels import timing

    def say(line: str) -> None:
        print(f"bench: {line}", file=sys.stderr, flush=True)

    device = jax.devices()[0]
    on_cpu = device.platform == "cpu"
    named = bool(options.shapes) and options.shapes != ["all"]
    chosen_shapes = select(options.ops, options.shapes, on_cpu)
    programs = plan(chosen_shapes, options.backends, bool(options.ops) or named, say)
    if on_cpu and not named:
        say("on a CPU the shapes are small ones (see --list); one named in --shapes is timed as it is")
    say(f"measuring a copy and a matmul on this {device.device_kind} ({device.platform})")
    peaks = timing.measure_peaks()
    speeds = f"{peaks.bytes_per_second / 1e9:,.0f} GB/s, {peaks.flops_per_second / 1e12:,.1f} TFLOP/s"
    say(f"{speeds}; {2 * len(programs)} programs to time")
    rows = [
        row for shape, backend in programs for row in time_shape(shape, backend, peaks, options.repeats, named, say)
    ]
    title = f"{device.device_kind} ({device.platform}), jax {jax.__version__}, measured {speeds}"
    print(title)
    print(table(rows))
    if options.json:
        options.json.write_text(json.dumps(as_json(rows, peaks, command), indent=1) + "\n", encoding="utf-8")
    if options.chart:
        chart(rows, options.chart, title)
    return 1 if any(row.error for row in rows) or not rows else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

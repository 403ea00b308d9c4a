"""Times the sequence operations on this machine: python -m hybrid_jax.bench [--ops gdn] [--shapes gdn_300m]

Forward and forward + backward of each operation, named shape (kernels/shapes.py) and backend, beside the device's
floor: each pass reads each of its inputs once and writes each of its outputs once, or does the FLOPs that the
mathematics needs, at the memory bandwidth and the matmul speed measured when it starts.
"""

import argparse
import dataclasses
import datetime
import difflib
import importlib.util
import io
import json
import math
import os
import shlex
import signal
import sys
import time
from collections.abc import Callable, Sequence
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hybrid_jax import __version__, output, platform
from hybrid_jax.command import Parser, logged
from hybrid_jax.command import main as answered
from hybrid_jax.errors import UserError
from hybrid_jax.report import aligned
from hybrid_jax.signals import StopRequest

if TYPE_CHECKING:
    from hybrid_jax.kernels.shapes import Shape
    from hybrid_jax.kernels.timing import Peaks, Row

BACKENDS = ("reference", "chunked", "triton")
DEFAULT_SHAPES = ("gdn_300m", "qwen3_next", "long", "kda_300m", "mamba2_300m", "mla_300m", "mla_wide")
PASSES = {"forward": "fwd", "forward+backward": "fwd+bwd"}
CHARTS = (".png", ".svg", ".pdf")


# What is timed.


def select(ops: Sequence[str], names: Sequence[str], on_cpu: bool) -> list["Shape"]:
    """The shapes to time: those named (NAME, NAME_small, or "all"), else the published models', of `ops` ([] = all).

    On a CPU what is not named is small. Raises UserError for an unknown name or a named shape of another operation.
    """
    from hybrid_jax.kernels.shapes import OPS, SHAPES

    _known("--ops", ops, tuple(OPS))
    if "all" in names and len(names) > 1:
        raise UserError("--shapes: all stands for every shape, name it alone")
    table = SHAPES | {small.name: small for small in (shape.small() for shape in SHAPES.values())}
    everything = list(names) == ["all"]
    if names and not everything:
        _known("--shapes", names, tuple(table))
        chosen = [table[name] for name in dict.fromkeys(names)]
        for shape in chosen:
            if ops and shape.op not in ops:
                raise UserError(f"--shapes: {shape.name} is a shape of {shape.op}, not of --ops {','.join(ops)}")
    else:
        chosen = [SHAPES[name] for name in (SHAPES if everything else DEFAULT_SHAPES)]
        if on_cpu:
            # Shapes that differ in size only become the same.
            small = {dataclasses.replace(shape.small(), name=""): shape.small() for shape in reversed(chosen)}
            chosen = list(reversed(small.values()))
    return [shape for shape in chosen if not ops or shape.op in ops]


def plan(shapes: Sequence["Shape"], backends: Sequence[str], named: bool, say: Callable) -> list[tuple["Shape", str]]:
    """(shape, backend) of every pair of programs to time: the named backends, else all but reference that run here.

    Traces them all, so that one that cannot run raises its UserError before anything is timed. Where the user
    `named` no operation or shape, those without one of the backends are left out, and `say` tells.
    """
    import jax

    from hybrid_jax.kernels import launch, timing
    from hybrid_jax.kernels import shapes as shapes_lib

    _known("--backends", backends, BACKENDS)
    interpreted = "TRITON_INTERPRET asks for Triton's interpreter, whose time says nothing (unset TRITON_INTERPRET)"
    reason = interpreted if launch.interpreting() else launch.why_not()
    if reason and not backends:
        say(f"triton left out: {reason}")
    wanted = backends or [name for name in BACKENDS[1:] if not (name == "triton" and reason)]
    found, missing = [], {}
    for shape in shapes:
        have = importlib.import_module(shapes_lib.OPS[shape.op]).BACKENDS
        for backend in wanted:
            if backend in have:
                found.append((shape, backend))
            else:
                missing[shape.op, backend] = f"{shape.op} has no {backend!r} implementation"
                if backends and named:
                    choices = ", ".join(name for name in BACKENDS if name in have)
                    raise UserError(f"--backends: {missing[shape.op, backend]}; choose one of {choices}")
    if reason and any(backend == "triton" for _, backend in found):
        raise UserError(f"--backends: triton cannot run here: {reason}; choose one of reference, chunked")
    for line in missing.values():
        say(line)
    if not found:
        raise UserError(f"--backends: no operation here has a {' or '.join(map(repr, wanted))} implementation")
    for shape, backend in found:
        fn, args = shapes_lib.program(shape, backend)
        try:
            jax.eval_shape(fn, *args)
        except UserError as error:
            raise UserError(f"--backends: {timing.plain(error)} (shape {shape.name})") from None
    return found


def _known(option: str, names: Sequence[str], choices: Sequence[str]) -> None:
    for name in names:
        if name not in choices:
            close = difflib.get_close_matches(name, choices, 1)
            more = ", ... (see --list)" if len(choices) > 8 else ""
            hint = f"did you mean {close[0]!r}?" if close else f"choose one of {', '.join(choices[:8])}{more}"
            raise UserError(f"{option}: unknown name {name!r}; {hint}")


class Stop(StopRequest):
    """A Ctrl-C or SIGTERM as a request to stop after the program being timed; a second one ends at once."""

    def _receive(self, number: int, frame: Any) -> None:
        if not self.signal:
            self.signal = number
            name = signal.Signals(number).name
            os.write(2, f"\nbench: {name}: stopping after this program (again: at once)\n".encode())

    def _received(self, number: int) -> None:
        if self._heard:
            os._exit(128 + number)  # a compiler's threads may hold locks
        self._heard = time.monotonic()


# What is shown.


def milliseconds(seconds: float) -> str:
    """Three significant digits, without an exponent."""
    value = seconds * 1e3
    if value <= 0:
        return "0"
    return f"{value:.{max(0, 2 - math.floor(math.log10(value)))}f}"


def table(rows: Sequence["Row"]) -> str:
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
        lines.append((row.shape, f"{row.sizes} {_short(row.dtype)}", row.backend, PASSES[row.passes], *cells))
    text = aligned(lines) if len(lines) > 1 else []
    if any(row.host_bound for row in rows):
        text.append("* starting it takes the host at least half that time, so it may be the host's time")
    text += [f"FAILED {row.shape} {row.backend} {row.passes}: {row.error}" for row in rows if row.error]
    return "\n".join(text)


def as_json(rows: Sequence["Row"], peaks: "Peaks", command: str, stopped: bool = False) -> dict[str, Any]:
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
        "stopped": stopped,
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


def chart(timed: Sequence["Row"], kind: str, title: str) -> bytes:
    """An image ("png", "svg" or "pdf") of at least one row without error: one panel a shape, a bar for each backend
    and pass from 0, its 10-90% spread, and the floor across it."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

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
            alpha = 0.55 if row.passes == "forward" else 0.95
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
    image = io.BytesIO()
    figure.savefig(image, format=kind)
    return image.getvalue()


def listing(ops: Sequence[str]) -> str:
    """The named shapes of `ops` ([] = all), their sizes, and which are timed by default."""
    from hybrid_jax.kernels.shapes import OPS, SHAPES

    _known("--ops", ops, tuple(OPS))
    shapes = [shape for shape in SHAPES.values() if not ops or shape.op in ops]

    rows = [("shape", "op", "sizes", "default")]
    rows += [(s.name, s.op, f"{s} {_short(s.dtype)}", "yes" * (s.name in DEFAULT_SHAPES)) for s in shapes]
    return "\n".join([*aligned(rows), "NAME_small is the same with B <= 2, T <= 150 and fewer heads, in float32."])


def _short(dtype: str) -> str:
    return {"bfloat16": "bf16", "float32": "fp32"}.get(dtype, dtype)


# The command.


def _names(text: str) -> list[str]:
    names = dict.fromkeys(name.strip() for name in text.split(",") if name.strip())
    if not names:
        raise argparse.ArgumentTypeError(f"{text!r} names nothing")
    return list(names)


def _write(option: str, name: str, content: bytes, say: Callable) -> None:
    try:
        output.write(name, content)
    except OSError as error:
        raise UserError(f"{option}: cannot write {name}: {error.strerror or error}") from None
    say(f"wrote {name}")


def main(arguments: Sequence[str]) -> int:
    """The command; returns the exit code: 1 if a program failed, 2 for a mistake of the user, 130 for Ctrl-C."""
    parser = Parser("bench", __doc__)
    names: dict[str, Any] = dict(type=_names, default=[], metavar="A,B")
    shapes = f"default: {', '.join(DEFAULT_SHAPES)}; on a CPU the small versions of these"
    parser.add_argument("--ops", **names, help="operations: gdn, kda, ssd, attention (default: all)")
    parser.add_argument("--shapes", **names, help=f"named shapes (see --list), or all ({shapes})")
    parser.add_argument("--backends", **names, help="reference, chunked, triton (default: the last two where they run)")
    parser.add_argument("--repeats", type=int, default=20, metavar="N", help="samples of each program (default: 20)")
    parser.add_argument("--json", metavar="FILE", help="write every number to this file")
    parser.add_argument("--chart", metavar="FILE.png", help="draw a bar chart into this file (png, svg or pdf)")
    parser.add_argument("--platform", choices=platform.REQUESTS, default="", help="default: JAX_PLATFORMS, else auto")
    parser.add_argument("--list", action="store_true", help="list the named shapes (of --ops) and stop")

    def run(arguments: Sequence[str]) -> int:
        return _run(parser.parse_args(arguments), shlex.join(["python", "-m", "hybrid_jax.bench", *arguments]))

    return answered(run, arguments, "nothing is written")


def _run(options: argparse.Namespace, command: str) -> int:
    if options.repeats < 1:
        raise UserError(f"--repeats: {options.repeats} is not positive")
    if options.list:
        print(listing(options.ops))
        return 0
    kind = Path(options.chart or "").suffix.lower()
    if options.json is not None:
        output.check("--json", options.json)
    if options.chart is not None:
        output.check("--chart", options.chart)
        if kind not in CHARTS:
            raise UserError(f"--chart: {options.chart} must end in .png, .svg or .pdf")
        if options.json is not None and os.path.realpath(options.json) == os.path.realpath(options.chart):
            raise UserError("--chart: this is the file of --json")
        if importlib.util.find_spec("matplotlib") is None:
            raise UserError("--chart: matplotlib is not installed; run: pip install matplotlib")
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
    with logged(say):  # the first use of a kernel on a device takes its self-test's time
        programs = plan(chosen_shapes, options.backends, bool(options.ops) or named, say)
    if on_cpu and not named:
        say("on a CPU the shapes are small ones (see --list); one named in --shapes is timed as it is")
    say(f"measuring a copy and a matmul on this {device.device_kind} ({device.platform})")
    rows: list[timing.Row] = []
    with Stop().listen() as stop:
        peaks = timing.measure_peaks()
        speeds = f"{peaks.bytes_per_second / 1e9:,.0f} GB/s, {peaks.flops_per_second / 1e12:,.1f} TFLOP/s"
        say(f"{speeds}; {2 * len(programs)} programs to time")
        for shape, backend in programs:
            rows += timing.time_shape(shape, backend, peaks, options.repeats, named, say, stop)
    title = f"{device.device_kind} ({device.platform}), jax {jax.__version__}, measured {speeds}"
    print(title)
    if rows:
        print(table(rows))
    timed = [row for row in rows if not row.error]
    if options.json and (rows or not stop.signal):  # an older file is worth more than nothing
        text = json.dumps(as_json(rows, peaks, command, bool(stop.signal)), indent=1) + "\n"
        _write("--json", options.json, text.encode(), say)
    if options.chart and timed:
        _write("--chart", options.chart, chart(timed, kind[1:], title), say)
    elif options.chart:
        say(f"nothing was timed, so {options.chart} is not written")
    if stop.signal:
        print(f"stopped: {len(timed)} of {2 * len(programs)} programs timed", file=sys.stderr)
        return 128 + stop.signal
    return 1 if len(timed) < len(rows) or not rows else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

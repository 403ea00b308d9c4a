"""How long a program takes on this device, and the least time that the device allows an operation.

Shapes: B batch, T time.
"""

import dataclasses
import math
import re
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from hybrid_jax.errors import UserError
from hybrid_jax.kernels import shapes
from hybrid_jax.kernels.shapes import Shape
from hybrid_jax.report import host_memory
from hybrid_jax.signals import StopRequest

COLD_BYTES = 2**28  # the inputs in turn are larger than any cache of a GPU
PASSES = ("forward", "forward+backward")
SLOW_SECONDS = 5.0  # on a CPU a shape that nobody named is left out above this
BATCH_SECONDS = 0.02  # device time between two synchronisations (GPU)
PROGRAM_SECONDS = 60.0  # no more than 3 samples of one program after this


@dataclasses.dataclass(frozen=True)
class Peaks:
    """What this device was seen to do: bytes per second of a large copy (read and written), bf16 FLOPs per second."""

    bytes_per_second: float
    flops_per_second: float


@dataclasses.dataclass(frozen=True)
class Samples:
    """Seconds a launch, one for each batch of `launches`; `host` is what the host takes to start one."""

    seconds: tuple[float, ...]
    launches: int
    host: float

    def percentile(self, percent: float) -> float:
        return float(np.percentile(self.seconds, percent))


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


def traffic(shape: Shape, backward: bool) -> int:
    """Bytes that cannot be avoided: each pass reads each of its inputs once and writes each of its outputs once.

    In a model the rest of the network runs between forward and backward, so the backward pass reads the inputs
    again; what a pass saves for the other is not counted.
    """

    def size(arrays):
        return sum(math.prod(x.shape) * x.dtype.itemsize for x in arrays.values())

    inputs, results = shapes.arguments(shape), shapes.results(shape)
    gradients = {name: x for name, x in inputs.items() if name != "segment_ids"}
    return size(inputs) + size(results) + (size(inputs) + size(results) + size(gradients) if backward else 0)


def flops(shape: Shape, segment_ids=None) -> float:
    """Forward FLOPs that the mathematics needs, as hybrid_jax.flops counts them; backward is twice that.

    `segment_ids` [B, T] or None: attention counts the pairs inside documents.
    """
    if shape.op != "attention":
        return (4.0 if shape.op == "ssd" else 6.0) * shape.B * shape.T * shape.HV * shape.K * shape.V
    lengths = [shape.T] * shape.B
    if segment_ids is not None:
        lengths = [n for row in np.asarray(segment_ids) for n in np.unique(row, return_counts=True)[1].tolist()]
    pairs = sum(n * (n + 1) / 2 for n in lengths)
    return 2.0 * shape.H * (shape.K + shape.V) * pairs


def floor(shape: Shape, backward: bool, peaks: Peaks, segment_ids=None) -> tuple[float, str]:
    """(seconds, "memory" or "compute") below which no program can be: the sum over the passes of the slower of the
    two. A float32 shape is held against the bf16 matmul all the same: a floor, if a low one."""
    total, memory, compute = 0.0, 0.0, 0.0
    forward = flops(shape, segment_ids)
    once = traffic(shape, False)
    passes = [(once, forward), (traffic(shape, True) - once, 2 * forward)]
    for size, work in passes if backward else passes[:1]:
        times = size / peaks.bytes_per_second, work / peaks.flops_per_second
        memory, compute, total = memory + times[0], compute + times[1], total + max(times)
    return total, "memory" if memory >= compute else "compute"


def memory_limit() -> int:
    """Bytes that a program on this device can use; 0 if unknown."""
    device = jax.devices()[0]
    return host_memory() if device.platform == "cpu" else (device.memory_stats() or {}).get("bytes_limit", 0)


def measure_peaks() -> Peaks:
    """Times a large copy and a large matmul on this device; the fastest sample counts, as this is for a floor."""
    on_cpu = jax.default_backend() == "cpu"
    size = min(2**26 if on_cpu else 2**28, (memory_limit() or 2**34) // 128)  # larger than any cache
    return Peaks(_bandwidth(size), _matmul_speed(1024 if on_cpu else 8192, on_cpu))


def _fastest(launch: Callable[[int], Any]) -> float:
    return min(time_program(launch, 10, most=16).seconds)


def _bandwidth(size: int) -> float:
    """Bytes per second, read and written, of a copy of `size` fp32 numbers, or of negating them in place: a copy's
    fresh pages have to be mapped first, which on a CPU takes longer than copying."""
    held = [jax.random.normal(jax.random.key(0), (size,), jnp.float32)]
    copy = jax.jit(jnp.copy).lower(*held).compile()
    negate = jax.jit(jnp.negative, donate_argnums=0).lower(*held).compile()

    def in_place(i: int):
        held.append(negate(held.pop()))
        return held[0]

    return 2 * 4 * size / min(_fastest(lambda i: copy(held[0])), _fastest(in_place))


def _matmul_speed(n: int, on_cpu: bool) -> float:
    """FLOPs per second of an [n, n] matmul in bf16; on a CPU, where XLA multiplies bf16 as fp32, the faster of both."""
    kinds = (jnp.bfloat16, jnp.float32) if on_cpu else (jnp.bfloat16,)
    seconds = []
    for kind in kinds:
        a, b = (jax.random.normal(key, (n, n), kind) for key in jax.random.split(jax.random.key(1)))
        matmul = jax.jit(jnp.matmul).lower(a, b).compile()
        seconds.append(_fastest(lambda i, matmul=matmul, a=a, b=b: matmul(a, b)))  # type: ignore[misc]
    return 2.0 * n**3 / min(seconds)


def time_compiled(compiled: Callable, args: tuple, argument_bytes: int, result_bytes: int, repeats: int) -> Samples:
    """Times a compiled program on `args` of `argument_bytes`; `result_bytes`: what its run allocates."""
    # In a model the inputs were written a while ago: copies in turn keep them out of a GPU's caches.
    on_cpu = jax.default_backend() == "cpu"
    copies = 1 if on_cpu else min(16, math.ceil(COLD_BYTES / max(argument_bytes, 1)))
    sets = [args, *(jax.tree.map(lambda x: x.copy(), args) for _ in range(copies - 1))]
    # Launches that wait may each hold the memory of their results.
    most = max(1, min(1000, (memory_limit() or 2**34) // 4 // max(result_bytes, 1)))
    return time_program(lambda i: compiled(*sets[i % copies]), repeats, most)


def time_program(launch: Callable[[int], Any], repeats: int, most: int = 1000) -> Samples:
    """Times `launch(i)`, which starts a compiled program for the i-th time and returns all its results, so that
    nothing can be dropped from it. `repeats` samples, fewer (3 at least) of a slow one; `most` launches a sample.

    On a GPU a sample is many asynchronous launches between two synchronisations: kernels queue behind each other
    as in a training step, so neither the host's latency nor the synchronisation is in the time, unless starting a
    program takes longer than running it (`Samples.host` tells). A loop on the device would need every launch to
    depend on the one before, which costs passes over memory that are not the operation's. A CPU may run queued
    programs at the same time, so there each is waited for.
    """

    def batch(launches: int) -> float:
        start = time.perf_counter()
        for i in range(launches):
            out = launch(i)
        jax.block_until_ready(out)
        return (time.perf_counter() - start) / launches

    began = time.perf_counter()
    once = min(batch(1), batch(1))  # the first one also sets things up
    launches = 1
    if jax.default_backend() != "cpu":
        for _ in range(3):  # a lone launch is mostly latency, so estimate again; it also lets the clock rise
            launches = max(1, min(most, math.ceil(BATCH_SECONDS / once)))
            once = batch(launches)
    few = min(launches, 8)  # below the number of programs that the runtime lets wait
    start = time.perf_counter()
    for i in range(few):
        out = launch(i)
    host = (time.perf_counter() - start) / few
    jax.block_until_ready(out)
    seconds: list[float] = []
    while len(seconds) < repeats and (len(seconds) < 3 or time.perf_counter() - began < PROGRAM_SECONDS):
        seconds.append(batch(launches))
    return Samples(tuple(seconds), launches, host)


def time_shape(
    shape: Shape, backend: str, peaks: Peaks, repeats: int, named: bool, say: Callable, stop: StopRequest | None = None
) -> list[Row]:
    """Compiles and times both programs of a shape, as far as `stop` lets it. What fails has `error`; what is too much
    for this device and was not `named` by the user has no row, and `say` tells why."""
    rows: list[Row] = []
    kernels = 0
    data: tuple = ()
    for backward in (False, True):
        if stop and stop.signal:
            break
        row = Row(shape.op, shape.name, str(shape), shape.dtype, backend, PASSES[backward])
        what = f"{shape.name} {backend} {row.passes}"
        try:
            before = kernels
            compiled, kernels = _compile(row, shape, backward)
            if reason := fell_back(backend, backward, before, kernels):
                raise UserError(reason)
            if not _fits(row, what, named, say):
                continue
            data = data or (shapes.inputs(shape), shapes.cotangents(shape))
            left_out = _time(row, shape, compiled, data[: 1 + backward], peaks, repeats, named)
            if left_out:
                say(f"{what}: left out, {left_out}")
                continue
            say(f"{what}: compiled in {row.compile_seconds:.1f} s, {row.median * 1e3:.3g} ms")
        except Exception as error:  # a compiler's, the runtime's (memory), a self-test's: the other rows still count
            if stop and stop.signal:
                break  # Ctrl-C also ends the processes that it compiles in
            text = plain(error) if isinstance(error, UserError) else f"{type(error).__name__}: {error}"
            row.error = " ".join(text.split())[:300]
            say(f"{what}: {row.error}")
        rows.append(row)
    return rows


def _compile(row: Row, shape: Shape, backward: bool) -> tuple[Callable, int]:
    """The compiled program and how many Triton kernels it holds; fills in the row's sizes."""
    start = time.perf_counter()
    fn, abstract = shapes.program(shape, row.backend, backward)
    lowered = jax.jit(fn).lower(*abstract)
    compiled = lowered.compile()
    row.compile_seconds = time.perf_counter() - start
    sizes: Any = compiled.memory_analysis()
    row.argument_bytes, row.output_bytes = sizes.argument_size_in_bytes, sizes.output_size_in_bytes
    row.temporary_bytes = sizes.temp_size_in_bytes
    row.total_bytes = row.argument_bytes + row.output_bytes + row.temporary_bytes
    return compiled, lowered.as_text().count("triton_kernel_call")


def _fits(row: Row, what: str, named: bool, say: Callable) -> bool:
    limit = memory_limit()
    if not limit or row.total_bytes <= limit:
        return True
    over = f"it needs {row.total_bytes / 2**30:.1f} GiB of this device's {limit / 2**30:.1f} GiB"
    say(f"{what}: {over}; trying all the same" if named else f"{what}: left out, {over}")
    return named


def _time(row: Row, shape: Shape, compiled: Callable, args: tuple, peaks: Peaks, repeats: int, named: bool) -> str:
    """Fills in times and floor. Returns why it did not: on a CPU, a run takes long and the shape was not named."""
    start = time.perf_counter()
    jax.block_until_ready(compiled(*args))
    first = time.perf_counter() - start
    if jax.default_backend() == "cpu" and first > SLOW_SECONDS and not named:
        return f"one run takes {first:.0f} s (name it in --shapes to time it)"
    taken = time_compiled(compiled, args, row.argument_bytes, row.output_bytes + row.temporary_bytes, repeats)
    row.median, row.p10, row.p90 = taken.percentile(50), taken.percentile(10), taken.percentile(90)
    row.samples, row.launches, row.host = len(taken.seconds), taken.launches, taken.host
    backward, ids = row.passes == PASSES[1], args[0].get("segment_ids")
    row.bytes_moved = traffic(shape, backward)
    row.flops = flops(shape, ids) * (3 if backward else 1)
    row.floor, row.floor_by = floor(shape, backward, peaks, ids)
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


def plain(error: UserError) -> str:
    """Its message without what only a configuration file has: the key, and "auto"."""
    text = re.sub(r"^config\.kernels\.\w+: ", "", str(error))
    return text.replace("choose auto or chunked", "choose chunked").replace("choose one of auto, ", "choose one of ")

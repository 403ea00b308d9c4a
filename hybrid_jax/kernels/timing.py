"""How long a program takes on this device, and the least time that the device allows an operation.

Shapes: B batch, T time.
"""

import dataclasses
import math
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from hybrid_jax.kernels import shapes
from hybrid_jax.kernels.shapes import Shape
from hybrid_jax.report import host_memory

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

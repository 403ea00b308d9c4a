"""How an operation picks its implementation, and how it is split over the devices of the current mesh.

A named backend runs or raises: nothing falls back in silence. `auto` says once, in the log, what it picked.
"""

import functools
import logging
from collections.abc import Callable, Collection

import jax
from jax.sharding import PartitionSpec

from hybrid_jax.errors import UserError

BACKENDS = ("auto", "reference", "chunked", "triton")
BATCH_AXES = ("data", "fsdp")  # mesh axes over which rows of a batch are split

log = logging.getLogger(__name__)


def resolve(op: str, backend: str, available: Collection[str]) -> str:
    """The backend that runs `op`: `backend` itself, or for "auto" the fastest one in `available`.

    Raises UserError when the name is unknown or `op` has no such implementation.
    """
    if backend not in BACKENDS:
        raise UserError(f"config.kernels.backend: unknown backend {backend!r}, choose one of {', '.join(BACKENDS)}")
    if backend == "auto":
        return _automatic(op, tuple(available))
    if backend not in available:
        choices = ", ".join(("auto", *available))
        raise UserError(f"config.kernels.backend: {op} has no {backend!r} implementation, choose one of {choices}")
    return backend


@functools.cache
def _automatic(op: str, available: tuple[str, ...]) -> str:
    choice = next(name for name in ("triton", "chunked", "reference") if name in available)
    log.info("kernels: %s runs on the %r backend", op, choice)
    return choice


def batch_axes() -> tuple[str, ...]:
    """The axes of the current mesh (see jax.set_mesh) that split a batch over more than one device."""
    mesh = jax.sharding.get_abstract_mesh()
    auto = jax.sharding.AxisType.Auto
    types = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    return tuple(a for a in BATCH_AXES if mesh.shape.get(a, 1) > 1 and types[a] == auto)


def over_batch(fn: Callable) -> Callable:
    """Wraps `fn` in jax.shard_map over the batch axes of the current mesh.

    The wrapped function takes `fn`'s positional arguments; every array's leading axis is the batch B, except in
    the tuple `replicated`, which is passed after them whole. All outputs have the leading axis B. Rows that do
    not divide over the devices (one prompt being continued, say) are computed by each device.
    """

    @functools.wraps(fn)
    def call(*batched, replicated: tuple = ()):
        axes = batch_axes()
        mesh = jax.sharding.get_abstract_mesh()
        parts = 1
        for axis in axes:
            parts *= mesh.shape[axis]
        if parts == 1 or batched[0].shape[0] % parts:
            return fn(*batched, *replicated)
        rows, whole = PartitionSpec(axes), PartitionSpec()
        specs = (rows,) * len(batched) + (whole,) * len(replicated)
        # check_vma rejects custom_vjp rules and scan carries that start from zeros.
        split = jax.shard_map(fn, mesh=mesh, in_specs=specs, out_specs=rows, check_vma=False)
        return split(*batched, *replicated)

    return call

"""How an operation picks its implementation, and how it is split over the devices of the current mesh.

A named backend runs or raises: nothing falls back in silence. The log says once what each operation runs on.
"""

import functools
import logging
from collections.abc import Callable, Collection

import jax
from jax.sharding import PartitionSpec

from hybrid_jax.errors import UserError
from hybrid_jax.kernels import launch

BACKENDS = ("auto", "reference", "chunked", "triton")
BATCH_AXES = ("data", "fsdp")  # mesh axes over which rows of a batch are split

log = logging.getLogger(__name__)


def resolve(op: str, backend: str, available: Collection[str], unfit: str = "") -> str:
    """The backend that runs `op`: `backend` itself, or for "auto" the fastest one in `available` that can.

    unfit: why the Triton kernels cannot take this problem, "" if they can.
    Raises UserError when the name is unknown, `op` has no such implementation, or Triton is named and cannot run.
    """
    key = f"config.kernels.{'attention' if op == 'attention' else 'backend'}"
    if backend not in BACKENDS:
        raise UserError(f"{key}: unknown backend {backend!r}, choose one of {', '.join(('auto', *available))}")
    if backend == "auto":
        reason = _why_not_triton(unfit) if "triton" in available else ""
        able = [name for name in available if not (name == "triton" and reason)]
        backend = next(name for name in ("triton", "chunked", "reference") if name in able)
        _say(op, backend, reason)
        return backend
    if backend not in available:
        choices = ", ".join(("auto", *available))
        raise UserError(f"{key}: {op} has no {backend!r} implementation, choose one of {choices}")
    if backend == "triton" and unfit:
        raise UserError(f"{key}: triton cannot run {op} here: {unfit}; choose auto or chunked")
    check(backend)
    _say(op, backend, "")
    return backend


def check(backend: str) -> None:
    """Raises UserError if `backend` is "triton" and no Triton kernel can run on this machine."""
    if backend == "triton":
        launch.executor()


def _why_not_triton(unfit: str) -> str:
    if reason := unfit or launch.why_not():
        return reason
    return "its interpreter is for tests" if launch.executor() == "interpreter" else ""


@functools.cache
def _say(op: str, backend: str, reason: str) -> None:
    """Once a process for the same words."""
    note = f" (not triton: {reason})" if reason else ""
    if backend == "triton" and launch.executor() == "interpreter":
        note = " in Triton's interpreter: right, and very slow"
    log.info("kernels: %s runs on the %r backend%s", op, backend, note)


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

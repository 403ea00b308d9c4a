"""How an operation picks its implementation, and how it is split over the devices of the current mesh.

A named backend runs or raises: nothing falls back in silence. The log says once what each operation runs on.
"""

import functools
import logging
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
from jax.sharding import PartitionSpec

from hybrid_jax.errors import UserError
from hybrid_jax.kernels import launch

BACKENDS = ("auto", "reference", "chunked", "triton")
BATCH_AXES = ("data", "fsdp")  # mesh axes over which rows of a batch are split
TENSOR_AXIS = "tensor"  # the one over which heads, columns and the vocabulary are
WEIGHT_AXES = ("fsdp", TENSOR_AXIS)  # those over which weights may be

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
        note = " in Triton's interpreter: very slow"
    log.info("kernels: %s runs on the %r backend%s", op, backend, note)


def split_axes(axes: Collection[str]) -> tuple[str, ...]:
    """Those of `axes` that split something over more than one device in the current mesh (see jax.set_mesh), and are
    not split already by a shard_map around."""
    mesh = jax.sharding.get_abstract_mesh()
    free = _free_axes(mesh)
    return tuple(a for a in axes if a in free and mesh.shape[a] > 1)


def _free_axes(mesh) -> set[str]:
    types = zip(mesh.axis_names, mesh.axis_types, strict=True)
    return {axis for axis, kind in types if kind == jax.sharding.AxisType.Auto}


def batch_axes() -> tuple[str, ...]:
    """The axes of the current mesh that split a batch over more than one device."""
    return split_axes(BATCH_AXES)


def splits_weights() -> bool:
    """Whether the current mesh has devices that hold parts of a weight: joined weights would have to be cut anew."""
    return bool(split_axes(WEIGHT_AXES))


def tensor_axis(size: int) -> str | None:
    """The axis of the current mesh over which `size` heads, columns or ids are split, None if they are not."""
    axes = split_axes((TENSOR_AXIS,))
    return axes[0] if axes and size % jax.sharding.get_abstract_mesh().shape[axes[0]] == 0 else None


def constrain(x: jax.Array, layout: str) -> jax.Array:
    """`x` laid out over the current mesh as `layout` says, see `over_devices`; so is its gradient."""
    batch, tensor = batch_axes(), split_axes((TENSOR_AXIS,))
    return jax.lax.with_sharding_constraint(x, _spec(layout, batch, tensor)) if batch or tensor else x


def _spec(layout: str, batch: tuple[str, ...], tensor: tuple[str, ...]) -> PartitionSpec:
    axes = {"B": batch or None, "H": tensor or None, ".": None}
    return PartitionSpec(*(axes[c] for c in layout))


def fitted(spec: PartitionSpec, shape: Sequence[int], sizes: Mapping[str, int]) -> PartitionSpec:
    """`spec` without the mesh axes of `sizes` that are 1, or by which an axis of `shape` does not divide."""

    def axes(entry: Any, size: int) -> Any:
        kept: list[str] = []
        for axis in _axes(entry):
            if sizes.get(axis, 1) > 1 and size % (sizes[axis] * math.prod(sizes[a] for a in kept)) == 0:
                kept.append(axis)
        return tuple(kept) if len(kept) > 1 else kept[0] if kept else None

    return _trimmed(axes(entry, size) for entry, size in zip(spec, shape, strict=False))


def without(spec: PartitionSpec, axis: str) -> PartitionSpec:
    """`spec` where nothing is cut over `axis`."""
    kept = [tuple(a for a in _axes(entry) if a != axis) for entry in spec]
    return _trimmed(axes if len(axes) > 1 else axes[0] if axes else None for axes in kept)


def _axes(entry: Any) -> tuple[str, ...]:
    """The mesh axes of one entry of a PartitionSpec."""
    return (entry,) if isinstance(entry, str) else entry or ()


def _trimmed(entries: Iterable[Any]) -> PartitionSpec:
    found = list(entries)
    while found and found[-1] is None:
        found.pop()
    return PartitionSpec(*found)


class Weight(NamedTuple):
    """How a weight lies on the current mesh, and how it is multiplied with: whole over "fsdp"."""

    stored: PartitionSpec
    used: PartitionSpec

    @staticmethod
    def of(spec: PartitionSpec, shape: Sequence[int], used: PartitionSpec | None = None) -> "Weight | None":
        """Of a weight that lies as `spec` says (sharding.TABLE), None where all devices have the whole of it."""
        mesh = jax.sharding.get_abstract_mesh()
        sizes = {axis: mesh.shape[axis] for axis in split_axes(WEIGHT_AXES)}
        if used is None:
            used = PartitionSpec(*(None if "fsdp" in _axes(entry) else entry for entry in spec))
        found = Weight(fitted(spec, shape, sizes), fitted(used, shape, sizes))
        return found if any(found) else None

    def gathered(self, x: jax.Array) -> jax.Array:
        """`x`, stored, as it is used."""
        # Said of what comes in too: else the partitioner gathers the fp32 values that `x` was rounded from.
        return self._through(jax.lax.with_sharding_constraint(x, self.stored), self.used)

    def scattered(self, gradient: jax.Array) -> jax.Array:
        """The gradient of `gathered`'s result, as the weight is stored."""
        stored = (*self.stored, *(None,) * len(self.used))
        if any(entry and entry != stored[i] for i, entry in enumerate(self.used)):
            # Said of what comes in too: else it is made as it will be stored, out of whole activations.
            gradient = jax.lax.with_sharding_constraint(gradient, self.used)
        return self._through(gradient, self.stored)

    def _through(self, x: jax.Array, spec: PartitionSpec) -> jax.Array:
        if {entry for entry in self.used if entry} - set(self.stored):  # other parts, along another axis
            x = jax.lax.with_sharding_constraint(x, PartitionSpec())
        return jax.lax.with_sharding_constraint(x, spec)

    def of_inputs(self, x: jax.Array) -> jax.Array:
        """`x` [tokens, in], which is multiplied with the weight [in, out], as it lies there."""
        return self._flat(x, 0)

    def of_outputs(self, x: jax.Array) -> jax.Array:
        """The product [tokens, out], or its gradient, as it lies."""
        return self._flat(x, 1)

    def _flat(self, x: jax.Array, axis: int) -> jax.Array:
        # Where it is not said, the way in which one weight's gradient is stored is taken for all products with x.
        entry = self.used[axis] if len(self.used) > axis else None
        return jax.lax.with_sharding_constraint(x, PartitionSpec(batch_axes() or None, entry))


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def gather(x: jax.Array, spec: PartitionSpec, dtype: Any) -> jax.Array:
    """The weight `x` [V, D], which lies as `spec` says, whole over "fsdp": rounded to `dtype`, in its own type. Its
    gradient is added up in that and lies as the weight does."""
    weight = Weight.of(spec, x.shape)
    return x if weight is None else weight.gathered(x.astype(dtype)).astype(x.dtype)


def _gather_forward(x, spec, dtype):
    return gather(x, spec, dtype), None


def _gather_backward(spec, dtype, saved, gradient):
    weight = Weight.of(spec, gradient.shape)
    return (gradient if weight is None else weight.scattered(gradient),)


gather.defvjp(_gather_forward, _gather_backward)


@jax.custom_vjp
def looked_up(x: jax.Array) -> jax.Array:
    """`x` [B, T, D], looked up in a table of which devices on "fsdp" hold columns: its gradient goes there, columns of
    all their rows. Left to itself, the compiler makes it whole on each device where "data" is larger than 1."""
    return x


def _looked_up_backward(_, gradient):
    if not split_axes(("fsdp",)):
        return (gradient,)
    rows = tuple(axis for axis in batch_axes() if axis != "fsdp")
    sizes = dict(jax.sharding.get_abstract_mesh().shape)
    spec = fitted(PartitionSpec(rows or None, None, "fsdp"), gradient.shape, sizes)
    return (jax.lax.with_sharding_constraint(gradient, spec),)


looked_up.defvjp(lambda x: (x, None), _looked_up_backward)


def over_devices(fn: Callable, inputs: Collection[str], outputs: Collection[str]) -> Callable:
    """Wraps `fn` in jax.shard_map over the axes of the current mesh.

    inputs, outputs: a layout for each array, a letter an axis from the left: B is split as the batch is, H as heads (or
    columns, or the vocabulary) are, "." and what is left over are whole. Where rows do not divide over the devices (one
    prompt being continued, say), or heads do not, each device computes them all. None stands for no array.
    """

    @functools.wraps(fn)
    def call(*arrays):
        mesh = jax.sharding.get_abstract_mesh()

        def fitting(letter: str, axes: tuple[str, ...]) -> tuple[str, ...]:
            parts = math.prod(mesh.shape[axis] for axis in axes)
            sizes = (
                x.shape[i]
                for x, layout in zip(arrays, inputs, strict=True)
                if x is not None
                for i, c in enumerate(layout)
                if c == letter
            )
            return axes if all(size % parts == 0 for size in sizes) else ()

        batch, tensor = fitting("B", batch_axes()), fitting("H", split_axes((TENSOR_AXIS,)))
        if not batch and not tensor:
            return fn(*arrays)
        ins = tuple(_spec(layout, batch, tensor) for layout in inputs)
        outs = tuple(_spec(layout, batch, tensor) for layout in outputs)
        # check_vma rejects custom_vjp rules and scan carries that start from zeros.
        split = jax.shard_map(fn, in_specs=ins, out_specs=outs, axis_names=_free_axes(mesh), check_vma=False)
        return split(*arrays)

    return call

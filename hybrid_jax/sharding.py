"""The mesh of a run and ONE table that says how every array of the train state lies on it.

Mesh axes: "data" (copies of everything), "fsdp" (rows of the batch like "data"; parameters, gradients and moments are
cut: ZeRO-3, or with mesh.zero = 1 the moments alone) and "tensor" (heads, columns and the vocabulary). The last axes
are the innermost, neighbouring devices: data x fsdp is hybrid sharding, copies between hosts and cuts inside one.

All are Auto axes: the compiler places what is between, so the state's shardings are given explicitly on the way in AND
out of the step, and gradients are constrained to their parameter's. A sublayer's weights are gathered over "fsdp", in
the compute dtype, where it begins, and again in the backward pass (`gather`); their gradients are added up in fp32.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Mapping, Sequence
from itertools import zip_longest
from typing import TYPE_CHECKING, Any

import jax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from hybrid_jax import config_checks
from hybrid_jax.errors import UserError
from hybrid_jax.kernels import dispatch
from hybrid_jax.layers.context import GATHERED
from hybrid_jax.optimizer import STACKED, path_str

if TYPE_CHECKING:
    from hybrid_jax.config import MeshConfig

PyTree = Any
Table = Sequence[tuple[str, PartitionSpec]]

AXES = ("data", "fsdp", "tensor")

_COLUMNS, _ROWS = PartitionSpec("fsdp", "tensor"), PartitionSpec("tensor", "fsdp")
_WHOLE_HEADS = PartitionSpec(("fsdp", "tensor"), None)  # used whole on each device of "tensor"

# (regex that must match the END of a dotted parameter path, spec of ONE layer's parameter); the first match wins. Axes
# that do not divide are left out, see `fitted`. Moments and gradients have their parameter's path as a suffix, so one
# rule covers all three.
TABLE: Table = (
    (r"embed\.weight|lm_head\.weight", _ROWS),  # by vocabulary
    (r"mlp\.(gate|up)_proj\.weight", _COLUMNS),
    (r"mixer\.(q|k|v|b|a|g|q_b|kv_b|f_b|g_b)_proj\.weight", _COLUMNS),
    (r"mixer\.(q|k|v|g_b)_proj\.bias", PartitionSpec("tensor")),
    (r"(mlp\.down|mixer\.o|mixer\.out)_proj\.weight", _ROWS),
    # Latents, and Mamba2's joined projection, which is cut by heads where it is used.
    (r"mixer\.(q_a_proj|kv_a_proj_with_mqa|f_a_proj|g_a_proj|in_proj)\.weight", _WHOLE_HEADS),
    (r"mixer\.[qkv]_conv1d\.weight", PartitionSpec("tensor", None)),
    (r"mixer\.(A_log|dt_bias|D)", PartitionSpec("tensor")),
    (r"mixer\.conv1d\.(weight|bias)", PartitionSpec()),  # x, B and C joined
    (r".*norm\.weight", PartitionSpec()),
)


def make_mesh(cfg: MeshConfig, devices: Sequence[Any] | None = None) -> Mesh:
    """A mesh over all devices (or `devices`) with the axes AXES; a size of -1 takes what is left.

    Raises UserError when the sizes do not multiply to the number of devices.
    """
    devices = jax.devices() if devices is None else list(devices)
    shape = config_checks.mesh_shape(cfg, len(devices))
    return jax.make_mesh(tuple(shape), AXES, axis_types=(AxisType.Auto,) * len(AXES), devices=devices)


def batch_ways(mesh: Mesh) -> int:
    """Number of parts into which the rows of a batch are split."""
    return math.prod(mesh.shape[axis] for axis in dispatch.BATCH_AXES)


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """Of a step's batch [A, B, T]: accumulation steps and tokens whole, rows split."""
    return NamedSharding(mesh, PartitionSpec(None, dispatch.BATCH_AXES))


def replicated(mesh: Mesh) -> NamedSharding:
    return NamedSharding(mesh, PartitionSpec())


def spec_of(path: str, rank: int, table: Table = TABLE) -> PartitionSpec:
    """The spec of the array with `rank` axes at a dotted path such as "params.layers.0.mixer.A_log"; counters and other
    scalars are whole."""
    if rank == 0:
        return PartitionSpec()
    found = next(((p, s) for p, s in table if re.search(rf"(?:^|\.)(?:{p})$", path)), None)
    if found is None:
        raise UserError(f"sharding: no rule for the parameter {path}; add one to hybrid_jax/sharding.py")
    pattern, spec = found
    stacked = STACKED in path.split(".")
    if not any(spec):
        return PartitionSpec()
    spec = PartitionSpec(None, *spec) if stacked else spec
    if len(spec) > rank:
        raise UserError(f"sharding: the rule {pattern!r} has more axes than {path}, which has {rank - stacked} a layer")
    return spec


def fitted(spec: PartitionSpec, shape: Sequence[int], sizes: Mapping[str, int]) -> PartitionSpec:
    """`spec` without the mesh axes of `sizes` that are 1, or by which an axis of `shape` does not divide."""

    def axes(entry: Any, size: int) -> Any:
        kept: list[str] = []
        for axis in _axes(entry):
            if sizes.get(axis, 1) > 1 and size % (sizes[axis] * math.prod(sizes[a] for a in kept)) == 0:
                kept.append(axis)
        return tuple(kept) if len(kept) > 1 else kept[0] if kept else None

    found = [axes(entry, size) for entry, size in zip(spec, shape, strict=False)]
    while found and found[-1] is None:
        found.pop()
    return PartitionSpec(*found)


def shardings(tree: PyTree, mesh: Mesh, table: Table = TABLE, zero: int = 3) -> PyTree:
    """NamedShardings for a tree of arrays or ShapeDtypeStructs (parameters, moments, a whole train state).

    zero: with 1 the parameters, which are what is under "params", are not cut over "fsdp".
    """
    sizes = dict(mesh.shape)

    def one(path: tuple[Any, ...], x: Any) -> NamedSharding:
        name = path_str(path)
        cut = {**sizes, "fsdp": 1} if zero == 1 and name.split(".")[0] == "params" else sizes
        return NamedSharding(mesh, fitted(spec_of(name, len(x.shape), table), x.shape, cut))

    return jax.tree_util.tree_map_with_path(one, tree)


def gather(params: PyTree, dtype: Any, table: Table = TABLE) -> PyTree:
    """`params`, a tree without stacked ones, each whole over "fsdp" on every device; arrays of two axes rounded to
    `dtype`, but in their own type.

    Their gradients come back in the parameters' own shardings, added up in the parameters' type. Nothing happens where
    the current mesh has no such axis.
    """
    mesh = jax.sharding.get_abstract_mesh()
    sizes = {axis: mesh.shape[axis] for axis in dispatch.split_axes(dispatch.WEIGHT_AXES)}
    if not sizes:
        return params

    def one(path: tuple[Any, ...], x: jax.Array) -> jax.Array:
        spec = spec_of(path_str(path), x.ndim, table)
        here = fitted(spec, x.shape, sizes)
        entries = zip_longest(spec, here)
        whole = PartitionSpec(*(None if "fsdp" in _axes(wanted) else found for wanted, found in entries))
        whole = whole if any(whole) else PartitionSpec()
        if here == whole:
            return x
        return checkpoint_name(_gather(x, here, whole, dtype if x.ndim > 1 else x.dtype), GATHERED)

    return jax.tree_util.tree_map_with_path(one, params)


def _axes(entry: Any) -> tuple[str, ...]:
    return (entry,) if isinstance(entry, str) else entry or ()


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2, 3))
def _gather(x: jax.Array, here: PartitionSpec, whole: PartitionSpec, dtype: Any) -> jax.Array:
    return jax.lax.with_sharding_constraint(x.astype(dtype), whole).astype(x.dtype)


def _gather_forward(x, here, whole, dtype):
    return _gather(x, here, whole, dtype), None


def _gather_backward(here, whole, dtype, saved, gradient):
    return (jax.lax.with_sharding_constraint(gradient, here),)


_gather.defvjp(_gather_forward, _gather_backward)


def abstract(tree: PyTree, shards: PyTree) -> PyTree:
    """ShapeDtypeStructs of `tree` that carry the shardings `shards`."""
    return jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), tree, shards)

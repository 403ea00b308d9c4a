"""The mesh of a run and ONE table that says how every array of the train state lies on it.

Mesh axes: "data" (copies of everything), "fsdp" (rows of the batch like "data"; parameters, gradients and moments are
cut: ZeRO-3, or with mesh.zero = 1 the moments alone) and "tensor" (heads, columns and the vocabulary). The last axes
are the innermost, neighbouring devices: data x fsdp is hybrid sharding, copies between hosts and cuts inside one.

All are Auto axes: the compiler places what is between, so the state's shardings are given explicitly on the way in AND
out of the step, and gradients are constrained to their parameter's. A weight is gathered over "fsdp" where it is
multiplied with, in the compute dtype, and again in the backward pass (layers.linear); gradients are added up in fp32.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import jax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from hybrid_jax import config_checks
from hybrid_jax.errors import UserError
from hybrid_jax.kernels import dispatch
from hybrid_jax.optimizer import STACKED, path_str

if TYPE_CHECKING:
    from hybrid_jax.config import MeshConfig

PyTree = Any
Table = Sequence[tuple[str, PartitionSpec]]

AXES = ("data", "fsdp", "tensor")

_COLUMNS, _ROWS = PartitionSpec("fsdp", "tensor"), PartitionSpec("tensor", "fsdp")
_WHOLE_HEADS = PartitionSpec(("fsdp", "tensor"), None)  # used whole on each device of "tensor"

# (regex that must match the END of a dotted parameter path, spec of ONE layer's parameter); the first match wins. Axes
# that do not divide are left out (dispatch.fitted). Moments and gradients have their parameter's path as a suffix, so
# one rule covers all three.
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


def shardings(tree: PyTree, mesh: Mesh, table: Table = TABLE, zero: int = 3) -> PyTree:
    """NamedShardings for a tree of arrays or ShapeDtypeStructs (parameters, moments, a whole train state).

    zero: with 1 the parameters, which are what is under "params", are not cut over "fsdp".
    """
    sizes = dict(mesh.shape)

    def one(path: tuple[Any, ...], x: Any) -> NamedSharding:
        name = path_str(path)
        cut = {**sizes, "fsdp": 1} if zero == 1 and name.split(".")[0] == "params" else sizes
        return NamedSharding(mesh, dispatch.fitted(spec_of(name, len(x.shape), table), x.shape, cut))

    return jax.tree_util.tree_map_with_path(one, tree)


def abstract(tree: PyTree, shards: PyTree) -> PyTree:
    """ShapeDtypeStructs of `tree` that carry the shardings `shards`."""
    return jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), tree, shards)

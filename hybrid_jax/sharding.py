"""The mesh of a run and ONE table that says how every array of the train state lies on it.

Mesh axes: "data" (copies of the parameters, rows of the batch), "fsdp" (rows of the batch too, parameters to
be split), "tensor" (heads and columns). All are Auto axes: the compiler places what is between, so the
state's shardings are given explicitly on the way in AND out of the step, and gradients are constrained to
their parameter's.
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
from hybrid_jax.kernels.dispatch import BATCH_AXES
from hybrid_jax.optimizer import STACKED, path_str

if TYPE_CHECKING:
    from hybrid_jax.config import MeshConfig

PyTree = Any
Table = Sequence[tuple[str, PartitionSpec]]

AXES = ("data", "fsdp", "tensor")

# (regex that must match the END of a dotted parameter path, spec of ONE layer's parameter); the first match
# wins.
# Moments and gradients have their parameter's path as a suffix, so one rule covers all three.
TABLE: Table = ((r".*", PartitionSpec()),)  # everything whole on every device: data parallelism


def make_mesh(cfg: MeshConfig, devices: Sequence[Any] | None = None) -> Mesh:
    """A mesh over all devices (or `devices`) with the axes AXES; a size of -1 takes what is left.

    Raises UserError when the sizes do not multiply to the number of devices.
    """
    devices = jax.devices() if devices is None else list(devices)
    shape = config_checks.mesh_shape(cfg, len(devices))
    return jax.make_mesh(tuple(shape), AXES, axis_types=(AxisType.Auto,) * len(AXES), devices=devices)


def batch_ways(mesh: Mesh) -> int:
    """Number of parts into which the rows of a batch are split."""
    return math.prod(mesh.shape[axis] for axis in BATCH_AXES)


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """Of a step's batch [A, B, T]: accumulation steps and tokens whole, rows split."""
    return NamedSharding(mesh, PartitionSpec(None, BATCH_AXES))


def replicated(mesh: Mesh) -> NamedSharding:
    return NamedSharding(mesh, PartitionSpec())


def spec_of(path: str, rank: int, table: Table = TABLE) -> PartitionSpec:
    """The spec of the array with `rank` axes at a dotted path such as "params.layers.0.mixer.A_log"."""
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


def shardings(tree: PyTree, mesh: Mesh, table: Table = TABLE) -> PyTree:
    """NamedShardings for a tree of arrays or ShapeDtypeStructs (parameters, moments, a whole train state)."""

    def one(path: tuple[Any, ...], x: Any) -> NamedSharding:
        return NamedSharding(mesh, spec_of(path_str(path), len(x.shape), table))

    return jax.tree_util.tree_map_with_path(one, tree)


def abstract(tree: PyTree, shards: PyTree) -> PyTree:
    """ShapeDtypeStructs of `tree` that carry the shardings `shards`."""
    return jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), tree, shards)

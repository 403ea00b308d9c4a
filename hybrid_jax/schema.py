"""Whether a checkpoint's arrays are those that this version and config need, and what makes older ones so."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np

from hybrid_jax import sharding
from hybrid_jax.errors import UserError
from hybrid_jax.optimizer import leaf_paths

PyTree = Any
Log = Callable[[str], None]

SCHEMA = 1  # raise when the state's tree changes in a way that old checkpoints cannot be read into
# From a state's tree of schema n to one of n + 1, arrays whole on every device; none has been needed yet.
MIGRATIONS: dict[int, Callable[[PyTree], PyTree]] = {}
_LISTED = 50  # arrays that do not fit, named in the log


def mismatches(saved: PyTree, wanted: PyTree) -> list[str]:
    """Where the saved arrays differ from the wanted ones in path, shape or dtype: of a train state the
    parameters only, if they differ, as their moments then do too; shapes first."""

    def arrays(tree: PyTree) -> dict[str, tuple[tuple[int, ...], str]]:
        return {path: (tuple(x.shape), str(np.dtype(x.dtype))) for path, x in leaf_paths(tree)}

    def text(array: tuple[tuple[int, ...], str]) -> str:
        return f"{array[1]}{list(array[0])}"

    have, want = arrays(saved), arrays(wanted)
    lines = [f"{p} is missing" for p in want if p not in have]
    lines += [f"{p} is not in this model" for p in have if p not in want]
    both = [p for p in want if p in have and have[p] != want[p]]
    shapes = [f"{p} is {text(have[p])} but this config needs {text(want[p])}" for p in both]
    lines = shapes + lines
    return [line for line in lines if line.startswith("params.")] or lines


def template(where: Path, meta: dict[str, Any], saved: PyTree, wanted: PyTree, pattern: str, log: Log) -> PyTree:
    """What to read a checkpoint into: `wanted`, or for an older schema the arrays as they are in it, whole on every
    device of `wanted`'s mesh. saved: a tree of things with shape and dtype; wanted: of ShapeDtypeStructs.

    Raises UserError if the checkpoint is of a schema that this version cannot read, or if its arrays are not `wanted`:
    `log` gets a line for each of them.
    """
    check_version(where, meta)
    if version_of(meta) == SCHEMA:
        check_arrays(where, meta, saved, wanted, pattern, log)
        return wanted
    whole = sharding.replicated(jax.tree.leaves(wanted)[0].sharding.mesh)
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=whole), saved)


def check_version(where: Path, meta: dict[str, Any]) -> None:
    """Raises UserError if the checkpoint is of a schema that this version cannot read."""
    found = version_of(meta)
    if found > SCHEMA:
        raise UserError(f"{where}: written by a newer hybrid_jax (schema {found}, this one reads {SCHEMA})")
    if missing := [older for older in range(found, SCHEMA) if older not in MIGRATIONS]:
        writer = meta.get("packages", {}).get("hybrid_jax", "")
        raise UserError(
            f"{where}: written by an older hybrid_jax {writer} (schema {found}; this one reads {SCHEMA} and has no way "
            f"from {missing[0]} to {missing[0] + 1}); go on with the version that wrote it"
        )


def migrate(where: Path, meta: dict[str, Any], state: PyTree, wanted: PyTree, pattern: str, log: Log) -> PyTree:
    """The state, as read into `template`'s tree, as one of this version's with `wanted`'s shardings."""
    found = version_of(meta)
    if found == SCHEMA:
        return state
    for older in range(found, SCHEMA):
        state = MIGRATIONS[older](state)
    check_arrays(where, meta, state, wanted, pattern, log)
    return jax.tree.map(lambda x, w: jax.device_put(x, w.sharding), state, wanted)


def version_of(meta: dict[str, Any]) -> int:
    """The schema of a checkpoint's record."""
    return int(meta.get("schema", SCHEMA))


def check_arrays(where: Path, meta: dict[str, Any], saved: PyTree, wanted: PyTree, pattern: str, log: Log) -> None:
    """Raises UserError if the saved arrays are not the wanted ones: `log` gets a line for each of them."""
    lines = mismatches(saved, wanted)
    if not lines:
        return
    if set(saved) == {"params"} != set(wanted):
        raise UserError(
            f"{where}: holds parameters only: begin with it by config.checkpoint.init_from in another config.workdir"
        )
    for line in lines[:_LISTED]:
        log(f"{where}: {line}")
    if len(lines) > _LISTED:
        log(f"{where}: and {len(lines) - _LISTED} more")
    more = f" (and {len(lines) - 2} more)" if len(lines) > 2 else ""
    old = meta.get("pattern", "")
    patterns = f"pattern {old} there, {pattern} here; " if old != pattern else ""
    raise UserError(
        f"{where}: is of another model: {patterns}{'; '.join(lines[:2])}{more}; set another config.workdir, or the "
        "model that this run began with"
    )

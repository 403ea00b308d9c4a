"""Checkpoints of a run: written asynchronously by Orbax, found again by themselves.

`{folder}/{step}/` holds the state after `step` optimizer steps and, as JSON, what it belongs to. Orbax writes
into a folder with a temporary name and renames it at the end, so a half-written one is never taken for whole;
one that was damaged later is passed over for the next older one. Every process of a run calls every method,
from its main thread.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import logging
import platform
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint.experimental.v1 as ocp

from hybrid_jax import distributed
from hybrid_jax.errors import UserError
from hybrid_jax.optimizer import leaf_paths

if TYPE_CHECKING:
    from hybrid_jax.config import Config

PyTree = Any

SCHEMA = 1  # raise when the state's tree changes in a way that old checkpoints cannot be read into
PACKAGES = ("hybrid_jax", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy")
_STATE = "state"
# Keys of the config that may differ from one start of a run to the next without a word.
_FREE_KEYS = {
    "train": ("steps", "max_bad_steps", "profile_steps", "micro_batch_size"),
    "model": ("remat", "loss_chunk_tokens"),
    "optimizer": (),
    "data": ("cache_dir",),
}
_NAMED_CHANGES = 8  # more are counted


def describe(cfg: Config, fingerprint: str) -> dict[str, Any]:
    """What a checkpoint belongs to, as JSON: schema, config, pattern, package versions, data fingerprint."""
    from hybrid_jax import config as config_lib

    versions = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue  # run from a checkout
    return {
        "schema": SCHEMA,
        "config": config_lib.to_dict(cfg),
        "pattern": cfg.model.layout,
        "packages": versions,
        "data": fingerprint,
    }


def changes(saved: dict[str, Any], current: dict[str, Any]) -> list[str]:
    """Lines about what makes the run go on otherwise than it began: model, optimizer, samples."""
    if not saved.get("config"):
        return ["this checkpoint's record of its config is missing: whether it is the same one is not known"]
    lines = []
    for section, free in _FREE_KEYS.items():
        old, new = (_flat(d["config"].get(section, {}), f"config.{section}") for d in (saved, current))
        for key, value in new.items():
            if key.split(".", 2)[2] not in free and key in old and old[key] != value:
                lines.append(f"{key} was {old[key]!r} when this checkpoint was written and is {value!r} now")
    if len(lines) > _NAMED_CHANGES:
        lines[_NAMED_CHANGES:] = [f"{len(lines) - _NAMED_CHANGES} more keys of the config changed"]
    if not any("config.data." in line or "config.train." in line for line in lines):
        if saved.get("data") != current["data"]:
            lines.append("the data changed since this checkpoint was written; training goes on with the new data")
    return lines


def _flat(section: dict[str, Any], prefix: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in section.items():
        path = f"{prefix}.{name}"
        found |= _flat(value, path) if isinstance(value, dict) else {path: value}
    return found


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


class Checkpoints:
    """The checkpoints in one folder. Use as a context manager, or call `close`: it waits for a write in
    progress."""

    def __init__(self, folder: str | Path, keep: int, meta: dict[str, Any], log: Callable[[str], None]):
        self.folder = Path(folder).absolute()
        self.meta, self.log = meta, log
        self.folder.mkdir(parents=True, exist_ok=True)
        training = ocp.training
        self._orbax = training.Checkpointer(
            self.folder,
            save_decision_policy=training.save_decision_policies.FixedIntervalPolicy(1),  # the caller decides when
            preservation_policy=training.preservation_policies.LatestN(max(keep, 1)),
            cleanup_tmp_directories=True,
        )

    def __enter__(self) -> Checkpoints:
        return self

    def __exit__(self, *unused: object) -> None:
        self.close()

    def steps(self) -> list[int]:
        """Steps of the whole checkpoints, oldest first."""
        return [checkpoint.step for checkpoint in self._orbax.checkpoints]

    def save(self, step: int, state: PyTree, record: Mapping[str, Any] | None = None) -> None:
        """Starts writing; returns when `state` has been copied, so that it may be donated. Replaces nothing.

        `record`, JSON, is found again in the meta that `restore` returns.
        """
        if step in self.steps():
            return
        meta = {**self.meta, **(record or {})}
        with self._writing():
            self._orbax.save_async(step, state, force=True, checkpointable_name=_STATE, custom_metadata=meta)

    def delete_after(self, step: int) -> None:
        """Deletes the checkpoints that are newer than `step`, newest first. None may be being written."""
        for newer in reversed(self.steps()):
            if newer > step:
                self._orbax.delete(newer)

    def wait(self) -> None:
        """Until what was started has been written. Raises UserError if writing failed."""
        with self._writing():
            self._orbax.wait()

    def close(self) -> None:
        with self._writing():
            self._orbax.close()

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # orbax raises many kinds, also for a full disk
            newest = self.steps()
            kept = f"checkpoint {newest[-1]} is kept" if newest else "there is none yet"
            raise UserError(f"{self.folder}: a checkpoint could not be written: {_one_line(error)}; {kept}") from error

    def restore(self, wanted: PyTree) -> tuple[PyTree, int, dict[str, Any]] | None:
        """(state, step, meta) of the newest checkpoint that can be read, or None when there is none.

        `wanted` is a tree of ShapeDtypeStructs with shardings. Raises UserError when the checkpoint is of
        another model (naming the first paths that differ), of a newer schema, or when there are some and none
        can be read.
        """
        reasons = []
        for step in reversed(self.steps()):
            began = time.perf_counter()
            state, meta, reason = self._try_restore(step, wanted)
            if not distributed.everywhere(not reason):
                reasons.append(f"{step}: {reason or 'unreadable in another process'}")
                self.log(f"checkpoint {step} cannot be read and is passed over ({reason})")
                continue
            self.log(f"restored checkpoint {step} in {time.perf_counter() - began:.1f} s")
            for other in reasons:  # else the run could never save at those steps again
                self._orbax.delete(int(other.split(":")[0]))
            return state, step, meta
        if reasons:
            raise UserError(
                f"{self.folder}: none of the {len(reasons)} checkpoints can be read ({reasons[0]}); move the "
                "folder "
                "away to start anew"
            )
        return None

    def _try_restore(self, step: int, wanted: PyTree) -> tuple[PyTree, dict[str, Any], str]:
        try:
            found = self._orbax.metadata(step)
            meta, saved = dict(found.custom_metadata or {}), found.metadata
            if isinstance(saved, dict) and set(saved) == {_STATE}:
                saved = saved[_STATE]
        except Exception:  # orbax raises many kinds, by which file is damaged
            return None, {}, "its files are incomplete or damaged"
        if saved is None:
            return None, {}, "its index is damaged"
        self._check(step, meta, saved, wanted)
        asyncio_log = logging.getLogger("asyncio")  # one traceback for each file that is not there
        level = asyncio_log.level
        asyncio_log.setLevel(logging.CRITICAL + 1)
        try:
            state = self._orbax.load(step, wanted, checkpointable_name=_STATE)
            jax.block_until_ready(state)
        except Exception:
            return None, {}, "its files are incomplete or damaged"
        finally:
            asyncio_log.setLevel(level)
        if not bool(_all_finite(state)):
            return None, {}, "it holds values that are not finite"
        return state, meta, ""

    def _check(self, step: int, meta: dict[str, Any], saved: PyTree, wanted: PyTree) -> None:
        where = f"{self.folder / str(step)}"
        if meta.get("schema", 0) > SCHEMA:
            raise UserError(
                f"{where}: written by a newer hybrid_jax (schema {meta['schema']}, this one reads {SCHEMA})"
            )
        lines = mismatches(saved, wanted)
        if not lines:
            return
        more = f" (and {len(lines) - 2} more)" if len(lines) > 2 else ""
        old, new = meta.get("pattern", ""), self.meta["pattern"]
        pattern = f"pattern {old} there, {new} here; " if old != new else ""
        raise UserError(
            f"{where}: is of another model: {pattern}{'; '.join(lines[:2])}{more}; set another "
            "config.workdir, or the "
            "model that this run began with"
        )


@jax.jit
def _all_finite(state: PyTree) -> jax.Array:
    floats = [x for x in jax.tree.leaves(state) if jnp.issubdtype(x.dtype, jnp.floating)]
    return jnp.all(jnp.stack([jnp.isfinite(x).all() for x in floats]))


def _one_line(error: Exception) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= 160 else text[:157] + "..."

"""What a run's checkpoints say of where they come from, and whether a restart goes on with the same thing.

No jax here: plain data, JSON-ready.
"""

from __future__ import annotations

import importlib.metadata
import platform
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hybrid_jax.config import Config

SCHEMA = 1  # raise when the state's tree changes in a way that old checkpoints cannot be read into
PACKAGES = ("hybrid_jax", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy")
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

"""What a run's checkpoints say of where they come from, and whether a restart goes on with the same thing.

Plain data, JSON-ready.
"""

from __future__ import annotations

import functools
import importlib.metadata
import platform
import re
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hybrid_jax.data.interface import fingerprint
from hybrid_jax.errors import UserError

if TYPE_CHECKING:
    from hybrid_jax.config import Config

PACKAGES = ("hybrid_jax", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy")
# Keys of the config that may differ from one start of a run to the next without a word; those of `data`, and these
# of `train`, are compared by what they make of the data.
_OF_THE_DATA = ("seed", "sequence_length", "global_batch_size")
_FREE_KEYS = {
    "train": ("steps", "max_bad_steps", "profile_steps", "requeue_exit_code", "micro_batch_size"),
    "model": ("remat", "remat_layers", "loss_chunk_tokens"),
    "optimizer": (),
}
# Keys that may differ between the processes of a run: folders of a host, whose content is compared, and what process 0
# alone writes.
_OF_A_PROCESS = (
    *("workdir", "workspace", "group", "user", "data.path", "data.validation_path", "data.cache_dir"),
    *("tune.gemm_cache", "checkpoint.init_from"),
    *("log.tensorboard", "log.wandb", "log.wandb_mode", "log.wandb_project"),
)
_GIT_SECONDS = 10
_DIGEST = re.compile(r"\b[0-9a-f]{32,}$")
_NAMED_CHANGES = 8  # more are counted


def describe(cfg: Config, data: Mapping[str, str]) -> dict[str, Any]:
    """What a checkpoint belongs to, as JSON: schema, config, pattern, package versions, git revision, data.

    data: `Dataset.identity` of the training split. The number of rows a step joins it, as it decides which of
    them a step reads.
    """
    from hybrid_jax import config as config_lib
    from hybrid_jax.schema import SCHEMA

    versions = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue  # run from a checkout
    identity = {**data, "train.global_batch_size": str(cfg.train.global_batch_size)}
    return {
        "schema": SCHEMA,
        "config": config_lib.to_dict(cfg),
        "pattern": cfg.model.layout,
        "packages": versions,
        **revision(Path(__file__).parent),
        "data": fingerprint(identity),
        "data_identity": identity,
    }


def of_every_process(cfg: Config) -> dict[str, Any]:
    """The values of the config that have to be the same in all processes of a run, by key."""
    from hybrid_jax import config as config_lib

    values = _flat(config_lib.to_dict(cfg), "config")
    return {key: value for key, value in values.items() if key.removeprefix("config.") not in _OF_A_PROCESS}


@functools.cache
def revision(folder: Path) -> dict[str, Any]:
    """{"revision": commit, "dirty": whether tracked files were changed} of the git checkout that the folder is part
    of; {} outside one, for files that it does not track, and without git."""

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(folder), *arguments]
        done = subprocess.run(command, capture_output=True, text=True, timeout=_GIT_SECONDS, check=True)
        return done.stdout.strip()

    try:
        if not git("ls-files", "--", "."):  # an installed package inside another project's checkout
            return {}
        return {"revision": git("rev-parse", "HEAD"), "dirty": bool(git("status", "--porcelain", "-uno"))}
    except (OSError, subprocess.SubprocessError):
        return {}


def changes(saved: dict[str, Any], current: dict[str, Any]) -> list[str]:
    """Lines about what makes the run go on otherwise than it began: model, optimizer, samples.

    Raises UserError, naming what changed, if the samples are not those that the run began with, unless
    config.data.allow_change is set.
    """
    if not saved.get("config"):
        return ["this checkpoint's record of its config is missing: whether it is the same one is not known"]
    lines = []
    known = "data_identity" in saved
    for section, free in _FREE_KEYS.items():
        old, new = (_flat(d["config"].get(section, {}), f"config.{section}") for d in (saved, current))
        for key, value in new.items():
            name = key.split(".", 2)[2]
            if name in free or (known and section == "train" and name in _OF_THE_DATA):
                continue
            if key in old and old[key] != value:
                lines.append(f"{key} was {old[key]!r} when this checkpoint was written and is {value!r} now")
    if len(lines) > _NAMED_CHANGES:
        lines[_NAMED_CHANGES:] = [f"{len(lines) - _NAMED_CHANGES} more keys of the config changed"]
    return lines + _data_changes(saved, current)


def _data_changes(saved: dict[str, Any], current: dict[str, Any]) -> list[str]:
    if "data_identity" not in saved:
        return ["an older version wrote this checkpoint: whether the data is still the same is not known"]
    old, new = saved["data_identity"], current["data_identity"]
    # A part that only one of them knows, as a tokenizer whose record was lost or found, tells nothing.
    told = [_change(name, old[name], new[name]) for name in new if name in old and old[name] != new[name]]
    if not told:
        return []
    what = "; ".join(told[:_NAMED_CHANGES]) + f"; and {len(told) - _NAMED_CHANGES} more" * (len(told) > _NAMED_CHANGES)
    if current["config"]["data"].get("allow_change"):
        return [f"the data changed since this checkpoint was written, as data.allow_change lets it: {what}"]
    raise UserError(
        f"the data is not what this run was trained on: {what}; set it back, set another config.workdir, or set "
        "config.data.allow_change=True to go on with it as it is now"
    )


def _change(name: str, old: str, new: str) -> str:
    """In words: digests mean nothing to a person, and a weight is a number of windows of so many."""
    if _DIGEST.search(old) and _DIGEST.search(new):
        return f"{name} changed"
    unit = " windows" if name.startswith("the weight of ") else ""
    return f"{name} was {old}{unit} and is {new}{unit}"


def _flat(section: dict[str, Any], prefix: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in section.items():
        path = f"{prefix}.{name}"
        found |= _flat(value, path) if isinstance(value, dict) else {path: value}
    return found

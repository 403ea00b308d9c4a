"""The loss on a run's own validation data, or on another store, of any number of windows on any number of devices."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from jax.sharding import Mesh

from hybrid_jax import data, progress, sharding
from hybrid_jax.config import Config
from hybrid_jax.data.interface import Dataset
from hybrid_jax.errors import UserError
from hybrid_jax.model import Params
from hybrid_jax.step import Programs
from hybrid_jax.validation import Loss, Validation

TOKENS_AT_ONCE = {"cpu": 2**13}  # on a device
_TOKENS_AT_ONCE = 2**15  # elsewhere


def open_dataset(cfg: Config, prefix: str, trained_on: dict[str, str]) -> Dataset:
    """The validation split of a run's data, or all of the token store(s) `prefix`, as config.data.path names them.

    trained_on: the identity of the run's training data. Raises UserError as data.open does, and for a store that was
    made with another tokenizer.
    """
    about = cfg.data
    if prefix:
        about = dataclasses.replace(about, source="store", path="", validation_path=prefix)
    elif about.source == "store" and not about.path.strip(", "):
        raise UserError("--validation: the run has no data of its own; name a token store with --data PREFIX")
    train = cfg.train
    try:
        dataset = data.open(
            about,
            sequence_length=train.sequence_length,
            vocab_size=cfg.model.vocab_size,
            seed=train.seed,
            split="validation",
        )
    except UserError as error:
        said = str(error).replace("config.data.validation_path: ", "")
        raise UserError(f"{'--data' if prefix else '--validation'}: {said}") from None
    key = "the tokenizer"
    ours, theirs = dataset.identity.get(key), trained_on.get(key)
    if ours and theirs and ours != theirs:
        raise UserError(f"--data: {prefix} was made with another tokenizer than what the run was trained on")
    return dataset


class _Windows:
    """The first `count` windows of a data set; what is asked for beyond them is padding."""

    def __init__(self, dataset: Dataset, count: int):
        self._dataset, self._count = dataset, count
        self.tokenizer = dataset.tokenizer

    def batch(self, step: int, rows: Sequence[int], global_batch_size: int) -> dict[str, np.ndarray]:
        batch = self._dataset.batch(step, rows, global_batch_size)
        beyond = step * global_batch_size + np.asarray(rows) >= self._count
        return batch | {"targets": np.where(beyond[:, None], -1, batch["targets"])}


def loss(
    cfg: Config, params: Params, mesh: Mesh, dataset: Dataset, windows: int, batch_size: int, line: progress.Line
) -> Loss:
    """Over the first `windows` windows, batch_size rows at a time over all devices (0: as many as seem to fit).

    params: whole on every device of the mesh. Raises UserError where no token counts.
    """
    ways, length = sharding.batch_ways(mesh), cfg.train.sequence_length
    at_once = TOKENS_AT_ONCE.get(mesh.devices.flat[0].platform, _TOKENS_AT_ONCE) // length
    rows = max(min(batch_size // ways if batch_size else at_once, -(-windows // ways)), 1) * ways
    train = dataclasses.replace(cfg.train, global_batch_size=rows, micro_batch_size=0)
    validation = Validation(Programs(dataclasses.replace(cfg, train=train), mesh), _Windows(dataset, windows))
    batches = -(-windows // rows)
    line.say(f"loss on {windows:,} windows of {length:,} tokens, {rows} at a time")
    count = progress.Count(line, windows, windows, "windows")
    try:
        found = validation.loss(params, batches, lambda: count.add(rows, rows))
    finally:
        line.close()
    if not found.tokens:
        raise UserError("--validation: no token of these windows counts; take more --batches")
    return found


def as_dict(found: Loss, windows: int, description: str) -> dict[str, Any]:
    """JSON-ready; what is per byte is left out where bytes are not known."""
    values = {"data": description, "windows": windows, "tokens": found.tokens, "nats_per_token": found.nats}
    values["perplexity"] = math.exp(min(found.nats, 700.0))
    if not math.isnan(found.per_byte):
        values |= {"nats_per_byte": found.per_byte, "bits_per_byte": found.per_byte / math.log(2)}
    return values

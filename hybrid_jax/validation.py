"""The loss over a validation split: the same sums in the course of training and of an evaluation."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, Protocol

import jax
import numpy as np

from hybrid_jax import feed, sharding
from hybrid_jax.data.interface import Batches, Tokenizer
from hybrid_jax.step import Programs, batch_shape


@dataclasses.dataclass(frozen=True)
class Loss:
    """nats: mean cross entropy of a token. tokens: targets counted. bytes_per_token: NaN where it is not known."""

    nats: float
    tokens: int
    bytes_per_token: float

    @property
    def per_byte(self) -> float:
        """Nats per byte of text; NaN where it is not known."""
        return self.nats / self.bytes_per_token

    def __str__(self) -> str:
        known = "" if math.isnan(self.per_byte) else f", {self.per_byte:.4f} per byte"
        return f"{self.nats:.4f} nats per token{known}"

    def values(self, name: str) -> dict[str, float]:
        """As a run's metrics call them."""
        known = {} if math.isnan(self.per_byte) else {f"{name}_per_byte": self.per_byte}
        return {name: self.nats, **known}


class Windows(Batches, Protocol):
    """As much of a data set as is needed here."""

    @property
    def tokenizer(self) -> Tokenizer: ...


class Validation:
    """Of one data set, by the compiled evaluation of `programs`, which is compiled when it is first needed."""

    def __init__(self, programs: Programs, dataset: Windows):
        self._programs, self._dataset = programs, dataset
        cfg, mesh = programs.cfg, programs.mesh
        self._placement = feed.Placement(batch_shape(cfg, mesh), sharding.batch_sharding(mesh))

    @functools.cached_property
    def _evaluate(self) -> jax.stages.Compiled:
        return self._programs.compile_evaluate()

    def loss(self, params: Any, batches: int, done: Callable[[], None] = lambda: None) -> Loss:
        """Over the first `batches` global batches, the same ones every time; `done` is called after each.

        Raises UserError for an id that the model does not have.
        """
        size, sums = self._placement.global_batch_size, []
        for index in range(batches):
            batch = self._dataset.batch(index, self._placement.rows, size)
            feed.check_ids(batch, self._programs.cfg.model.vocab_size, index)
            sums.append(self._evaluate(params, self._placement.place(batch)))
            if index:  # one batch is always under way
                jax.block_until_ready(sums[index - 1])
            done()
        total, count = np.sum(np.asarray(jax.device_get(sums), np.float64), axis=0)
        return Loss(float(total / max(count, 1.0)), int(count), self._dataset.tokenizer.bytes_per_token)

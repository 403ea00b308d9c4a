"""Training that diverges where a test wants it to: a chosen batch spoils the parameters of the step that reads it.

`Poison({12: 30.0}).install()` in the trainer's process, before `train.run`.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np

from hybrid_jax import step, train


class _Recording:
    """A data source that tells which first rows are those of the batches to spoil."""

    def __init__(self, dataset: Any, poison: "Poison"):
        self._dataset, self._poison = dataset, poison

    def __getattr__(self, name: str) -> Any:
        return getattr(self._dataset, name)

    def batch(self, index: int, rows: Any, global_batch_size: int) -> dict[str, np.ndarray]:
        batch = self._dataset.batch(index, rows, global_batch_size)
        self._poison.batch_of[batch["tokens"][0].tobytes()] = index
        return batch


class Poison:
    """`factors`: batch -> what the embedding is multiplied by before the update with that batch; NaN works too.

    `read` holds (training step, batch) of each step that ran, in order.
    """

    def __init__(self, factors: Mapping[int, float]):
        self.factors = factors
        self.batch_of: dict[bytes, int] = {}
        self.read: list[tuple[int, int]] = []

    def install(self, patch: Callable[[Any, str, Any], None] = setattr) -> None:
        open_splits, compile_step = train.data.open_splits, step.Programs.compile_step

        def opened(cfg: Any) -> Any:
            training, validation = open_splits(cfg)
            return _Recording(training, self), validation

        patch(train.data, "open_splits", opened)
        patch(step.Programs, "compile_step", lambda programs: functools.partial(self._step, compile_step(programs)))

    def _step(self, compiled: Any, state: Any, batch: Any, stop: Any) -> Any:
        row = np.asarray(batch["tokens"].addressable_shards[0].data)[0, 0]
        index = self.batch_of[row.tobytes()]
        self.read.append((int(state["step"]) + 1, index))
        if index in self.factors:
            weight = state["params"]["embed"]["weight"]
            spoilt = jax.device_put(weight * self.factors[index], weight.sharding)
            state = {**state, "params": {**state["params"], "embed": {**state["params"]["embed"], "weight": spoilt}}}
        return compiled(state, batch, stop)

"""From the rows of a data set to a step's arrays on the devices.

A accumulation steps, B rows of one accumulation step over all devices, T tokens.
"""

from __future__ import annotations

import dataclasses

import jax
import numpy as np
from jax.sharding import NamedSharding

from hybrid_jax.errors import UserError


@dataclasses.dataclass(frozen=True)
class Placement:
    """Which rows of the global batch this process reads, and how they become arrays [A, B, T].

    Row b of accumulation step a is row a * B + b of the global batch, whatever the number of devices and
    processes.
    """

    shape: tuple[int, int, int]
    sharding: NamedSharding

    def _rows(self, index: tuple[slice, ...] | None) -> range:
        return range(self.shape[1])[index[1]] if index is not None else range(0)

    @property
    def _mine(self) -> list[int]:
        indices = self.sharding.addressable_devices_indices_map(self.shape).values()
        return sorted({b for index in indices for b in self._rows(index)})

    @property
    def global_batch_size(self) -> int:
        return self.shape[0] * self.shape[1]

    @property
    def rows(self) -> list[int]:
        """Rows of the global batch that live on this process's devices, in the order that `place` expects."""
        return [a * self.shape[1] + b for a in range(self.shape[0]) for b in self._mine]

    def place(self, batch: dict[str, np.ndarray]) -> dict[str, jax.Array]:
        """The arrays [len(rows), T] of this process as its part of global arrays [A, B, T]."""
        at = {b: i for i, b in enumerate(self._mine)}

        def one(array: np.ndarray) -> jax.Array:
            local = array.reshape(self.shape[0], len(at), self.shape[2])
            return jax.make_array_from_callback(
                self.shape,
                self.sharding,
                lambda index: local[:, np.asarray([at[b] for b in self._rows(index)])],
            )

        return {name: one(array) for name, array in batch.items()}


def check_ids(batch: dict[str, np.ndarray], vocab_size: int, step: int) -> None:
    """Raises UserError unless all tokens lie in [0, vocab_size) and all targets in [-1, vocab_size).

    A lookup would clamp a wrong id, and drop its gradient, in silence.
    """
    for name, low in (("tokens", 0), ("targets", -1)):
        array = batch[name]
        if array.size and not low <= array.min() <= array.max() < vocab_size:
            bad = array[(array < low) | (array >= vocab_size)].flat[0]
            raise UserError(
                f"config.model.vocab_size: step {step} has the id {bad} in its {name}, not one of "
                f"{vocab_size}; raise model.vocab_size or choose another data.tokenizer"
            )

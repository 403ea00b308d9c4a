"""What every sublayer of one forward pass shares."""

import dataclasses

import jax
import jax.numpy as jnp

# Name (jax.ad_checkpoint.checkpoint_name) of what goes into an operation, projected and convolved.
MIXER_IN = "mixer_in"
# Of products with weights.
PRODUCT = "product"


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Context:
    """positions [B, T] i32 count from 0 in each document; segment_ids [B, T] i32 or None name the documents.

    count [B] i32, of decoding only: how many of the T tokens of a row there are; those that follow are padding, and
    leave no trace in the layers' states. None: all T.
    `backend` runs the recurrences, `attention` softmax attention.
    """

    positions: jax.Array
    segment_ids: jax.Array | None = None
    count: jax.Array | None = None
    backend: str = dataclasses.field(default="auto", metadata={"static": True})
    attention: str = dataclasses.field(default="auto", metadata={"static": True})

    def unpadded(self, x: jax.Array, padding: float | jax.Array = 0.0) -> jax.Array:
        """x [B, T, ...] with `padding` in place of what belongs to padding."""
        if self.count is None:
            return x
        there = jnp.arange(x.shape[1]) < self.count[:, None]
        return jnp.where(there.reshape(*there.shape, *[1] * (x.ndim - 2)), x, padding)


def count_positions(documents: jax.Array) -> jax.Array:
    """positions [B, T] i32 that restart at 0 where `documents` [B, T] changes."""
    T = documents.shape[1]
    steps = jnp.broadcast_to(jnp.arange(T, dtype=jnp.int32), documents.shape)
    new = jnp.pad(documents[:, 1:] != documents[:, :-1], ((0, 0), (1, 0)), constant_values=True)
    starts = jax.lax.cummax(jnp.where(new, steps, 0), axis=1)
    return steps - starts

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

    `length` (i32 scalar, or None outside decoding) is the number of tokens already in the layers' states.
    `backend` runs the recurrences, `attention` softmax attention.
    """

    positions: jax.Array
    segment_ids: jax.Array | None = None
    length: jax.Array | None = None
    backend: str = dataclasses.field(default="auto", metadata={"static": True})
    attention: str = dataclasses.field(default="auto", metadata={"static": True})


def count_positions(documents: jax.Array) -> jax.Array:
    """positions [B, T] i32 that restart at 0 where `documents` [B, T] changes."""
    T = documents.shape[1]
    steps = jnp.broadcast_to(jnp.arange(T, dtype=jnp.int32), documents.shape)
    new = jnp.pad(documents[:, 1:] != documents[:, :-1], ((0, 0), (1, 0)), constant_values=True)
    starts = jax.lax.cummax(jnp.where(new, steps, 0), axis=1)
    return steps - starts

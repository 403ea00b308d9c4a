"""Packed rows: which document each token belongs to. Shapes: B batch, T time."""

import jax
import jax.numpy as jnp


def number_documents(segment_ids: jax.Array) -> jax.Array:
    """segment_ids [B, T] -> [B, T] i32: 0 in a row's first document, one more after each change of id.

    Attention compares ids, recurrences look for changes: on these numbers both see the same borders, even where
    an id returns later in the row.
    """
    new = segment_ids[:, 1:] != segment_ids[:, :-1]
    return jnp.pad(jnp.cumsum(new, axis=1, dtype=jnp.int32), ((0, 0), (1, 0)))

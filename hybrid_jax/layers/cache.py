"""What softmax attention keeps of the tokens it has seen while decoding.

Shapes: B batch, T time, S tokens that there is room for, G key/value heads, K channels.
"""

import jax
import jax.numpy as jnp

from hybrid_jax.layers.context import Context


def append(cache: jax.Array, new: jax.Array, ctx: Context) -> jax.Array:
    """`cache` [B, G, S, K] with `new` [B, T, G, K], but for its padding, at ctx.positions [B, T] < S."""
    B, G, S, _ = cache.shape
    T = new.shape[1]
    # What goes past the end is not written; each token has a place of its own there.
    place = ctx.unpadded(ctx.positions, S + jnp.arange(T))
    if B * G * T == 1:  # XLA makes something else of a single update, for which it copies the cache
        place, new = jnp.concatenate([place, jnp.full((1, 1), S + 1)], axis=1), jnp.concatenate([new, new], axis=1)
    where = (jnp.arange(B)[:, None, None], jnp.arange(G)[:, None], place[:, None])
    return cache.at[where].set(new.swapaxes(1, 2).astype(cache.dtype), mode="drop", unique_indices=True)


def read(cache: jax.Array, start: int | jax.Array, length: int) -> jax.Array:
    """The `length` tokens of `cache` [B, G, S, K] from `start` on."""
    return jax.lax.dynamic_slice_in_dim(cache, start, length, axis=2)

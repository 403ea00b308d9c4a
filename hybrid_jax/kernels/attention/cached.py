"""Attention of new tokens against a cache of keys, as in decoding; no gradients.

Shapes: B batch, T queries, S keys that the cache has room for, J keys in a block, H query heads, G key/value heads,
R query heads that share one (H = G R), K key dim, V value dim.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from hybrid_jax.kernels.precision import accumulator, einsum

BLOCK = 512

Read = Callable[[int | jax.Array, int], tuple[jax.Array, jax.Array]]


def attention_cached(q: jax.Array, positions: jax.Array, read: Read, size: int, scale: float) -> jax.Array:
    """softmax(scale q k^T) v over the keys at or before each query's position, in fp32.

    q [B, T, H, K]; positions [B, T] i32 in [0, size) are those of the queries among the keys. read(start, J) gives the
    keys [B, G, J, K] and values [B, G, J, V] at start to start + J. Returns [B, T, H, V] in the values' dtype.

    One query takes all `size` keys at once. More of them take one block after another, up to the last key that any of
    them sees (online softmax, arXiv:2205.14135): memory does not grow with `size`, nor time with the empty part of it.
    """
    B, T, H, K = q.shape
    block = size if T == 1 else min(BLOCK, size)
    k_shape, v_shape = jax.eval_shape(lambda: read(0, block))
    G, V = k_shape.shape[1], v_shape.shape[-1]
    q_BGRTK = jnp.moveaxis(q.reshape(B, T, G, H // G, K), 1, 3)
    compute = accumulator(q.dtype)

    def attend(j, carry):
        top, total, acc = carry
        start = jnp.minimum(j * block, size - block)  # the last block may overlap the one before it
        k_BGJK, v_BGJV = read(start, block)
        # The keys first: where they are second, XLA transposes them on a CPU.
        s_BGRTJ = jnp.moveaxis(einsum("bgjk,bgrtk->bgjrt", k_BGJK, q_BGRTK, dtype=q.dtype), 2, -1) * scale
        key = start + jnp.arange(block)
        seen_BTJ = (key <= positions[..., None]) & (key >= j * block)
        s_BGRTJ = jnp.where(seen_BTJ[:, None, None], s_BGRTJ, -jnp.inf)
        # Every query sees the first key, so that from the first block on `new_top` is finite.
        new_top = jnp.maximum(top, jnp.max(s_BGRTJ, axis=-1))
        shrink = jnp.exp(top - new_top)
        p_BGRTJ = jnp.exp(s_BGRTJ - new_top[..., None])
        total = total * shrink + jnp.sum(p_BGRTJ, axis=-1)
        pv = einsum("bgrtj,bgjv->bgrtv", p_BGRTJ, v_BGJV, dtype=v_shape.dtype)
        return new_top, total, acc * shrink[..., None] + pv

    rows = (B, G, H // G, T)
    carry = (jnp.full(rows, -jnp.inf, compute), jnp.zeros(rows, compute), jnp.zeros((*rows, V), compute))
    if block == size:
        _, total, acc = attend(0, carry)
    else:
        _, total, acc = jax.lax.fori_loop(0, jnp.max(positions) // block + 1, attend, carry)
    return jnp.moveaxis(acc / total[..., None], 3, 1).reshape(B, T, H, V).astype(v_shape.dtype)

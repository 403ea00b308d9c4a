"""Causal attention in blocks with an online softmax (arXiv:2205.14135) and its own backward pass.

Shapes: B batch, T time, H query heads, G key/value heads, R query heads that share one (H = G R), K key dim,
V value dim, i and j tokens of a query block and of a key block. In einsums: b i j g r k v.

One scan runs over the pairs (query block, key block) on or under the diagonal and no others, so causality
halves the work. The forward pass keeps the output and the log of each row's softmax sum (lse); the backward
pass forms the probabilities again from it. The number of query blocks does not grow with T, nor does the key
block: a pair's scores, like everything else here, take memory linear in T.

A masked score is -inf: it neither moves the running maximum nor adds anything but an exact 0, so that no
output depends on later tokens or on other documents in any bit.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name

from hybrid_jax.kernels import RESIDUAL
from hybrid_jax.kernels.cuts import block_sizes
from hybrid_jax.kernels.documents import number_documents
from hybrid_jax.kernels.precision import accumulator, einsum


def attention_chunked(q, k, v, segment_ids, scale: float):
    """See hybrid_jax.kernels.attention.attention; q, k and v have the same T."""
    B, T, H, K = q.shape
    G = k.shape[2]
    block_q, block_k = block_sizes(T)
    documents = number_documents(segment_ids)
    pad = -T % max(block_q, block_k)
    if pad:
        q, k, v = (jnp.pad(z, ((0, 0), (0, pad), (0, 0), (0, 0))) for z in (q, k, v))
        documents = jnp.pad(documents, ((0, 0), (0, pad)), mode="edge")
    q = q.reshape(B, T + pad, G, H // G, K)
    o = _attention(scale, block_q, block_k, q, k, v, documents)
    return o.reshape(B, T + pad, H, -1)[:, :T]


def _pairs(T: int, block_q: int, block_k: int, by_key: bool):
    """Pairs of blocks with a key that some query sees, in order of the query block or of the key block.

    Returns i32 arrays (i, j, first), where first marks the first pair with its query (key) block.
    """
    i, j = np.meshgrid(np.arange(T // block_q), np.arange(T // block_k), indexing="ij")
    if by_key:
        i, j = i.T, j.T
    visible = j * block_k < (i + 1) * block_q
    i, j = i[visible].astype(np.int32), j[visible].astype(np.int32)
    run = j if by_key else i
    return i, j, np.diff(run, prepend=-1) != 0


def _take(z: jax.Array, block, size: int, axis: int) -> jax.Array:
    return jax.lax.dynamic_slice_in_dim(z, block * size, size, axis)


def _put(z: jax.Array, part: jax.Array, block, size: int, axis: int) -> jax.Array:
    return jax.lax.dynamic_update_slice_in_dim(z, part.astype(z.dtype), block * size, axis)


def _scores(scale, block_q, block_k, q_BGRiK, k_BGjK, documents, i, j):
    """Scaled scores of one pair of blocks [B, G, R, i, j] in fp32, -inf where masked."""
    s = einsum("bgrik,bgjk->bgrij", q_BGRiK, k_BGjK, dtype=q_BGRiK.dtype) * scale
    row = i * block_q + jnp.arange(block_q)
    column = j * block_k + jnp.arange(block_k)
    doc_i, doc_j = _take(documents, i, block_q, 1), _take(documents, j, block_k, 1)
    seen = (row[:, None] >= column) & (doc_i[:, :, None] == doc_j[:, None, :])
    return jnp.where(seen[:, None, None], s, -jnp.inf)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _attention(scale, block_q, block_k, q, k, v, documents):
    """q [B, T, G, R, K], k [B, T, G, K], v [B, T, G, V] -> [B, T, G, R, V]."""
    return _forward(scale, block_q, block_k, q, k, v, documents)[0]


def _heads_first(z: jax.Array) -> jax.Array:
    """[B, T, G, ..., D] -> [B, G, ..., T, D]: one layout change here instead of one in every pair."""
    return jnp.moveaxis(z, 1, -2)


def _forward(scale, block_q, block_k, q, k, v, documents):
    B, T, G, R, _ = q.shape
    compute = accumulator(q.dtype)
    qT, kT, vT = (_heads_first(z) for z in (q, k, v))

    def step(carry, pair):
        o, lse, top, total, acc = carry
        i, j, first = pair
        q_i, k_j, v_j = _take(qT, i, block_q, 3), _take(kT, j, block_k, 2), _take(vT, j, block_k, 2)
        s = _scores(scale, block_q, block_k, q_i, k_j, documents, i, j)
        top = jnp.where(first, -jnp.inf, top)
        new_top = jnp.maximum(top, jnp.max(s, axis=-1))
        # A row that has seen nothing yet has top = -inf, and -inf - -inf is not a number.
        safe = jnp.where(new_top == -jnp.inf, 0, new_top)
        shrink = jnp.exp(top - safe)
        p = jnp.exp(s - safe[..., None])
        total = jnp.where(first, 0, total) * shrink + jnp.sum(p, axis=-1)
        pv = einsum("bgrij,bgjv->bgriv", p, v_j, dtype=v.dtype)
        acc = jnp.where(first, 0, acc) * shrink[..., None] + pv
        # Written at every pair, right after the row's last.
        divisor = jnp.where(total == 0, 1, total)
        o = _put(o, jnp.moveaxis(acc / divisor[..., None], 3, 1), i, block_q, 1)
        lse = _put(lse, safe + jnp.log(divisor), i, block_q, 3)
        return (o, lse, new_top, total, acc), None

    V = v.shape[-1]
    row = jnp.zeros((B, G, R, block_q), compute)
    carry = (
        jnp.zeros((B, T, G, R, V), v.dtype),
        jnp.zeros((B, G, R, T), compute),
        row,
        row,
        jnp.zeros((B, G, R, block_q, V), compute),
    )
    (o, lse, *_), _ = jax.lax.scan(step, carry, _pairs(T, block_q, block_k, by_key=False))
    o, lse = checkpoint_name(o, RESIDUAL), checkpoint_name(lse, RESIDUAL)
    return o, (q, k, v, documents, o, lse)


def _backward(scale, block_q, block_k, saved, do):
    q, k, v, documents, o, lse = saved
    B, T, G, _, K = q.shape
    V = v.shape[-1]
    compute = lse.dtype
    qT, kT, vT, doT = (_heads_first(z) for z in (q, k, v, do))
    # sum_j p_ij dp_ij, the part of ds_ij that normalisation takes away
    delta = jnp.moveaxis(jnp.sum(o.astype(compute) * do.astype(compute), axis=-1), 1, -1)

    def step(carry, pair):
        dq, dk, dv, dk_block, dv_block = carry
        i, j, first = pair
        q_i, do_i = _take(qT, i, block_q, 3), _take(doT, i, block_q, 3)
        k_j, v_j = _take(kT, j, block_k, 2), _take(vT, j, block_k, 2)
        s = _scores(scale, block_q, block_k, q_i, k_j, documents, i, j)
        p = jnp.exp(s - _take(lse, i, block_q, 3)[..., None])
        dp = einsum("bgriv,bgjv->bgrij", do_i, v_j, dtype=v.dtype)
        ds = p * (dp - _take(delta, i, block_q, 3)[..., None]) * scale
        dv_block = jnp.where(first, 0, dv_block) + einsum("bgrij,bgriv->bgjv", p, do_i, dtype=v.dtype)
        dk_block = jnp.where(first, 0, dk_block) + einsum("bgrij,bgrik->bgjk", ds, q_i, dtype=q.dtype)
        dq_block = jnp.moveaxis(einsum("bgrij,bgjk->bgrik", ds, k_j, dtype=q.dtype), 3, 1)
        dq = _put(dq, _take(dq, i, block_q, 1) + dq_block, i, block_q, 1)
        # Written at every pair, right after the block's last.
        dk = _put(dk, jnp.moveaxis(dk_block, 2, 1), j, block_k, 1)
        dv = _put(dv, jnp.moveaxis(dv_block, 2, 1), j, block_k, 1)
        return (dq, dk, dv, dk_block, dv_block), None

    carry = (
        jnp.zeros(q.shape, compute),
        jnp.zeros_like(k),
        jnp.zeros_like(v),
        jnp.zeros((B, G, block_k, K), compute),
        jnp.zeros((B, G, block_k, V), compute),
    )
    (dq, dk, dv, *_), _ = jax.lax.scan(step, carry, _pairs(T, block_q, block_k, by_key=True))
    return dq.astype(q.dtype), dk, dv, None


_attention.defvjp(_forward, _backward)

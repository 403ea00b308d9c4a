"""Kimi Delta Attention in chunks (arXiv:2510.26692): as gdn/chunked.py, with a decay per key channel.

The decay then sits inside the products over channels: A_ij = beta_i sum_d k_id k_jd exp(g_{j+1,d} + ... +
g_{i,d}). Splitting it into exp(G_i) exp(-G_j) overflows. Here the pairs (i, j) of a chunk are covered by
dyadic squares instead: for b = 1, 2, 4, .. 32, rows from the right half and columns from the left half of
every aligned run of 2b tokens, where

    exp(sum between) = exp(sum from the middle to i) exp(sum from j to the middle)

has two exponents <= 0 for any gates, bounded or not. Each strictly lower pair lies in exactly one square, so
nothing on the diagonal (whose decay is 1) takes part, every exponent is a direct sum of gates of tokens no
later than i, and a square's derivative reaches exactly the gates that its pairs straddle. No [C,C,K] array is
formed.

Shapes: B batch, T time, H q/k heads, R value heads per q/k head, HV = H R, K key dim, V value dim, N chunks,
C chunk, M all of N, B, H, P runs of b tokens, S = 2 for q and k.
"""

import jax
import jax.numpy as jnp
import numpy as np

from hybrid_jax.kernels import blockwise
from hybrid_jax.kernels.delta_rule import Masks, dot, scan_states
from hybrid_jax.kernels.triangular import unit_lower_inverse

# Squares narrower than this are multiplied and summed elementwise in float32, which is exact and no slower
# (H200: 14.8 ms for forward and backward at B32 T2048 H8 K32 V64, against 15.6 with 8 and 18.5 with none but
# sums).
SMALLEST_DOT = 16


def _spans(chunk):
    """Which gates each decay of a chunk sums: 0/1 matrices [log2(C) + 2, C, C], a row for each token.

    For square width b = 1, 2, 4, ..: rows in a right half sum from the middle through the token, rows in a
    left half from after the token to the middle. Then from the chunk's start through the token, and after the
    token to its end.
    """
    row, column = np.arange(chunk)[:, None], np.arange(chunk)
    spans = []
    for level in range(chunk.bit_length() - 1):
        middle = (row >> level | 1) << level  # of the run of 2b tokens around `row`
        through = (middle <= column) & (column <= row)
        after = (row < column) & (column < middle)
        spans.append(np.where(row >= middle, through, after))
    return np.stack([*spans, column <= row, column > row]).astype(np.float32)


def _halves(x, width):
    """Left and right halves [M,R,P,b,K] of every run of 2b tokens of x [M,R,C,K]."""
    M, R, C, K = x.shape
    runs = x.reshape(M, R, C // (2 * width), 2, width, K)
    return runs[:, :, :, 0], runs[:, :, :, 1]


def _square(dtype, rows, columns):
    """Products of rows [M,R,P,2b,K] (of q, then of k) with columns [M,R,P,b,K]: [M,R,P,S,b,b]."""
    width = columns.shape[-2]
    if width < SMALLEST_DOT:
        products = jnp.sum(rows[..., :, None, :] * columns[..., None, :, :], axis=-1)
    else:
        products = dot("mrpik,mrpjk->mrpij", dtype, rows, columns)
    return products.reshape(*products.shape[:3], 2, width, width)


def _pairs(dtype, q, k, g):
    """Decayed products of all strictly lower pairs of a chunk, and the sums of gates to and from its ends.

    q, k [N,B,H,C,K], g [N,B,H,R,C,K]. Returns sum_d q_id k_jd exp(g_{j+1,d} + .. + g_id) [N,B,H,R,C,C] and
    the same with k_id, both zero for j >= i; and the gates summed from the chunk's start through i, and after
    j to its end, like g.
    """
    *_, R, C, K = g.shape
    # All leading axes become one, M: XLA's CPU library (jax 0.10.2) crashes on sums over arrays of rank 8.
    q, k, gates = q.reshape(-1, 1, C, K), k.reshape(-1, 1, C, K), g.reshape(-1, R, C, K)
    *squares, through, after = dot("sic,mrck->smrik", g.dtype, jnp.asarray(_spans(C), g.dtype), gates)
    products = jnp.zeros((*gates.shape[:3], 2, 1, 1), g.dtype)  # [M,R,P,S,b,b]: the runs of b tokens done so far
    for level, span in enumerate(squares):
        width = 1 << level
        decay = jnp.exp(span)
        _, q_right = _halves(q * decay, width)
        k_left, k_right = _halves(k * decay, width)
        square = _square(dtype, jnp.concatenate([q_right, k_right], axis=-2), k_left)
        left, right = products[:, :, 0::2], products[:, :, 1::2]
        top = jnp.concatenate([left, jnp.zeros_like(left)], axis=-1)
        products = jnp.concatenate([top, jnp.concatenate([square, right], axis=-1)], axis=-2)
    products = products.reshape(*g.shape[:-2], 2, C, C)
    return products[..., 0, :, :], products[..., 1, :, :], through.reshape(g.shape), after.reshape(g.shape)


def _form(scale, dtype, q, k, v, g, beta, state, masks: Masks):
    """One block; see blockwise.run."""
    qk, kk, through, after = _pairs(dtype, q, k, g)
    T = unit_lower_inverse(beta[..., None] * jnp.where(masks.pairs, kk, 0))
    own = jnp.sum(q * k, axis=-1)[:, :, :, None, :, None] * jnp.eye(g.shape[-2], dtype=g.dtype)
    P = scale * (jnp.where(masks.pairs, qk, 0) + own)
    k = k[:, :, :, None]
    gamma = jnp.exp(jnp.where(masks.enters[..., None], through, -jnp.inf))
    w = dot("nbhrij,nbhrjk->nbhrik", dtype, T, beta[..., None] * gamma * k)
    u = dot("nbhrij,nbhrjv->nbhriv", dtype, T, beta[..., None] * v)
    kg = jnp.exp(jnp.where(masks.leaves[..., None], after, -jnp.inf)) * k
    carry = jnp.where(masks.carries[..., None], gamma[..., -1, :], 0)
    before, v_new, state = scan_states(dtype, w, u, kg, carry, state)
    o = dot("nbhrik,nbhrkv->nbhriv", dtype, scale * gamma * q[:, :, :, None], before)
    o += dot("nbhrij,nbhrjv->nbhriv", dtype, P, v_new)
    return o, state


def kda_chunked(q, k, v, g, beta, scale: float, initial_state: jax.Array, segment_ids: jax.Array):
    """The operation of kernels.kda.kda, which documents the arguments; none may be None here."""
    return blockwise.run(_form, scale, q, k, v, g, beta, initial_state, segment_ids)

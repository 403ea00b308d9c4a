"""Gated DeltaNet in chunks (arXiv:2412.06464): matrix products inside a chunk, a short scan between chunks.

Inside a chunk entered with state S, with D_ij = exp(g_{j+1} + ... + g_i) for j <= i in one document (0
elsewhere) and gamma_i the decay from the chunk's start to token i:

    T  = (I + stril(beta_i (k_i . k_j) D_ij))^-1
    V' = T (beta V) - T (beta gamma K) S                  what each token really adds to the state
    o  = scale (gamma Q) S + scale (Q K^T * D) V'
    S <- gamma_C S + (D_C K)^T V'

Shapes: B batch, T time, H q/k heads, R value heads per q/k head, HV = H R, K key dim, V value dim, N chunks,
C chunk.
"""

import jax
import jax.numpy as jnp

from hybrid_jax.kernels import blockwise
from hybrid_jax.kernels.delta_rule import Masks, dot, scan_states
from hybrid_jax.kernels.triangular import unit_lower_inverse


def _decays(g, masks: Masks):
    """g [N,B,H,R,C] -> D [N,B,H,R,C,C] and gamma [N,B,H,R,C], each a direct sum of gates (see delta_rule)."""
    C = g.shape[-1]
    lower = jnp.tril(jnp.ones((C, C), g.dtype))
    after = jnp.where(jnp.tril(jnp.ones((C, C), bool), -1), g[..., :, None], 0)  # [l, j]: g_l where l > j
    between = dot("il,nbhrlj->nbhrij", g.dtype, lower, after)
    entering = dot("il,nbhrl->nbhri", g.dtype, lower, g)
    return (
        jnp.exp(jnp.where(masks.pairs, between, -jnp.inf)),
        jnp.exp(jnp.where(masks.enters, entering, -jnp.inf)),
    )


def _form(scale, dtype, q, k, v, g, beta, state, masks: Masks):
    """One block; see blockwise.run."""
    D, gamma = _decays(g, masks)
    kk = dot("nbhik,nbhjk->nbhij", dtype, k, k)[:, :, :, None]
    qk = dot("nbhik,nbhjk->nbhij", dtype, q, k)[:, :, :, None]
    T = unit_lower_inverse(jnp.tril(beta[..., None] * kk * D, -1))
    # Scaling the columns of T instead of the rows of K lets the heads of a group share K.
    w = dot("nbhrij,nbhjk->nbhrik", dtype, T * (beta * gamma)[..., None, :], k)
    u = dot("nbhrij,nbhrjv->nbhriv", dtype, T, beta[..., None] * v)
    to_end = jnp.where(masks.leaves, D[..., -1, :], 0)
    kg = to_end[..., None] * k[:, :, :, None]
    carry = jnp.where(masks.carries, gamma[..., -1], 0)[..., None]
    before, v_new, state = scan_states(dtype, w, u, kg, carry, state)
    o = (scale * gamma)[..., None] * dot("nbhik,nbhrkv->nbhriv", dtype, q, before)
    o += dot("nbhrij,nbhrjv->nbhriv", dtype, scale * qk * D, v_new)
    return o, state


def gdn_chunked(q, k, v, g, beta, scale: float, initial_state: jax.Array, segment_ids: jax.Array):
    """The operation of kernels.gdn.gdn, which documents the arguments; none may be None here."""
    return blockwise.run(_form, scale, q, k, v, g, beta, initial_state, segment_ids)

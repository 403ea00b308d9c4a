"""Attention with all scores at once: plain, in float64 when q is float64.

Shapes: B batch, T queries, S keys (as many), H query heads, G key/value heads, R query heads that share one (H = G R),
K key dim, V value dim.
"""

import jax
import jax.numpy as jnp

from hybrid_jax.kernels.documents import number_documents
from hybrid_jax.kernels.precision import accumulator


def attention_reference(q, k, v, segment_ids, scale: float):
    """See hybrid_jax.kernels.attention.attention."""
    B, T, H, K = q.shape
    S, G = k.shape[1:3]
    compute = accumulator(q.dtype)
    highest = jax.lax.Precision.HIGHEST if jnp.finfo(q.dtype).bits >= 32 else None
    q_BTGRK = q.reshape(B, T, G, H // G, K)
    s_BGRTS = jnp.einsum("btgrk,bsgk->bgrts", q_BTGRK, k, precision=highest, preferred_element_type=compute)
    doc_BT = number_documents(segment_ids)
    seen = (jnp.arange(T)[:, None] >= jnp.arange(S)) & (doc_BT[:, :, None] == doc_BT[:, None, :])[:, None, None]
    # Every query sees at least itself, so no row is all -inf.
    p_BGRTS = jax.nn.softmax(jnp.where(seen, s_BGRTS * scale, -jnp.inf), axis=-1).astype(v.dtype)
    o_BTGRV = jnp.einsum("bgrts,bsgv->btgrv", p_BGRTS, v, precision=highest, preferred_element_type=compute)
    return o_BTGRV.reshape(B, T, H, -1).astype(v.dtype)

"""Kimi Delta Attention's recurrence (arXiv:2510.26692): a delta rule with one decay per key channel.

Shapes: B batch, T time, H q/k heads, HV value heads, K key dim, V value dim.
"""

import jax

from hybrid_jax.kernels import delta_rule
from hybrid_jax.kernels.kda.chunked import kda_chunked
from hybrid_jax.kernels.kda.reference import kda_reference

BACKENDS = {"reference": kda_reference, "chunked": kda_chunked}


def kda(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    g: jax.Array,
    beta: jax.Array,
    *,
    scale: float | None = None,
    initial_state: jax.Array | None = None,
    segment_ids: jax.Array | None = None,
    backend: str = "auto",
) -> tuple[jax.Array, jax.Array]:
    """S <- diag(exp(g_t)) S;  S <- S + beta_t k_t (v_t - k_t^T S)^T;  o_t = scale q_t^T S.

    g [B, T, HV, K] fp32: the natural logarithm of each key channel's decay, <= 0 and otherwise of any size.
    All other arguments, the results and the errors raised are those of kernels.gdn.gdn.
    """
    gate_shape = (*v.shape[:3], q.shape[-1])
    options = (scale, initial_state, segment_ids)
    return delta_rule.call("kda", BACKENDS, backend, q, k, v, g, beta, gate_shape, *options)

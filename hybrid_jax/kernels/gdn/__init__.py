"""Gated DeltaNet's recurrence (arXiv:2412.06464): a delta rule with one decay per head.

Shapes: B batch, T time, H q/k heads, HV value heads, K key dim, V value dim.
"""

import jax

from hybrid_jax.kernels import delta_rule
from hybrid_jax.kernels.documents import number_documents
from hybrid_jax.kernels.gdn.chunked import gdn_chunked
from hybrid_jax.kernels.gdn.reference import gdn_reference


def _gdn_triton(q, k, v, g, beta, scale: float, initial_state: jax.Array, segment_ids: jax.Array | None):
    from hybrid_jax.kernels.gdn.triton import gdn_triton  # it imports Triton, which not every machine has

    documents = None if segment_ids is None else number_documents(segment_ids)
    return gdn_triton(q, k, v, g, beta, scale, initial_state, documents)


BACKENDS = {"reference": gdn_reference, "chunked": gdn_chunked, "triton": _gdn_triton}


def gdn(
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
    """S <- exp(g_t) S;  S <- S + beta_t k_t (v_t - k_t^T S)^T;  o_t = scale q_t^T S, from initial_state or 0.

    q, k [B, T, H, K], raw: they are divided by sqrt(sum x^2 + 1e-6) here. v [B, T, HV, V]; value head i uses
    q/k head i // (HV / H). g [B, T, HV] fp32, the natural logarithm of the decay, <= 0. beta [B, T, HV], up
    to 2. scale: K^-0.5 when None. initial_state [B, HV, K, V] fp32. segment_ids [B, T] int: a change of id
    starts a new document, whose state starts from zero. initial_state enters the first document of a row
    only; the final state is that of its last document.

    Returns o [B, T, HV, V] in v's dtype and the final state [B, HV, K, V] in fp32 (float64 where v is
    float64). bf16 inputs: matmul operands are rounded to bf16; sums, states, gates and inverses stay fp32.
    The triton backend takes bf16 and fp32 inputs, K a multiple of 4 from 16 to 256 and V one up to 512.
    Raises ValueError when shapes do not fit, UserError for a backend that does not exist or cannot run here.
    """
    options = (scale, initial_state, segment_ids)
    return delta_rule.call("gdn", BACKENDS, backend, q, k, v, g, beta, v.shape[:3], *options)

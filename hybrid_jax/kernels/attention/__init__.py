"""Causal softmax attention with grouped heads, documents, and key and value widths that may differ.

Shapes: B batch, T time, H query heads, Hkv key/value heads, Dk key dim, Dv value dim.
"""

import jax
import jax.numpy as jnp

from hybrid_jax.kernels import dispatch
from hybrid_jax.kernels.attention.chunked import attention_chunked
from hybrid_jax.kernels.attention.reference import attention_reference

BACKENDS = ("reference", "chunked")


def attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    scale: float | None = None,
    segment_ids: jax.Array | None = None,
    backend: str = "auto",
) -> jax.Array:
    """softmax(scale q k^T) v over the keys at or before each query and in its document, in fp32.

    q [B, T, H, Dk], k [B, T, Hkv, Dk], v [B, T, Hkv, Dv]; query head i reads key/value head i // (H / Hkv).
    scale is Dk^-0.5 unless given. segment_ids [B, T] int: a change of id starts a new document. Decoding goes through
    kernels.attention.cached.

    Returns [B, T, H, Dv] in v's dtype. Raises ValueError when shapes do not fit, UserError for a backend that
    does not exist.
    """
    _check_shapes(q, k, v, segment_ids)
    name = dispatch.resolve("attention", backend, BACKENDS)
    B, T = q.shape[:2]
    scale = float(q.shape[-1] ** -0.5 if scale is None else scale)
    fn = {"reference": attention_reference, "chunked": attention_chunked}[name]
    if segment_ids is None:
        segment_ids = jnp.zeros((B, T), jnp.int32)

    def rows(q, k, v, segment_ids):
        return (fn(q, k, v, segment_ids, scale),)

    return dispatch.over_devices(rows, ("B.H", "B.H", "B.H", "B"), ("B.H",))(q, k, v, segment_ids)[0]


def _check_shapes(q, k, v, segment_ids) -> None:
    if not q.ndim == k.ndim == v.ndim == 4:
        raise ValueError(f"attention: q {q.shape}, k {k.shape}, v {v.shape} must be [batch, time, head, dim]")
    B, T, H, Dk = q.shape
    if k.shape[:2] != (B, T) or k.shape[3] != Dk or v.shape[:3] != k.shape[:3]:
        raise ValueError(f"attention: shapes of q {q.shape}, k {k.shape} and v {v.shape} do not fit")
    if k.shape[2] < 1 or H % k.shape[2]:
        raise ValueError(f"attention: {H} query heads do not divide into {k.shape[2]} key/value heads")
    if segment_ids is not None and segment_ids.shape != (B, T):
        raise ValueError(f"attention: segment_ids {segment_ids.shape} must be {(B, T)}")

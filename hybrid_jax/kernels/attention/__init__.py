"""Causal softmax attention with grouped heads, documents, and key and value widths that may differ.

Shapes: B batch, T queries, S keys, H query heads, Hkv key/value heads, Dk key dim, Dv value dim.
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
    q_offset: int | jax.Array = 0,
    backend: str = "auto",
) -> jax.Array:
    """softmax(scale q k^T) v over the keys at or before each query and in its document, in fp32.

    q [B, T, H, Dk], k [B, S, Hkv, Dk], v [B, S, Hkv, Dv]; query head i reads key/value head i // (H / Hkv).
    scale is Dk^-0.5 unless given. segment_ids [B, T] int: a change of id starts a new document.
    q_offset: query i stands at position q_offset + i among the keys. Anything but the Python integer 0 means
    decoding against a cache of S keys: the scores of all T queries are formed at once, whatever the backend.
    Segments are for q_offset = 0 and S = T. With q_offset = 0 keys past T are never seen.

    Returns [B, T, H, Dv] in v's dtype. Raises ValueError when shapes do not fit, UserError for a backend that
    does not exist.
    """
    decoding = not (isinstance(q_offset, int) and q_offset == 0)
    _check_shapes(q, k, v, segment_ids, decoding)
    name = dispatch.resolve("attention", backend, BACKENDS)
    B, T = q.shape[:2]
    scale = float(q.shape[-1] ** -0.5 if scale is None else scale)
    if decoding:

        def decode(q, k, v, q_offset):
            return (attention_reference(q, k, v, None, scale, q_offset),)

        split = dispatch.over_devices(decode, ("B.H", "B.H", "B.H", ""), ("B.H",))
        return split(q, k, v, jnp.asarray(q_offset, jnp.int32))[0]

    fn = {"reference": attention_reference, "chunked": attention_chunked}[name]
    if segment_ids is None:
        segment_ids = jnp.zeros((B, T), jnp.int32)

    def rows(q, k, v, segment_ids):
        return (fn(q, k, v, segment_ids, scale),)

    return dispatch.over_devices(rows, ("B.H", "B.H", "B.H", "B"), ("B.H",))(q, k[:, :T], v[:, :T], segment_ids)[0]


def _check_shapes(q, k, v, segment_ids, decoding: bool) -> None:
    if not q.ndim == k.ndim == v.ndim == 4:
        raise ValueError(f"attention: q {q.shape}, k {k.shape}, v {v.shape} must be [batch, time, head, dim]")
    B, T, H, Dk = q.shape
    if k.shape[0] != B or k.shape[3] != Dk or v.shape[:3] != k.shape[:3]:
        raise ValueError(f"attention: shapes of q {q.shape}, k {k.shape} and v {v.shape} do not fit")
    if k.shape[2] < 1 or H % k.shape[2]:
        raise ValueError(f"attention: {H} query heads do not divide into {k.shape[2]} key/value heads")
    if not decoding and k.shape[1] < T:
        raise ValueError(f"attention: {T} queries from position 0 but only {k.shape[1]} keys")
    if segment_ids is not None and (decoding or k.shape[1] != T or segment_ids.shape != (B, T)):
        raise ValueError(f"attention: segment_ids {segment_ids.shape} must be {(B, T)}, with q_offset=0 and {T} keys")

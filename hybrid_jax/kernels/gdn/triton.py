"""Gated DeltaNet in Triton: six kernels for forward and backward, over q, k and v as they lie in memory.

The chunk form of kernels.gdn.chunked with three changes. Keys and queries are never normalised in memory: 1/|q|
and 1/|k| go into fp32 coefficients of rows and columns, so that the dots see q and k as they were stored. The
inverse T of I + A, A = stril(beta_i (k_i . k_j) D_ij), is applied to what the state predicts wrongly,

    E = V - gamma K S,  V' = T' E,  T' = T diag(beta),

instead of being spread over K and V (the WY form). And what it does to the state is folded into the keys that write,

    S <- gamma_C S + X^T E,  X = T'^T (D_C K),

so that only two dots of a chunk wait for the chunk before. The derivatives are short: with dV' the gradient of V',

    dV = dE = T'^T dV' = T'^T P^T dO + X dS,     P = scale (Q K^T) * D,
    d(k_i . k_j) = -(dV_i . V'_j) D_ij (j < i),  d beta_i = (dV_i / beta_i) . (V'_i / beta_i).

Forward: `prepare` (each chunk alone: T', X), `scan` (the state before each chunk), `output` (each chunk alone).
Backward: `prepare` again, `query_gradients` (each chunk alone: what follows from do and the states), `reverse_scan`
(dV and the gradient of the state after each chunk), `key_gradients` (each chunk alone). Saved between them: the
inputs and the states, nothing else. dq and dk are summed over the value heads of a group inside the kernels.
Gates and beta come computed: one number a token and head each, they save no pass over q, k or v.

Long rows with few heads are scanned in segments: see kernels.delta.plan.

Precision with bf16 inputs: operands of dots are rounded to bf16; T' keeps 16 bits, as a sum of two bf16 matrices
(similar keys amplify its rounding); states, coefficients, sums and the inverse are fp32. Gates' gradients: see
kernels.delta_rule; a strict sum is always summed directly.

Bytes a token and value head, R value heads a q/k head, C = 64, bf16, q and k read once a group thanks to the cache:
prepare 2K/R + 2K + 256; scan 2K/R + 2K + 2V + KV/32; output 4K/R + 4V + 256 + KV/32; query_gradients 6K/R + 8V + 384 +
KV/32; reverse_scan 4K/R + 2K + 6V + KV/32; key_gradients 6K/R + 4V + 128 + KV/16. With `prepare` twice 26K/R + 8K +
24V + 1280 + 3KV/16: for R = 2 and K = V = 64 4.9 KB, for K = V = 128 10.1 KB. Reading and writing every tensor of
forward and backward once takes 12K/R + 14V bytes.

Shapes: B batch, T time, H q/k heads, R value heads per q/k head, HV = H R, K key dim, V value dim, N chunks, C chunk.
"""

import functools

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from hybrid_jax.kernels import RESIDUAL
from hybrid_jax.kernels.cuts import triton_class
from hybrid_jax.kernels.delta import plan as planning
from hybrid_jax.kernels.delta.plan import Plan
from hybrid_jax.kernels.delta.scans import reverse_scan, scan
from hybrid_jax.kernels.gdn.chunks import key_gradients, output, prepare, query_gradients

_ROWS = {"prepare": planning.CHUNKS} | dict.fromkeys(("output", "query_gradients", "key_gradients"), planning.VALUES)


def shape_class(K: int, dtype) -> str:
    """The row of the tile tables for key dim K and the type of q, k and v."""
    return triton_class("gdn", K, jnp.dtype(dtype).itemsize)


def _plan(q, v, packed: bool) -> Plan:
    return planning.make_plan("gdn", shape_class(q.shape[-1], q.dtype), _ROWS, q, v, packed)


def _prepare(plan: Plan, k, g, beta, documents):
    """(inverse, writers, coefficients, carries) of `prepare`."""
    programs = plan.B * plan.chunks * plan.HV
    carries = plan.shape(plan.B, plan.HV, plan.chunks, dtype=jnp.float32)
    outputs = (plan.inverse, plan.per_key, plan.vector, carries)
    constants = {"PACKED": plan.packed, "PARTS": plan.parts}
    return plan.launch(prepare, (k, g, beta, documents), outputs, programs, constants)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _gdn(packed, scale, q, k, v, g, beta, initial_state, documents):
    return _forward(packed, scale, q, k, v, g, beta, initial_state, documents)[0]


def _forward(packed, scale, q, k, v, g, beta, initial_state, documents):
    plan = _plan(q, v, packed)
    inverse, *prepared = _prepare(plan, k, g, beta, documents)
    states, final = plan.scan(scan, (k, v, *prepared), initial_state, PER_CHANNEL=False)
    inputs = (q, k, v, g, documents, inverse, states)
    programs = plan.B * plan.chunks * plan.HV * plan.blocks(output)
    constants = {"V": plan.V, "SCALE": scale, "PACKED": packed, "PARTS": plan.parts}
    (o,) = plan.launch(output, inputs, [plan.per_value], programs, constants)
    o, states = checkpoint_name(o, RESIDUAL), checkpoint_name(states, RESIDUAL)
    return (o, final), (q, k, v, g, beta, documents, states)


def _backward(packed, scale, saved, cotangents):
    q, k, v, g, beta, documents, states = saved
    do, dfinal = cotangents
    plan = _plan(q, v, packed)
    inverse, *prepared = _prepare(plan, k, g, beta, documents)
    programs, vector = plan.B * plan.chunks * plan.H, plan.vector
    inputs = (q, k, v, g, documents, do, inverse, states)
    outputs = (q, plan.per_value, plan.per_value, plan.pairs, vector, vector)
    constants = {"V": plan.V, "PACKED": packed}
    dq, values, dv_local, dattention, log_decays, of_queries = plan.launch(
        query_gradients, inputs, outputs, programs, constants | {"SCALE": scale, "PARTS": plan.parts}
    )
    scanned = (q, k, do, dv_local, of_queries, *prepared)
    dv, dstates, dinitial = plan.scan(reverse_scan, scanned, dfinal, [plan.per_value], PER_CHANNEL=False)
    around = (q, k, g, beta, documents, values, dv, dattention, log_decays, states, dstates)
    dk, dg, dbeta = plan.launch(key_gradients, around, (k, g, beta), programs, constants)
    return dq, dk, dv, dg, dbeta, dinitial, None


_gdn.defvjp(_forward, _backward)


def gdn_triton(q, k, v, g, beta, scale: float, initial_state: jax.Array, documents: jax.Array | None):
    """The operation of kernels.gdn.gdn, which documents the arguments; documents [B, T] i32 number each row's
    documents from 0, None when there is one."""
    dtype = jnp.result_type(q, k, v)
    q, k = q.astype(dtype), k.astype(dtype)
    g, beta, initial_state = (x.astype(jnp.float32) for x in (g, beta, initial_state))
    packed = documents is not None
    o, final = _gdn(packed, scale, q, k, v.astype(dtype), g, beta, initial_state, documents if packed else g)
    return o.astype(v.dtype), final

"""Kimi Delta Attention in Triton: kernels as in kernels.gdn.triton, with a decay for each key channel:

    E = V - (gamma K) S,  V' = T' E,  o = (scale gamma Q) S + P V',
    S <- diag(gamma_C) S + X^T E,  X = T'^T (Lambda K),

gamma_i the decays from the chunk's start through token i, Lambda_j those after j to its end, both at most 1. What is
multiplied with decays (gamma K, scale gamma Q, X) is written once, by `prepare`, as are T' and P; how their pairs of
tokens are covered without overflow, for any gates, says kernels.kda.decays.

The log decays g come from the raw gate inside the kernels, forward and again backward:

    softplus: g = -exp(A_log) softplus(f + dt_bias);  bounded: g = lower_bound sigmoid(exp(A_log) (f + dt_bias)).

Forward: `prepare` (each chunk alone), `scan` (the state before each chunk), `output` (each chunk alone). Backward:
`prepare` again, `value_gradients` (each chunk alone: what follows from do), `reverse_scan`, `state_gradients` (each
chunk alone: what follows from dV and the gradients of the states), `input_gradients` (each chunk and block of channels
alone: all that is elementwise in channels). Saved between forward and backward: the inputs and the states.

Gradients of u = x / |x| become those of x by taking out what lies along u. That needs a sum over all channels, which
the blocks of channels do not have; it follows from vectors over values: with sigma = u . d loss / d u,

    sigma_q = do . o = rowsum(dP * P) + rowsum((scale gamma Q) * (do S^T)),    sigma_k = 2 dV . V' / beta - dV . V

(a key counts once as what reads the state and once as what writes it). Sums of gates' derivatives run over the pairs
of a chunk in which a gate lies; both tokens of a pair add the same product, so that pairs in which it does not lie
cancel exactly.

Precision with bf16 inputs: as in kernels.gdn.triton; gates, decays and their sums are fp32, decayed keys and queries
are rounded to bf16 for the dots. Those of A keep 16 bits within blocks. What is at most 4 and matters beside larger
terms only is fp16, with three bits more than bf16: pairs of different blocks, and both factors of X.

Bytes a token and value head, R value heads a q/k head, bf16, q and k read once a group thanks to the cache: prepare
4K/R + 8K + 6C + 12 (and 4K that stay in it); scan 4K + 2V + 2KV/C; output 4K + 4V + 6C + 2KV/C; value_gradients
6K + 8V + 8C + 2KV/C; reverse_scan 6K + 6V + 2KV/C; state_gradients 4K + 6V + 2C + 4KV/C; input_gradients 8K/R + 10K
+ 4C. With `prepare` twice 16K/R + 50K + 26V + 32C + 12KV/C: for K = 32, V = 64, R = 1, C = 16 5.8 KB, for K = V = 128,
C = 32 19 KB. Reading and writing every tensor of forward and backward once takes 12K/R + 6K + 14V bytes.

Shapes: B batch, T time, H q/k heads, R value heads per q/k head, HV = H R, K key dim, V value dim, N chunks, C chunk.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from hybrid_jax.kernels import RESIDUAL
from hybrid_jax.kernels.cuts import triton_class
from hybrid_jax.kernels.delta import plan as planning
from hybrid_jax.kernels.delta.plan import Plan
from hybrid_jax.kernels.delta.scans import reverse_scan, scan
from hybrid_jax.kernels.kda.channels import input_gradients, prepare
from hybrid_jax.kernels.kda.values import output, state_gradients, value_gradients


class _Options(NamedTuple):
    """What is compiled in: packed rows, the scale of q, the form of the gate ("log", "softplus" or "bounded") and its
    lower bound."""

    packed: bool
    scale: float
    form: str
    bound: float


_ROWS = {
    "prepare": {**planning.CHUNKS, **planning.CHANNELS},
    "output": planning.VALUES,
    "value_gradients": planning.VALUES,
    "state_gradients": planning.VALUES,
    "input_gradients": planning.CHANNELS,
}


def shape_class(K: int, dtype) -> str:
    """The row of the tile tables for key dim K and the type of q, k and v."""
    return triton_class("kda", K, jnp.dtype(dtype).itemsize)


def _plan(q, v, packed: bool) -> Plan:
    return planning.make_plan("kda", shape_class(q.shape[-1], q.dtype), _ROWS, q, v, packed)


def _of_gates(plan: Plan, options: _Options):
    """Constants of the kernels that see the gates."""
    constants = {"SCALE": options.scale, "FORM": options.form, "BOUND": options.bound}
    return constants | {"PACKED": options.packed, "PARTS": plan.parts}


def _prepare(plan: Plan, options: _Options, inputs):
    """(inverse, readers, queries, writers, attention, carries, q_norms, k_norms, lowest) of `prepare`."""
    programs = plan.B * plan.chunks * plan.HV
    carries = plan.shape(plan.B, plan.HV, plan.chunks, plan.K, dtype=jnp.float32)
    outputs = (plan.inverse, *3 * [plan.per_key], plan.pairs, carries, *3 * [plan.vector])
    return plan.launch(prepare, inputs, outputs, programs, _of_gates(plan, options))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _kda(options, q, k, v, gates, A_log, dt_bias, beta, initial_state, documents):
    return _forward(options, q, k, v, gates, A_log, dt_bias, beta, initial_state, documents)[0]


def _forward(options, q, k, v, gates, A_log, dt_bias, beta, initial_state, documents):
    plan = _plan(q, v, options.packed)
    raw = (q, k, gates, A_log, dt_bias, beta, documents)
    inverse, readers, queries, writers, attention, carries, *_ = _prepare(plan, options, raw)
    states, final = _scan(plan, scan, (readers, v, writers, carries, carries), initial_state)
    programs = plan.B * plan.chunks * plan.HV * plan.blocks(output)
    constants = {"V": plan.V, "PARTS": plan.parts}
    seen = (readers, queries, v, inverse, attention, states)
    (o,) = plan.launch(output, seen, [plan.per_value], programs, constants)
    o, states = checkpoint_name(o, RESIDUAL), checkpoint_name(states, RESIDUAL)
    return (o, final), (q, k, v, gates, A_log, dt_bias, beta, documents, states)


def _backward(options, saved, cotangents):
    q, k, v, gates, A_log, dt_bias, beta, documents, states = saved
    do, dfinal = cotangents
    plan = _plan(q, v, options.packed)
    programs, vector = plan.B * plan.chunks * plan.HV, plan.vector
    raw = (q, k, gates, A_log, dt_bias, beta, documents)
    inverse, readers, queries, writers, attention, carries, *of_tokens = _prepare(plan, options, raw)
    values, dv_local, *of_queries = plan.launch(
        value_gradients,
        (readers, queries, v, do, inverse, attention, states),
        (plan.per_value, plan.per_value, plan.pairs, plan.per_key, vector),
        programs,
        {"V": plan.V, "PARTS": plan.parts},
    )
    scanned = (queries, readers, do, dv_local, carries, writers, carries, carries)
    dv, dstates, dinitial = _scan(plan, reverse_scan, scanned, dfinal, [plan.per_value])
    *of_keys, dbeta = plan.launch(
        state_gradients,
        (v, beta, values, dv, states, dstates),
        (plan.pairs, plan.per_key, plan.per_key, carries, vector, beta),
        programs,
        {"V": plan.V},
    )
    sums = plan.shape(plan.B, plan.chunks, plan.HV, 2, plan.K, dtype=jnp.float32)
    dq, dk, dgates, sums = plan.launch(
        input_gradients,
        (q, k, gates, A_log, dt_bias, documents, *of_tokens, *of_queries, *of_keys),
        (q, k, gates, sums),
        plan.B * plan.chunks * plan.H * plan.channel_blocks(input_gradients),
        _of_gates(plan, options),
    )
    if options.form == "log":
        dA_log, ddt_bias = jnp.zeros_like(A_log), jnp.zeros_like(dt_bias)
    else:
        dA_log, ddt_bias = jnp.sum(sums[:, :, :, 0], axis=(0, 1, 3)), jnp.sum(sums[:, :, :, 1], axis=(0, 1))
    return dq, dk, dv, dgates, dA_log, ddt_bias, dbeta, dinitial, None


_kda.defvjp(_forward, _backward)


def _scan(plan: Plan, kernel, inputs, state, per_token=()):
    # A row for each value head, and decays by channel; see kernels.delta.scans.
    return plan._replace(H=plan.HV).scan(kernel, inputs, state, per_token, PER_CHANNEL=True)


def kda_triton(q, k, v, g, beta, scale: float, initial_state, documents, form: str, bound: float, A_log, dt_bias):
    """The operation of kernels.kda.kda, which documents the arguments; documents [B, T] i32 number each row's
    documents from 0, None when there is one.

    form: "log" for log decays g, when A_log [HV] and dt_bias [HV, K] are not read.
    """
    dtype = jnp.result_type(q, k, v)
    q, k = q.astype(dtype), k.astype(dtype)
    beta, initial_state, A_log, dt_bias = (x.astype(jnp.float32) for x in (beta, initial_state, A_log, dt_bias))
    g = g.astype(jnp.float32) if form == "log" else g
    options = _Options(documents is not None, scale, form, bound)
    documents = beta if documents is None else documents
    o, final = _kda(options, q, k, v.astype(dtype), g, A_log, dt_bias, beta, initial_state, documents)
    return o.astype(v.dtype), final

"""Kimi Delta Attention in Triton: kernels as in kernels.gdn.triton, with a decay for each key channel:

    E = V - (gamma K) S,  V' = T' E,  o = (scale gamma Q) S + P V',
    S <- diag(gamma_C) S + X^T E,  X = T'^T (Lambda K),

gamma_i the decays from the chunk's start through token i, Lambda_j those after j to its end, both at most 1. What is
multiplied with decays (gamma K, scale gamma Q, X) is written once, by `prepare`, as are T' and P; how their pairs of
tokens are covered without overflow, for any gates, says kernels.kda.decays.

The log decays g come from the raw gate inside the kernels, forward and again backward:

    softplus: g = -exp(A_log) softplus(f + dt_bias);  bounded: g = lower_bound sigmoid(exp(A_log) (f + dt_bias)).

Forward: `blocks` (each block of S = 16 tokens alone: gates, decays, and pairs within the block), `prepare` (each chunk
alone: joins the blocks), `scan` (the state before each chunk), `output` (each chunk alone). Backward: `prepare_again`
(each chunk alone: what `prepare` made of decays, without pairs), `value_gradients` (each chunk alone: what follows
from do), `reverse_scan`, `state_gradients` (each chunk and block of channels alone: what follows from dV and the
gradients of the states), `input_gradients` (each block of tokens alone: all that is elementwise in channels). A chunk
is one block or two. Saved between forward and backward: the inputs, the states, V', T', P, two norms a token and a
number a block, 2KV/C + 2V + 6C + 8 bytes a token and value head in bf16.

What is elementwise in channels costs most (K numbers a token and head, each a dozen times), and there most of the time
went into waiting and into moving numbers between threads. Hence kernels that few registers and few warps suffice for;
tiles [channels, tokens] where products sum over tokens, which then take them without a move, and where states are left
operands, which matrix units of some GPUs read from shared memory; narrow tiles that products with the identity widen
(kernels.device.widen); sums of squares and the like from the diagonals of products; and loads a step ahead.

Gradients of u = x / |x| become those of x by taking out what lies along u. That needs a sum over all channels, which
the blocks of channels do not have; it follows from vectors over values: with sigma = u . d loss / d u,

    sigma_q = do . o = rowsum(dP * P) + rowsum((scale gamma Q) * (do S^T)),    sigma_k = 2 dV . V' / beta - dV . V

(a key counts once as what reads the state and once as what writes it). Sums of gates' derivatives run over the pairs
of a block in which a gate lies; both tokens of a pair add the same product, so that pairs in which it does not lie
cancel exactly. Pairs of two blocks are products of a row, decayed from its block's start, and a column, decayed to its
block's end: to each block they are as the state is, something outside.

Precision with bf16 inputs: as in kernels.gdn.triton; gates, decays and their sums are fp32, decayed keys and queries
are rounded to bf16 for the dots. Those of A keep 16 bits within blocks. What is at most 4 and matters beside larger
terms only is fp16, with three bits more than bf16: pairs of different blocks, and both factors of X.

Bytes a token and value head, R value heads a q/k head, bf16, q and k read once a group thanks to the cache, and C = 32:
blocks 4K/R + 8K + 110; prepare 12K + 6C + 100; scan 4K + 2V + 2KV/C; output 4K + 6V + 6C + 2KV/C; prepare_again 4K/R +
11K + 4C; value_gradients 6V + 8C; reverse_scan 6K + 6V + 2KV/C; state_gradients 8K + 8V + 2C + 4KV/C; input_gradients
8K/R + 13K + 4C. Together, with K = V = 128 and R = 1, 20 KB; where a chunk is one block (prepare 4K, prepare_again 8K,
input_gradients 10K), with K = 32 and V = 64, 6 KB. Reading and writing every tensor of forward and backward once takes
12K/R + 6K + 14V bytes.

Shapes: B batch, T time, H q/k heads, R value heads per q/k head, HV = H R, K key dim, V value dim, N chunks, C chunk,
M blocks of S tokens.
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
from hybrid_jax.kernels.device import BLOCK
from hybrid_jax.kernels.kda.blocks import blocks
from hybrid_jax.kernels.kda.channels import input_gradients, prepare, prepare_again
from hybrid_jax.kernels.kda.values import output, state_gradients, value_gradients


class _Options(NamedTuple):
    """What is compiled in: packed rows, the scale of q, the form of the gate ("log", "softplus" or "bounded") and its
    lower bound."""

    packed: bool
    scale: float
    form: str
    bound: float


_BLOCK = BLOCK.value

# The rows of a shape class in the tile tables.
_ROWS = {
    "blocks": planning.CHANNELS,
    "prepare": {"C": (16, 32)},
    "output": planning.VALUES,
    "prepare_again": planning.CHANNELS,
    "value_gradients": planning.VALUES,
    "state_gradients": {**planning.VALUES, **planning.CHANNELS},
    "input_gradients": planning.CHANNELS,
}


def shape_class(K: int, dtype) -> str:
    """The row of the tile tables for key dim K and the type of q, k and v."""
    return triton_class("kda", K, jnp.dtype(dtype).itemsize)


def _plan(q, v, packed: bool) -> Plan:
    return planning.make_plan("kda", shape_class(q.shape[-1], q.dtype), _ROWS, q, v, packed)


def _of_gates(plan: Plan, options: _Options):
    """Constants of the kernels that see the gates."""
    return {"FORM": options.form, "BOUND": options.bound, "PACKED": options.packed, "PARTS": plan.parts}


def _prepare(plan: Plan, options: _Options, inputs, beta):
    """((inverse, attention, q_norms, k_logs, lowest), (readers, queries, writers, carries)) of `blocks` and
    `prepare`."""
    count = plan.chunks * (plan.chunk // _BLOCK)
    block_carries = _carries(plan, _BLOCK)
    square = (plan.B, count, plan.HV, _BLOCK, _BLOCK)
    pairs = plan.shape(*square, dtype=jnp.float32), plan.shape(*square)
    lowest = plan.shape(plan.B, plan.HV, count, dtype=jnp.float32)
    outputs = (*3 * [plan.per_key], block_carries, *pairs, plan.vector, plan.vector, lowest)
    constants = _of_gates(plan, options) | {"SCALE": options.scale}
    *made, q_norms, k_logs, lowest = plan.launch(blocks, inputs, outputs, plan.B * count * plan.HV, constants)
    joined = [plan.shape(1)] * 3 if plan.chunk == _BLOCK else [plan.per_key, plan.per_key, _carries(plan)]
    outputs = (plan.inverse, *joined[:2], plan.per_key, plan.pairs, joined[2])
    programs, constants = plan.B * plan.chunks * plan.HV, {"PARTS": plan.parts}
    inverse, *frames, attention, carries = plan.launch(prepare, (beta, *made), outputs, programs, constants)
    if plan.chunk == _BLOCK:  # as `blocks` wrote them
        frames[:2], carries = made[:2], made[3]
    return (inverse, attention, q_norms, k_logs, lowest), (*frames, carries)


def _carries(plan: Plan, length: int | None = None):
    """A decay a channel for each run of `length` tokens, of a chunk when None."""
    count = plan.chunks * (plan.chunk // (length or plan.chunk))
    return plan.shape(plan.B, plan.HV, count, plan.K, dtype=jnp.float32)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _kda(options, q, k, v, gates, A_log, dt_bias, beta, initial_state, documents):
    return _forward(options, q, k, v, gates, A_log, dt_bias, beta, initial_state, documents)[0]


def _forward(options, q, k, v, gates, A_log, dt_bias, beta, initial_state, documents):
    plan = _plan(q, v, options.packed)
    of_pairs, (readers, queries, writers, carries) = _prepare(
        plan, options, (q, k, gates, A_log, dt_bias, documents), beta
    )
    inverse, attention, *_ = of_pairs
    states, final = _scan(plan, scan, (readers, v, writers, carries, carries), initial_state)
    programs = plan.B * plan.chunks * plan.HV * plan.blocks(output)
    constants = {"V": plan.V, "PARTS": plan.parts}
    seen = (readers, queries, v, inverse, attention, states)
    o, values = plan.launch(output, seen, [plan.per_value, plan.per_value], programs, constants)
    o, *made = (checkpoint_name(x, RESIDUAL) for x in (o, states, values, *of_pairs))
    return (o, final), (q, k, v, gates, A_log, dt_bias, beta, documents, *made)


def _backward(options, saved, cotangents):
    q, k, v, gates, A_log, dt_bias, beta, documents, states, values, inverse, attention, *of_tokens = saved
    do, dfinal = cotangents
    plan = _plan(q, v, options.packed)
    programs, vector, carries = plan.B * plan.chunks * plan.HV, plan.vector, _carries(plan)
    q_norms, k_logs, _ = of_tokens
    blocks_of_row = plan.chunks * (plan.chunk // _BLOCK)
    between = plan.shape(1, dtype=jnp.float32), plan.shape(1)
    if plan.chunk > _BLOCK:
        between = _carries(plan, _BLOCK), plan.shape(plan.B, plan.chunks, plan.HV, 3, _BLOCK, plan.K)
    readers, queries, writers, carries, *between = plan.launch(
        prepare_again,
        (q, k, gates, A_log, dt_bias, beta, documents, inverse, q_norms, k_logs),
        (*3 * [plan.per_key], carries, *between),
        programs,
        _of_gates(plan, options),
    )
    dv_local, dattention, diagonal, of_pairs, sizes_p = plan.launch(
        value_gradients,
        (do, values, inverse, attention, q_norms, k_logs),
        (plan.per_value, plan.pairs, vector, vector, vector),
        programs,
        {"V": plan.V, "PARTS": plan.parts},
    )
    scanned = (queries, readers, do, dv_local, carries, writers, carries, carries)
    dv, dstates, dinitial = _scan(plan, reverse_scan, scanned, dfinal, [plan.per_value])
    parts_of_sums = plan.channel_blocks(state_gradients)
    sizes = {"SIZE": plan.per_key.size, "ROWS": vector.size}
    *found, dbeta = plan.launch(
        state_gradients,
        (queries, v, beta, values, do, dv, states, dstates, carries, q_norms, k_logs, of_pairs),
        (
            plan.per_key,
            plan.shape(parts_of_sums, *vector.shape, dtype=jnp.float32),
            plan.pairs,
            vector,
            plan.shape(2, *plan.per_key.shape),
            carries,
            vector,
            beta,
        ),
        programs * parts_of_sums,
        {"V": plan.V} | sizes,
    )
    sums = plan.shape(plan.B, blocks_of_row, plan.HV, 2, plan.K, dtype=jnp.float32)
    dq, dk, dgates, sums = plan.launch(
        input_gradients,
        (q, k, gates, A_log, dt_bias, documents, *of_tokens, *between, dattention, diagonal, sizes_p, *found),
        (q, k, gates, sums),
        plan.B * blocks_of_row * plan.H,
        _of_gates(plan, options) | {"SCALE": options.scale, "SUMS": parts_of_sums} | sizes,
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

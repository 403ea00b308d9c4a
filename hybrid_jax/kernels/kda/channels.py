"""Kimi Delta Attention's kernels over key channels, a chunk of a row at a time: here the gates are. kernels.kda.triton
says how they fit together.

Symbols as there. Shapes: B batch, T time, H q/k heads, R value heads per q/k head, HV = H R, K key dim, V value dim,
N chunks, C chunk; BK >= K, BC and BV widths of tiles: all channels, a block of channels, a block of values.
"""

import triton
import triton.language as tl

from hybrid_jax.kernels.delta.chunks import load_inverse
from hybrid_jax.kernels.device import dot, load_columns, split, store_columns
from hybrid_jax.kernels.kda.decays import (
    LN2,
    LOG2E,
    chunk_documents,
    entering_decay,
    leaving_decay,
    log_decays,
    token_sums,
)


@triton.jit
def prepare(
    q,
    k,
    gates,
    A_log,
    dt_bias,
    documents,
    q_norms,
    k_norms,
    inverse,
    readers,
    queries,
    writers,
    carries,
    T: tl.constexpr,
    H: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    N: tl.constexpr,
    C: tl.constexpr,
    BK: tl.constexpr,
    BC: tl.constexpr,
    SCALE: tl.constexpr,
    FORM: tl.constexpr,
    BOUND: tl.constexpr,
    PACKED: tl.constexpr,
    PARTS: tl.constexpr,
):
    """What reads, asks and writes the states: one program a chunk, value head and block of BC channels.

    readers [B,T,HV,K]: gamma K. queries: scale gamma Q. writers: X. carries [B,HV,N,K]: the chunk's decay.
    """
    BLOCKS: tl.constexpr = BK // BC
    program = tl.program_id(0)
    key = program % BLOCKS * BC + tl.arange(0, BC)
    head = (program // BLOCKS) % HV
    n = (program // BLOCKS // HV) % N
    b = (program // BLOCKS // HV // N).to(tl.int64)
    dtype: tl.constexpr = k.dtype.element_ty
    at = tl.arange(0, C)
    start = (b * T * H + head // (HV // H)) * K
    v_start = (b * T * HV + head) * K
    row = (b * HV + head) * (N * C) + n * C + at
    # All that is read is asked for before anything waits for it.
    k_tile = load_columns(k + start, n * C, H * K, key, C, T, K)
    q_tile = load_columns(q + start, n * C, H * K, key, C, T, K)
    k_norm, q_norm = tl.load(k_norms + row), tl.load(q_norms + row)
    high, low = load_inverse(inverse, (b * N + n) * HV + head, C, PARTS)
    document, previous, last = at, 0, 0
    if PACKED:
        document, previous, last = chunk_documents(documents, b, n, T, C)
    _, g = log_decays(gates, A_log, dt_bias, b, n, head, key, T, HV, K, C, FORM, BOUND)
    g_high, g_low = split(g, dtype)
    carry = tl.exp2(tl.sum(g, axis=1))
    entering = entering_decay(g_high, g_low, C, PARTS)
    if PACKED:
        entering = tl.where((document == previous)[None, :], entering, 0.0)
        carry = tl.where(previous == last, carry, 0.0)
    tl.store(carries + ((b * HV + head) * N + n) * K + key, carry, mask=key < K)
    store_columns(queries + v_start, q_tile * q_norm[None, :] * entering, n * C, HV * K, key, C, T, K)
    k_unit = k_tile * k_norm[None, :]
    store_columns(readers + v_start, k_unit * entering, n * C, HV * K, key, C, T, K)
    leaving = leaving_decay(g_high, g_low, C, PARTS)
    if PACKED:
        leaving = tl.where((document == last)[None, :], leaving, 0.0)
    kept, kept_low = split(k_unit * leaving, dtype)
    writer = dot(kept, high)
    if PARTS == 2:  # X of similar keys is a small difference of large terms
        writer += dot(kept, low)
        writer += dot(kept_low, high)
    store_columns(writers + v_start, writer, n * C, HV * K, key, C, T, K)


@triton.jit
def _store_unnormalised(
    out,
    du,
    unit,
    along,
    norm,
    n,
    key,
    SCALE: tl.constexpr,
    T: tl.constexpr,
    H: tl.constexpr,
    R: tl.constexpr,
    K: tl.constexpr,
    N: tl.constexpr,
    C: tl.constexpr,
):
    """The gradient of x from du / SCALE, that of u = x / |x|: (du - u (u . du)) / |x|. unit: SCALE u; norm: SCALE /
    |x|; along: u . du of each value head."""
    total = tl.load(along)
    for r in tl.static_range(1, R):
        total += tl.load(along + r * (N * C))
    du = SCALE * du - unit * (total / SCALE)[None, :]
    store_columns(out, du * (tl.load(norm) / SCALE)[None, :], n * C, H * K, key, C, T, K)


@triton.jit
def input_gradients(
    q,
    k,
    gates,
    A_log,
    dt_bias,
    documents,
    q_norms,
    k_norms,
    of_q,
    of_k,
    of_decays,
    asked,
    along_q,
    read,
    written,
    through,
    along_k,
    dq,
    dk,
    dgates,
    of_gates,
    T: tl.constexpr,
    H: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    N: tl.constexpr,
    C: tl.constexpr,
    BK: tl.constexpr,
    BC: tl.constexpr,
    SCALE: tl.constexpr,
    FORM: tl.constexpr,
    BOUND: tl.constexpr,
    PACKED: tl.constexpr,
    PARTS: tl.constexpr,
):
    """dq, dk [B,T,H,K] and dgates [B,T,HV,K] from what `pair_gradients` (of_q, of_k, of_decays) and the kernels over
    values found: one program a chunk, q/k head and block of BC channels. of_gates [B,N,HV,2,K]: the chunk's sums for
    d A_log and d dt_bias.
    """
    BLOCKS: tl.constexpr = BK // BC
    program = tl.program_id(0)
    key = program % BLOCKS * BC + tl.arange(0, BC)
    group = (program // BLOCKS) % H
    n = (program // BLOCKS // H) % N
    b = (program // BLOCKS // H // N).to(tl.int64)
    R: tl.constexpr = HV // H
    dtype: tl.constexpr = k.dtype.element_ty
    at = tl.arange(0, C)
    start = (b * T * H + group) * K
    row = (b * HV + group * R) * (N * C) + n * C + at
    document, previous, last = at, 0, 0
    if PACKED:
        document, previous, last = chunk_documents(documents, b, n, T, C)
    dq_tile, dk_tile = tl.zeros([BC, C], tl.float32), tl.zeros([BC, C], tl.float32)
    for r in tl.range(0, R, disable_licm=True):
        head = group * R + r
        chunk = (b * N + n) * HV + head
        head_start = (b * T * HV + head) * K
        _, g = log_decays(gates, A_log, dt_bias, b, n, head, key, T, HV, K, C, FORM, BOUND)
        g_high, g_low = split(g, dtype)
        carry = tl.exp2(tl.sum(g, axis=1))
        entering = entering_decay(g_high, g_low, C, PARTS)
        if PACKED:
            entering = tl.where((document == previous)[None, :], entering, 0.0)
            carry = tl.where(previous == last, carry, 0.0)
        part = load_columns(asked + head_start, n * C, HV * K, key, C, T, K) * entering
        unit = load_columns(q + start, n * C, H * K, key, C, T, K) * tl.load(q_norms + row)[None, :]
        of_sums = unit * part
        dq_tile += load_columns(of_q + head_start, n * C, HV * K, key, C, T, K) + part
        if R == 1:
            _store_unnormalised(
                dq + start, dq_tile, unit, along_q + row, q_norms + row, n, key, SCALE, T, H, R, K, N, C
            )
        # Registers are what this kernel is short of: loads wait for their turn.
        tl.debug_barrier()
        part = load_columns(read + head_start, n * C, HV * K, key, C, T, K) * entering
        unit = load_columns(k + start, n * C, H * K, key, C, T, K) * tl.load(k_norms + row)[None, :]
        of_sums -= unit * part
        dk_tile += load_columns(of_k + head_start, n * C, HV * K, key, C, T, K) - part
        dg = token_sums(of_sums, at[:, None] >= at[None, :], document, PACKED, PARTS, dtype)
        tl.debug_barrier()
        leaving = leaving_decay(g_high, g_low, C, PARTS)
        if PACKED:
            leaving = tl.where((document == last)[None, :], leaving, 0.0)
        part = load_columns(written + head_start, n * C, HV * K, key, C, T, K) * leaving
        dk_tile += part
        unit = load_columns(k + start, n * C, H * K, key, C, T, K) * tl.load(k_norms + row)[None, :]
        dg += token_sums(unit * part, at[:, None] < at[None, :], document, PACKED, PARTS, dtype)
        if R == 1:
            _store_unnormalised(dk + start, dk_tile, unit, along_k + row, k_norms + row, n, key, 1.0, T, H, R, K, N, C)
        tl.debug_barrier()
        dg += load_columns(of_decays + head_start, n * C, HV * K, key, C, T, K)
        carried = tl.load(through + ((b * HV + head) * N + n) * K + key, mask=key < K, other=0.0) * carry
        dg = tl.where((n * C + at < T)[None, :], dg + carried[:, None], 0.0)
        if FORM != "log":
            rate = tl.exp(tl.load(A_log + head))
            x, g = log_decays(gates, A_log, dt_bias, b, n, head, key, T, HV, K, C, FORM, BOUND)
            if FORM == "softplus":
                of_rate = dg * g
                dg *= -rate / (1.0 + tl.exp2(-LOG2E * x))
                scale = LN2
            else:
                part = tl.sigmoid(rate * x)
                dg *= BOUND * rate * (part * (1.0 - part))
                of_rate = dg * x
                scale = 1.0
            summed = of_gates + chunk * 2 * K + key
            tl.store(summed, tl.sum(of_rate, axis=1) * scale, mask=key < K)
            tl.store(summed + K, tl.sum(dg, axis=1), mask=key < K)
        store_columns(dgates + head_start, dg, n * C, HV * K, key, C, T, K)
    if R > 1:
        unit = load_columns(q + start, n * C, H * K, key, C, T, K) * tl.load(q_norms + row)[None, :]
        _store_unnormalised(dq + start, dq_tile, unit, along_q + row, q_norms + row, n, key, SCALE, T, H, R, K, N, C)
        unit = load_columns(k + start, n * C, H * K, key, C, T, K) * tl.load(k_norms + row)[None, :]
        _store_unnormalised(dk + start, dk_tile, unit, along_k + row, k_norms + row, n, key, 1.0, T, H, R, K, N, C)

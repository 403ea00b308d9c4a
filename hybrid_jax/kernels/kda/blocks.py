"""Kimi Delta Attention's first kernel: what passes within a block of 16 tokens, whatever the chunk. kernels.kda.triton
says how the kernels fit together.

Symbols as there. Shapes: B batch, T time, H q/k heads, HV value heads, K key dim, N chunks, C chunk, M blocks of S = 16
tokens; BK >= K and BC widths of tiles: all channels, a block of channels.
"""

import triton
import triton.language as tl

from hybrid_jax.kernels.delta.chunks import inverse_norm
from hybrid_jax.kernels.device import BLOCK, dot, load_rows, store_rows, truncate, widen
from hybrid_jax.kernels.kda.decays import (
    LOG2_E,
    STEEPEST,
    UNCENTRE,
    halves,
    load_bias,
    load_gates,
    load_rate,
    log_decays,
    pair_decays,
    rest,
    sums,
    up_to,
    zone_decays,
    zones,
)


@triton.jit
def documents_around(documents, b, n, T: tl.constexpr, C: tl.constexpr):
    """Of the C tokens from token n C of a packed row: their documents [C], those of the token before and of the last
    one."""
    ids = documents + b * T
    document = tl.load(ids + tl.minimum(n * C + tl.arange(0, C), T - 1))
    before = tl.load(ids + tl.minimum(tl.maximum(n * C - 1, 0), T - 1))
    last = tl.load(ids + tl.minimum(n * C + C - 1, T - 1))
    return document, before, last


@triton.jit
def _products(k_row, q_row, column, dtype: tl.constexpr, PARTS: tl.constexpr):
    """(k_row . column, q_row . column) [S,S], the first of 16 bits of both: similar keys amplify the rounding of A."""
    row, row_low = truncate(k_row, dtype)
    right, right_low = truncate(column, dtype)
    right = tl.trans(right)
    query = q_row.to(dtype)
    kk, qk = dot(row, right), dot(query, right)
    if PARTS == 2:
        right_low = tl.trans(right_low)
        kk += dot(row, right_low)
        kk += dot(row_low, right)
        qk += dot(query, right_low)
    return kk, qk


@triton.jit
def blocks(
    q,
    k,
    gates,
    A_log,
    dt_bias,
    documents,
    readers,
    queries,
    writers,
    carries,
    key_pairs,
    query_pairs,
    q_norms,
    k_logs,
    lowest,
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
    """What follows from q, k and the gates of one block of S tokens: one program a block and value head.

    With gamma and Lambda over the block: readers [B,T,HV,K]: gamma K, queries: scale gamma Q, writers: Lambda K, in
    fp16 where `prepare` is to join blocks; carries [B,HV,M,K]: the block's decay. key_pairs, query_pairs [B,M,HV,S,S]:
    decayed k_i . k_j, j < i, and scale q_i . k_j, j <= i. q_norms, k_logs [B,HV,N C]: scale / |q| and log2 of 1 / |k|.
    lowest [B,HV,M]: the least sum of the block's gates, of all channels.
    """
    S: tl.constexpr = BLOCK
    BLOCKS: tl.constexpr = N * (C // S)
    UNBOUNDED: tl.constexpr = FORM != "bounded" or LOG2_E * BOUND * S < STEEPEST
    program = tl.program_id(0)
    head = program % HV
    n = (program // HV) % BLOCKS
    b = (program // HV // BLOCKS).to(tl.int64)
    dtype: tl.constexpr = k.dtype.element_ty
    half: tl.constexpr = tl.float16 if PARTS == 2 else dtype
    at = tl.arange(0, S)
    start = (b * T * H + head // (HV // H)) * K
    v_start = (b * T * HV + head) * K
    all_keys = tl.arange(0, BK)
    k_norm = inverse_norm(load_rows(k + start, n * S, H * K, all_keys, S, T, K))
    q_norm = SCALE * inverse_norm(load_rows(q + start, n * S, H * K, all_keys, S, T, K))
    row = (b * HV + head) * (N * C) + n * S + at
    tl.store(q_norms + row, q_norm)
    k_log = tl.log2(k_norm)
    tl.store(k_logs + row, k_log)
    document, previous, last = at, 0, 0
    if PACKED:
        document, previous, last = documents_around(documents, b, n, T, S)

    # Rows of q take the decays of those of k, 1 / |k| and all; what is wrong in that is a factor of the row.
    q_to_k = q_norm / k_norm
    to_reader, to_query = tl.full([S], UNCENTRE, tl.float32), q_to_k * UNCENTRE
    if PACKED:
        to_reader = tl.where(document == previous, to_reader, 0.0)
        to_query = tl.where(document == previous, to_query, 0.0)
    A, P = tl.zeros([S, S], tl.float32), tl.zeros([S, S], tl.float32)
    lowest_sums = tl.zeros([BC], tl.float32)
    to_token, after_token = up_to(document, S, PACKED, dtype), rest(S, dtype)
    rate, inside = load_rate(A_log, head, FORM), (n * S + at < T)[:, None]
    key = tl.arange(0, BC)
    next_k = load_rows(k + start, n * S, H * K, key, S, T, K)
    next_q = load_rows(q + start, n * S, H * K, key, S, T, K)
    next_gates = load_gates(gates, b, n, head, key, T, HV, K, S)
    for channels in tl.range(0, BK // BC, disable_licm=True):
        k_tile, q_tile, raw = widen(next_k), widen(next_q), next_gates
        key = channels * BC + tl.arange(0, BC)
        next_k = load_rows(k + start, n * S, H * K, key + BC, S, T, K)
        next_q = load_rows(q + start, n * S, H * K, key + BC, S, T, K)
        next_gates = load_gates(gates, b, n, head, key + BC, T, HV, K, S)
        x = raw.to(tl.float32) + load_bias(dt_bias, head, key, K, FORM)[None, :]
        g = log_decays(x, rate, inside, FORM, BOUND, PARTS)
        g_high, g_low = truncate(g, dtype)
        total = sums(to_token, g_high, g_low, PARTS)
        row_decay, column_decay = pair_decays(total, k_log[:, None], UNBOUNDED)
        k_row, q_row = k_tile * row_decay, q_tile * row_decay
        kk, qk = _products(k_row, q_row, k_tile * column_decay, dtype, PARTS)
        A += kk
        P += qk
        writer = k_tile * tl.exp2(sums(after_token, g_high, g_low, PARTS) + k_log[:, None])
        sum_of_gates = tl.sum(g, axis=0)
        lowest_sums = tl.minimum(lowest_sums, sum_of_gates)
        carry = tl.exp2(sum_of_gates)
        if PACKED:
            writer = tl.where((document == last)[:, None], writer, 0.0)
            carry = tl.where(previous == last, carry, 0.0)
        tl.store(carries + ((b * HV + head) * BLOCKS + n) * K + key, carry, mask=key < K)
        reader, query = k_row * to_reader[:, None], q_row * to_query[:, None]
        if C == S:
            store_rows(readers + v_start, reader, n * S, HV * K, key, S, T, K)
            store_rows(queries + v_start, query, n * S, HV * K, key, S, T, K)
        else:
            store_rows(readers + v_start, reader.to(half).to(dtype, bitcast=True), n * S, HV * K, key, S, T, K)
            store_rows(queries + v_start, query.to(half).to(dtype, bitcast=True), n * S, HV * K, key, S, T, K)
        store_rows(writers + v_start, writer.to(half).to(dtype, bitcast=True), n * S, HV * K, key, S, T, K)
    lowest_sum = tl.min(lowest_sums)
    tl.store(lowest + (b * HV + head) * BLOCKS + n, lowest_sum)
    if UNBOUNDED:
        if lowest_sum < STEEPEST + 1:  # a sum in another order may differ a little
            # Rare, and kept out of the registers of the rest.
            for channels in tl.range(0, BK // BC, disable_licm=True):
                key = channels * BC + tl.arange(0, BC)
                raw = load_gates(gates, b, n, head, key, T, HV, K, S)
                x = raw.to(tl.float32) + load_bias(dt_bias, head, key, K, FORM)[None, :]
                g = log_decays(x, rate, inside, FORM, BOUND, PARTS)
                g_high, g_low = truncate(g, dtype)
                total = sums(to_token, g_high, g_low, PARTS)
                if tl.min(total) <= STEEPEST:
                    k_tile = load_rows(k + start, n * S, H * K, key, S, T, K)
                    q_tile = load_rows(q + start, n * S, H * K, key, S, T, K)
                    coarse, fine = halves(g, dtype, PARTS)
                    coarse, fine = dot(to_token, coarse), dot(to_token, fine)
                    zone = zones(total, coarse, fine)
                    for z in tl.range(1, tl.max(zone).to(tl.int32) + 1, disable_licm=True):
                        row_of, column_of = zone_decays(zone, coarse, fine, z, k_log[:, None])
                        kk, qk = _products(k_tile * row_of, q_tile * row_of, k_tile * column_of, dtype, PARTS)
                        A += kk
                        P += qk
    i, j = at[:, None], at[None, :]
    pairs = ((b * BLOCKS + n) * HV + head) * (S * S) + i * S + j
    A, P = tl.where(i > j, A, 0.0), tl.where(i >= j, P * q_to_k[:, None], 0.0)
    if PACKED:
        same = document[:, None] == document[None, :]
        A, P = tl.where(same, A, 0.0), tl.where(same, P, 0.0)
    tl.store(key_pairs + pairs, A)
    tl.store(query_pairs + pairs, P.to(dtype))

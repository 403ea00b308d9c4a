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
    column_decay,
    in_square,
    load_bias,
    load_gates,
    load_rate,
    log_decays,
    rest,
    row_decay,
    square_decay,
    sums,
    up_to,
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
def _exact_pairs(q_tile, k_tile, g_high, g_low, PARTS: tl.constexpr):
    """Decayed products of all pairs j < i of a block, and of q_i with k_i, whatever the gates: (k_i . k_j, q_i . k_j),
    each [S,S]."""
    at = tl.arange(0, BLOCK)
    qk = tl.where(at[:, None] == at[None, :], tl.sum(q_tile * k_tile, axis=1)[:, None], 0.0)
    kk = tl.zeros([BLOCK, BLOCK], tl.float32)
    for level in tl.range(0, 4, disable_licm=True):
        part_kk, part_qk = _square(q_tile, k_tile, g_high, g_low, level, PARTS)
        kk += part_kk
        qk += part_qk
    return kk, qk


@triton.jit
def _square(q_tile, k_tile, g_high, g_low, level, PARTS: tl.constexpr):
    """The same of the pairs in squares of width 2^level."""
    decay = square_decay(g_high, g_low, level, BLOCK, PARTS)
    keep = in_square(level, BLOCK)
    kk, qk = _products(k_tile * decay, q_tile * decay, k_tile * decay, g_high.dtype, PARTS)
    return tl.where(keep, kk, 0.0), tl.where(keep, qk, 0.0)


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
    decayed k_i . k_j, j < i, and scale q_i . k_j, j <= i. q_norms, k_logs, lowest [B,HV,N C]: scale / |q|, log2 of 1 /
    |k|, and the least sum, of all channels, of gates from the block's start through a token.
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
    lowest_sum = tl.zeros([S], tl.float32)
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
        decay = row_decay(total, k_log[:, None])
        k_row, q_row = k_tile * decay, q_tile * decay
        kk, qk = _products(k_row, q_row, k_tile * column_decay(total, k_log[:, None]), dtype, PARTS)
        if UNBOUNDED:
            least = tl.min(total, axis=1)
            lowest_sum = tl.minimum(lowest_sum, least)
            kk = tl.where((least >= STEEPEST)[:, None], kk, 0.0)
            qk = tl.where((least >= STEEPEST)[:, None], qk, 0.0)
        A += kk
        P += qk
        writer = k_tile * tl.exp2(sums(after_token, g_high, g_low, PARTS) + k_log[:, None])
        carry = tl.exp2(tl.sum(g, axis=0))
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
    tl.store(lowest + row, lowest_sum)
    if UNBOUNDED:
        if tl.min(lowest_sum) < STEEPEST:
            # Rare, and kept out of the registers of the rest.
            for channels in tl.range(0, BK // BC, disable_licm=True):
                key = channels * BC + tl.arange(0, BC)
                raw = load_gates(gates, b, n, head, key, T, HV, K, S)
                x = raw.to(tl.float32) + load_bias(dt_bias, head, key, K, FORM)[None, :]
                g = log_decays(x, rate, inside, FORM, BOUND, PARTS)
                g_high, g_low = truncate(g, dtype)
                least = tl.min(sums(to_token, g_high, g_low, PARTS), axis=1)
                if tl.min(least) < STEEPEST:
                    k_tile = load_rows(k + start, n * S, H * K, key, S, T, K) * k_norm[:, None]
                    q_tile = load_rows(q + start, n * S, H * K, key, S, T, K) * k_norm[:, None]
                    kk, qk = _exact_pairs(q_tile, k_tile, g_high, g_low, PARTS)
                    A += tl.where((least < STEEPEST)[:, None], kk, 0.0)
                    P += tl.where((least < STEEPEST)[:, None], qk, 0.0)
    i, j = at[:, None], at[None, :]
    pairs = ((b * BLOCKS + n) * HV + head) * (S * S) + i * S + j
    A, P = tl.where(i > j, A, 0.0), tl.where(i >= j, P * q_to_k[:, None], 0.0)
    if PACKED:
        same = document[:, None] == document[None, :]
        A, P = tl.where(same, A, 0.0), tl.where(same, P, 0.0)
    tl.store(key_pairs + pairs, A)
    tl.store(query_pairs + pairs, P.to(dtype))

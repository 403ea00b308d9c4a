"""Kimi Delta Attention's kernels over key channels, a chunk of a row at a time: here the gates are. kernels.kda.triton
says how they fit together.

Symbols as there. Shapes: B batch, T time, H q/k heads, R value heads per q/k head, HV = H R, K key dim, V value dim,
N chunks, C chunk; BK >= K, BC and BV widths of tiles: all channels, a block of channels, a block of values.
"""

import triton
import triton.language as tl

from hybrid_jax.kernels.delta.chunks import apply, inverse_norm, load_strength, store_inverse
from hybrid_jax.kernels.device import BLOCK, dot, load_rows, split, store_rows
from hybrid_jax.kernels.kda.decays import (
    STEEPEST,
    block_sums,
    column_decay,
    entering_decay,
    in_block,
    in_square,
    is_right,
    leaving_decay,
    log_decays,
    row_decay,
    square_decay,
    widest_level,
)


@triton.jit
def _documents(documents, b, n, T: tl.constexpr, C: tl.constexpr):
    """Of chunk n in a packed row: the tokens' documents [C], those of the token before it and of its last one."""
    ids = documents + b * T
    document = tl.load(ids + tl.minimum(n * C + tl.arange(0, C), T - 1))
    before = tl.load(ids + tl.maximum(n * C - 1, 0))
    last = tl.load(ids + tl.minimum(n * C + C - 1, T - 1))
    return document, before, last


@triton.jit
def _exact_pairs(q_unit, k_unit, g_high, g_low, C: tl.constexpr, PARTS: tl.constexpr):
    """Decayed products of all pairs j < i of one block of 16 tokens, and of q_i with k_i, whatever the gates:
    (k_i . k_j, q_i . k_j), each [C,C]."""
    at = tl.arange(0, C)
    qk = tl.where(at[:, None] == at[None, :], tl.sum(q_unit * k_unit, axis=1)[:, None], 0.0)
    kk = tl.zeros([C, C], tl.float32)
    for level in tl.range(0, 4, disable_licm=True):
        part_kk, part_qk = _square(q_unit, k_unit, g_high, g_low, level, C, PARTS)
        kk += part_kk
        qk += part_qk
    return kk, qk


@triton.jit
def _square(q_unit, k_unit, g_high, g_low, level, C: tl.constexpr, PARTS: tl.constexpr):
    """The same of the pairs in squares of width 2^level."""
    dtype: tl.constexpr = g_high.dtype
    decay = square_decay(g_high, g_low, level, C, PARTS)
    high, low = split(k_unit * decay, dtype)
    column = tl.trans(high)
    kk = dot(high, column)
    if PARTS == 2:  # similar keys amplify the rounding of A
        kk += dot(high, tl.trans(low))
        kk += dot(low, column)
    keep = in_square(level, C)
    return tl.where(keep, kk, 0.0), tl.where(keep, dot((q_unit * decay).to(dtype), column), 0.0)


@triton.jit
def prepare(
    q,
    k,
    gates,
    A_log,
    dt_bias,
    beta,
    documents,
    inverse,
    readers,
    queries,
    writers,
    attention,
    carries,
    q_norms,
    k_norms,
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
    """All that follows from q, k, gates and beta: one program a chunk and value head.

    inverse [B,N,HV,PARTS,C,C]: T' as high and low part. readers [B,T,HV,K]: gamma K. queries: scale gamma Q.
    writers: X. attention [B,N,HV,C,C]: P. carries [B,HV,N,K]: the chunk's decay. q_norms, k_norms, lowest [B,HV,N C]:
    scale / |q|, 1 / |k|, and the least sum, of all channels, of gates from the block's start through a token.
    """
    program = tl.program_id(0)
    head = program % HV
    n = (program // HV) % N
    b = (program // HV // N).to(tl.int64)
    dtype: tl.constexpr = k.dtype.element_ty
    at = tl.arange(0, C)
    start = (b * T * H + head // (HV // H)) * K
    v_start = (b * T * HV + head) * K
    chunk = (b * N + n) * HV + head
    all_keys = tl.arange(0, BK)
    k_norm = inverse_norm(load_rows(k + start, n * C, H * K, all_keys, C, T, K))
    q_norm = SCALE * inverse_norm(load_rows(q + start, n * C, H * K, all_keys, C, T, K))
    row = (b * HV + head) * (N * C) + n * C + at
    tl.store(q_norms + row, q_norm)
    tl.store(k_norms + row, k_norm)
    document, previous, last = at, 0, 0
    if PACKED:
        document, previous, last = _documents(documents, b, n, T, C)

    A, P = tl.zeros([C, C], tl.float32), tl.zeros([C, C], tl.float32)
    kept = tl.zeros([C, BK // BC, BC], dtype)  # Lambda K
    kept_low = kept
    lowest_sum = tl.zeros([C], tl.float32)
    for channels in tl.range(0, BK // BC, disable_licm=True):
        key = channels * BC + tl.arange(0, BC)
        k_unit = load_rows(k + start, n * C, H * K, key, C, T, K) * k_norm[:, None]
        q_unit = load_rows(q + start, n * C, H * K, key, C, T, K) * q_norm[:, None]
        _, g = log_decays(gates, A_log, dt_bias, b, n, head, key, T, HV, K, C, FORM, BOUND)
        g_high, g_low = split(g, dtype)
        # Pairs within blocks of 16 tokens.
        sums = block_sums(g_high, g_low, document, C, PACKED, PARTS)
        rows = row_decay(sums)
        high, low = split(k_unit * rows, dtype)
        column, column_low = split(k_unit * column_decay(sums), dtype)
        column = tl.trans(column)
        kk = dot(high, column)
        if PARTS == 2:
            kk += dot(high, tl.trans(column_low))
            kk += dot(low, column)
        qk = dot((q_unit * rows).to(dtype), column)
        if FORM != "bounded" or BOUND * BLOCK < STEEPEST:
            least = tl.min(sums, axis=1)
            lowest_sum = tl.minimum(lowest_sum, least)
            if tl.min(least) < STEEPEST:
                exact_kk, exact_qk = _exact_pairs(q_unit, k_unit, g_high, g_low, C, PARTS)
                steep = (least < STEEPEST)[:, None]
                kk, qk = tl.where(steep, exact_kk, kk), tl.where(steep, exact_qk, qk)
        A += tl.where(in_block(C), kk, 0.0)
        P += tl.where(in_block(C) | (at[:, None] == at[None, :]), qk, 0.0)
        # Pairs of different blocks.
        for level in tl.range(4, widest_level(C) + 1, disable_licm=True):
            part_kk, part_qk = _square(q_unit, k_unit, g_high, g_low, level, C, PARTS)
            A += part_kk
            P += part_qk
        entering, leaving = entering_decay(g_high, g_low, sums, C, PARTS), leaving_decay(g_high, g_low, C, PARTS)
        carry = tl.exp(tl.sum(g, axis=0))
        if PACKED:
            entering = tl.where((document == previous)[:, None], entering, 0.0)
            leaving = tl.where((document == last)[:, None], leaving, 0.0)
            carry = tl.where(previous == last, carry, 0.0)
        tl.store(carries + ((b * HV + head) * N + n) * K + key, carry, mask=key < K)
        store_rows(readers + v_start, k_unit * entering, n * C, HV * K, key, C, T, K)
        store_rows(queries + v_start, q_unit * entering, n * C, HV * K, key, C, T, K)
        here = (tl.arange(0, BK // BC) == channels)[None, :, None]
        high, low = split(k_unit * leaving, dtype)
        kept = tl.where(here, tl.expand_dims(high, 1), kept)
        if PARTS == 2:
            kept_low = tl.where(here, tl.expand_dims(low, 1), kept_low)
    tl.store(lowest + row, lowest_sum)
    if PACKED:
        same = document[:, None] == document[None, :]
        A, P = tl.where(same, A, 0.0), tl.where(same, P, 0.0)
    tl.store(attention + chunk * (C * C) + at[:, None] * C + at[None, :], P.to(dtype))

    strength = load_strength(beta, b, n, head, T, HV, C)
    x = store_inverse(inverse, chunk, A * strength[:, None], strength, C, PARTS)
    high, low = split(tl.trans(x), dtype)
    writer = apply(high, low, tl.reshape(kept, [C, BK]), PARTS)
    if PARTS == 2:  # X of similar keys is a small difference of large terms
        writer += dot(high, tl.reshape(kept_low, [C, BK]))
    store_rows(writers + v_start, writer, n * C, HV * K, all_keys, C, T, K)


@triton.jit
def _sum_rows(keep, x, document, PACKED: tl.constexpr, PARTS: tl.constexpr, dtype: tl.constexpr):
    """The sums of those rows of x that `keep` [C,C] selects for each row, within its document."""
    if PACKED:
        keep = keep & (document[:, None] == document[None, :])
    matrix = keep.to(dtype)
    high, low = split(x, dtype)
    y = dot(matrix, high)
    if PARTS == 2:
        y += dot(matrix, low)
    return y


@triton.jit
def _sum_before(x, document, PACKED: tl.constexpr, PARTS: tl.constexpr, dtype: tl.constexpr):
    """y_t = sum of x_j over j < t of t's document, [C, columns]."""
    at = tl.arange(0, x.shape[0])
    return _sum_rows(at[:, None] > at[None, :], x, document, PACKED, PARTS, dtype)


@triton.jit
def _sum_from(x, document, PACKED: tl.constexpr, PARTS: tl.constexpr, dtype: tl.constexpr):
    """y_t = sum of x_i over i >= t of t's document, [C, columns]."""
    at = tl.arange(0, x.shape[0])
    return _sum_rows(at[:, None] <= at[None, :], x, document, PACKED, PARTS, dtype)


@triton.jit
def _square_gradients(q_unit, k_unit, dA, dP, g_high, g_low, level, C: tl.constexpr, PARTS: tl.constexpr):
    """What dA and dP [C,C] of `_square` give to q, to k and to the sums of gates through each token [C,channels]."""
    dtype: tl.constexpr = g_high.dtype
    decay = square_decay(g_high, g_low, level, C, PARTS)
    keep = in_square(level, C)
    a, p = tl.where(keep, dA, 0.0).to(dtype), tl.where(keep, dP, 0.0).to(dtype)
    k_decayed, q_decayed = (k_unit * decay).to(dtype), (q_unit * decay).to(dtype)
    to_k = dot(a + tl.trans(a), k_decayed)
    to_k += dot(tl.trans(p), q_decayed)
    to_q = dot(p, k_decayed)
    sign = tl.where(is_right(level, C), 1.0, -1.0)[:, None]
    return decay * to_q, decay * to_k, sign * k_decayed * to_k + q_decayed * to_q


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
    lowest,
    dattention,
    asked,
    along_q,
    dpairs,
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
    """dq, dk [B,T,H,K] and dgates [B,T,HV,K] from what the other kernels found: one program a chunk, q/k head and
    block of BC channels. of_gates [B,N,HV,2,K]: the chunk's sums for d A_log and d dt_bias.
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
    k_norm, q_norm = tl.load(k_norms + row), tl.load(q_norms + row)
    document, previous, last = at, 0, 0
    if PACKED:
        document, previous, last = _documents(documents, b, n, T, C)
    dq_tile, dk_tile = tl.zeros([C, BC], tl.float32), tl.zeros([C, BC], tl.float32)
    of_q_norm, of_k_norm = tl.zeros([C], tl.float32), tl.zeros([C], tl.float32)
    for r in tl.range(0, R, disable_licm=True):
        head = group * R + r
        chunk = (b * N + n) * HV + head
        head_start = (b * T * HV + head) * K
        row = (b * HV + head) * (N * C) + n * C + at
        of_q_norm += tl.load(along_q + row)
        of_k_norm += tl.load(along_k + row)
        pairs = chunk * (C * C) + at[:, None] * C + at[None, :]
        of_sums = tl.zeros([C, BC], tl.float32)  # d loss / d (sum of gates from the chunk's start through i)
        least = tl.zeros([C], tl.float32)
        if FORM != "bounded" or BOUND * BLOCK < STEEPEST:
            least = tl.load(lowest + row)
            if tl.min(least) < STEEPEST:
                _, g = log_decays(gates, A_log, dt_bias, b, n, head, key, T, HV, K, C, FORM, BOUND)
                g_high, g_low = split(g, dtype)
                keep = in_block(C) & (least < STEEPEST)[:, None]
                if PACKED:
                    keep = keep & (document[:, None] == document[None, :])
                dA = tl.where(keep, tl.load(dpairs + pairs), 0.0).to(dtype)
                dP = tl.where(keep, tl.load(dattention + pairs), 0.0).to(dtype)
                k_unit = load_rows(k + start, n * C, H * K, key, C, T, K) * k_norm[:, None]
                q_unit = load_rows(q + start, n * C, H * K, key, C, T, K) * q_norm[:, None]
                for level in tl.range(0, 4, disable_licm=True):
                    of_q, of_k, of_g = _square_gradients(q_unit, k_unit, dA, dP, g_high, g_low, level, C, PARTS)
                    dq_tile += of_q
                    dk_tile += of_k
                    of_sums += of_g
                # Nothing loaded here is kept in registers through the rest of the kernel.
                tl.debug_barrier()
        k_unit = load_rows(k + start, n * C, H * K, key, C, T, K) * k_norm[:, None]
        q_unit = load_rows(q + start, n * C, H * K, key, C, T, K) * q_norm[:, None]
        raw, g = log_decays(gates, A_log, dt_bias, b, n, head, key, T, HV, K, C, FORM, BOUND)
        g_high, g_low = split(g, dtype)
        dA, dP = tl.load(dpairs + pairs), tl.load(dattention + pairs)
        if PACKED:
            same = document[:, None] == document[None, :]
            dA, dP = tl.where(same, dA, 0.0), tl.where(same, dP, 0.0)
        # The diagonal has no decay, and stays out of the gates' gradients. What a pair gives to both its tokens is the
        # same product, to the last bit.
        own = tl.sum(tl.where(at[:, None] == at[None, :], dP, 0.0).to(tl.float32), axis=1)[:, None]
        dk_tile += own * q_unit
        dq_tile += own * k_unit
        # Pairs of different blocks of 16 tokens.
        for level in tl.range(4, widest_level(C) + 1, disable_licm=True):
            of_q, of_k, of_g = _square_gradients(q_unit, k_unit, dA, dP, g_high, g_low, level, C, PARTS)
            dq_tile += of_q
            dk_tile += of_k
            of_sums += of_g
        # Pairs within blocks.
        keep = in_block(C) & (least >= STEEPEST)[:, None]
        a, p = tl.where(keep, dA, 0.0).to(dtype), tl.where(keep, dP, 0.0).to(dtype)
        sums = block_sums(g_high, g_low, document, C, PACKED, PARTS)
        rows, columns = row_decay(sums), column_decay(sums)
        column = (k_unit * columns).to(dtype)
        k_row, q_row = (k_unit * rows).to(dtype), (q_unit * rows).to(dtype)
        to_q = dot(p, column)
        of_sums += q_row * to_q
        dq_tile += rows * to_q
        to_k = dot(a, column)
        of_sums += k_row * to_k
        dk_tile += rows * to_k
        to_column = dot(tl.trans(p), q_row)
        to_column += dot(tl.trans(a), k_row)
        of_sums -= column * to_column
        dk_tile += columns * to_column
        # Through the states around the chunk.
        entering, leaving = entering_decay(g_high, g_low, sums, C, PARTS), leaving_decay(g_high, g_low, C, PARTS)
        carry = tl.exp(tl.sum(g, axis=0))
        if PACKED:
            entering = tl.where((document == previous)[:, None], entering, 0.0)
            leaving = tl.where((document == last)[:, None], leaving, 0.0)
            carry = tl.where(previous == last, carry, 0.0)
        part = load_rows(asked + head_start, n * C, HV * K, key, C, T, K) * entering
        of_sums += q_unit * part
        dq_tile += part
        part = load_rows(read + head_start, n * C, HV * K, key, C, T, K) * entering
        of_sums -= k_unit * part
        dk_tile -= part
        part = load_rows(written + head_start, n * C, HV * K, key, C, T, K) * leaving
        dk_tile += part
        dg = _sum_before(k_unit * part, document, PACKED, PARTS, dtype)
        dg += _sum_from(of_sums, document, PACKED, PARTS, dtype)
        carried = tl.load(through + ((b * HV + head) * N + n) * K + key, mask=key < K, other=0.0) * carry
        dg = tl.where((n * C + at < T)[:, None], dg + carried[None, :], 0.0)
        if FORM != "log":
            rate = tl.exp(tl.load(A_log + head))
            if FORM == "softplus":
                of_rate = dg * g
                dg *= -rate * tl.sigmoid(raw)
            else:
                part = tl.sigmoid(rate * raw)
                dg *= BOUND * rate * (part * (1.0 - part))
                of_rate = dg * raw
            total = of_gates + chunk * 2 * K + key
            tl.store(total, tl.sum(of_rate, axis=0), mask=key < K)
            tl.store(total + K, tl.sum(dg, axis=0), mask=key < K)
        store_rows(dgates + head_start, dg, n * C, HV * K, key, C, T, K)
    # The gradients of x from those of u = x / |x|: (du - u (u . du)) / |x|.
    q_tile = load_rows(q + start, n * C, H * K, key, C, T, K) * (q_norm / SCALE)[:, None]
    dq_tile = (SCALE * dq_tile - q_tile * of_q_norm[:, None]) * (q_norm / SCALE)[:, None]
    store_rows(dq + start, dq_tile, n * C, H * K, key, C, T, K)
    k_tile = load_rows(k + start, n * C, H * K, key, C, T, K) * k_norm[:, None]
    dk_tile = (dk_tile - k_tile * of_k_norm[:, None]) * k_norm[:, None]
    store_rows(dk + start, dk_tile, n * C, H * K, key, C, T, K)

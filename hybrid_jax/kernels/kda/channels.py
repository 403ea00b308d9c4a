"""Kimi Delta Attention's kernels over key channels, a chunk of a row at a time: here the gates are. kernels.kda.triton
says how they fit together.

Symbols as there. Shapes: B batch, T time, H q/k heads, R value heads per q/k head, HV = H R, K key dim, V value dim,
N chunks, C chunk; BK >= K, BC and BV widths of tiles: all channels, a block of channels, a block of values.
"""

import triton
import triton.language as tl

from hybrid_jax.kernels.delta.chunks import inverse_norm, load_strength, store_inverse
from hybrid_jax.kernels.device import BLOCK, dot, load_rows, round_to, split, store_rows
from hybrid_jax.kernels.kda.decays import (
    LOG2_E,
    STEEPEST,
    UNCENTRE,
    column_decay,
    in_block,
    in_square,
    log_decays,
    middle_decay,
    others,
    outer_decays,
    rest,
    row_decay,
    selecting,
    square_decay,
    sums,
    up_to,
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
    half: tl.constexpr = tl.float16 if PARTS == 2 else dtype
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
    lowest_sum = tl.zeros([C], tl.float32)
    to_token, after_token = up_to(document, C, PACKED, dtype), rest(C, dtype)
    other = after_token
    if C == 32:
        other = others(C, dtype)
    for channels in tl.range(0, BK // BC, disable_licm=True):
        key = channels * BC + tl.arange(0, BC)
        k_tile = load_rows(k + start, n * C, H * K, key, C, T, K)
        q_tile = load_rows(q + start, n * C, H * K, key, C, T, K)
        _, g = log_decays(gates, A_log, dt_bias, b, n, head, key, T, HV, K, C, FORM, BOUND)
        g_high, g_low = split(g, dtype)
        total = sums(to_token, g_high, g_low, PARTS)
        here = at >= 0
        if FORM != "bounded" or LOG2_E * BOUND * BLOCK < STEEPEST:
            least = tl.min(total, axis=1)
            lowest_sum = tl.minimum(lowest_sum, least)
            here = least >= STEEPEST
            if tl.min(least) < STEEPEST:
                q_unit, k_unit = q_tile * q_norm[:, None], k_tile * k_norm[:, None]
                kk, qk = _exact_pairs(q_unit, k_unit, g_high, g_low, C, PARTS)
                A += tl.where(here[:, None], 0.0, kk)
                P += tl.where(here[:, None], 0.0, qk)
        k_row = k_tile * row_decay(total, k_norm)
        q_row = q_tile * row_decay(total, q_norm)
        high, low = split(k_row, dtype)
        column, column_low = split(k_tile * column_decay(total, k_norm), dtype)
        column = tl.trans(column)
        kk = dot(high, column)
        if PARTS == 2:  # similar keys amplify the rounding of A
            kk += dot(high, tl.trans(column_low))
            kk += dot(low, column)
        A += tl.where(in_block(C) & here[:, None], kk, 0.0)
        keep = (in_block(C) | (at[:, None] == at[None, :])) & here[:, None]
        P += tl.where(keep, dot(q_row.to(dtype), column), 0.0)
        # Pairs of different blocks, and what passes the chunk's ends.
        column = k_tile * tl.exp2(sums(after_token, g_high, g_low, PARTS) + tl.log2(k_norm)[:, None])
        k_row, q_row = k_row * UNCENTRE, q_row * UNCENTRE
        if C > BLOCK:
            right = tl.trans(column.to(half))
            keep = in_square(4, C)
            A += tl.where(keep, dot(k_row.to(half), right), 0.0)
            P += tl.where(keep, dot(q_row.to(half), right), 0.0)
        if C == 64:
            middle = middle_decay(g_high, g_low, C, PARTS)
            right = tl.trans((column * middle).to(half))
            keep = in_square(5, C)
            A += tl.where(keep, dot((k_row * middle).to(half), right), 0.0)
            P += tl.where(keep, dot((q_row * middle).to(half), right), 0.0)
        if C > BLOCK:
            before, after = outer_decays(other, g_high, g_low, C, PARTS)
            k_row, q_row, column = k_row * before, q_row * before, column * after
        carry = tl.exp2(tl.sum(g, axis=0))
        if PACKED:
            k_row = tl.where((document == previous)[:, None], k_row, 0.0)
            q_row = tl.where((document == previous)[:, None], q_row, 0.0)
            column = tl.where((document == last)[:, None], column, 0.0)
            carry = tl.where(previous == last, carry, 0.0)
        tl.store(carries + ((b * HV + head) * N + n) * K + key, carry, mask=key < K)
        store_rows(readers + v_start, k_row, n * C, HV * K, key, C, T, K)
        store_rows(queries + v_start, q_row, n * C, HV * K, key, C, T, K)
        # Lambda K waits in memory, where X will be: in registers it would leave no room for the rest.
        kept = column.to(half).to(dtype, bitcast=True)
        store_rows(writers + v_start, kept, n * C, HV * K, key, C, T, K)
    tl.debug_barrier()
    tl.store(lowest + row, lowest_sum)
    if PACKED:
        same = document[:, None] == document[None, :]
        A, P = tl.where(same, A, 0.0), tl.where(same, P, 0.0)
    tl.store(attention + chunk * (C * C) + at[:, None] * C + at[None, :], P.to(dtype))

    strength = load_strength(beta, b, n, head, T, HV, C)
    x = store_inverse(inverse, chunk, A * strength[:, None], strength, C, PARTS)
    # X of similar keys is a small difference of large terms, none above 4: fp16 keeps three bits more than bf16.
    kept = load_rows(writers + v_start, n * C, HV * K, all_keys, C, T, K).to(half, bitcast=True)
    tl.debug_barrier()
    writer = strength[:, None] * dot(tl.trans(x.to(half)), kept)
    store_rows(writers + v_start, writer, n * C, HV * K, all_keys, C, T, K)


@triton.jit
def _sum_rows(keep, x, document, PACKED: tl.constexpr, PARTS: tl.constexpr, dtype: tl.constexpr):
    """The sums of those rows of x that `keep` [C,C] selects for each row, within its document."""
    if PACKED:
        keep = keep & (document[:, None] == document[None, :])
    high, low = split(x, dtype)
    return sums(selecting(keep, dtype), high, low, PARTS)


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
def _decayed_gradients(q_tile, k_tile, a, p, q_rows, k_rows, columns):
    """What a and p [C,C], gradients of pairs of rows k k_rows and q q_rows and columns k columns, give to q, to k and
    to the sums of gates through each token, all [C,channels]."""
    dtype: tl.constexpr = a.dtype
    k_wide, k_row = round_to(k_tile * k_rows, dtype)
    q_wide, q_row = round_to(q_tile * q_rows, dtype)
    wide, column = round_to(k_tile * columns, dtype)
    to_q, to_k = dot(p, column), dot(a, column)
    to_column = dot(tl.trans(a), k_row)
    to_column += dot(tl.trans(p), q_row)
    of_sums = k_wide * to_k + q_wide * to_q
    return q_rows * to_q, k_rows * to_k + columns * to_column, of_sums - wide * to_column


@triton.jit
def _square_gradients(q_tile, k_tile, q_norm, k_norm, dA, dP, g_high, g_low, level, C: tl.constexpr,
                      PARTS: tl.constexpr):  # fmt: skip
    """The gradients through `_square`'s pairs, as of `_decayed_gradients`."""
    keep = in_square(level, C)
    a, p = tl.where(keep, dA, 0.0).to(g_high.dtype), tl.where(keep, dP, 0.0).to(g_high.dtype)
    decay = square_decay(g_high, g_low, level, C, PARTS)
    of_k = decay * k_norm[:, None]
    return _decayed_gradients(q_tile, k_tile, a, p, decay * q_norm[:, None], of_k, of_k)


@triton.jit
def _exact_gradients(q_tile, k_tile, q_norm, k_norm, dA, dP, g_high, g_low, C: tl.constexpr, PARTS: tl.constexpr):
    """The gradients through `_exact_pairs`."""
    of_q = tl.zeros(q_tile.shape, tl.float32)
    of_k, of_g = of_q, of_q
    for level in tl.range(0, 4, disable_licm=True):
        part = _square_gradients(q_tile, k_tile, q_norm, k_norm, dA, dP, g_high, g_low, level, C, PARTS)
        of_q += part[0]
        of_k += part[1]
        of_g += part[2]
    return of_q, of_k, of_g


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
        least = tl.zeros([C], tl.float32)
        if FORM != "bounded" or LOG2_E * BOUND * BLOCK < STEEPEST:
            least = tl.load(lowest + row)
            if tl.min(least) < STEEPEST:
                # Rare, and kept out of the registers of the rest: the outputs hold its parts meanwhile.
                _, g = log_decays(gates, A_log, dt_bias, b, n, head, key, T, HV, K, C, FORM, BOUND)
                g_high, g_low = split(g, dtype)
                keep = in_block(C) & (least < STEEPEST)[:, None]
                if PACKED:
                    keep = keep & (document[:, None] == document[None, :])
                dA = tl.where(keep, tl.load(dpairs + pairs), 0.0).to(dtype)
                dP = tl.where(keep, tl.load(dattention + pairs), 0.0).to(dtype)
                k_tile = load_rows(k + start, n * C, H * K, key, C, T, K)
                q_tile = load_rows(q + start, n * C, H * K, key, C, T, K)
                parts = _exact_gradients(q_tile, k_tile, q_norm, k_norm, dA, dP, g_high, g_low, C, PARTS)
                store_rows(dq + start, parts[0], n * C, H * K, key, C, T, K)
                store_rows(dk + start, parts[1], n * C, H * K, key, C, T, K)
                store_rows(dgates + head_start, parts[2], n * C, HV * K, key, C, T, K)
                tl.debug_barrier()
        # All loads at once: each waits for memory a long time.
        k_tile = load_rows(k + start, n * C, H * K, key, C, T, K)
        q_tile = load_rows(q + start, n * C, H * K, key, C, T, K)
        asked_tile = load_rows(asked + head_start, n * C, HV * K, key, C, T, K)
        read_tile = load_rows(read + head_start, n * C, HV * K, key, C, T, K)
        written_tile = load_rows(written + head_start, n * C, HV * K, key, C, T, K)
        dA, dP = tl.load(dpairs + pairs), tl.load(dattention + pairs)
        raw, g = log_decays(gates, A_log, dt_bias, b, n, head, key, T, HV, K, C, FORM, BOUND)
        g_high, g_low = split(g, dtype)
        if PACKED:
            same = document[:, None] == document[None, :]
            dA, dP = tl.where(same, dA, 0.0), tl.where(same, dP, 0.0)
        # The diagonal has no decay, and stays out of the gates' gradients. What a pair gives to both its tokens is the
        # same product, to the last bit. Decays times 1 / |k| or scale / |q| give gradients of k and q as they were
        # before they were normalised, but for what lies along them.
        own = tl.sum(tl.where(at[:, None] == at[None, :], dP, 0.0).to(tl.float32), axis=1) * q_norm * k_norm
        dk_tile += own[:, None] * q_tile
        dq_tile += own[:, None] * k_tile
        # Pairs within blocks of 16 tokens, with a row's decays from its block's start and a column's to that; and pairs
        # of neighbouring blocks, with the same rows and a column's decays to its block's end.
        total = sums(up_to(document, C, PACKED, dtype), g_high, g_low, PARTS)
        near = column_decay(total, k_norm)
        wide, column = round_to(k_tile * near, dtype)
        keep = in_block(C) & (least >= STEEPEST)[:, None]
        a, p = tl.where(keep, dA, 0.0).to(dtype), tl.where(keep, dP, 0.0).to(dtype)
        to_q, to_k = dot(p, column), dot(a, column)
        far = tl.exp2(sums(rest(C, dtype), g_high, g_low, PARTS) + tl.log2(k_norm)[:, None])
        if C > BLOCK:
            keep = in_square(4, C)
            a4, p4 = tl.where(keep, dA, 0.0).to(dtype), tl.where(keep, dP, 0.0).to(dtype)
            wide4, column = round_to(k_tile * far, dtype)
            to_q += dot(p4, column) * UNCENTRE
            to_k += dot(a4, column) * UNCENTRE
        entering, after = tl.full([C, BC], UNCENTRE, tl.float32), tl.full([C, BC], 1.0, tl.float32)
        if C > BLOCK:
            before, after = outer_decays(others(C, dtype), g_high, g_low, C, PARTS)
            entering = before * UNCENTRE
        carry = tl.exp2(tl.sum(g, axis=0))
        if PACKED:
            entering = tl.where((document == previous)[:, None], entering, 0.0)
            after = tl.where((document == last)[:, None], after, 0.0)
            carry = tl.where(previous == last, carry, 0.0)
        # Rows, with what the state before the chunk was asked and predicted. of_sums: d loss / d (sum of gates from the
        # chunk's start through i).
        rows = row_decay(total, k_norm)
        k_decayed = k_tile * rows
        k_wide, k_row = round_to(k_decayed, dtype)
        part = read_tile * entering
        of_sums = k_wide * to_k - k_decayed * part
        dk_tile += rows * (to_k - part)
        rows = row_decay(total, q_norm)
        q_decayed = q_tile * rows
        q_wide, q_row = round_to(q_decayed, dtype)
        part = asked_tile * entering
        of_sums += q_wide * to_q + q_decayed * part
        dq_tile += rows * (to_q + part)
        to_column = dot(tl.trans(p), q_row)
        to_column += dot(tl.trans(a), k_row)
        of_sums -= wide * to_column
        dk_tile += near * to_column
        if C > BLOCK:
            to_column = dot(tl.trans(p4), q_row)
            to_column += dot(tl.trans(a4), k_row)
            to_column *= UNCENTRE
            of_sums -= wide4 * to_column
            dk_tile += far * to_column
        if C == 64:
            middle = middle_decay(g_high, g_low, C, PARTS)
            keep = in_square(5, C)
            a, p = tl.where(keep, dA, 0.0).to(dtype), tl.where(keep, dP, 0.0).to(dtype)
            k_decay = row_decay(total, k_norm) * UNCENTRE * middle
            of_q, of_k, of_g = _decayed_gradients(q_tile, k_tile, a, p, rows * UNCENTRE * middle, k_decay, far * middle)
            dq_tile += of_q
            dk_tile += of_k
            of_sums += of_g
        part = written_tile * (far * after)
        dk_tile += part
        if FORM != "bounded" or LOG2_E * BOUND * BLOCK < STEEPEST:
            if tl.min(least) < STEEPEST:
                dq_tile += load_rows(dq + start, n * C, H * K, key, C, T, K)
                dk_tile += load_rows(dk + start, n * C, H * K, key, C, T, K)
                of_sums += load_rows(dgates + head_start, n * C, HV * K, key, C, T, K)
        dg = _sum_before(k_tile * part, document, PACKED, PARTS, dtype)
        dg += _sum_from(of_sums, document, PACKED, PARTS, dtype)
        carried = tl.load(through + ((b * HV + head) * N + n) * K + key, mask=key < K, other=0.0) * carry
        dg = tl.where((n * C + at < T)[:, None], dg + carried[None, :], 0.0)
        if FORM != "log":
            rate = tl.exp(tl.load(A_log + head))
            if FORM == "softplus":
                of_rate = dg * g * (1 / LOG2_E)
                dg *= -rate * tl.exp2(raw * LOG2_E + g * (1 / rate))  # the sigmoid: exp(raw - softplus(raw))
            else:
                part = tl.sigmoid(rate * raw)
                dg *= BOUND * rate * (part * (1.0 - part))
                of_rate = dg * raw
            total = of_gates + chunk * 2 * K + key
            tl.store(total, tl.sum(of_rate, axis=0), mask=key < K)
            tl.store(total + K, tl.sum(dg, axis=0), mask=key < K)
        store_rows(dgates + head_start, dg, n * C, HV * K, key, C, T, K)
    # The gradients of x from those of u = x / |x|: (du - u (u . du)) / |x|.
    along = of_q_norm * q_norm * q_norm * (1 / (SCALE * SCALE))
    dq_tile -= load_rows(q + start, n * C, H * K, key, C, T, K) * along[:, None]
    store_rows(dq + start, dq_tile, n * C, H * K, key, C, T, K)
    along = of_k_norm * k_norm * k_norm
    dk_tile -= load_rows(k + start, n * C, H * K, key, C, T, K) * along[:, None]
    store_rows(dk + start, dk_tile, n * C, H * K, key, C, T, K)

"""Kimi Delta Attention's kernels over the pairs of tokens of a chunk. kernels.kda.triton says how they fit together.

Symbols as there. Shapes: B batch, T time, H q/k heads, R value heads per q/k head, HV = H R, K key dim, N chunks,
C chunk; BK >= K, and BC the width of a block of channels.
"""

import triton
import triton.language as tl

from hybrid_jax.kernels.delta.chunks import inverse_norm, load_strength, store_inverse
from hybrid_jax.kernels.device import BLOCK, dot, load_columns, load_rows, rounded, split, store_columns
from hybrid_jax.kernels.kda.decays import (
    LOG2E,
    STEEPEST,
    block_sums,
    column_decay,
    in_block,
    in_square,
    is_right,
    log_decays,
    rest_decay,
    row_decay,
    square_decay,
    token_documents,
    token_sums,
)


@triton.jit
def _products(high, low, column, column_low, PARTS: tl.constexpr):
    """Products over channels of the tokens of two tiles [K,C], each a high and a low part [C,C]."""
    x = dot(tl.trans(high), column)
    if PARTS == 2:  # similar keys amplify the rounding of A
        x += dot(tl.trans(high), column_low)
        x += dot(tl.trans(low), column)
    return x


@triton.jit
def _square(q_unit, k_unit, g_high, g_low, level, C: tl.constexpr, PARTS: tl.constexpr):
    """Decayed products (k_i . k_j, q_i . k_j) of the pairs in squares of width 2^level, each [C,C]."""
    dtype: tl.constexpr = g_high.dtype
    decay = square_decay(g_high, g_low, level, C, PARTS)
    high, low = split(k_unit * decay, dtype)
    kk = _products(high, low, high, low, PARTS)
    qk = dot(tl.trans((q_unit * decay).to(dtype)), high)
    keep = in_square(level, C)
    return tl.where(keep, kk, 0.0), tl.where(keep, qk, 0.0)


@triton.jit
def pairs(
    q,
    k,
    gates,
    A_log,
    dt_bias,
    beta,
    documents,
    inverse,
    attention,
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
    """What the pairs of tokens of a chunk say: one program a chunk and value head.

    inverse [B,N,HV,PARTS,C,C]: T' as high and low part. attention [B,N,HV,C,C]: P. q_norms, k_norms, lowest [B,HV,N C]:
    scale / |q|, 1 / |k|, and the least sum, of all channels, of gates (base 2) from the block's start through a token.
    """
    program = tl.program_id(0)
    head = program % HV
    n = (program // HV) % N
    b = (program // HV // N).to(tl.int64)
    dtype: tl.constexpr = k.dtype.element_ty
    at = tl.arange(0, C)
    start = (b * T * H + head // (HV // H)) * K
    chunk = (b * N + n) * HV + head
    all_keys = tl.arange(0, BK)
    k_norm = inverse_norm(load_rows(k + start, n * C, H * K, all_keys, C, T, K))
    q_norm = SCALE * inverse_norm(load_rows(q + start, n * C, H * K, all_keys, C, T, K))
    row = (b * HV + head) * (N * C) + n * C + at
    tl.store(q_norms + row, q_norm)
    tl.store(k_norms + row, k_norm)
    document = at
    if PACKED:
        document = token_documents(documents, b, n, T, C)

    own = at[:, None] == at[None, :]
    A, P = tl.zeros([C, C], tl.float32), tl.zeros([C, C], tl.float32)
    lowest_sum = tl.zeros([C], tl.float32)
    for channels in tl.range(0, BK // BC, disable_licm=True):
        key = channels * BC + tl.arange(0, BC)
        k_unit = load_columns(k + start, n * C, H * K, key, C, T, K) * k_norm[None, :]
        _, g = log_decays(gates, A_log, dt_bias, b, n, head, key, T, HV, K, C, FORM, BOUND)
        g_high, g_low = split(g, dtype)
        # Pairs within blocks of 16 tokens, and of the two blocks of 32 tokens: rows are the same.
        total = block_sums(g_high, g_low, document, C, PACKED, PARTS)
        near = in_block(C)
        least = tl.zeros([C], tl.float32)
        if FORM != "bounded" or BOUND * LOG2E * BLOCK < STEEPEST:
            least = tl.min(total, axis=0)
            lowest_sum = tl.minimum(lowest_sum, least)
            near = near & (least >= STEEPEST)[:, None]
        rows = row_decay(total)
        high, low = split(k_unit * rows, dtype)
        column, column_low = split(k_unit * column_decay(total), dtype)
        A += tl.where(near, _products(high, low, column, column_low, PARTS), 0.0)
        if C > BLOCK:
            far_column, column_low = split(k_unit * rest_decay(g_high, g_low, C, PARTS), dtype)
            A += tl.where(in_square(4, C), _products(high, low, far_column, column_low, PARTS), 0.0)
        q_unit = load_columns(q + start, n * C, H * K, key, C, T, K) * q_norm[None, :]
        query = (q_unit * rows).to(dtype)
        P += tl.where(near | (own & (least >= STEEPEST)[:, None]), dot(tl.trans(query), column), 0.0)
        if C > BLOCK:
            P += tl.where(in_square(4, C), dot(tl.trans(query), far_column), 0.0)
        if C > 2 * BLOCK:
            kk, qk = _square(q_unit, k_unit, g_high, g_low, 5, C, PARTS)
            A += kk
            P += qk
        if FORM != "bounded" or BOUND * LOG2E * BLOCK < STEEPEST:
            if tl.min(least) < STEEPEST:
                # Nothing is kept in registers for this through the rest of the loop.
                tl.debug_barrier()
                k_unit = load_columns(k + start, n * C, H * K, key, C, T, K) * k_norm[None, :]
                q_unit = load_columns(q + start, n * C, H * K, key, C, T, K) * q_norm[None, :]
                steep = (least < STEEPEST)[:, None]
                P += tl.where(steep & own, tl.sum(q_unit * k_unit, axis=0)[:, None], 0.0)
                for level in tl.range(0, 4, disable_licm=True):
                    kk, qk = _square(q_unit, k_unit, g_high, g_low, level, C, PARTS)
                    A += tl.where(steep, kk, 0.0)
                    P += tl.where(steep, qk, 0.0)
    tl.store(lowest + row, lowest_sum)
    if PACKED:
        same = document[:, None] == document[None, :]
        A, P = tl.where(same, A, 0.0), tl.where(same, P, 0.0)
    tl.store(attention + chunk * (C * C) + at[:, None] * C + at[None, :], P.to(dtype))
    strength = load_strength(beta, b, n, head, T, HV, C)
    store_inverse(inverse, chunk, A * strength[:, None], strength, C, PARTS)


@triton.jit
def _square_gradients(q_unit, k_unit, dA, dP, g_high, g_low, level, C: tl.constexpr, PARTS: tl.constexpr):
    """What dA and dP [C,C] of the pairs in squares of width 2^level give to q, to k and to the sums of gates through
    each token [channels,C]."""
    dtype: tl.constexpr = g_high.dtype
    decay = square_decay(g_high, g_low, level, C, PARTS)
    keep = in_square(level, C)
    a, p = tl.where(keep, dA, 0.0).to(dtype), tl.where(keep, dP, 0.0).to(dtype)
    k_decayed, q_decayed = rounded(k_unit * decay, dtype), rounded(q_unit * decay, dtype)
    to_q = dot(k_decayed.to(dtype), tl.trans(p))
    to_k = dot(k_decayed.to(dtype), a + tl.trans(a))
    to_k += dot(q_decayed.to(dtype), p)
    sign = tl.where(is_right(level, C), 1.0, -1.0)[None, :]
    return decay * to_q, decay * to_k, sign * k_decayed * to_k + q_decayed * to_q


@triton.jit
def _pair_gradients(
    q_unit,
    k_unit,
    dA,
    dP,
    g_high,
    g_low,
    document,
    least,
    of_q,
    of_k,
    of_gates,
    start,
    key,
    STEEP: tl.constexpr,
    T: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    C: tl.constexpr,
    PACKED: tl.constexpr,
    PARTS: tl.constexpr,
):
    """`pair_gradients` from what it has loaded, for tokens from `start` on; STEEP: some tokens' gates are too steep for
    one square a block."""
    dtype: tl.constexpr = g_high.dtype
    at = tl.arange(0, C)
    # Pairs within blocks of 16 tokens and of the two blocks of 32 tokens have the same rows. What a pair gives to both
    # its tokens is the same product, to the last bit.
    keep = in_block(C)
    if STEEP:
        keep = keep & (least >= STEEPEST)[:, None]
    a, p = tl.where(keep, dA, 0.0).to(dtype), tl.where(keep, dP, 0.0).to(dtype)
    total = block_sums(g_high, g_low, document, C, PACKED, PARTS)
    rows, columns = row_decay(total), column_decay(total)
    column = rounded(k_unit * columns, dtype)
    to_q, to_k = dot(column.to(dtype), tl.trans(p)), dot(column.to(dtype), tl.trans(a))
    if C > BLOCK:
        keep = in_square(4, C)
        far_a, far_p = tl.where(keep, dA, 0.0).to(dtype), tl.where(keep, dP, 0.0).to(dtype)
        far_columns = rest_decay(g_high, g_low, C, PARTS)
        far_column = rounded(k_unit * far_columns, dtype)
        to_q += dot(far_column.to(dtype), tl.trans(far_p))
        to_k += dot(far_column.to(dtype), tl.trans(far_a))
    # The diagonal has no decay, and stays out of the gates' gradients.
    own = tl.sum(tl.where(at[:, None] == at[None, :], dP, 0.0).to(tl.float32), axis=0)[None, :]
    q_row = rounded(q_unit * rows, dtype)
    of_sums = q_row * to_q  # d loss / d (sum of gates from the chunk's start through i)
    dq = rows * to_q + own * k_unit
    dk = rows * to_k + own * q_unit
    if not STEEP and C <= 2 * BLOCK:
        store_columns(of_q, dq, start, HV * K, key, C, T, K)
    k_row = rounded(k_unit * rows, dtype)
    of_sums += k_row * to_k
    to_column = dot(q_row.to(dtype), p)
    to_column += dot(k_row.to(dtype), a)
    of_sums -= column * to_column
    dk += columns * to_column
    if C > BLOCK:
        to_column = dot(q_row.to(dtype), far_p)
        to_column += dot(k_row.to(dtype), far_a)
        of_sums -= far_column * to_column
        dk += far_columns * to_column
    if C > 2 * BLOCK:
        more_q, more_k, more_g = _square_gradients(q_unit, k_unit, dA, dP, g_high, g_low, 5, C, PARTS)
        dq += more_q
        dk += more_k
        of_sums += more_g
    if STEEP:
        keep = in_block(C) & (least < STEEPEST)[:, None]
        dA, dP = tl.where(keep, dA, 0.0).to(dtype), tl.where(keep, dP, 0.0).to(dtype)
        for level in tl.range(0, 4, disable_licm=True):
            more_q, more_k, more_g = _square_gradients(q_unit, k_unit, dA, dP, g_high, g_low, level, C, PARTS)
            dq += more_q
            dk += more_k
            of_sums += more_g
    if STEEP or C > 2 * BLOCK:
        store_columns(of_q, dq, start, HV * K, key, C, T, K)
    store_columns(of_k, dk, start, HV * K, key, C, T, K)
    dg = token_sums(of_sums, at[:, None] >= at[None, :], document, PACKED, PARTS, dtype)
    store_columns(of_gates, dg, start, HV * K, key, C, T, K)


@triton.jit
def pair_gradients(
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
    dpairs,
    of_q,
    of_k,
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
    """What the pairs of tokens of a chunk give to the gradients of q / |q| and k / |k| (that of q over SCALE) and of
    the log decays, each [B,T,HV,K]: one program a chunk, value head and block of BC channels."""
    BLOCKS: tl.constexpr = BK // BC
    program = tl.program_id(0)
    key = program % BLOCKS * BC + tl.arange(0, BC)
    head = (program // BLOCKS) % HV
    n = (program // BLOCKS // HV) % N
    b = (program // BLOCKS // HV // N).to(tl.int64)
    dtype: tl.constexpr = k.dtype.element_ty
    at = tl.arange(0, C)
    start = (b * T * H + head // (HV // H)) * K
    head_start = (b * T * HV + head) * K
    row = (b * HV + head) * (N * C) + n * C + at
    pairs = ((b * N + n) * HV + head) * (C * C) + at[:, None] * C + at[None, :]
    least = tl.zeros([C], tl.float32)
    if FORM != "bounded" or BOUND * LOG2E * BLOCK < STEEPEST:
        least = tl.load(lowest + row)
    dA, dP = tl.load(dpairs + pairs), tl.load(dattention + pairs)
    k_unit = load_columns(k + start, n * C, H * K, key, C, T, K) * tl.load(k_norms + row)[None, :]
    q_unit = load_columns(q + start, n * C, H * K, key, C, T, K) * tl.load(q_norms + row)[None, :]
    document = at
    if PACKED:
        document = token_documents(documents, b, n, T, C)
        same = document[:, None] == document[None, :]
        dA, dP = tl.where(same, dA, 0.0), tl.where(same, dP, 0.0)
    _, g = log_decays(gates, A_log, dt_bias, b, n, head, key, T, HV, K, C, FORM, BOUND)
    g_high, g_low = split(g, dtype)
    # Two programs, so that the rare one takes no registers of the other.
    if tl.min(least) < STEEPEST:
        _pair_gradients(
            q_unit, k_unit, dA, dP, g_high, g_low, document, least, of_q + head_start, of_k + head_start,
            of_gates + head_start, n * C, key, True, T, HV, K, C, PACKED, PARTS,
        )  # fmt: skip
    else:
        _pair_gradients(
            q_unit, k_unit, dA, dP, g_high, g_low, document, least, of_q + head_start, of_k + head_start,
            of_gates + head_start, n * C, key, False, T, HV, K, C, PACKED, PARTS,
        )  # fmt: skip

"""Kimi Delta Attention's kernels over key channels: chunks made of blocks, and the gradients of q, k and gates.
kernels.kda.triton says how they fit together.

Symbols as there. Shapes: B batch, T time, H q/k heads, R value heads per q/k head, HV = H R, K key dim, V value dim,
N chunks, C chunk; BK >= K, BC and BV widths of tiles: all channels, a block of channels, a block of values.
"""

import triton
import triton.language as tl

from hybrid_jax.kernels.delta.chunks import load_inverse, load_strength, store_inverse
from hybrid_jax.kernels.device import BLOCK, dot, load_rows, round_to, store_rows, store_turned, truncate, widen_turned
from hybrid_jax.kernels.kda.blocks import documents_around
from hybrid_jax.kernels.kda.decays import (
    LOG2_E,
    STEEPEST,
    UNCENTRE,
    halves,
    load_bias,
    load_gates,
    load_rate,
    log_decays,
    outer_decays,
    pair_decays,
    rest,
    selecting,
    sums_turned,
    up_to,
    zone_decays,
    zones,
)


@triton.jit
def _load_half(pointer, start, stride, columns, rows: tl.constexpr, height, width: tl.constexpr, half: tl.constexpr):
    """A tile that `blocks` wrote in fp16."""
    return load_rows(pointer, start, stride, columns, rows, height, width).to(half, bitcast=True)


@triton.jit
def _store_part(pointer, x, part, first, key, K: tl.constexpr):
    """Tokens `first` to `first` + S of x [channels,C] to the tile [S,K] with number `part`."""
    x = tl.trans(x.to(pointer.dtype.element_ty))
    at = tl.arange(0, x.shape[0])
    tile = pointer + part * (BLOCK * K) + (at - first)[:, None] * K + key[None, :]
    tl.store(tile, x, mask=((at >= first) & (at < first + BLOCK))[:, None] & (key < K)[None, :])


@triton.jit
def prepare(
    beta,
    block_readers,
    block_queries,
    block_writers,
    block_carries,
    key_pairs,
    query_pairs,
    inverse,
    readers,
    queries,
    writers,
    attention,
    carries,
    T: tl.constexpr,
    H: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    N: tl.constexpr,
    C: tl.constexpr,
    BK: tl.constexpr,
    PARTS: tl.constexpr,
):
    """Joins what `blocks` wrote to chunks: one program a chunk and value head.

    inverse [B,N,HV,PARTS,C,C]: T' as high and low part. readers [B,T,HV,K]: gamma K. queries: scale gamma Q.
    writers: X. attention [B,N,HV,C,C]: P. carries [B,HV,N,K]: the chunk's decay.
    """
    PER: tl.constexpr = C // BLOCK
    program = tl.program_id(0)
    head = program % HV
    n = (program // HV) % N
    b = (program // HV // N).to(tl.int64)
    dtype: tl.constexpr = readers.dtype.element_ty
    half: tl.constexpr = tl.float16 if PARTS == 2 else dtype
    at, key = tl.arange(0, C), tl.arange(0, BK)
    block = at // BLOCK
    start = (b * T * HV + head) * K
    chunk = (b * N + n) * HV + head
    pairs = ((b * N + n) * PER + block) * HV + head
    pairs = pairs[:, None] * (BLOCK * BLOCK) + (at % BLOCK)[:, None] * BLOCK + (at % BLOCK)[None, :]
    own = block[:, None] == block[None, :]
    A = tl.load(key_pairs + pairs, mask=own, other=0.0)
    P = tl.load(query_pairs + pairs, mask=own, other=0.0).to(tl.float32)
    column = _load_half(block_writers + start, n * C, HV * K, key, C, T, K, half)
    if C > BLOCK:
        place = (b * HV + head) * N + n
        row = _load_half(block_readers + start, n * C, HV * K, key, C, T, K, half)
        query = _load_half(block_queries + start, n * C, HV * K, key, C, T, K, half)
        right, keep = tl.trans(column), block[:, None] > block[None, :]
        A += tl.where(keep, dot(row, right), 0.0)
        P += tl.where(keep, dot(query, right), 0.0)
        before, after = outer_decays(block_carries, place, key, C, K)
        store_rows(readers + start, row * before, n * C, HV * K, key, C, T, K)
        store_rows(queries + start, query * before, n * C, HV * K, key, C, T, K)
        column = (column * after).to(half)
        carry = tl.full([BK], 1.0, tl.float32)
        for each in tl.static_range(PER):
            carry *= tl.load(block_carries + (place * PER + each) * K + key, mask=key < K, other=0.0)
        tl.store(carries + place * K + key, carry, mask=key < K)
    tl.store(attention + chunk * (C * C) + at[:, None] * C + at[None, :], P.to(dtype))
    strength = load_strength(beta, b, n, head, T, HV, C)
    x = store_inverse(inverse, chunk, A * strength[:, None], strength, C, PARTS)
    # X of similar keys is a small difference of large terms, none above 4: fp16 keeps three bits more than bf16.
    writer = strength[:, None] * dot(tl.trans(x.to(half)), column)
    store_rows(writers + start, writer, n * C, HV * K, key, C, T, K)


@triton.jit
def prepare_again(
    q,
    k,
    gates,
    A_log,
    dt_bias,
    beta,
    documents,
    inverse,
    q_norms,
    k_logs,
    readers,
    queries,
    writers,
    carries,
    block_carries,
    parts,
    T: tl.constexpr,
    H: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    N: tl.constexpr,
    C: tl.constexpr,
    BK: tl.constexpr,
    BC: tl.constexpr,
    FORM: tl.constexpr,
    BOUND: tl.constexpr,
    PACKED: tl.constexpr,
    PARTS: tl.constexpr,
):
    """readers, queries, writers and carries as of `prepare`, from what it saved: one program a chunk and value head.

    What passes between the two blocks of C = 2 S: block_carries [B,HV,M,K], the decays over blocks, whatever their
    documents; parts [B,N,HV,3,S,K]: k / |k| and q / |k| of the second block, decayed from its start, and k / |k| of the
    first, decayed to its end.
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
    row = (b * HV + head) * (N * C) + n * C + at
    k_norm, q_norm = tl.exp2(tl.load(k_logs + row)), tl.load(q_norms + row)
    high, low = load_inverse(inverse, chunk, C, PARTS)
    strength = load_strength(beta, b, n, head, T, HV, C)
    x_turned = high.to(tl.float32)
    if PARTS == 2:
        x_turned += low
    x_turned = (x_turned / strength[None, :]).to(half)
    to_reader, to_query, to_writer = k_norm, q_norm, k_norm
    document, previous, last = at, 0, 0
    if PACKED:
        document, previous, last = documents_around(documents, b, n, T, C)
        to_reader = tl.where(document == previous, k_norm, 0.0)
        to_query = tl.where(document == previous, q_norm, 0.0)
        to_writer = tl.where(document == last, k_norm, 0.0)
    # Tiles are [channels, tokens] here: all products sum over tokens, and take them as they are.
    to_token = tl.trans(up_to(document, C, PACKED, dtype))
    after_token = tl.trans(rest(C, dtype))
    rate = load_rate(A_log, head, FORM)
    late, inside, place = (at >= BLOCK)[None, :], (n * C + at < T)[None, :], (b * HV + head) * N + n
    key = tl.arange(0, BC)
    next_k = load_rows(k + start, n * C, H * K, key, C, T, K)
    next_q = load_rows(q + start, n * C, H * K, key, C, T, K)
    next_gates = load_gates(gates, b, n, head, key, T, HV, K, C)
    for channels in tl.range(0, BK // BC, disable_licm=True):
        k_tile, q_tile, x = widen_turned(next_k), widen_turned(next_q), widen_turned(next_gates)
        key = channels * BC + tl.arange(0, BC)
        next_k = load_rows(k + start, n * C, H * K, key + BC, C, T, K)
        next_q = load_rows(q + start, n * C, H * K, key + BC, C, T, K)
        next_gates = load_gates(gates, b, n, head, key + BC, T, HV, K, C)
        x += load_bias(dt_bias, head, key, K, FORM)[:, None]
        g = log_decays(x, rate, inside, FORM, BOUND, PARTS)
        g_high, g_low = truncate(g, dtype)
        decay = tl.exp2(sums_turned(g_high, g_low, to_token, PARTS))
        reader, query = k_tile * decay, q_tile * decay
        writer = k_tile * tl.exp2(sums_turned(g_high, g_low, after_token, PARTS))
        if C > BLOCK:
            first = tl.exp2(tl.sum(tl.where(late, 0.0, g), axis=1))
            second = tl.exp2(tl.sum(tl.where(late, g, 0.0), axis=1))
            tl.store(block_carries + 2 * place * K + key, first, mask=key < K)
            tl.store(block_carries + (2 * place + 1) * K + key, second, mask=key < K)
            carry = first * second
            _store_part(parts, reader * k_norm[None, :], chunk * 3, BLOCK, key, K)
            _store_part(parts, query * k_norm[None, :], chunk * 3 + 1, BLOCK, key, K)
            _store_part(parts, writer * k_norm[None, :], chunk * 3 + 2, 0, key, K)
            before = tl.where(late, first[:, None], 1.0)
            reader, query = reader * before, query * before
            writer *= tl.where(late, 1.0, second[:, None])
        else:
            carry = tl.exp2(tl.sum(g, axis=1))
        if PACKED:
            carry = tl.where(previous == last, carry, 0.0)
        tl.store(carries + place * K + key, carry, mask=key < K)
        store_turned(readers + v_start, reader * to_reader[None, :], n * C, HV * K, key, C, T, K)
        store_turned(queries + v_start, query * to_query[None, :], n * C, HV * K, key, C, T, K)
        writer = dot((writer * to_writer[None, :]).to(half), x_turned) * strength[None, :]
        store_turned(writers + v_start, writer, n * C, HV * K, key, C, T, K)


@triton.jit
def _through_pairs(k_tile, q_tile, rows, columns, a, p, dtype: tl.constexpr):
    """What the gradients a and p [S,S] of pairs give to columns of k [channels,S], and, to be multiplied with `rows`,
    to rows of q and of k; and to the sums of gates through each token. rows, columns: decays, with 1 / |k|.

    What a pair gives to both its tokens is the same product, to the last bit.
    """
    wide, narrow = round_to(k_tile * columns, dtype)
    to_q, to_k = dot(narrow, tl.trans(p)), dot(narrow, tl.trans(a))
    k_wide, k_row = round_to(k_tile * rows, dtype)
    q_wide, q_row = round_to(q_tile * rows, dtype)
    to_column = dot(q_row, p)
    to_column += dot(k_row, a)
    return to_column * columns, to_q, to_k, k_wide * to_k + q_wide * to_q - wide * to_column


@triton.jit
def _load_pairs(dpairs, dattention, chunk, second, pair, to_unit, C: tl.constexpr):
    """Gradients of a block's pairs, of keys and of queries with keys: a and p [S,S], times `to_unit`."""
    at = tl.arange(0, BLOCK)
    own = chunk * (C * C) + second * (BLOCK * C + BLOCK) + at[:, None] * C + at[None, :]
    a, p = tl.load(dpairs + own, mask=pair, other=0.0), tl.load(dattention + own, mask=pair, other=0.0)
    return (a.to(tl.float32) * to_unit).to(a.dtype), (p.to(tl.float32) * to_unit).to(p.dtype)


@triton.jit
def _load_cross(dpairs, dattention, chunk, second, document, others, C: tl.constexpr, PACKED: tl.constexpr):
    """The same of pairs of both blocks of a chunk, from the other block's tokens to this one's."""
    at = tl.arange(0, BLOCK)
    cross = chunk * (C * C) + BLOCK * C
    cross += at[:, None] * tl.where(second == 1, 1, C) + at[None, :] * tl.where(second == 1, C, 1)
    a, p = tl.load(dpairs + cross), tl.load(dattention + cross)
    if PACKED:
        same = others[:, None] == document[None, :]
        a, p = tl.where(same, a, 0.0).to(a.dtype), tl.where(same, p, 0.0).to(p.dtype)
    return a, p


@triton.jit
def input_gradients(
    q,
    k,
    gates,
    A_log,
    dt_bias,
    documents,
    q_norms,
    k_logs,
    lowest,
    carries,
    parts,
    dattention,
    diagonal,
    sizes_p,
    asked,
    along_q,
    dpairs,
    sizes_a,
    exchanged,
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
    SIZE: tl.constexpr,
    SUMS: tl.constexpr,
    ROWS: tl.constexpr,
):
    """dq, dk [B,T,H,K] and dgates [B,T,HV,K] from what the other kernels found: one program a block and q/k head.
    of_gates [B,M,HV,2,K]: the block's sums for d A_log and d dt_bias.
    """
    S: tl.constexpr = BLOCK
    R: tl.constexpr = HV // H
    PER: tl.constexpr = C // S
    BLOCKS: tl.constexpr = N * PER
    UNBOUNDED: tl.constexpr = FORM != "bounded" or LOG2_E * BOUND * S < STEEPEST
    program = tl.program_id(0)
    group = program % H
    n = (program // H) % BLOCKS
    b = (program // H // BLOCKS).to(tl.int64)
    dtype: tl.constexpr = k.dtype.element_ty
    at = tl.arange(0, S)
    i, j = at[:, None], at[None, :]
    document, previous, last, others, pair = at, 0, 0, at, i > j
    if PACKED:
        document, _, _ = documents_around(documents, b, n, T, S)
        others, _, _ = documents_around(documents, b, n ^ (PER - 1), T, S)
        _, previous, last = documents_around(documents, b, n // PER, T, C)
        same = document[:, None] == document[None, :]
        pair = pair & same
    # Whether the block is its chunk's second, where that has two.
    second = n % PER
    start = (b * T * H + group) * K
    first = (b * HV + group * R) * (N * C) + n * S + at
    k_log, q_norm = tl.load(k_logs + first), tl.load(q_norms + first)
    k_norm = tl.exp2(k_log)
    lowest_sum, sizes = 0.0, tl.zeros([S], tl.float32)
    of_q_norm, of_k_norm = tl.zeros([S], tl.float32), tl.zeros([S], tl.float32)
    for each in tl.static_range(R):
        sizes = tl.maximum(sizes, tl.load(sizes_a + first + each * (N * C)))
        sizes = tl.maximum(sizes, tl.load(sizes_p + first + each * (N * C)))
        for part in tl.static_range(SUMS):
            of_q_norm += tl.load(along_q + part * ROWS + first + each * (N * C))
        of_k_norm += tl.load(along_k + first + each * (N * C))
        if UNBOUNDED:
            lowest_sum = tl.minimum(lowest_sum, tl.load(lowest + (b * HV + group * R + each) * BLOCKS + n))
    # The gradients of x from those of u = x / |x|: (du - u (u . du)) / |x|.
    of_q_norm *= q_norm * q_norm * (1 / (SCALE * SCALE))
    of_k_norm *= k_norm * k_norm
    k_square = k_norm * k_norm

    # Times decays of 2^-96 small gradients of pairs would vanish, as of a loss that is a mean over many tokens, 2^-30:
    # all is in a unit of their size meanwhile. Within its bounds what comes from outside the block is in range too.
    exponent = (tl.max(sizes, axis=0).to(tl.int32, bitcast=True) >> 23) - 127
    log_unit = tl.minimum(tl.maximum(exponent, -60), 0).to(tl.float32)
    unit, to_unit = tl.exp2(log_unit), tl.exp2(-log_unit)

    # Tiles are [channels, tokens] from here: all products sum over tokens, and take them as they are.
    to_token, inside = tl.trans(up_to(document, S, PACKED, dtype)), (n * S + at < T)[None, :]
    steep = False
    if UNBOUNDED:
        steep = lowest_sum < STEEPEST + 1  # a sum in another order may differ a little
        if steep:
            # Rare, and kept out of the registers of the rest: the outputs hold its parts, in the unit, meanwhile.
            for channels in tl.range(0, BK // BC, disable_licm=True):
                key = channels * BC + tl.arange(0, BC)
                dq_tile, dk_tile = tl.zeros([BC, S], tl.float32), tl.zeros([BC, S], tl.float32)
                for r in tl.range(0, R, disable_licm=True):
                    head = group * R + r
                    raw = load_gates(gates, b, n, head, key, T, HV, K, S)
                    x = widen_turned(raw) + load_bias(dt_bias, head, key, K, FORM)[:, None]
                    g = log_decays(x, load_rate(A_log, head, FORM), inside, FORM, BOUND, PARTS)
                    g_high, g_low = truncate(g, dtype)
                    total = sums_turned(g_high, g_low, to_token, PARTS)
                    of_sums = tl.zeros([BC, S], tl.float32)
                    if tl.min(total) <= STEEPEST:
                        k_tile = widen_turned(load_rows(k + start, n * S, H * K, key, S, T, K))
                        q_tile = widen_turned(load_rows(q + start, n * S, H * K, key, S, T, K))
                        chunk = (b * N + n // PER) * HV + head
                        a, p = _load_pairs(dpairs, dattention, chunk, second, pair, to_unit, C)
                        coarse, fine = halves(g, dtype, PARTS)
                        coarse, fine = dot(coarse, to_token), dot(fine, to_token)
                        zone = zones(total, coarse, fine)
                        for z in tl.range(1, tl.max(zone).to(tl.int32) + 1, disable_licm=True):
                            rows, columns = zone_decays(zone, coarse, fine, z, k_log[None, :])
                            of_column, to_q, to_k, of_gate = _through_pairs(k_tile, q_tile, rows, columns, a, p, dtype)
                            dq_tile += rows * to_q
                            dk_tile += rows * to_k + of_column
                            of_sums += of_gate
                    store_turned(dgates + (b * T * HV + head) * K, of_sums, n * S, HV * K, key, S, T, K)
                store_turned(dq + start, dq_tile, n * S, H * K, key, S, T, K)
                store_turned(dk + start, dk_tile, n * S, H * K, key, S, T, K)
            tl.debug_barrier()

    before, since = i < j, i >= j
    if PACKED:
        before, since = before & same, since & same
    after_token = tl.trans(rest(S, dtype))
    before, since = selecting(before, dtype), selecting(since, dtype)
    dq_tile, dk_tile = tl.zeros([BC, S], tl.float32), tl.zeros([BC, S], tl.float32)
    head, chunk, row = group * R, (b * N + n // PER) * HV + group * R, first
    a, p = _load_pairs(dpairs, dattention, chunk, second, pair, to_unit, C)
    if PER == 2:
        cross_a, cross_p = _load_cross(dpairs, dattention, chunk, second, document, others, C, PACKED)
    rate = load_rate(A_log, head, FORM)
    if FORM == "softplus":
        inverse_rate, log_rate = 1 / rate, tl.log2(rate) + log_unit
    own = tl.load(diagonal + first) * k_square * to_unit
    for step in tl.range(0, BK // BC * R, disable_licm=True):
        r, key = 0, step * BC + tl.arange(0, BC)
        if R > 1:
            r, key = step % R, step // R * BC + tl.arange(0, BC)
            head, chunk, row = group * R + r, (b * N + n // PER) * HV + group * R + r, first + r * (N * C)
            a, p = _load_pairs(dpairs, dattention, chunk, second, pair, to_unit, C)
            if PER == 2:
                cross_a, cross_p = _load_cross(dpairs, dattention, chunk, second, document, others, C, PACKED)
            rate = load_rate(A_log, head, FORM)
            if FORM == "softplus":
                inverse_rate, log_rate = 1 / rate, tl.log2(rate) + log_unit
            own = tl.load(diagonal + row) * k_square * to_unit
        head_start = (b * T * HV + head) * K
        carried = tl.load(through + ((b * HV + head) * N + n // PER) * K + key, mask=key < K, other=0.0)
        k_tile = load_rows(k + start, n * S, H * K, key, S, T, K)
        q_tile = load_rows(q + start, n * S, H * K, key, S, T, K)
        raw = load_gates(gates, b, n, head, key, T, HV, K, S)
        asked_tile = load_rows(asked + head_start, n * S, HV * K, key, S, T, K)
        read_tile = load_rows(exchanged + head_start, n * S, HV * K, key, S, T, K)
        written_tile = load_rows(exchanged + SIZE + head_start, n * S, HV * K, key, S, T, K)
        if PER == 2:
            x_part = load_rows(parts + (chunk * 3 + 2 * second) * (S * K), 0, K, key, S, S, K)
            y_part = load_rows(parts + (chunk * 3 + 1 + second) * (S * K), 0, K, key, S, S, K)
            there = exchanged + head_start + second.to(tl.int64) * SIZE
            there = load_rows(there, (n ^ 1) * S, HV * K, key, S, T, K)
            asked_there = load_rows(asked + head_start, (n ^ 1) * S, HV * K, key, S, tl.where(second == 0, T, 0), K)
            there, asked_there = widen_turned(there), widen_turned(asked_there)
            if PACKED:
                crosses = tl.where(second == 1, others == last, others == previous)[None, :]
                there, asked_there = tl.where(crosses, there, 0.0), tl.where(crosses, asked_there, 0.0)
            crossed = tl.sum(widen_turned(x_part) * there + widen_turned(y_part) * asked_there, axis=1)
            place = ((b * HV + head) * BLOCKS + n) * K + key
            carried += crossed * tl.load(carries + place, mask=key < K, other=0.0)
            of_x, of_y = dot(tl.trans(x_part), cross_a), dot(tl.trans(y_part), cross_p)
        x = widen_turned(raw) + load_bias(dt_bias, head, key, K, FORM)[:, None]
        g = log_decays(x, rate, inside, FORM, BOUND, PARTS)
        k_tile, q_tile = widen_turned(k_tile), widen_turned(q_tile)
        g_high, g_low = truncate(g, dtype)
        total = sums_turned(g_high, g_low, to_token, PARTS)
        rows, columns = pair_decays(total, k_log[None, :], UNBOUNDED)
        # Decays times 1 / |k|, also of rows of q, whose factors know it, give gradients of k and q as they were before
        # they were normalised, but for what lies along them. The diagonal has no decay, and stays out of the gates'
        # gradients.
        dk_part, to_q, to_k, of_sums = _through_pairs(k_tile, q_tile, rows, columns, a, p, dtype)
        # With what comes from outside the block. of_sums: d loss / d (sum of gates from the block's start through i).
        asked_tile, read_tile = widen_turned(asked_tile), widen_turned(read_tile)
        written_tile = widen_turned(written_tile)
        if PACKED:
            asked_tile = tl.where((document == previous)[None, :], asked_tile, 0.0)
            read_tile = tl.where((document == previous)[None, :], read_tile, 0.0)
            written_tile = tl.where((document == last)[None, :], written_tile, 0.0)
        if PER == 1:
            asked_tile, read_tile = asked_tile * (UNCENTRE * to_unit), read_tile * (UNCENTRE * to_unit)
            written_tile *= to_unit
        else:
            # Pairs of both blocks, and what tokens there exchange with states across the block here. The first block
            # meets rows of the second, k in x_part and q in y_part; the second columns of the first, in both.
            carry = tl.load(carries + place + tl.where(second == 1, -K, K), mask=key < K, other=0.0)
            entering = tl.where(second == 1, carry, 1.0) * (UNCENTRE * to_unit)
            leaving = tl.where(second == 1, 1.0, carry) * to_unit
            to_row = tl.where(second == 1, UNCENTRE * to_unit, 0.0)
            to_writer = tl.where(second == 1, 0.0, to_unit)
            asked_tile = asked_tile * entering[:, None] + of_y * to_row
            read_tile = read_tile * entering[:, None] + of_x * to_row
            written_tile = written_tile * leaving[:, None] + (of_x + of_y) * to_writer
        of_sums += (k_tile * rows) * read_tile + (q_tile * rows) * asked_tile
        written_tile *= tl.exp2(sums_turned(g_high, g_low, after_token, PARTS) + k_log[None, :])
        dk_part += rows * (to_k + read_tile) + written_tile + own[None, :] * q_tile
        dq_part = rows * (to_q + asked_tile) + own[None, :] * k_tile
        if UNBOUNDED:
            if steep:
                of_sums += widen_turned(load_rows(dgates + head_start, n * S, HV * K, key, S, T, K))
                if r == 0:
                    dq_part += widen_turned(load_rows(dq + start, n * S, H * K, key, S, T, K))
                    dk_part += widen_turned(load_rows(dk + start, n * S, H * K, key, S, T, K))
        part_high, part_low = truncate(k_tile * written_tile, dtype)
        dg = sums_turned(part_high, part_low, before, PARTS)
        part_high, part_low = truncate(of_sums, dtype)
        dg += sums_turned(part_high, part_low, since, PARTS)
        dg = tl.where(inside, dg + (carried * to_unit)[:, None], 0.0)
        if FORM != "log":
            if FORM == "softplus":
                of_rate = tl.sum(dg * g, axis=1) * (unit * (1 / LOG2_E))
                # The unit times the rate times the sigmoid: exp(x - softplus(x)).
                dg *= -tl.exp2(x * LOG2_E + (g * inverse_rate + log_rate))
            else:
                sigmoid = tl.sigmoid(rate * x)
                dg *= (BOUND * rate * unit) * (sigmoid * (1.0 - sigmoid))
                of_rate = tl.sum(dg * x, axis=1)
            of_block = of_gates + ((b * BLOCKS + n) * HV + head) * 2 * K + key
            tl.store(of_block, of_rate, mask=key < K)
            tl.store(of_block + K, tl.sum(dg, axis=1), mask=key < K)
        else:
            dg *= unit
        store_turned(dgates + head_start, dg, n * S, HV * K, key, S, T, K)
        if R > 1:
            dq_part += tl.where(r == 0, 0.0, dq_tile)
            dk_part += tl.where(r == 0, 0.0, dk_tile)
            dq_tile, dk_tile = dq_part, dk_part
        if r == R - 1:
            store_turned(dq + start, dq_part * unit - q_tile * of_q_norm[None, :], n * S, H * K, key, S, T, K)
            store_turned(dk + start, dk_part * unit - k_tile * of_k_norm[None, :], n * S, H * K, key, S, T, K)

"""Kimi Delta Attention's kernels that see one chunk of a row at a time; kernels.kda.triton says how they fit together.

Symbols as there. Shapes: B batch, T time, H q/k heads, R value heads per q/k head, HV = H R, K key dim, V value dim,
N chunks, C chunk, M = C / S blocks of S = 16 tokens, BK >= K and BV widths of tiles.
"""

import triton
import triton.language as tl

from hybrid_jax.kernels.delta.chunks import (
    apply,
    inverse_norm,
    load_inverse,
    load_strength,
    local_gradient,
    store_inverse,
    store_unnormalised,
)
from hybrid_jax.kernels.device import BLOCK, diagonal, dot, load_rows, split, store_rows
from hybrid_jax.kernels.kda.decays import (
    block_dot,
    entering_decay,
    gate_blocks,
    in_square,
    inner_decay,
    is_right,
    leaving_decay,
    log_decays,
    on_diagonal,
    outer_decay,
    prefix,
    suffix,
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
    T: tl.constexpr,
    H: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    N: tl.constexpr,
    C: tl.constexpr,
    BK: tl.constexpr,
    SCALE: tl.constexpr,
    FORM: tl.constexpr,
    BOUND: tl.constexpr,
    PACKED: tl.constexpr,
    PARTS: tl.constexpr,
):
    """All that follows from q, k, gates and beta: one program a chunk and value head.

    inverse [B,N,HV,PARTS,C,C]: T' as high and low part. readers [B,T,HV,K]: gamma K. queries: scale gamma Q.
    writers: X. attention [B,N,HV,C,C]: P. carries [B,HV,N,K]: the chunk's decay.
    """
    program = tl.program_id(0)
    head = program % HV
    n = (program // HV) % N
    b = (program // HV // N).to(tl.int64)
    dtype: tl.constexpr = k.dtype.element_ty
    key, at = tl.arange(0, BK), tl.arange(0, C)
    start = (b * T * H + head // (HV // H)) * K
    v_start = (b * T * HV + head) * K
    chunk = (b * N + n) * HV + head
    k_unit = load_rows(k + start, n * C, H * K, key, C, T, K)
    k_unit = k_unit * inverse_norm(k_unit)[:, None]
    q_unit = load_rows(q + start, n * C, H * K, key, C, T, K)
    q_unit = q_unit * (SCALE * inverse_norm(q_unit))[:, None]
    _, g = log_decays(gates, A_log, dt_bias, b, n, head, key, T, HV, K, C, FORM, BOUND)
    g_high, g_low, totals = gate_blocks(g, C, dtype)

    # Pairs within blocks of 16 tokens.
    k_blocks, q_blocks = tl.reshape(k_unit, [C // BLOCK, BLOCK, BK]), tl.reshape(q_unit, [C // BLOCK, BLOCK, BK])
    within = tl.arange(0, BLOCK)
    own = tl.sum(q_blocks * k_blocks, axis=2)  # P_ii has no decay
    P = tl.where((within[:, None] == within[None, :])[None, :, :], own[:, :, None], 0.0)
    A = tl.zeros([C // BLOCK, BLOCK, BLOCK], tl.float32)
    for level in tl.static_range(4):
        decay = inner_decay(g_high, g_low, level, PARTS)
        high, low = split(k_blocks * decay, dtype)
        kk = block_dot(high, tl.trans(high, 0, 2, 1))
        if PARTS == 2:  # similar keys amplify the rounding of A
            kk += block_dot(high, tl.trans(low, 0, 2, 1))
            kk += block_dot(low, tl.trans(high, 0, 2, 1))
        keep = in_square(within, level)[None, :, :]
        A += tl.where(keep, kk, 0.0)
        P += tl.where(keep, block_dot((q_blocks * decay).to(dtype), tl.trans(high, 0, 2, 1)), 0.0)
    A, P = on_diagonal(A, C), on_diagonal(P, C)

    # Pairs of different blocks.
    before, after = prefix(g_high, g_low, PARTS), suffix(g_high, g_low, PARTS)
    for level in tl.static_range(2):
        if C >= 32 << level:
            decay = outer_decay(before, after, totals, level, C)
            high, low = split(k_unit * decay, dtype)
            kk = dot(high, tl.trans(high))
            if PARTS == 2:
                kk += dot(high, tl.trans(low))
                kk += dot(low, tl.trans(high))
            keep = in_square(at, level + 4)
            A += tl.where(keep, kk, 0.0)
            P += tl.where(keep, dot((q_unit * decay).to(dtype), tl.trans(high)), 0.0)

    entering, leaving = entering_decay(before, totals, C), leaving_decay(after, totals, C)
    carry = tl.exp(tl.sum(totals, axis=0))
    if PACKED:
        document, previous, last = _documents(documents, b, n, T, C)
        same = document[:, None] == document[None, :]
        A, P = tl.where(same, A, 0.0), tl.where(same, P, 0.0)
        entering = tl.where((document == previous)[:, None], entering, 0.0)
        leaving = tl.where((document == last)[:, None], leaving, 0.0)
        carry = tl.where(previous == last, carry, 0.0)
    tl.store(carries + ((b * HV + head) * N + n) * K + key, carry, mask=key < K)
    tl.store(attention + chunk * (C * C) + at[:, None] * C + at[None, :], P.to(dtype))
    store_rows(readers + v_start, k_unit * entering, n * C, HV * K, key, C, T, K)
    store_rows(queries + v_start, q_unit * entering, n * C, HV * K, key, C, T, K)

    strength = load_strength(beta, b, n, head, T, HV, C)
    x = store_inverse(inverse, chunk, A * strength[:, None], strength, C, PARTS)
    high, low = split(tl.trans(x), dtype)
    store_rows(writers + v_start, apply(high, low, k_unit * leaving, PARTS), n * C, HV * K, key, C, T, K)


@triton.jit
def _new_values(readers, v, state, start, v_start, n, key, value, high, low,
                T: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr,
                PARTS: tl.constexpr):  # fmt: skip
    """V' = T' (V - gamma K S)."""
    reader = load_rows(readers + start, n * C, HV * K, key, C, T, K)
    v_tile = load_rows(v + v_start, n * C, HV * V, value, C, T, V)
    return apply(high, low, v_tile - dot(reader, state), PARTS).to(v.dtype.element_ty)


@triton.jit
def output(
    readers,
    queries,
    v,
    inverse,
    attention,
    states,
    o,
    T: tl.constexpr,
    H: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    N: tl.constexpr,
    C: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    PARTS: tl.constexpr,
):
    """o from the states before the chunks: one program a chunk, value head and block of BV columns."""
    BLOCKS: tl.constexpr = (V + BV - 1) // BV
    program = tl.program_id(0)
    value = program % BLOCKS * BV + tl.arange(0, BV)
    head = (program // BLOCKS) % HV
    n = (program // BLOCKS // HV) % N
    b = (program // BLOCKS // HV // N).to(tl.int64)
    key, at = tl.arange(0, BK), tl.arange(0, C)
    start = (b * T * HV + head) * K
    v_start = (b * T * HV + head) * V
    chunk = (b * N + n) * HV + head
    state = load_rows(states + chunk * K * V, 0, V, value, BK, K, V)
    high, low = load_inverse(inverse, chunk, C, PARTS)
    new = _new_values(readers, v, state, start, v_start, n, key, value, high, low, T, HV, K, V, C, PARTS)
    query = load_rows(queries + start, n * C, HV * K, key, C, T, K)
    P = tl.load(attention + chunk * (C * C) + at[:, None] * C + at[None, :])
    store_rows(o + v_start, dot(query, state) + dot(P, new), n * C, HV * V, value, C, T, V)


@triton.jit
def value_gradients(
    readers,
    v,
    do,
    inverse,
    attention,
    states,
    values,
    dv_local,
    dattention,
    T: tl.constexpr,
    H: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    N: tl.constexpr,
    C: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    PARTS: tl.constexpr,
):
    """What the reverse scan needs of each chunk: one program a chunk and value head.

    values [B,T,HV,V]: V'; dv_local [B,T,HV,V]: T'^T P^T do; dattention [B,N,HV,C,C]: d loss / d P.
    """
    program = tl.program_id(0)
    head = program % HV
    n = (program // HV) % N
    b = (program // HV // N).to(tl.int64)
    key, at = tl.arange(0, BK), tl.arange(0, C)
    start = (b * T * HV + head) * K
    v_start = (b * T * HV + head) * V
    chunk = (b * N + n) * HV + head
    high, low = load_inverse(inverse, chunk, C, PARTS)
    P = tl.load(attention + chunk * (C * C) + at[:, None] * C + at[None, :])
    dP = tl.zeros([C, C], tl.float32)
    for block in tl.range(0, (V + BV - 1) // BV, disable_licm=True):
        value = block * BV + tl.arange(0, BV)
        state = load_rows(states + chunk * K * V, 0, V, value, BK, K, V)
        do_tile = load_rows(do + v_start, n * C, HV * V, value, C, T, V)
        new = _new_values(readers, v, state, start, v_start, n, key, value, high, low, T, HV, K, V, C, PARTS)
        store_rows(values + v_start, new, n * C, HV * V, value, C, T, V)
        dP += dot(do_tile, tl.trans(new))
        dv_tile = local_gradient(P, do_tile, high, low, PARTS)
        store_rows(dv_local + v_start, dv_tile, n * C, HV * V, value, C, T, V)
    tl.store(dattention + chunk * (C * C) + at[:, None] * C + at[None, :], dP.to(P.dtype))


@triton.jit
def _select(keep, x, dtype: tl.constexpr, PARTS: tl.constexpr):
    """The sums of those rows of x that `keep` [C,C] selects for each row."""
    high, low = split(x, dtype)
    y = dot(keep.to(dtype), high)
    if PARTS == 2:
        y += dot(keep.to(dtype), low)
    return y


@triton.jit
def input_gradients(
    q,
    k,
    gates,
    A_log,
    dt_bias,
    beta,
    documents,
    do,
    values,
    dv,
    dattention,
    states,
    dstates,
    dq,
    dk,
    dgates,
    dbeta,
    of_gates,
    T: tl.constexpr,
    H: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    N: tl.constexpr,
    C: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    SCALE: tl.constexpr,
    FORM: tl.constexpr,
    BOUND: tl.constexpr,
    PACKED: tl.constexpr,
    PARTS: tl.constexpr,
):
    """dq, dk [B,T,H,K], dgates [B,T,HV,K] and dbeta [B,T,HV], given dv and the states around each chunk: one program
    a chunk and q/k head. of_gates [B,N,HV,2,K]: the chunk's sums for d A_log and d dt_bias.
    """
    program = tl.program_id(0)
    group = program % H
    n = (program // H) % N
    b = (program // H // N).to(tl.int64)
    R: tl.constexpr = HV // H
    M: tl.constexpr = C // BLOCK
    dtype: tl.constexpr = k.dtype.element_ty
    key, at, within = tl.arange(0, BK), tl.arange(0, C), tl.arange(0, BLOCK)
    token = n * C + at
    start = (b * T * H + group) * K
    dq_tile, dk_tile = tl.zeros([C, BK], tl.float32), tl.zeros([C, BK], tl.float32)
    for r in tl.range(0, R, disable_licm=True):
        head = group * R + r
        chunk = (b * N + n) * HV + head
        v_start = (b * T * HV + head) * V
        k_unit = load_rows(k + start, n * C, H * K, key, C, T, K)
        k_unit = k_unit * inverse_norm(k_unit)[:, None]
        q_unit = load_rows(q + start, n * C, H * K, key, C, T, K)
        q_unit = q_unit * (SCALE * inverse_norm(q_unit))[:, None]
        raw, g = log_decays(gates, A_log, dt_bias, b, n, head, key, T, HV, K, C, FORM, BOUND)
        g_high, g_low, totals = gate_blocks(g, C, dtype)
        before, after = prefix(g_high, g_low, PARTS), suffix(g_high, g_low, PARTS)
        entering, leaving = entering_decay(before, totals, C), leaving_decay(after, totals, C)
        carry = tl.exp(tl.sum(totals, axis=0))
        straddles = at[:, None] <= at[None, :]  # token t's gate is in the sums through tokens i >= t
        follows = at[:, None] > at[None, :]  # and in those after tokens j < t
        if PACKED:
            document, previous, last = _documents(documents, b, n, T, C)
            same = document[:, None] == document[None, :]
            straddles, follows = straddles & same, follows & same
            entering = tl.where((document == previous)[:, None], entering, 0.0)
            leaving = tl.where((document == last)[:, None], leaving, 0.0)
            carry = tl.where(previous == last, carry, 0.0)
        strength = load_strength(beta, b, n, head, T, HV, C)

        dA = tl.zeros([C, C], tl.float32)
        dstrength = tl.zeros([C], tl.float32)
        from_start = tl.zeros([C, BK], tl.float32)  # d loss / d (sum of gates from the chunk's start through i)
        to_end = tl.zeros([C, BK], tl.float32)  # d loss / d (sum of gates after j to its end)
        through = tl.zeros([BK], tl.float32)
        for block in tl.range(0, (V + BV - 1) // BV, disable_licm=True):
            value = block * BV + tl.arange(0, BV)
            new = load_rows(values + v_start, n * C, HV * V, value, C, T, V)
            dv_tile = load_rows(dv + v_start, n * C, HV * V, value, C, T, V)
            do_tile = load_rows(do + v_start, n * C, HV * V, value, C, T, V)
            state = load_rows(states + chunk * K * V, 0, V, value, BK, K, V)
            dstate = load_rows(dstates + chunk * K * V, 0, V, value, BK, K, V)
            dA -= dot(dv_tile, tl.trans(new))
            ratio = (dv_tile.to(tl.float32) / strength[:, None]) * (new.to(tl.float32) / strength[:, None])
            dstrength += tl.sum(ratio, axis=1)
            through += tl.sum(state.to(tl.float32) * dstate.to(tl.float32), axis=1)
            part = dot(do_tile, tl.trans(state)) * entering
            from_start += q_unit * part
            dq_tile += part
            part = dot(dv_tile, tl.trans(state)) * entering
            from_start -= k_unit * part
            dk_tile -= part
            part = dot(new, tl.trans(dstate)) * leaving
            to_end += k_unit * part
            dk_tile += part
        tl.store(dbeta + (b * T + token) * HV + head, dstrength, mask=token < T)

        # The diagonal has no decay, and stays out of the gates' gradients.
        dP = tl.load(dattention + chunk * (C * C) + at[:, None] * C + at[None, :])
        own = tl.sum(tl.where(at[:, None] == at[None, :], dP, 0.0).to(tl.float32), axis=1)[:, None]
        dq_tile += own * k_unit
        dk_tile += own * q_unit
        dA = dA.to(dtype)
        if PACKED:
            dA, dP = tl.where(same, dA, 0.0), tl.where(same, dP, 0.0)
        # Pairs of different blocks. What a pair gives to both its tokens is the same product, to the last bit.
        for level in tl.static_range(2):
            if C >= 32 << level:
                decay = outer_decay(before, after, totals, level, C)
                keep = in_square(at, level + 4)
                a, p = tl.where(keep, dA, 0.0), tl.where(keep, dP, 0.0)
                k_decayed, q_decayed = (k_unit * decay).to(dtype), (q_unit * decay).to(dtype)
                to_k = dot(a + tl.trans(a), k_decayed) + dot(tl.trans(p), q_decayed)
                to_q = dot(p, k_decayed)
                sign = tl.where(is_right(at, level + 4), 1.0, -1.0)[:, None]
                from_start += sign * k_decayed * to_k + q_decayed * to_q
                dk_tile += decay * to_k
                dq_tile += decay * to_q
        # Pairs within blocks.
        k_blocks, q_blocks = tl.reshape(k_unit, [M, BLOCK, BK]), tl.reshape(q_unit, [M, BLOCK, BK])
        dA_blocks, dP_blocks = diagonal(dA, M, BLOCK).to(dtype), diagonal(dP, M, BLOCK).to(dtype)
        dk_blocks, dq_blocks = tl.zeros([M, BLOCK, BK], tl.float32), tl.zeros([M, BLOCK, BK], tl.float32)
        of_sums = tl.zeros([M, BLOCK, BK], tl.float32)
        for level in tl.static_range(4):
            decay = inner_decay(g_high, g_low, level, PARTS)
            keep = in_square(within, level)[None, :, :]
            a, p = tl.where(keep, dA_blocks, 0.0), tl.where(keep, dP_blocks, 0.0)
            k_decayed, q_decayed = (k_blocks * decay).to(dtype), (q_blocks * decay).to(dtype)
            to_k = block_dot(a + tl.trans(a, 0, 2, 1), k_decayed) + block_dot(tl.trans(p, 0, 2, 1), q_decayed)
            to_q = block_dot(p, k_decayed)
            sign = tl.where(is_right(within, level), 1.0, -1.0)[None, :, None]
            of_sums += sign * k_decayed * to_k + q_decayed * to_q
            dk_blocks += decay * to_k
            dq_blocks += decay * to_q
        dk_tile += tl.reshape(dk_blocks, [C, BK])
        dq_tile += tl.reshape(dq_blocks, [C, BK])
        from_start += tl.reshape(of_sums, [C, BK])

        dg = _select(straddles, from_start, dtype, PARTS) + _select(follows, to_end, dtype, PARTS)
        dg += (carry * through)[None, :]
        dg = tl.where((token < T)[:, None], dg, 0.0)
        if FORM != "log":
            rate = tl.exp(tl.load(A_log + head))
            if FORM == "softplus":
                dgate = dg * (-rate) * tl.sigmoid(raw)
                of_rate = dg * g
            else:
                part = tl.sigmoid(rate * raw)
                dgate = dg * (BOUND * rate) * (part * (1.0 - part))
                of_rate = dgate * raw
            sums = of_gates + chunk * 2 * K + key
            tl.store(sums, tl.sum(of_rate, axis=0), mask=key < K)
            tl.store(sums + K, tl.sum(dgate, axis=0), mask=key < K)
            dg = dgate
        store_rows(dgates + (b * T * HV + head) * K, dg, n * C, HV * K, key, C, T, K)
    dq_tile *= SCALE * inverse_norm(load_rows(q + start, n * C, H * K, key, C, T, K))[:, None]
    dk_tile *= inverse_norm(load_rows(k + start, n * C, H * K, key, C, T, K))[:, None]
    store_unnormalised(dq, dq_tile, q, start, n, key, T, H, K, C)
    store_unnormalised(dk, dk_tile, k, start, n, key, T, H, K, C)

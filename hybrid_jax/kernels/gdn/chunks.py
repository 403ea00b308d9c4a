"""Gated DeltaNet's kernels that see one chunk of a row at a time; kernels.gdn.triton says how they fit together.

Symbols as there. Shapes: B batch, T time, H q/k heads, R value heads per q/k head, HV = H R, K key dim, V value dim,
N chunks, C chunk, BK >= K and BV widths of tiles.
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
)
from hybrid_jax.kernels.device import dot, load_rows, prefix_sum, split, store_rows, strict_prefix_sum, suffix_sum


@triton.jit
def _decays(g, documents, b, n, head, T: tl.constexpr, HV: tl.constexpr, C: tl.constexpr, PACKED: tl.constexpr):
    """Of chunk n: sum of its document's gates up to each token [C], decay from the chunk's start and to its end
    [C], decay over the whole chunk, and the tokens' documents [C]."""
    token = n * C + tl.arange(0, C)
    row = g + b * T * HV + head
    gate = tl.load(row + token * HV, mask=token < T, other=0.0)
    next_token = token + 1  # a sum over later gates only, never the difference of two sums
    later = tl.load(row + next_token * HV, mask=(next_token < T) & (next_token < n * C + C), other=0.0)
    document = token * 0
    if PACKED:
        ids = documents + b * T
        document = tl.load(ids + tl.minimum(token, T - 1))
    total = prefix_sum(gate, document, PACKED)
    leaving = suffix_sum(later, document, PACKED)
    entering = total
    whole = tl.sum(gate, axis=0)
    if PACKED:
        before = tl.load(ids + tl.maximum(n * C - 1, 0))
        last = tl.load(ids + tl.minimum(n * C + C - 1, T - 1))
        entering = tl.where(document == before, entering, float("-inf"))
        leaving = tl.where(document == last, leaving, float("-inf"))
        whole = tl.where(before == last, whole, float("-inf"))
    return total, tl.exp(entering), tl.exp(leaving), tl.exp(whole), document


@triton.jit
def _pair_decays(total, document, C: tl.constexpr, PACKED: tl.constexpr):
    """D [C, C]: the decay between tokens j <= i of one document, 0 elsewhere (masked before exp)."""
    at = tl.arange(0, C)
    keep = at[:, None] >= at[None, :]
    if PACKED:
        keep = keep & (document[:, None] == document[None, :])
    return tl.exp(tl.where(keep, total[:, None] - total[None, :], float("-inf")))


@triton.jit
def prepare(
    k,
    g,
    beta,
    documents,
    inverse,
    writers,
    coefficients,
    carries,
    T: tl.constexpr,
    H: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    N: tl.constexpr,
    C: tl.constexpr,
    BK: tl.constexpr,
    PACKED: tl.constexpr,
    PARTS: tl.constexpr,
):
    """What the scans need of each chunk: one program a chunk and value head.

    inverse [B,N,HV,PARTS,C,C]: T' as high and low part. writers [B,T,HV,K]: X. coefficients [B,HV,N C]: gamma / |k|.
    carries [B,HV,N]: the chunk's decay.
    """
    program = tl.program_id(0)
    head = program % HV
    n = (program // HV) % N
    b = (program // HV // N).to(tl.int64)
    dtype: tl.constexpr = k.dtype.element_ty
    total, entering, leaving, whole, document = _decays(g, documents, b, n, head, T, HV, C, PACKED)
    start = (b * T * H + head // (HV // H)) * K
    k_tile = load_rows(k + start, n * C, H * K, tl.arange(0, BK), C, T, K)
    k_norm = inverse_norm(k_tile)
    at = tl.arange(0, C)
    tl.store(coefficients + (b * HV + head) * N * C + n * C + at, entering * k_norm)
    tl.store(carries + (b * HV + head) * N + n, whole)

    strength = load_strength(beta, b, n, head, T, HV, C)
    A = dot(k_tile, tl.trans(k_tile)) * k_norm[None, :] * (strength * k_norm)[:, None]
    A = tl.where(at[:, None] > at[None, :], A * _pair_decays(total, document, C, PACKED), 0.0)
    x = store_inverse(inverse, (b * N + n) * HV + head, A, strength, C, PARTS)

    high, low = split(tl.trans(x * strength[None, :] * (leaving * k_norm)[:, None]), dtype)
    BLOCK: tl.constexpr = 64 if BK > 64 else BK
    for block in tl.range(0, BK // BLOCK, disable_licm=True):
        columns = block * BLOCK + tl.arange(0, BLOCK)
        writer = apply(high, low, load_rows(k + start, n * C, H * K, columns, C, T, K), PARTS)
        store_rows(writers + (b * T * HV + head) * K, writer, n * C, HV * K, columns, C, T, K)


@triton.jit
def _new_values(state, k, v, of_k, high, low, PARTS: tl.constexpr):
    """V' = T' (V - gamma K S)."""
    return apply(high, low, v - of_k[:, None] * dot(k, state), PARTS)


@triton.jit
def output(
    q,
    k,
    v,
    g,
    documents,
    inverse,
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
    SCALE: tl.constexpr,
    PACKED: tl.constexpr,
    PARTS: tl.constexpr,
):
    """o from the states before the chunks: one program a chunk, value head and block of BV columns."""
    BLOCKS: tl.constexpr = (V + BV - 1) // BV
    program = tl.program_id(0)
    value = program % BLOCKS * BV + tl.arange(0, BV)
    head = (program // BLOCKS) % HV
    n = (program // BLOCKS // HV) % N
    b = (program // BLOCKS // HV // N).to(tl.int64)
    dtype: tl.constexpr = q.dtype.element_ty
    key = tl.arange(0, BK)
    start = (b * T * H + head // (HV // H)) * K
    v_start = (b * T * HV + head) * V
    chunk = (b * N + n) * HV + head
    k_tile = load_rows(k + start, n * C, H * K, key, C, T, K)
    state = load_rows(states + chunk * K * V, 0, V, value, BK, K, V)
    v_tile = load_rows(v + v_start, n * C, HV * V, value, C, T, V)
    high, low = load_inverse(inverse, chunk, C, PARTS)
    total, entering, _, _, document = _decays(g, documents, b, n, head, T, HV, C, PACKED)
    k_norm = inverse_norm(k_tile)
    new = _new_values(state, k_tile, v_tile, entering * k_norm, high, low, PARTS).to(dtype)
    q_tile = load_rows(q + start, n * C, H * K, key, C, T, K)
    of_q = SCALE * inverse_norm(q_tile)
    P = dot(q_tile, tl.trans(k_tile)) * _pair_decays(total, document, C, PACKED)
    P = P * k_norm[None, :] * of_q[:, None]
    out = (entering * of_q)[:, None] * dot(q_tile, state) + dot(P.to(dtype), new)
    store_rows(o + v_start, out, n * C, HV * V, value, C, T, V)


@triton.jit
def query_gradients(
    q,
    k,
    v,
    g,
    documents,
    do,
    inverse,
    states,
    dq,
    values,
    dv_local,
    dattention,
    log_decays,
    of_queries,
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
    PACKED: tl.constexpr,
    PARTS: tl.constexpr,
):
    """All that follows from do and the states before the chunks: one program a chunk and q/k head.

    dq [B,T,H,K]; values [B,T,HV,V]: V'; dv_local [B,T,HV,V]: T'^T P^T do, what the chunk's own outputs give to dv;
    dattention [B,N,HV,C,C]: d loss / d (q_i . k_j); log_decays [B,HV,N C]: what P and scale gamma q S add to the
    derivative by the sum of gates up to each token; of_queries [B,HV,N C]: scale gamma / |q|.
    """
    program = tl.program_id(0)
    group = program % H
    n = (program // H) % N
    b = (program // H // N).to(tl.int64)
    R: tl.constexpr = HV // H
    dtype: tl.constexpr = k.dtype.element_ty
    key = tl.arange(0, BK)
    at = tl.arange(0, C)
    start = (b * T * H + group) * K
    dq_tile = tl.zeros([C, BK], tl.float32)
    for r in tl.range(0, R, disable_licm=True):
        head = group * R + r
        chunk = (b * N + n) * HV + head
        v_start = (b * T * HV + head) * V
        q_tile = load_rows(q + start, n * C, H * K, key, C, T, K)
        k_tile = load_rows(k + start, n * C, H * K, key, C, T, K)
        total, entering, _, _, document = _decays(g, documents, b, n, head, T, HV, C, PACKED)
        of_q, k_norm = SCALE * inverse_norm(q_tile), inverse_norm(k_tile)
        factor = _pair_decays(total, document, C, PACKED) * k_norm[None, :] * of_q[:, None]
        P = dot(q_tile, tl.trans(k_tile)) * factor
        high, low = load_inverse(inverse, chunk, C, PARTS)
        dP = tl.zeros([C, C], tl.float32)
        log_decay = tl.zeros([C], tl.float32)
        for block in range((V + BV - 1) // BV):
            value = block * BV + tl.arange(0, BV)
            state = load_rows(states + chunk * K * V, 0, V, value, BK, K, V)
            v_tile = load_rows(v + v_start, n * C, HV * V, value, C, T, V)
            do_tile = load_rows(do + v_start, n * C, HV * V, value, C, T, V)
            new = _new_values(state, k_tile, v_tile, entering * k_norm, high, low, PARTS).to(dtype)
            store_rows(values + v_start, new, n * C, HV * V, value, C, T, V)
            dP += dot(do_tile, tl.trans(new))
            dv_tile = local_gradient(P.to(dtype), do_tile, high, low, PARTS)
            store_rows(dv_local + v_start, dv_tile, n * C, HV * V, value, C, T, V)
            part = dot(do_tile, tl.trans(state)) * (entering * of_q)[:, None]
            log_decay += tl.sum(q_tile * part, axis=1)
            dq_tile += part
        # The diagonal has no decay: it stays out of rows and columns alike.
        pairs = tl.where(at[:, None] > at[None, :], dP * P, 0.0)
        log_decay += tl.sum(pairs, axis=1)
        log_decay -= tl.sum(pairs, axis=0)
        rounded = (dP * factor).to(dtype)
        tl.store(dattention + chunk * (C * C) + at[:, None] * C + at[None, :], rounded)
        dq_tile += dot(rounded, k_tile)
        row = (b * HV + head) * (N * C) + n * C + at
        tl.store(log_decays + row, log_decay)
        tl.store(of_queries + row, entering * of_q)
    _store_unnormalised(dq, dq_tile, q, start, n, key, T, H, K, C)


@triton.jit
def key_gradients(
    q,
    k,
    g,
    beta,
    documents,
    values,
    dv,
    dattention,
    log_decays,
    states,
    dstates,
    dk,
    dg,
    dbeta,
    T: tl.constexpr,
    H: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    N: tl.constexpr,
    C: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    PACKED: tl.constexpr,
):
    """dk [B,T,H,K], dg and dbeta [B,T,HV], given dv and the states around each chunk: one program a chunk and q/k
    head."""
    program = tl.program_id(0)
    group = program % H
    n = (program // H) % N
    b = (program // H // N).to(tl.int64)
    R: tl.constexpr = HV // H
    dtype: tl.constexpr = k.dtype.element_ty
    key = tl.arange(0, BK)
    at = tl.arange(0, C)
    token = n * C + at
    start = (b * T * H + group) * K
    dk_tile = tl.zeros([C, BK], tl.float32)
    for r in tl.range(0, R, disable_licm=True):
        head = group * R + r
        chunk = (b * N + n) * HV + head
        v_start = (b * T * HV + head) * V
        here = (b * T + token) * HV + head
        k_tile = load_rows(k + start, n * C, H * K, key, C, T, K)
        k_norm = inverse_norm(k_tile)
        total, entering, leaving, whole, document = _decays(g, documents, b, n, head, T, HV, C, PACKED)
        strength = load_strength(beta, b, n, head, T, HV, C)
        log_decay = tl.load(log_decays + (b * HV + head) * (N * C) + token)
        dA = tl.zeros([C, C], tl.float32)
        dstrength = tl.zeros([C], tl.float32)
        out_of = tl.zeros([C], tl.float32)  # d loss / d log(decay from token i to the chunk's end)
        through = 0.0
        for block in range((V + BV - 1) // BV):
            value = block * BV + tl.arange(0, BV)
            new = load_rows(values + v_start, n * C, HV * V, value, C, T, V)
            dv_tile = load_rows(dv + v_start, n * C, HV * V, value, C, T, V)
            state = load_rows(states + chunk * K * V, 0, V, value, BK, K, V)
            dstate = load_rows(dstates + chunk * K * V, 0, V, value, BK, K, V)
            dA -= dot(dv_tile, tl.trans(new))
            ratio = (dv_tile.to(tl.float32) / strength[:, None]) * (new.to(tl.float32) / strength[:, None])
            dstrength += tl.sum(ratio, axis=1)
            through += tl.sum(state.to(tl.float32) * dstate.to(tl.float32))
            part = dot(dv_tile, tl.trans(state)) * (-entering * k_norm)[:, None]
            log_decay += tl.sum(k_tile * part, axis=1)
            dk_tile += part
            part = dot(new, tl.trans(dstate)) * (leaving * k_norm)[:, None]
            out_of += tl.sum(k_tile * part, axis=1)
            dk_tile += part
        D = tl.where(at[:, None] > at[None, :], _pair_decays(total, document, C, PACKED), 0.0)
        dA = dA * D * k_norm[None, :] * k_norm[:, None]
        pairs = dA * dot(k_tile, tl.trans(k_tile))
        log_decay += tl.sum(pairs, axis=1)
        log_decay -= tl.sum(pairs, axis=0)
        rounded = dA.to(dtype)
        dk_tile += dot(rounded, k_tile)
        dk_tile += dot(tl.trans(rounded), k_tile)
        q_tile = load_rows(q + start, n * C, H * K, key, C, T, K)
        dP = tl.load(dattention + chunk * (C * C) + at[:, None] * C + at[None, :])
        dk_tile += dot(tl.trans(dP), q_tile)
        dgate = suffix_sum(log_decay, document, PACKED) + strict_prefix_sum(out_of, C) + whole * through
        tl.store(dg + here, dgate, mask=token < T)
        tl.store(dbeta + here, dstrength, mask=token < T)
    _store_unnormalised(dk, dk_tile, k, start, n, key, T, H, K, C)


@triton.jit
def _store_unnormalised(out, dx, x, start, n, key, T: tl.constexpr, H: tl.constexpr, K: tl.constexpr, C: tl.constexpr):
    """The gradient of x from dx, that of u = x / |x| times 1 / |x|: dx - u (u . dx)."""
    tile = load_rows(x + start, n * C, H * K, key, C, T, K)
    unit = tile * inverse_norm(tile)[:, None]
    dx -= unit * tl.sum(unit * dx, axis=1)[:, None]
    store_rows(out + start, dx, n * C, H * K, key, C, T, K)

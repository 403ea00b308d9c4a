"""Kimi Delta Attention's kernels over values and states, a chunk of a row at a time: no gate is seen here.
kernels.kda.triton says how they fit together.

Symbols as there. Shapes: B batch, T time, H q/k heads, R value heads per q/k head, HV = H R, K key dim, V value dim,
N chunks, C chunk; BK >= K, BC and BV widths of tiles: all channels, a block of channels, a block of values.
"""

import triton
import triton.language as tl

from hybrid_jax.kernels.delta.chunks import apply, load_inverse, load_strength, local_gradient
from hybrid_jax.kernels.device import dot, load_rows, store_rows, store_turned, widen_turned


@triton.jit
def output(
    readers,
    queries,
    v,
    inverse,
    attention,
    states,
    o,
    values,
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
    """o and V', like v, from the states before the chunks: one program a chunk, value head and block of BV columns."""
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
    reader = load_rows(readers + start, n * C, HV * K, key, C, T, K)
    v_tile = load_rows(v + v_start, n * C, HV * V, value, C, T, V)
    new = apply(high, low, v_tile - dot(reader, state), PARTS).to(v_tile.dtype)
    store_rows(values + v_start, new, n * C, HV * V, value, C, T, V)
    query = load_rows(queries + start, n * C, HV * K, key, C, T, K)
    P = tl.load(attention + chunk * (C * C) + at[:, None] * C + at[None, :])
    store_rows(o + v_start, dot(query, state) + dot(P, new), n * C, HV * V, value, C, T, V)


@triton.jit
def value_gradients(
    do,
    values,
    inverse,
    attention,
    q_norms,
    k_logs,
    dv_local,
    dattention,
    diagonal,
    of_pairs,
    sizes_p,
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
    """What follows from do within a chunk: one program a chunk and value head.

    dv_local [B,T,HV,V]: T'^T P^T do; dattention [B,N,HV,C,C]: d loss / d P, times what makes the decays of a row of k,
    1 / |k| and all, those of q; its diagonal [B,HV,N C]; of_pairs [B,HV,N C]: the sums of dP * P over a row;
    sizes_p [B,HV,N C]: the largest size below the diagonal in a row of dattention.
    """
    program = tl.program_id(0)
    head = program % HV
    n = (program // HV) % N
    b = (program // HV // N).to(tl.int64)
    at = tl.arange(0, C)
    v_start = (b * T * HV + head) * V
    chunk = (b * N + n) * HV + head
    row = (b * HV + head) * (N * C) + n * C + at
    pairs = chunk * (C * C) + at[:, None] * C + at[None, :]
    high, low = load_inverse(inverse, chunk, C, PARTS)
    P = tl.load(attention + pairs)
    dP = tl.zeros([C, C], tl.float32)
    for block in tl.range(0, (V + BV - 1) // BV, disable_licm=True):
        value = block * BV + tl.arange(0, BV)
        do_tile = load_rows(do + v_start, n * C, HV * V, value, C, T, V)
        new = load_rows(values + v_start, n * C, HV * V, value, C, T, V)
        dP += dot(do_tile, tl.trans(new))
        dv_tile = local_gradient(P, do_tile, high, low, PARTS)
        store_rows(dv_local + v_start, dv_tile, n * C, HV * V, value, C, T, V)
    tl.store(of_pairs + row, tl.sum(dP * P, axis=1))
    dP *= (tl.load(q_norms + row) * tl.exp2(-tl.load(k_logs + row)))[:, None]
    tl.store(diagonal + row, tl.sum(tl.where(at[:, None] == at[None, :], dP, 0.0), axis=1))
    tl.store(sizes_p + row, tl.max(tl.where(at[:, None] > at[None, :], tl.abs(dP), 0.0), axis=1))
    tl.store(dattention + pairs, dP.to(P.dtype))


@triton.jit
def state_gradients(
    queries,
    v,
    beta,
    values,
    do,
    dv,
    states,
    dstates,
    carries,
    q_norms,
    k_logs,
    of_pairs,
    asked,
    along_q,
    dpairs,
    sizes_a,
    exchanged,
    through,
    along_k,
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
    BC: tl.constexpr,
    SIZE: tl.constexpr,
    ROWS: tl.constexpr,
):
    """What follows from do, dv and the states around each chunk: one program a chunk, value head and block of BC
    channels.

    asked [B,T,HV,K]: do S^T, times what makes the decays of a row of k, 1 / |k| and all, those of q; exchanged
    [2,B,T,HV,K]: -dV S^T and V' dS^T; through [B,HV,N,K]: the sums over values of S dS, decayed over the chunk. dpairs
    [B,N,HV,C,C]: -dV V'^T, d loss / d (k_i . k_j) of decayed keys; sizes_a: as sizes_p, of dpairs. Of u . d loss / d u,
    along_q [K / BC,B,HV,N C]: for u = q / |q|, parts of a sum; along_k [B,HV,N C]: for u = k / |k|, 2 dV . V' / beta -
    dV . V. dbeta [B,T,HV].
    """
    BLOCKS: tl.constexpr = BK // BC
    program = tl.program_id(0)
    part = program % BLOCKS
    head = (program // BLOCKS) % HV
    n = (program // BLOCKS // HV) % N
    b = (program // BLOCKS // HV // N).to(tl.int64)
    key, at = part * BC + tl.arange(0, BC), tl.arange(0, C)
    token = n * C + at
    start = (b * T * HV + head) * K
    v_start = (b * T * HV + head) * V
    chunk = (b * N + n) * HV + head
    row = (b * HV + head) * (N * C) + token
    # Tiles are [channels, tokens] here: the states are then left operands, which need not pass through registers.
    asks, reads = tl.zeros([BC, C], tl.float32), tl.zeros([BC, C], tl.float32)
    writes, products = tl.zeros([BC, C], tl.float32), tl.zeros([BC, BC], tl.float32)
    for block in tl.range(0, (V + BV - 1) // BV, disable_licm=True):
        value = block * BV + tl.arange(0, BV)
        inside = (key < K)[:, None] & (value < V)[None, :]
        place = chunk * (K * V) + key[:, None] * V + value[None, :]
        state = tl.load(states + place, mask=inside, other=0.0)
        dstate = tl.load(dstates + place, mask=inside, other=0.0)
        do_tile = load_rows(do + v_start, n * C, HV * V, value, C, T, V)
        dv_tile = load_rows(dv + v_start, n * C, HV * V, value, C, T, V)
        new = load_rows(values + v_start, n * C, HV * V, value, C, T, V)
        asks += dot(state, tl.trans(do_tile))
        reads += dot(state, tl.trans(dv_tile))
        writes += dot(dstate, tl.trans(new))
        products += dot(state, tl.trans(dstate))
    # All loads at once: each waits for memory a long time.
    place = ((b * HV + head) * N + n) * K + key
    carry = tl.load(carries + place, mask=key < K, other=0.0)
    query = load_rows(queries + start, n * C, HV * K, key, C, T, K)
    q_to_k = tl.load(q_norms + row) * tl.exp2(-tl.load(k_logs + row))
    along = tl.where(part == 0, tl.load(of_pairs + row), 0.0)
    products = tl.sum(tl.where(key[:, None] == key[None, :], products, 0.0), axis=1)
    tl.store(through + place, products * carry, mask=key < K)
    store_turned(exchanged + start, -reads, n * C, HV * K, key, C, T, K)
    store_turned(exchanged + SIZE + start, writes, n * C, HV * K, key, C, T, K)
    tl.store(along_q + part.to(tl.int64) * ROWS + row, along + tl.sum(widen_turned(query) * asks, axis=0))
    store_turned(asked + start, asks * q_to_k[None, :], n * C, HV * K, key, C, T, K)
    if part == 0:
        strength = load_strength(beta, b, n, head, T, HV, C)
        dA, of_keys = tl.zeros([C, C], tl.float32), tl.zeros([C, C], tl.float32)
        for block in tl.range(0, (V + BV - 1) // BV, disable_licm=True):
            value = block * BV + tl.arange(0, BV)
            dv_tile = load_rows(dv + v_start, n * C, HV * V, value, C, T, V)
            new = load_rows(values + v_start, n * C, HV * V, value, C, T, V)
            v_tile = load_rows(v + v_start, n * C, HV * V, value, C, T, V)
            dA -= dot(dv_tile, tl.trans(new))
            of_keys -= dot(dv_tile, tl.trans(v_tile))
        tl.store(dpairs + chunk * (C * C) + at[:, None] * C + at[None, :], dA.to(dpairs.dtype.element_ty))
        tl.store(sizes_a + row, tl.max(tl.where(at[:, None] > at[None, :], tl.abs(dA), 0.0), axis=1))
        own = at[:, None] == at[None, :]
        dstrength = tl.sum(tl.where(own, -dA, 0.0), axis=1) / (strength * strength)
        tl.store(along_k + row, tl.sum(tl.where(own, of_keys, 0.0), axis=1) + 2.0 * strength * dstrength)
        tl.store(dbeta + (b * T + token) * HV + head, dstrength, mask=token < T)

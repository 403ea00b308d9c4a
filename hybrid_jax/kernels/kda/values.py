"""Kimi Delta Attention's kernels over values and states, a chunk of a row at a time: no gate is seen here.
kernels.kda.triton says how they fit together.

Symbols as there. Shapes: B batch, T time, H q/k heads, R value heads per q/k head, HV = H R, K key dim, V value dim,
N chunks, C chunk; BK >= K, BC and BV widths of tiles: all channels, a block of channels, a block of values.
"""

import triton
import triton.language as tl

from hybrid_jax.kernels.delta.chunks import apply, load_inverse, load_strength, local_gradient
from hybrid_jax.kernels.device import dot, load_rows, store_rows


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
    queries,
    v,
    do,
    inverse,
    attention,
    states,
    values,
    dv_local,
    dattention,
    asked,
    along_q,
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
    """All that follows from do and the states before the chunks: one program a chunk and value head.

    values [B,T,HV,V]: V'; dv_local [B,T,HV,V]: T'^T P^T do; dattention [B,N,HV,C,C]: d loss / d P; asked [B,T,HV,K]:
    do S^T; along_q [B,HV,N C]: u . d loss / d u for u = q / |q|.
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
    ask = tl.zeros([C, BK], tl.float32)
    for block in tl.range(0, (V + BV - 1) // BV, disable_licm=True):
        value = block * BV + tl.arange(0, BV)
        state = load_rows(states + chunk * K * V, 0, V, value, BK, K, V)
        do_tile = load_rows(do + v_start, n * C, HV * V, value, C, T, V)
        new = _new_values(readers, v, state, start, v_start, n, key, value, high, low, T, HV, K, V, C, PARTS)
        store_rows(values + v_start, new, n * C, HV * V, value, C, T, V)
        dP += dot(do_tile, tl.trans(new))
        dv_tile = local_gradient(P, do_tile, high, low, PARTS)
        store_rows(dv_local + v_start, dv_tile, n * C, HV * V, value, C, T, V)
        ask += dot(do_tile, tl.trans(state))
    tl.store(dattention + chunk * (C * C) + at[:, None] * C + at[None, :], dP.to(P.dtype))
    store_rows(asked + start, ask, n * C, HV * K, key, C, T, K)
    query = load_rows(queries + start, n * C, HV * K, key, C, T, K)
    along = tl.sum(dP * P, axis=1) + tl.sum(query * ask, axis=1)
    tl.store(along_q + (b * HV + head) * (N * C) + n * C + at, along)


@triton.jit
def state_gradients(
    v,
    beta,
    values,
    dv,
    states,
    dstates,
    dpairs,
    read,
    written,
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
):
    """All that follows from dv and the states around each chunk: one program a chunk and value head.

    dpairs [B,N,HV,C,C]: -dV V'^T, d loss / d (k_i . k_j) of decayed keys; read, written [B,T,HV,K]: dV S^T and V' dS^T;
    through [B,HV,N,K]: the sums over values of S dS; along_k [B,HV,N C]: u . d loss / d u for u = k / |k|, which is
    2 dV . V' / beta - dV . V; dbeta [B,T,HV].
    """
    program = tl.program_id(0)
    head = program % HV
    n = (program // HV) % N
    b = (program // HV // N).to(tl.int64)
    key, at = tl.arange(0, BK), tl.arange(0, C)
    token = n * C + at
    start = (b * T * HV + head) * K
    v_start = (b * T * HV + head) * V
    chunk = (b * N + n) * HV + head
    strength = load_strength(beta, b, n, head, T, HV, C)
    dA = tl.zeros([C, C], tl.float32)
    reads, writes = tl.zeros([C, BK], tl.float32), tl.zeros([C, BK], tl.float32)
    dstrength, along = tl.zeros([C], tl.float32), tl.zeros([C], tl.float32)
    products = tl.zeros([BK], tl.float32)
    for block in tl.range(0, (V + BV - 1) // BV, disable_licm=True):
        value = block * BV + tl.arange(0, BV)
        new = load_rows(values + v_start, n * C, HV * V, value, C, T, V)
        dv_tile = load_rows(dv + v_start, n * C, HV * V, value, C, T, V)
        state = load_rows(states + chunk * K * V, 0, V, value, BK, K, V)
        dstate = load_rows(dstates + chunk * K * V, 0, V, value, BK, K, V)
        v_tile = load_rows(v + v_start, n * C, HV * V, value, C, T, V)
        dA -= dot(dv_tile, tl.trans(new))
        reads += dot(dv_tile, tl.trans(state))
        writes += dot(new, tl.trans(dstate))
        products += tl.sum(state.to(tl.float32) * dstate.to(tl.float32), axis=1)
        ratio = (dv_tile.to(tl.float32) / strength[:, None]) * (new.to(tl.float32) / strength[:, None])
        dstrength += tl.sum(ratio, axis=1)
        along -= tl.sum(dv_tile.to(tl.float32) * v_tile.to(tl.float32), axis=1)
    tl.store(dpairs + chunk * (C * C) + at[:, None] * C + at[None, :], dA.to(dpairs.dtype.element_ty))
    store_rows(read + start, reads, n * C, HV * K, key, C, T, K)
    store_rows(written + start, writes, n * C, HV * K, key, C, T, K)
    tl.store(through + ((b * HV + head) * N + n) * K + key, products, mask=key < K)
    tl.store(along_k + (b * HV + head) * (N * C) + token, along + 2.0 * strength * dstrength)
    tl.store(dbeta + (b * T + token) * HV + head, dstrength, mask=token < T)

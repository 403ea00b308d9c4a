"""The delta rules' kernels that go through a row chunk by chunk; kernels.gdn.triton says how they fit together.

Symbols as there. A chunk reads the state with gamma K and asks it with scale gamma Q. Decays of a head leave k and q
as they are stored, for all value heads of a group, and are coefficients of their rows; decays of channels
(PER_CHANNEL) are in `readers` and `queries`, which then have a row for each value head (H = HV).

Shapes: B batch, T time, H q/k heads, HV value heads, K key dim, V value dim, N chunks, C chunk, P segments, BK >= K
and BV widths of tiles; D is 1, or K with PER_CHANNEL.
"""

import triton
import triton.language as tl

from hybrid_jax.kernels.device import dot, load_rows, store_rows


@triton.jit
def _place(
    HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BV: tl.constexpr, SEGMENTS: tl.constexpr, MAP: tl.constexpr
):
    """Of a program of a scan: the row b HV + head, its segment in the order of the scan, its block of BV columns and,
    with MAP, whether those are columns of M (and not of the state)."""
    BLOCKS: tl.constexpr = (V + BV - 1) // BV
    COLUMNS: tl.constexpr = BLOCKS + ((K + BV - 1) // BV if MAP else 0)
    SCANNED: tl.constexpr = SEGMENTS - 1 if MAP else SEGMENTS
    program = tl.program_id(0)
    block = program % COLUMNS
    segment = (program // COLUMNS) % SCANNED
    row = (program // COLUMNS // SCANNED).to(tl.int64)
    of_map = block >= BLOCKS
    return row, segment, tl.where(of_map, block - BLOCKS, block) * BV + tl.arange(0, BV), of_map


@triton.jit
def _start(
    state,
    row,
    segment,
    key,
    column,
    of_map,
    BK: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    SEGMENTS: tl.constexpr,
    MAP: tl.constexpr,
):
    """What a program of a scan starts from: the state given to its segment; with MAP only the first segment has one
    [B,HV,K,V], later ones start from zero, or from the identity for M."""
    if MAP:
        known = tl.where((segment == 0) & (not of_map), V, 0)
        x = load_rows(state + row * K * V, 0, V, tl.where(column < known, column, V), BK, K, V)
        x = tl.where(of_map & (key[:, None] == column[None, :]), 1.0, x)
    else:
        x = load_rows(state + (row * SEGMENTS + segment) * K * V, 0, V, column, BK, K, V)
    return x


@triton.jit
def _carry(carries, chunk, key, K: tl.constexpr, PER_CHANNEL: tl.constexpr):
    """The decay of the state over a chunk, to be multiplied with it."""
    if PER_CHANNEL:
        x = tl.load(carries + chunk * K + key, mask=key < K, other=0.0)[:, None]
    else:
        x = tl.load(carries + chunk)
    return x


@triton.jit
def scan(
    readers,
    v,
    writers,
    coefficients,
    carries,
    entering,
    states,
    leaving,
    T: tl.constexpr,
    H: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    N: tl.constexpr,
    C: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    SEGMENTS: tl.constexpr,
    CHUNKS: tl.constexpr,
    MAP: tl.constexpr,
    PER_CHANNEL: tl.constexpr,
):
    """The state before each chunk [B,N,HV,K,V] and after each segment [B,HV,P,K,V] from the states `entering` segments
    of CHUNKS chunks [B,HV,P,K,V]: one program a value head, segment and block of BV columns.

    With MAP, from the state entering the row [B,HV,K,V], what carries a state over each segment but the last: S -> M
    S + S'. M grows from the identity without values and goes to `states` [B,HV,P,K,K]; S' grows from zero, in the
    first segment from the state itself, and goes to `leaving`.
    """
    row, segment, column, of_map = _place(HV, K, V, BV, SEGMENTS, MAP)
    b, head = row // HV, row % HV
    place = row * SEGMENTS + segment
    dtype: tl.constexpr = readers.dtype.element_ty
    key, at = tl.arange(0, BK), tl.arange(0, C)
    k_start = (b * T * H + head // (HV // H)) * K
    head_start = b * T * HV + head
    value = tl.where(of_map, V, column)  # past the last column, where loads of v give zero
    state = _start(entering, row, segment, key, column, of_map, BK, K, V, SEGMENTS, MAP)
    first = segment * CHUNKS
    stop = tl.minimum(first + CHUNKS, N)
    if MAP:
        stop = tl.where(of_map & (segment == 0), first, stop)  # the first segment's M is not needed
    for n in tl.range(first, stop, disable_licm=True):
        reader = load_rows(readers + k_start, n * C, H * K, key, C, T, K)
        v_tile = load_rows(v + head_start * V, n * C, HV * V, value, C, T, V)
        writer = load_rows(writers + head_start * K, n * C, HV * K, key, C, T, K)
        carry = _carry(carries, row * N + n, key, K, PER_CHANNEL)
        rounded = state.to(dtype)
        predicted = dot(reader, rounded)
        if not PER_CHANNEL:
            predicted *= tl.load(coefficients + row * (N * C) + n * C + at)[:, None]
        wrong = v_tile - predicted
        if not MAP:
            store_rows(states + ((b * N + n) * HV + head) * K * V, rounded, 0, V, value, BK, K, V)
        state = carry * state + dot(tl.trans(writer), wrong.to(dtype))
    if MAP:
        store_rows(states + place * K * K, state, 0, K, tl.where(of_map, column, K), BK, K, K)
    store_rows(leaving + place * K * V, state, 0, V, value, BK, K, V)


@triton.jit
def reverse_scan(
    queries,
    readers,
    do,
    dv_local,
    of_queries,
    writers,
    coefficients,
    carries,
    leaving,
    dv,
    dstates,
    entering,
    T: tl.constexpr,
    H: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    N: tl.constexpr,
    C: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    SEGMENTS: tl.constexpr,
    CHUNKS: tl.constexpr,
    MAP: tl.constexpr,
    PER_CHANNEL: tl.constexpr,
):
    """dv [B,T,HV,V], the gradient of the state after each chunk [B,N,HV,K,V] and before each segment [B,HV,P,K,V] from
    those of the states `leaving` the segments [B,HV,P,K,V]. Programs, and MAP (here M^T) from the last segment, as in
    `scan`.

    queries, readers [B,T,H,K], writers [B,T,HV,K]; of_queries, coefficients [B,HV,N C], read unless PER_CHANNEL;
    carries [B,HV,N,D].
    """
    row, passed, column, of_map = _place(HV, K, V, BV, SEGMENTS, MAP)
    segment = SEGMENTS - 1 - passed
    b, head = row // HV, row % HV
    place = row * SEGMENTS + segment
    dtype: tl.constexpr = readers.dtype.element_ty
    key, at = tl.arange(0, BK), tl.arange(0, C)
    qk_start = (b * T * H + head // (HV // H)) * K
    head_start = b * T * HV + head
    value = tl.where(of_map, V, column)
    dstate = _start(leaving, row, passed if MAP else segment, key, column, of_map, BK, K, V, SEGMENTS, MAP)
    first = segment * CHUNKS
    stop = tl.minimum(first + CHUNKS, N)
    if MAP:
        first = tl.where(of_map & (passed == 0), stop, first)
    for back in tl.range(0, stop - first, disable_licm=True):
        n = stop - 1 - back
        writer = load_rows(writers + head_start * K, n * C, HV * K, key, C, T, K)
        local = load_rows(dv_local + head_start * V, n * C, HV * V, value, C, T, V)
        query = load_rows(queries + qk_start, n * C, H * K, key, C, T, K)
        do_tile = load_rows(do + head_start * V, n * C, HV * V, value, C, T, V)
        reader = load_rows(readers + qk_start, n * C, H * K, key, C, T, K)
        carry = _carry(carries, row * N + n, key, K, PER_CHANNEL)
        rounded = dstate.to(dtype)
        dv_tile = local + dot(writer, rounded)
        if not MAP:
            store_rows(dstates + ((b * N + n) * HV + head) * K * V, rounded, 0, V, value, BK, K, V)
            store_rows(dv + head_start * V, dv_tile, n * C, HV * V, value, C, T, V)
        if not PER_CHANNEL:
            do_tile = (do_tile * tl.load(of_queries + row * (N * C) + n * C + at)[:, None]).to(dtype)
            dv_tile *= tl.load(coefficients + row * (N * C) + n * C + at)[:, None]
        dstate = carry * dstate + dot(tl.trans(query), do_tile)
        dstate -= dot(tl.trans(reader), dv_tile.to(dtype))
    if MAP:
        store_rows(dstates + place * K * K, dstate, 0, K, tl.where(of_map, column, K), BK, K, K)
    store_rows(entering + place * K * V, dstate, 0, V, value, BK, K, V)

"""SSD in chunks: matrix products inside a chunk, a short scan over chunk states, and its own backward pass.

Shapes: B batch, T time, H heads, G groups, R heads in a group (H = G R), P head dim, N state size, X chunks
in a block, C tokens in a chunk (i for the reading token, j for the written one). In einsums: b x g r i/j p n.

With a_t = dt_t A and D_ij = sum of a_t over j < t <= i, a chunk that starts from state S computes

    y_i = sum_{j<=i} (C_i.B_j) e^{D_ij} dt_j x_j  +  e^{D_i,start} S C_i  +  D x_i
    S'  = e^{D_end,start} S  +  sum_j e^{D_end,j} dt_j x_j B_j^T               (arXiv:2405.21060, section 6)

Time is cut into at most 8 blocks of chunks; a block's chunks are computed together. The forward pass keeps
the state before each block and nothing else, and the backward pass computes the rest of the block again:
memory is linear in T, and so is a block's share of it.

Decays are exponentials of D_ij, masked before exp (the other triangle would overflow), and D_ij is exact
however large the sums before it are: see _decay_sums. A document's tokens therefore see nothing of other
documents, not even in rounding, and the gradient of a token's decay is a sum over exactly the pairs that
straddle it, which neither cancels under fast decay nor touches other documents.
"""

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from hybrid_jax.kernels import RESIDUAL, cuts
from hybrid_jax.kernels.documents import number_documents
from hybrid_jax.kernels.precision import accumulator, einsum


def ssd_chunked(x, dt, A, B, C, D, initial_state, segment_ids, chunk_size: int):
    """See hybrid_jax.kernels.mamba2.ssd."""
    T = x.shape[1]
    cut = cuts.blocks_of(T, min(chunk_size, T))
    pad = -T % cut.tokens
    documents = number_documents(segment_ids)
    if pad:  # dt = 0 neither decays nor writes
        x, dt, B, C = (jnp.pad(z, ((0, 0), (0, pad)) + ((0, 0),) * (z.ndim - 2)) for z in (x, dt, B, C))
        documents = jnp.pad(documents, ((0, 0), (0, pad)), mode="edge")
    y, final_state = _ssd(cut.chunk, cut.chunks, x, dt, A, B, C, D, initial_state, documents)
    return y[:, :T], final_state


class _Block(NamedTuple):
    """One block's inputs with heads in groups and time in chunks, and the decays that follow from them."""

    x_BXGRCP: jax.Array
    dt_BXGRC: jax.Array
    B_BXGCN: jax.Array
    C_BXGCN: jax.Array
    pair_BXGRij: jax.Array  # e^{D_ij} where i reads j, else 0
    enter_BXGRC: jax.Array  # e^{D_i,start}, the incoming state's weight in token i; 0 past its document
    leave_BXGRC: jax.Array  # e^{D_end,j}, token j's weight in the outgoing state; 0 before its document
    carry_BXGR: jax.Array  # e^{D_end,start}, the incoming state's weight in the outgoing one


def _decay_sums(a_BXGRC: jax.Array):
    """Running sums of a within each chunk as a pair (hi, lo) of arrays [B, X, G, R, C] whose sums are exact.

    a is rounded to a grid so coarse that C terms add up exactly, the remainder to a finer one. A difference
    of two of these sums is then right to its own last bit, where one of plain running sums carries their
    rounding (2e-4 at 3200), in which it would also depend on tokens before both.
    """
    dtype = a_BXGRC.dtype
    bits = jnp.finfo(dtype).nmant + 1
    chunk = a_BXGRC.shape[-1]
    # exp of anything below this is 0: it bounds the sums.
    lowest = math.floor(math.log(float(jnp.finfo(dtype).smallest_subnormal))) - 1
    coarse = 2.0 ** (math.ceil(math.log2(-lowest * chunk)) - bits)
    fine = coarse * 2.0 ** (math.ceil(math.log2(chunk)) - bits)
    a = jnp.maximum(a_BXGRC, lowest)
    hi = jnp.round(a / coarse) * coarse
    lo = jnp.round((a - hi) / fine) * fine
    lower = jnp.tril(jnp.ones((chunk, chunk), dtype))
    return tuple(einsum("ij,bxgrj->bxgri", lower, z, dtype=dtype) for z in (hi, lo))


def _by_head(z: jax.Array, chunk: int, G: int) -> jax.Array:
    """[B, X C, G R, ...] -> [B, X, G, R, C, ...]."""
    Bsz, L, heads = z.shape[:3]
    return jnp.moveaxis(z.reshape(Bsz, L // chunk, chunk, G, heads // G, *z.shape[3:]), 2, 4)


def _prepare(chunk: int, A, before, x, dt, B, C, documents) -> _Block:
    """From arrays of one block, [B, X C, ...], and `before`, the document [B] of the token before it."""
    Bsz, L, H, _ = x.shape
    G = B.shape[2]
    X = L // chunk
    compute = accumulator(x.dtype)
    A_GR1 = A.astype(compute).reshape(G, H // G, 1)
    dt_BXGRC = _by_head(dt.astype(compute), chunk, G)
    hi, lo = _decay_sums(dt_BXGRC * A_GR1)

    def decay(mask, of, since):
        return jnp.exp(jnp.where(mask, (of(hi) - since(hi)) + (of(lo) - since(lo)), -jnp.inf))

    doc_BXC = documents.reshape(Bsz, X, chunk)
    before_BX = jnp.concatenate([before[:, None], doc_BXC[:, :-1, -1]], axis=1)
    same = jnp.tril(doc_BXC[..., :, None] == doc_BXC[..., None, :])[:, :, None, None]
    enters = (doc_BXC == before_BX[..., None])[:, :, None, None]
    leaves = (doc_BXC == doc_BXC[..., -1:])[:, :, None, None]
    carries = (doc_BXC[..., -1] == before_BX)[:, :, None, None]
    return _Block(
        x_BXGRCP=_by_head(x, chunk, G),
        dt_BXGRC=dt_BXGRC,
        B_BXGCN=_by_head(B, chunk, G)[:, :, :, 0],
        C_BXGCN=_by_head(C, chunk, G)[:, :, :, 0],
        pair_BXGRij=decay(same, lambda s: s[..., :, None], lambda s: s[..., None, :]),
        enter_BXGRC=decay(enters, lambda s: s, lambda s: 0.0),
        leave_BXGRC=decay(leaves, lambda s: s[..., -1:], lambda s: s),
        carry_BXGR=decay(carries, lambda s: s[..., -1], lambda s: 0.0),
    )


def _chunk_states(blk: _Block, state_BGRPN: jax.Array, op):
    """The state before each chunk of the block [B, X, G, R, P, N], and the one after the block."""
    weighted = blk.x_BXGRCP * (blk.dt_BXGRC * blk.leave_BXGRC)[..., None]
    written_BXGRPN = einsum("bxgrjp,bxgjn->bxgrpn", weighted, blk.B_BXGCN, dtype=op)

    def step(S, chunk):
        carry, written = chunk
        return carry[..., None, None] * S + written, S

    chunks = (blk.carry_BXGR.swapaxes(0, 1), written_BXGRPN.swapaxes(0, 1))
    after, states = jax.lax.scan(step, state_BGRPN, chunks)
    return states.swapaxes(0, 1), after


def _outputs(blk: _Block, S_BXGRPN: jax.Array, op) -> jax.Array:
    """y without the D x term, [B, X, G, R, C, P] fp32."""
    cb_BXGij = einsum("bxgin,bxgjn->bxgij", blk.C_BXGCN, blk.B_BXGCN, dtype=op)
    weights = cb_BXGij[:, :, :, None] * blk.pair_BXGRij * blk.dt_BXGRC[..., None, :]
    within = einsum("bxgrij,bxgrjp->bxgrip", weights, blk.x_BXGRCP, dtype=op)
    from_state = einsum("bxgin,bxgrpn->bxgrip", blk.C_BXGCN, S_BXGRPN, dtype=op)
    return within + blk.enter_BXGRC[..., None] * from_state


def _straddle(M_BXGRij: jax.Array) -> jax.Array:
    """sum of M_ij over j < t <= i for each t, [B, X, G, R, C], for M that is 0 where i < j.

    Not the row sums less the column sums from t on: those hold every pair past t twice, with opposite signs.
    """
    chunk = M_BXGRij.shape[-1]
    before = jnp.triu(jnp.ones((chunk, chunk), M_BXGRij.dtype), 1)  # [j, t]: j < t
    per_reader = einsum("bxgrij,jt->bxgrit", M_BXGRij, before, dtype=M_BXGRij.dtype)
    return jnp.sum(jnp.tril(per_reader), axis=-2)


def _block_gradients(blk: _Block, dy_BXGRCP, S_BXGRPN, dS_BGRPN, op):
    """dx (without D), d dt (not through a), da, dB and dC of one block, and d of the state before it."""
    compute = accumulator(op)
    x, dt, dy = blk.x_BXGRCP, blk.dt_BXGRC, dy_BXGRCP
    read = dy * blk.enter_BXGRC[..., None]

    def step(dS_after, chunk):
        carry, read_state = chunk
        return carry[..., None, None] * dS_after + read_state, dS_after

    read_BXGRPN = einsum("bxgrip,bxgin->bxgrpn", read, blk.C_BXGCN, dtype=op)
    chunks = (blk.carry_BXGR.swapaxes(0, 1), read_BXGRPN.swapaxes(0, 1))
    dS_BGRPN, after = jax.lax.scan(step, dS_BGRPN, chunks, reverse=True)
    dS_BXGRPN = after.swapaxes(0, 1)  # gradient of the state after each chunk

    cb_BXGij = einsum("bxgin,bxgjn->bxgij", blk.C_BXGCN, blk.B_BXGCN, dtype=op)
    kernel_BXGRij = cb_BXGij[:, :, :, None] * blk.pair_BXGRij
    dy_x_BXGRij = einsum("bxgrip,bxgrjp->bxgrij", dy, x, dtype=op)
    weighted_BXGRij = dy_x_BXGRij * dt[..., None, :]

    # u_j is the gradient of dt_j x_j
    to_state = einsum("bxgjn,bxgrpn->bxgrjp", blk.B_BXGCN, dS_BXGRPN, dtype=op) * blk.leave_BXGRC[..., None]
    u = einsum("bxgrij,bxgrip->bxgrjp", kernel_BXGRij, dy, dtype=op) + to_state
    ddt = jnp.sum(u * x, axis=-1)

    dcb_BXGij = jnp.sum(weighted_BXGRij * blk.pair_BXGRij, axis=3)
    from_state = einsum("bxgrip,bxgrpn->bxgin", read, S_BXGRPN, dtype=op)
    dC = einsum("bxgij,bxgjn->bxgin", dcb_BXGij, blk.B_BXGCN, dtype=op) + from_state
    written = x * (dt * blk.leave_BXGRC)[..., None]
    dB = einsum("bxgij,bxgin->bxgjn", dcb_BXGij, blk.C_BXGCN, dtype=op)
    dB += einsum("bxgrjp,bxgrpn->bxgjn", written, dS_BXGRPN, dtype=op)

    # a_t: pairs inside the chunk, state read at or after t, state written before t, state carried through.
    # The diagonal has no decay, and is left out by _straddle.
    da = _straddle(weighted_BXGRij * kernel_BXGRij)
    chunk = x.shape[-2]
    through_state = jnp.sum(dy * einsum("bxgin,bxgrpn->bxgrip", blk.C_BXGCN, S_BXGRPN, dtype=op), axis=-1)
    before_t = jnp.tril(jnp.ones((chunk, chunk), compute), -1)  # [t, j]: j < t
    from_t = jnp.triu(jnp.ones((chunk, chunk), compute))  # [t, i]: i >= t
    da += einsum("ti,bxgri->bxgrt", from_t, through_state * blk.enter_BXGRC, dtype=compute)
    da += einsum("tj,bxgrj->bxgrt", before_t, jnp.sum(to_state * x, axis=-1) * dt, dtype=compute)
    da += (blk.carry_BXGR * jnp.sum(dS_BXGRPN * S_BXGRPN, axis=(-2, -1)))[..., None]
    return u * dt[..., None], ddt, da, dB, dC, dS_BGRPN


def _slice(k, length: int, *arrays):
    return [jax.lax.dynamic_slice_in_dim(z, k * length, length, axis=1) for z in arrays]


def _place(whole: jax.Array, part: jax.Array, k, length: int) -> jax.Array:
    """Writes a block's [B, X, G, R, C, ...] into its place in `whole` [B, T, G R, ...]."""
    part = jnp.moveaxis(part.astype(whole.dtype), 4, 2).reshape(part.shape[0], length, *whole.shape[2:])
    return jax.lax.dynamic_update_slice_in_dim(whole, part, k * length, axis=1)


def _documents_before(documents: jax.Array, length: int) -> jax.Array:
    """The document of the token before each block [B, blocks]; the initial state belongs to document 0."""
    return jnp.pad(documents[:, length - 1 :: length][:, :-1], ((0, 0), (1, 0)))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _ssd(chunk: int, per_block: int, x, dt, A, B, C, D, initial_state, documents):
    return _forward(chunk, per_block, x, dt, A, B, C, D, initial_state, documents)[0]


def _forward(chunk, per_block, x, dt, A, B, C, D, initial_state, documents):
    Bsz, T, H, P = x.shape
    G, N = B.shape[2:]
    length = chunk * per_block
    before = _documents_before(documents, length)

    def step(carry, k):
        state, y = carry
        blk = _prepare(chunk, A, before[:, k], *_slice(k, length, x, dt, B, C, documents))
        S_BXGRPN, after = _chunk_states(blk, state, x.dtype)
        out = _outputs(blk, S_BXGRPN, x.dtype)
        if D is not None:
            out += D.astype(out.dtype).reshape(G, H // G, 1, 1) * blk.x_BXGRCP
        return (after, _place(y, out, k, length)), state

    state = initial_state.astype(accumulator(x.dtype)).reshape(Bsz, G, H // G, P, N)
    (state, y), states = jax.lax.scan(step, (state, jnp.zeros_like(x)), jnp.arange(T // length))
    y, states = checkpoint_name(y, RESIDUAL), checkpoint_name(states, RESIDUAL)
    final_state = state.reshape(Bsz, H, P, N)
    return (y, final_state), (x, dt, A, B, C, D, initial_state, documents, states)


def _backward(chunk, per_block, saved, cotangents):
    x, dt, A, B, C, D, initial_state, documents, states = saved
    dy, dfinal = cotangents
    Bsz, T, H, P = x.shape
    G, N = B.shape[2:]
    R = H // G
    length = chunk * per_block
    before = _documents_before(documents, length)
    compute = accumulator(x.dtype)
    op = x.dtype

    def step(carry, block):
        dS, whole = carry
        k, state = block
        blk = _prepare(chunk, A, before[:, k], *_slice(k, length, x, dt, B, C, documents))
        dy_BXGRCP = _by_head(_slice(k, length, dy)[0], chunk, G)
        S_BXGRPN, _ = _chunk_states(blk, state, op)
        dx, ddt, da, dB, dC, dS = _block_gradients(blk, dy_BXGRCP, S_BXGRPN, dS, op)
        dD = None
        if D is not None:
            dx += D.astype(compute).reshape(G, R, 1, 1) * dy_BXGRCP
            dD = einsum("bxgrcp,bxgrcp->gr", dy_BXGRCP, blk.x_BXGRCP, dtype=compute)
        parts = (dx, ddt, da, dB[:, :, :, None], dC[:, :, :, None])
        return (dS, tuple(_place(w, p, k, length) for w, p in zip(whole, parts, strict=True))), dD

    dS = dfinal.astype(compute).reshape(Bsz, G, R, P, N)
    zeros = jnp.zeros(dt.shape, compute)
    whole = (jnp.zeros_like(x), zeros, zeros, jnp.zeros_like(B), jnp.zeros_like(C))
    (dS, whole), dD = jax.lax.scan(step, (dS, whole), (jnp.arange(T // length), states), reverse=True)
    dx, ddt, da, dB, dC = whole
    ddt = (ddt + da * A.astype(compute)).astype(dt.dtype)
    dA = jnp.sum(da * dt.astype(compute), axis=(0, 1)).astype(A.dtype)
    if D is not None:
        dD = jnp.sum(dD, axis=0).reshape(H).astype(D.dtype)
    dinitial = dS.reshape(Bsz, H, P, N).astype(initial_state.dtype)
    return dx, ddt, dA, dB, dC, dD, dinitial, None


_ssd.defvjp(_forward, _backward)

"""A chunked recurrence over long rows, one block of chunks at a time, with its own VJP.

A row of T tokens is cut into chunks of C = 64 tokens, and the chunks into at most BLOCKS = 8 blocks. Blocks
are computed one after another; inside one, all chunks at once except for the short state scan. Temporary
memory is thus about an eighth of what the whole row would need, and linear in T. The backward pass keeps only
the inputs and the state that entered each block; it recomputes a block and differentiates that.

Blocks are read from and written to [B,T,...] arrays in place, so the row as a whole is never transposed.

Shapes: B batch, T time, H q/k heads, R value heads per q/k head, HV = H R, K key dim, V value dim, N chunks,
C chunk.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from hybrid_jax.kernels import RESIDUAL, cuts
from hybrid_jax.kernels.cuts import Cut
from hybrid_jax.kernels.delta_rule import document_masks, document_starts, l2_normalize
from hybrid_jax.kernels.precision import accumulator


def _cut(length: int) -> Cut:
    return cuts.blocks_of(length, cuts.chunk_of(length, cuts.CHUNK))


def _pad(x, cut):
    return jnp.pad(x, [(0, 0), (0, cut.blocks * cut.tokens - x.shape[1])] + [(0, 0)] * (x.ndim - 2))


def _read(x, block, cut, heads=()):
    """Block number `block` of x [B,T,...]: [N,B,*heads,C,...], its head axis (if any) split into `heads`."""
    x = jax.lax.dynamic_slice_in_dim(x, block * cut.tokens, cut.tokens, axis=1)
    x = x.reshape(x.shape[0], cut.chunks, cut.chunk, *heads, *x.shape[3:])
    order = (1, 0, *range(3, 3 + len(heads)), 2, *range(3 + len(heads), x.ndim))
    return jnp.transpose(x, order)


def _write(buffer, x, block, cut):
    """Put x [N,B,*heads,C,...] back as block number `block` of buffer [B,T,HV,...]."""
    heads = x.ndim - buffer.ndim
    x = jnp.transpose(x, (1, 0, 2 + heads, *range(2, 2 + heads), *range(3 + heads, x.ndim)))
    x = x.reshape(buffer.shape[0], cut.tokens, *buffer.shape[2:]).astype(buffer.dtype)
    return jax.lax.dynamic_update_slice_in_dim(buffer, x, block * cut.tokens, axis=1)


def _read_all(row, block, cut):
    q, k, v, g, beta, starts = row
    H = q.shape[2]
    grouped = (H, v.shape[2] // H)
    per_head = (_read(q, block, cut, (H,)), _read(k, block, cut, (H,)))
    return (*per_head, *(_read(x, block, cut, grouped) for x in (v, g, beta))), _read(starts, block, cut)


def _block(form, scale, inputs, state, starts):
    """One block: `form` on normalised q, k. Returns (o [N,B,H,R,C,V], state)."""
    q, k, v, g, beta = inputs
    dtype = jnp.result_type(q, k, v)
    wide = accumulator(dtype)
    q, k = l2_normalize(q), l2_normalize(k)
    v, g, beta = v.astype(wide), g.astype(wide), beta.astype(wide)
    return form(scale, dtype, q, k, v, g, beta, state, document_masks(starts))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def run(form: Callable, scale: float, q, k, v, g, beta, initial_state, segment_ids):
    """The whole row: `form` on each block of it.

    form(scale, dtype, q [N,B,H,C,K], k, v [N,B,H,R,C,V], g [N,B,H,R,C,...], beta [N,B,H,R,C], state
    [B,H,R,K,V], Masks) returns (o [N,B,H,R,C,V], state after the block); q and k arrive L2-normalised and
    everything in float32, dtype is that in which matmul operands may be rounded (the type of q, k, v). The
    arguments after `scale` and the results are those of kernels.gdn.gdn and kernels.kda.kda.
    """
    return _run_forward(form, scale, q, k, v, g, beta, initial_state, segment_ids)[0]


def _run_forward(form, scale, q, k, v, g, beta, initial_state, segment_ids):
    B, T, H, _ = q.shape
    HV, V = v.shape[2:]
    cut = _cut(T)
    row = [_pad(x, cut) for x in (q, k, v, g, beta, document_starts(segment_ids))]
    state = initial_state.astype(accumulator(v.dtype)).reshape(B, H, HV // H, *initial_state.shape[2:])

    def step(carry, block):
        state, o = carry
        inputs, starts = _read_all(row, block, cut)
        o_block, after = _block(form, scale, inputs, state, starts)
        return (after, _write(o, o_block, block, cut)), state

    o = jnp.zeros((B, cut.blocks * cut.tokens, HV, V), v.dtype)
    (final, o), entered = jax.lax.scan(step, (state, o), jnp.arange(cut.blocks))
    o, entered = checkpoint_name(o, RESIDUAL), checkpoint_name(entered, RESIDUAL)
    saved = (q, k, v, g, beta, initial_state, segment_ids, entered)
    return (o[:, :T], final.reshape(initial_state.shape)), saved


def _run_backward(form, scale, saved, cotangents):
    q, k, v, g, beta, initial_state, segment_ids, entered = saved
    d_o, d_final = cotangents
    T, H = q.shape[1:3]
    cut = _cut(T)
    row = [_pad(x, cut) for x in (q, k, v, g, beta, document_starts(segment_ids))]
    d_o = _pad(d_o, cut)

    def step(carry, xs):
        d_state, grads = carry
        block, state = xs
        inputs, starts = _read_all(row, block, cut)
        _, pull = jax.vjp(lambda inputs, state: _block(form, scale, inputs, state, starts), inputs, state)
        d_o_block = _read(d_o, block, cut, (H, v.shape[2] // H)).astype(state.dtype)
        d_inputs, d_state = pull((d_o_block, d_state))
        return (d_state, [_write(x, d, block, cut) for x, d in zip(grads, d_inputs, strict=True)]), None

    start = (d_final.reshape(entered.shape[1:]), [jnp.zeros_like(x) for x in row[:5]])
    (d_state, grads), _ = jax.lax.scan(step, start, (jnp.arange(cut.blocks), entered), reverse=True)
    d_initial = d_state.reshape(initial_state.shape).astype(initial_state.dtype)
    return (*(x[:, :T] for x in grads), d_initial, None)


run.defvjp(_run_forward, _run_backward)

"""Short causal depthwise convolution with SiLU, reset at document borders.

Shapes: B batch, T time, D channels, W taps.
"""

import functools

import jax
import jax.numpy as jnp
from flax import nnx

from hybrid_jax.kernels.documents import number_documents
from hybrid_jax.kernels.precision import accumulator


@functools.partial(jax.checkpoint, prevent_cse=False, static_argnums=(5,))
def _conv(x, weight, bias, initial_state, documents, activation):
    W = weight.shape[1]
    T = x.shape[1]
    compute = accumulator(x.dtype)  # bf16 products rounded before the sum lose bits
    padded = jnp.concatenate([initial_state.astype(x.dtype), x], axis=1)
    y = jnp.zeros((), compute)
    for j in range(W):
        tap = jax.lax.slice_in_dim(padded, j, j + T, axis=1)
        if documents is not None and j < W - 1:
            tap = jnp.where((documents[:, j : j + T] == documents[:, W - 1 :])[..., None], tap, 0)
        y = y + tap.astype(compute) * weight[:, j].astype(compute)
    if bias is not None:
        y = y + bias
    if activation == "silu":
        y = jax.nn.silu(y)
    return y.astype(x.dtype)


def short_conv(
    x: jax.Array,
    weight: jax.Array,
    bias: jax.Array | None = None,
    *,
    initial_state: jax.Array | None = None,
    segment_ids: jax.Array | None = None,
    count: jax.Array | None = None,
    activation: str = "silu",
) -> tuple[jax.Array, jax.Array]:
    """y[t] = silu(bias + sum_j weight[:, j] x[t - (W-1) + j]), and the last W-1 inputs.

    x [B, T, D], weight [D, W] (the last tap meets the current token), bias [D]; initial_state [B, W-1, D] holds
    the inputs before the row, oldest first (zeros when None), and enters the row's first document only. Where
    segment_ids [B, T] changes, taps before the border read zero. Returns y [B, T, D] and the final state
    [B, W-1, D] of the row's last document (zero before it), both in x.dtype. With count [B] i32 the final state is
    that after the first `count` tokens of each row; not together with segment_ids.
    """
    W = weight.shape[1]
    if initial_state is None:
        initial_state = jnp.zeros((x.shape[0], W - 1, x.shape[2]), x.dtype)
    documents = None
    if segment_ids is not None:  # [B, W-1+T]; what stands before the row belongs to its first document, 0
        documents = jnp.pad(number_documents(segment_ids), ((0, 0), (W - 1, 0)))
    y = _conv(x, weight, bias, initial_state, documents, activation)
    T = x.shape[1]
    inputs = jnp.concatenate([initial_state.astype(x.dtype), x], axis=1)
    if count is None:
        final = inputs[:, T:]
    else:
        final = jnp.take_along_axis(inputs, (count[:, None] + jnp.arange(W - 1))[..., None], axis=1)
    if documents is not None:
        final = jnp.where((documents[:, T:] == documents[:, -1:])[..., None], final, 0)
    return y, final


def conv_init(rngs: nnx.Rngs, channels: int, taps: int) -> jax.Array:
    """[channels, taps] ~ U(-b, b), b = taps^-0.5: a depthwise convolution's usual start (fan-in `taps`)."""
    bound = taps**-0.5
    return jax.random.uniform(rngs.params(), (channels, taps), minval=-bound, maxval=bound)


class ShortConv(nnx.Module):
    """weight [D, W] and, with `bias`, bias [D]."""

    def __init__(self, channels: int, taps: int, *, bias: bool = False, rngs: nnx.Rngs):
        self.weight = nnx.Param(conv_init(rngs, channels, taps))
        if bias:
            bound = taps**-0.5
            self.bias = nnx.Param(jax.random.uniform(rngs.params(), (channels,), minval=-bound, maxval=bound))

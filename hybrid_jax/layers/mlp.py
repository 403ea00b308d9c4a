"""SwiGLU. Shapes: B batch, T time, D model, F intermediate."""

import functools

import jax
from flax import nnx

from hybrid_jax.kernels.precision import accumulator
from hybrid_jax.layers.linear import Linear


@functools.partial(jax.checkpoint, prevent_cse=False)
def swiglu(gate: jax.Array, up: jax.Array) -> jax.Array:
    """silu(gate) * up in fp32, rounded once to gate.dtype."""
    compute = accumulator(gate.dtype)
    return (jax.nn.silu(gate.astype(compute)) * up.astype(compute)).astype(gate.dtype)


class SwiGLU(nnx.Module):
    """down(silu(gate(x)) * up(x)), Shazeer 2020 (arXiv:2002.05202)."""

    def __init__(self, hidden_size: int, intermediate_size: int, *, std: float, out_std: float, rngs: nnx.Rngs):
        self.gate_proj = Linear(hidden_size, intermediate_size, std=std, rngs=rngs)
        self.up_proj = Linear(hidden_size, intermediate_size, std=std, rngs=rngs)
        self.down_proj = Linear(intermediate_size, hidden_size, std=out_std, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """x [B, T, D] -> [B, T, D]."""
        # Two products: as one, their gradients would have to be joined by a copy of [B, T, 2F].
        return self.down_proj(swiglu(self.gate_proj(x), self.up_proj(x)))

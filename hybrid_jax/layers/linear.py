"""Matrix products with fp32 parameters."""

import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from flax import nnx

_FEW_ROWS = 128  # below some hundreds of rows a product takes the time in which its weights are read


def matmul(x: jax.Array, weight: jax.Array) -> jax.Array:
    """x [..., in] @ weight [in, out] in x's dtype; fp32 products are exact fp32 on every platform (no TF32)."""
    precision = jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    return jnp.matmul(x, weight.astype(x.dtype), precision=precision)


def together(x: jax.Array, groups: Sequence[Sequence[jax.Array]]) -> list[jax.Array]:
    """x [..., in] times the weights [in, out_i] of each group, side by side: [..., sum of out_i], one array a group.

    One product: one read of x instead of several. Where x has few rows, as in decoding, joining the weights would
    cost more than all products; then it is one for each of them.
    """
    if math.prod(x.shape[:-1]) <= _FEW_ROWS:
        products = [[matmul(x, w) for w in group] for group in groups]
        return [jnp.concatenate(group, axis=-1) for group in products]
    sizes = [sum(w.shape[1] for w in group) for group in groups]
    y = matmul(x, jnp.concatenate([w.astype(x.dtype) for group in groups for w in group], axis=1))
    edges = [sum(sizes[:i]) for i in range(1, len(sizes))]
    return jnp.split(y, edges, axis=-1)


class Linear(nnx.Module):
    """y = x W (+ b). weight [in, out] ~ N(0, std), or U(-bound, bound) when `bound` is given (bias alike)."""

    def __init__(self, n_in: int, n_out: int, *, std: float = 0.02, bound: float = 0.0, bias: bool = False, rngs):
        key = rngs.params()
        if bound:
            self.weight = nnx.Param(jax.random.uniform(key, (n_in, n_out), minval=-bound, maxval=bound))
        else:
            self.weight = nnx.Param(std * jax.random.normal(key, (n_in, n_out)))
        if bias:
            draw = jax.random.uniform(rngs.params(), (n_out,), minval=-bound, maxval=bound)
            self.bias = nnx.Param(draw if bound else jnp.zeros((n_out,)))
        self.has_bias = bias

    def __call__(self, x: jax.Array) -> jax.Array:
        y = matmul(x, self.weight[...])
        return y + self.bias[...].astype(y.dtype) if self.has_bias else y

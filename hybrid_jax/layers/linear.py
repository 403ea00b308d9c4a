"""Matrix products with fp32 parameters."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from flax import nnx

from hybrid_jax.kernels import dispatch


def _product(equation: str, x: jax.Array, y: jax.Array, dtype) -> jax.Array:
    precision = jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    return jnp.einsum(equation, x, y, precision=precision, preferred_element_type=dtype)


@jax.custom_vjp
def matmul(x: jax.Array, weight: jax.Array) -> jax.Array:
    """x [..., in] @ weight [in, out] in x's dtype; fp32 products are exact fp32 on every platform (no TF32).

    The weight's gradient is summed and left in its own type: what devices add up is never rounded to bf16.
    """
    return _product("...i,io->...o", x, weight.astype(x.dtype), x.dtype)


def _matmul_forward(x, weight):
    return matmul(x, weight), (x, weight)


def _matmul_backward(saved, dy):
    x, weight = saved
    dx = _product("...o,io->...i", dy, weight.astype(dy.dtype), x.dtype)
    return dx, _product("ni,no->io", x.reshape(-1, x.shape[-1]), dy.reshape(-1, dy.shape[-1]), weight.dtype)


matmul.defvjp(_matmul_forward, _matmul_backward)


def together(x: jax.Array, weights: Sequence[jax.Array]) -> list[jax.Array]:
    """x [..., in] times each of `weights` [in, out_i]: as one product, which reads x once, where weights are whole."""
    if dispatch.splits_weights():
        return [matmul(x, w) for w in weights]
    sizes = [w.shape[1] for w in weights]
    y = matmul(x, jnp.concatenate(weights, axis=1))
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

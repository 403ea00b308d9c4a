"""Matrix products with fp32 parameters."""

import functools
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec

from hybrid_jax.kernels import dispatch
from hybrid_jax.layers.context import PRODUCT

_WHOLE = PartitionSpec()

_FEW_ROWS = 128  # below some hundreds of rows a product takes the time in which its weights are read


def _product(equation: str, x: jax.Array, y: jax.Array, dtype) -> jax.Array:
    precision = jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    return jnp.einsum(equation, x, y, precision=precision, preferred_element_type=dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _matmul(x: jax.Array, weight: jax.Array, layout: dispatch.Weight | None) -> jax.Array:
    return _product("...i,io->...o", x, _whole(weight, x.dtype, layout), x.dtype)


def _whole(weight: jax.Array, dtype, layout: dispatch.Weight | None) -> jax.Array:
    weight = weight.astype(dtype)
    return weight if layout is None else layout.gathered(weight)


def _matmul_forward(x, weight, layout):
    return _matmul(x, weight, layout), (x, weight)


def _matmul_backward(layout, saved, dy):
    x, weight = saved
    dx = _product("...o,io->...i", dy, _whole(weight, dy.dtype, layout), x.dtype)
    x, dy = x.reshape(-1, x.shape[-1]), dy.reshape(-1, dy.shape[-1])
    if layout is not None:
        x, dy = layout.of_inputs(x), layout.of_outputs(dy)
    dw = _product("ni,no->io", x, dy, weight.dtype)
    return dx, dw if layout is None else layout.scattered(dw)


_matmul.defvjp(_matmul_forward, _matmul_backward)


def matmul(
    x: jax.Array, weight: jax.Array, spec: PartitionSpec = _WHOLE, used: PartitionSpec | None = None
) -> jax.Array:
    """x [..., in] @ weight [in, out] in x's dtype; fp32 products are exact fp32 on every platform (no TF32).

    spec: how the weight lies on the mesh; used: how it is multiplied with, unless that is `spec` without "fsdp". It is
    gathered in x's dtype, and again for the backward pass. Its gradient is added up in the weight's own type, over
    tokens and devices.
    """
    return checkpoint_name(_matmul(x, weight, dispatch.Weight.of(spec, weight.shape, used)), PRODUCT)


def together(x: jax.Array, layers: "Sequence[Linear | Sequence[Linear]]") -> list[jax.Array]:
    """x [..., in] through each of `layers`, without bias. Layers in a sequence of their own come out side by side, as
    one array, unless devices hold parts of their weights.

    One product, which reads x once. But where x has few rows, as in decoding, joining the weights would cost more than
    all products, and where devices hold parts of them they do not lie side by side: then it is one for each.
    """
    groups = [[layer] if isinstance(layer, Linear) else list(layer) for layer in layers]
    split = dispatch.splits_weights()
    if split or math.prod(x.shape[:-1]) <= _FEW_ROWS:
        products = [[matmul(x, layer.weight[...], layer.spec) for layer in group] for group in groups]
        if split:
            return [y for group in products for y in group]
        return [group[0] if len(group) == 1 else jnp.concatenate(group, axis=-1) for group in products]
    sizes = [sum(layer.weight.shape[1] for layer in group) for group in groups]
    y = matmul(x, jnp.concatenate([layer.weight[...] for group in groups for layer in group], axis=1))
    return jnp.split(y, np.cumsum(sizes)[:-1], axis=-1)


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
        self.spec = _WHOLE  # how the weight lies on the mesh

    def __call__(self, x: jax.Array) -> jax.Array:
        y = matmul(x, self.weight[...], self.spec)
        return y + self.bias[...].astype(y.dtype) if self.has_bias else y

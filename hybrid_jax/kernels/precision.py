"""In which types the operations compute: operands as they come, sums and states at least fp32."""

import jax
import jax.numpy as jnp


def accumulator(dtype) -> jnp.dtype:
    """float64 for float64, else float32: the type of states, gates, sums and inverses."""
    return jnp.promote_types(dtype, jnp.float32)


def einsum(spec: str, *operands: jax.Array, dtype) -> jax.Array:
    """Products of `operands` rounded to `dtype`, summed and returned in its accumulator.

    fp32 operands are multiplied exactly: no GPU may round them to TF32.
    """
    return jnp.einsum(
        spec,
        *(z.astype(dtype) for z in operands),
        precision=jax.lax.Precision.HIGHEST if jnp.finfo(dtype).bits >= 32 else None,
        preferred_element_type=accumulator(dtype),
    )


def upcast(x: jax.Array) -> jax.Array:
    """x in its accumulator's type."""
    return x.astype(accumulator(x.dtype))

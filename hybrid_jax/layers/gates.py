"""How the recurrent mixers' decay parameters start."""

import math

import jax
import jax.numpy as jnp
from flax import nnx


def a_log_init(rngs: nnx.Rngs, size: int) -> jax.Array:
    """log U(1, 16) [size]: drawn in fp32 and away from zero, so that no head starts at -inf."""
    return jnp.log(jax.random.uniform(rngs.params(), (size,), minval=1.0, maxval=16.0))


def dt_bias_init(rngs: nnx.Rngs, size: int) -> jax.Array:
    """[size] with softplus(dt_bias) log-uniform in [0.001, 0.1] (Mamba, arXiv:2312.00752, section 3.6)."""
    u = jax.random.uniform(rngs.params(), (size,))
    dt = jnp.maximum(jnp.exp(u * (math.log(0.1) - math.log(0.001)) + math.log(0.001)), 1e-4)
    return dt + jnp.log(-jnp.expm1(-dt))

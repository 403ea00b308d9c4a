"""The gate of Kimi Delta Attention (arXiv:2510.26692): from a raw projection to the logarithms of decays.

Shapes: B batch, T time, HV value heads, K key dim.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from hybrid_jax.kernels.precision import upcast


class Gate(NamedTuple):
    """A gate's parameters: A_log [HV] and dt_bias [HV, K], fp32, and its lower bound, a number < 0, or None."""

    A_log: jax.Array
    dt_bias: jax.Array
    lower_bound: float | None = None


def log_decay(f: jax.Array, gate: Gate) -> jax.Array:
    """Raw f [B, T, HV, K] -> log decay like it, fp32 (float64 for float64), <= 0:

    -exp(A_log) softplus(f + dt_bias), or lower_bound sigmoid(exp(A_log) (f + dt_bias)) with a lower bound.
    """
    f = upcast(f) + gate.dt_bias
    rate = jnp.exp(gate.A_log)[:, None]
    if gate.lower_bound is not None:
        return gate.lower_bound * jax.nn.sigmoid(rate * f)
    return -rate * jax.nn.softplus(f)

"""Kimi Delta Attention token by token: the recurrence itself, in float64 where an input is float64."""

import jax

from hybrid_jax.kernels.delta_rule import recurrence


def kda_reference(q, k, v, g, beta, scale: float, initial_state: jax.Array, segment_ids: jax.Array):
    """The operation of kernels.kda.kda, which documents the arguments; none may be None here."""
    return recurrence(q, k, v, g, beta, scale, initial_state, segment_ids)

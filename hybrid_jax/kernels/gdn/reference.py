"""Gated DeltaNet token by token: the recurrence itself, in float64 where an input is float64.

Shapes: B batch, T time, H q/k heads, R value heads per q/k head, HV = H R, K key dim, V value dim.
"""

import jax

from hybrid_jax.kernels.delta_rule import recurrence


def gdn_reference(q, k, v, g, beta, scale: float, initial_state: jax.Array, segment_ids: jax.Array):
    """The operation of kernels.gdn.gdn, which documents the arguments; none may be None here."""
    return recurrence(q, k, v, g[..., None], beta, scale, initial_state, segment_ids)

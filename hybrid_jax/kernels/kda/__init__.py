"""Kimi Delta Attention's recurrence (arXiv:2510.26692): a delta rule with one decay per key channel.

Shapes: B batch, T time, H q/k heads, HV value heads, K key dim, V value dim.
"""

import functools

import jax
import jax.numpy as jnp

from hybrid_jax.kernels import delta_rule
from hybrid_jax.kernels.documents import number_documents
from hybrid_jax.kernels.kda.chunked import kda_chunked
from hybrid_jax.kernels.kda.gates import Gate, log_decay
from hybrid_jax.kernels.kda.reference import kda_reference


def _of_log_decays(backend, lower_bound, q, k, v, g, beta, scale, initial_state, segment_ids, *parameters):
    """A backend that takes log decays, given raw gates: the decays are made here."""
    if parameters:
        A_log, dt_bias = parameters
        g = log_decay(g, Gate(A_log, dt_bias, lower_bound))
    return backend(q, k, v, g, beta, scale, initial_state, segment_ids)


def _kda_triton(lower_bound, q, k, v, g, beta, scale, initial_state, segment_ids, *parameters):
    from hybrid_jax.kernels.kda.triton import kda_triton  # it imports Triton, which not every machine has

    documents = None if segment_ids is None else number_documents(segment_ids)
    form = "log" if not parameters else "softplus" if lower_bound is None else "bounded"
    if not parameters:
        HV, K = g.shape[2:]
        parameters = (jnp.zeros(HV), jnp.zeros((HV, K)))  # not read
    bound = 0.0 if lower_bound is None else float(lower_bound)
    return kda_triton(q, k, v, g, beta, scale, initial_state, documents, form, bound, *parameters)


def _backends(lower_bound: float | None):
    return {
        "reference": functools.partial(_of_log_decays, kda_reference, lower_bound),
        "chunked": functools.partial(_of_log_decays, kda_chunked, lower_bound),
        "triton": functools.partial(_kda_triton, lower_bound),
    }


BACKENDS = _backends(None)


def kda(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    g: jax.Array,
    beta: jax.Array,
    *,
    gate: Gate | None = None,
    scale: float | None = None,
    initial_state: jax.Array | None = None,
    segment_ids: jax.Array | None = None,
    backend: str = "auto",
) -> tuple[jax.Array, jax.Array]:
    """S <- diag(exp(g_t)) S;  S <- S + beta_t k_t (v_t - k_t^T S)^T;  o_t = scale q_t^T S.

    g [B, T, HV, K] fp32: the natural logarithm of each key channel's decay, <= 0 and otherwise of any size. With a
    `gate`, g is instead the raw projection f, of any floating-point type, and the decays are log_decay(f, gate) of
    kernels.kda.gates; gradients are those of f and of the gate's parameters. The triton backend computes both inside
    its kernels. All other arguments, the results and the errors raised are those of kernels.gdn.gdn; ValueError for a
    lower bound that is not below 0.
    """
    gate_shape = (*v.shape[:3], q.shape[-1])
    options = (scale, initial_state, segment_ids)
    if gate is None:
        return delta_rule.call("kda", BACKENDS, backend, q, k, v, g, beta, gate_shape, *options)
    if gate.lower_bound is not None and not gate.lower_bound < 0:
        raise ValueError(f"kda: gate.lower_bound is {gate.lower_bound}, expected a number below 0 or None")
    form = "softplus" if gate.lower_bound is None else f"bounded {gate.lower_bound:g}"  # one self-test each
    backends = _backends(gate.lower_bound)
    sizes = v.shape[2], q.shape[-1]
    parameters = ("gate.A_log", gate.A_log, sizes[:1]), ("gate.dt_bias", gate.dt_bias, sizes)
    return delta_rule.call("kda", backends, backend, q, k, v, g, beta, gate_shape, *options, form, parameters)

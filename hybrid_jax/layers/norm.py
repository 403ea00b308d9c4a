"""Root-mean-square norms, plain and gated. Statistics and products in fp32, rounded once at the end.

Each is checkpointed: the backward pass keeps the inputs in their own dtype and recomputes the rest.
Shapes: ... any leading axes, D normalised axis, G groups.
"""

import functools

import jax
import jax.numpy as jnp
from flax import nnx

from hybrid_jax.kernels.precision import upcast

_ACTIVATIONS = {"silu": jax.nn.silu, "sigmoid": jax.nn.sigmoid}


@functools.partial(jax.checkpoint, prevent_cse=False, static_argnums=(2,))
def rms_norm(x: jax.Array, weight: jax.Array, eps: float) -> jax.Array:
    """x / sqrt(mean(x^2) + eps) * weight over the last axis. x [..., D], weight [D] -> [..., D] in x.dtype."""
    h = upcast(x)
    h = h * jax.lax.rsqrt(jnp.mean(h * h, axis=-1, keepdims=True) + eps)
    return (h * weight).astype(x.dtype)


@functools.partial(jax.checkpoint, prevent_cse=False, static_argnums=(3, 4))
def norm_then_gate(x: jax.Array, gate: jax.Array, weight: jax.Array, eps: float, activation: str) -> jax.Array:
    """rms_norm(x) * weight * activation(gate): output norm of Gated DeltaNet (silu) and KDA (sigmoid).

    x, gate [..., D], weight [D] -> [..., D] in x.dtype.
    """
    h = upcast(x)
    h = h * jax.lax.rsqrt(jnp.mean(h * h, axis=-1, keepdims=True) + eps) * weight
    return (h * _ACTIVATIONS[activation](upcast(gate))).astype(x.dtype)


@functools.partial(jax.checkpoint, prevent_cse=False, static_argnums=(3, 4))
def gate_then_norm(x: jax.Array, gate: jax.Array, weight: jax.Array, eps: float, groups: int) -> jax.Array:
    """Mamba-2's output norm: u = x silu(gate), then each of `groups` equal slices of u normalised by itself.

    x, gate [..., D], weight [D] -> [..., D] in x.dtype.
    """
    u = upcast(x) * jax.nn.silu(upcast(gate))
    u_G = u.reshape(*u.shape[:-1], groups, -1)
    u_G = u_G * jax.lax.rsqrt(jnp.mean(u_G * u_G, axis=-1, keepdims=True) + eps)
    return (u_G.reshape(u.shape) * weight).astype(x.dtype)


class RMSNorm(nnx.Module):
    """weight [D], ones at the start."""

    def __init__(self, size: int, eps: float):
        self.weight = nnx.Param(jnp.ones((size,)))
        self.eps = eps

    def __call__(self, x: jax.Array) -> jax.Array:
        return rms_norm(x, self.weight[...], self.eps)

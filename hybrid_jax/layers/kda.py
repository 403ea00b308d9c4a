"""Kimi Delta Attention mixer (arXiv:2510.26692), as in flash-linear-attention.

Shapes: B batch, T time, D model, HV value heads, K key channels, V value channels.
"""

import jax
import jax.numpy as jnp
from flax import nnx

from hybrid_jax.kernels.kda import kda
from hybrid_jax.kernels.kda.gates import Gate
from hybrid_jax.layers.context import Context
from hybrid_jax.layers.delta import DeltaMixer
from hybrid_jax.layers.gates import a_log_init, dt_bias_init
from hybrid_jax.layers.linear import Linear
from hybrid_jax.layers.norm import norm_then_gate

_NO_DECAY = -1e30  # a raw gate whose log decay is 0, bounded or not


class KDA(DeltaMixer):
    """Gated DeltaNet with one decay a key channel, from a low-rank projection f = W_fb W_fa x (rank V).

    g = -exp(A_log) softplus(f + dt_bias), or with lower_bound: g = lower_bound sigmoid(exp(A_log)(f + dt_bias)), see
    kernels.kda.gates.
    y = W_o [rms(o) * sigmoid(W_gb W_ga x + bias)], the gate also of rank V. Gates and state in fp32.
    """

    def __init__(self, cfg, hidden_size: int, norm_eps: float, *, std: float, out_std: float, rngs: nnx.Rngs):
        super().__init__(cfg, hidden_size, norm_eps, std=std, out_std=out_std, rngs=rngs)
        rank = self.value_dim
        bound = rank**-0.5
        self.f_a_proj = Linear(hidden_size, rank, std=std, rngs=rngs)
        self.f_b_proj = Linear(rank, cfg.num_v_heads * self.key_dim, bound=bound, rngs=rngs)
        self.g_a_proj = Linear(hidden_size, rank, std=std, rngs=rngs)
        self.g_b_proj = Linear(rank, cfg.num_v_heads * self.value_dim, bound=bound, bias=cfg.gate_bias, rngs=rngs)
        # A rate above 1 would saturate the bounded gate's sigmoid from the start.
        A_log = jnp.zeros((cfg.num_v_heads,)) if cfg.lower_bound else a_log_init(rngs, cfg.num_v_heads)
        self.A_log = nnx.Param(A_log)
        self.dt_bias = nnx.Param(dt_bias_init(rngs, cfg.num_v_heads * self.key_dim))

    def __call__(self, x: jax.Array, ctx: Context, state: dict | None = None):
        """x [B, T, D] -> ([B, T, D], new state)."""
        (q, k, v, beta), (f, gate), new_state = self.project(x, [self.f_a_proj, self.g_a_proj], ctx, state)
        f = ctx.unpadded(self.f_b_proj(f).reshape(*v.shape[:3], self.key_dim), _NO_DECAY)
        decay = Gate(self.A_log[...], self.dt_bias[...].reshape(f.shape[2:]), self.cfg.lower_bound or None)
        before = None if state is None else state["ssm"]
        o, new_state["ssm"] = kda(
            q, k, v, f, beta, gate=decay, initial_state=before, segment_ids=ctx.segment_ids, backend=ctx.backend
        )
        gate = self.g_b_proj(gate).reshape(o.shape)
        o = norm_then_gate(o, gate, self.o_norm.weight[...], self.o_norm.eps, "sigmoid")
        return self.o_proj(o.reshape(*x.shape[:2], -1)), new_state

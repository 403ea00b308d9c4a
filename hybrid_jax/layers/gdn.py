"""Gated DeltaNet mixer (arXiv:2412.06464), as in flash-linear-attention.

Shapes: B batch, T time, D model, HV value heads, V value channels.
"""

import jax
import jax.numpy as jnp
from flax import nnx

from hybrid_jax.kernels.gdn import gdn
from hybrid_jax.kernels.precision import upcast
from hybrid_jax.layers.context import Context
from hybrid_jax.layers.delta import DeltaMixer
from hybrid_jax.layers.gates import a_log_init, dt_bias_init
from hybrid_jax.layers.linear import Linear
from hybrid_jax.layers.norm import norm_then_gate


class GDN(DeltaMixer):
    """g = -exp(A_log) softplus(a + dt_bias), one a value head; beta = sigmoid(b), doubled with allow_neg_eigval;
    y = W_o [rms(o) * silu(W_g x)]. Gates and state in fp32.
    """

    def __init__(self, cfg, hidden_size: int, norm_eps: float, *, std: float, out_std: float, rngs: nnx.Rngs):
        super().__init__(cfg, hidden_size, norm_eps, std=std, out_std=out_std, rngs=rngs)
        self.a_proj = Linear(hidden_size, cfg.num_v_heads, std=std, rngs=rngs)
        self.A_log = nnx.Param(a_log_init(rngs, cfg.num_v_heads))
        self.dt_bias = nnx.Param(dt_bias_init(rngs, cfg.num_v_heads))
        if cfg.use_gate:
            self.g_proj = Linear(hidden_size, cfg.num_v_heads * self.value_dim, std=std, rngs=rngs)

    def __call__(self, x: jax.Array, ctx: Context, state: dict | None = None):
        """x [B, T, D] -> ([B, T, D], new state)."""
        others = [self.a_proj, self.g_proj] if self.cfg.use_gate else [self.a_proj]
        (q, k, v, beta), (a, *gate), new_state = self.project(x, others, ctx, state)
        a = upcast(a)
        g = ctx.unpadded(-jnp.exp(self.A_log[...]) * jax.nn.softplus(a + self.dt_bias[...]))
        before = None if state is None else state["ssm"]
        o, new_state["ssm"] = gdn(
            q, k, v, g, beta, initial_state=before, segment_ids=ctx.segment_ids, backend=ctx.backend
        )
        if gate:
            o = norm_then_gate(o, gate[0].reshape(o.shape), self.o_norm.weight[...], self.o_norm.eps, "silu")
        else:
            o = self.o_norm(o)
        return self.o_proj(o.reshape(*x.shape[:2], -1)), new_state

"""What Gated DeltaNet and Kimi Delta Attention share: projections, short convolution, state.

Shapes: B batch, T time, D model, H q/k heads, HV value heads, K key channels, V value channels, W taps.
"""

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from hybrid_jax.kernels.precision import upcast
from hybrid_jax.layers.context import MIXER_IN, Context
from hybrid_jax.layers.conv import ShortConv, short_conv
from hybrid_jax.layers.linear import Linear, together
from hybrid_jax.layers.norm import RMSNorm


class DeltaMixer(nnx.Module):
    """q, k, v = silu(conv(W x)), a per-head output norm and an output projection.

    Parameters carry flash-linear-attention's names (weights [in, out], convolutions [channels, W]).
    """

    def __init__(self, cfg, hidden_size: int, norm_eps: float, *, std: float, out_std: float, rngs: nnx.Rngs):
        self.cfg = cfg
        self.key_dim, self.value_dim = cfg.head_dim, cfg.v_head_dim
        qk_width, v_width = cfg.num_heads * self.key_dim, cfg.num_v_heads * self.value_dim
        self.q_proj = Linear(hidden_size, qk_width, std=std, rngs=rngs)
        self.k_proj = Linear(hidden_size, qk_width, std=std, rngs=rngs)
        self.v_proj = Linear(hidden_size, v_width, std=std, rngs=rngs)
        self.b_proj = Linear(hidden_size, cfg.num_v_heads, std=std, rngs=rngs)
        if cfg.use_short_conv:
            self.q_conv1d = ShortConv(qk_width, cfg.conv_size, rngs=rngs)
            self.k_conv1d = ShortConv(qk_width, cfg.conv_size, rngs=rngs)
            self.v_conv1d = ShortConv(v_width, cfg.conv_size, rngs=rngs)
        self.o_norm = RMSNorm(self.value_dim, norm_eps)
        self.o_proj = Linear(v_width, hidden_size, std=out_std, rngs=rngs)

    def init_state(self, batch: int, max_length: int, dtype) -> dict[str, jax.Array]:
        """Recurrent state [B, HV, K, V] fp32 and the last W-1 inputs of the convolution [B, W-1, channels]."""
        del max_length  # constant in the length
        cfg = self.cfg
        state = {"ssm": jnp.zeros((batch, cfg.num_v_heads, self.key_dim, self.value_dim), jnp.float32)}
        if cfg.use_short_conv:
            width = 2 * cfg.num_heads * self.key_dim + cfg.num_v_heads * self.value_dim
            state["conv"] = jnp.zeros((batch, cfg.conv_size - 1, width), dtype)
        return state

    def project(self, x: jax.Array, others: list[Linear], ctx: Context, state: dict | None):
        """q, k [B, T, H, K], v [B, T, HV, V], beta [B, T, HV] fp32, the outputs of `others`, and the new state."""
        cfg = self.cfg
        B, T, _ = x.shape
        groups = [[self.q_proj, self.k_proj, self.v_proj], [self.b_proj], *([p] for p in others)]
        qkv, b, *rest = together(x, [[p.weight[...] for p in group] for group in groups])
        new_state = {}
        if cfg.use_short_conv:
            taps = [conv.weight[...] for conv in (self.q_conv1d, self.k_conv1d, self.v_conv1d)]
            before = None if state is None else state["conv"]
            qkv, new_state["conv"] = short_conv(
                qkv, jnp.concatenate(taps), initial_state=before, segment_ids=ctx.segment_ids, count=ctx.count
            )
        else:
            qkv = jax.nn.silu(qkv)
        qk_width = cfg.num_heads * self.key_dim
        qkv = checkpoint_name(qkv, MIXER_IN)
        q, k, v = jnp.split(qkv, [qk_width, 2 * qk_width], axis=-1)
        q = q.reshape(B, T, cfg.num_heads, self.key_dim)
        k = k.reshape(B, T, cfg.num_heads, self.key_dim)
        v = v.reshape(B, T, cfg.num_v_heads, self.value_dim)
        beta = jax.nn.sigmoid(upcast(b))
        if cfg.allow_neg_eigval:
            beta = 2.0 * beta
        return (q, k, v, ctx.unpadded(beta)), rest, new_state

"""What Gated DeltaNet and Kimi Delta Attention share: projections, short convolution, state.

Shapes: B batch, T time, D model, H q/k heads, HV value heads, K key channels, V value channels, W taps.
"""

import jax
import jax.numpy as jnp
import numpy as np
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
        projections = [self.q_proj, self.k_proj, self.v_proj]
        taps = [c.weight[...] for c in (self.q_conv1d, self.k_conv1d, self.v_conv1d)] if cfg.use_short_conv else []
        outputs = together(x, [projections, self.b_proj, *others])
        joined = len(outputs) == 2 + len(others)
        *qkv, b = outputs[: 2 if joined else 4]
        rest = outputs[len(qkv) + 1 :]
        if joined and taps:
            taps = [jnp.concatenate(taps)]
        new_state = {}
        if taps:
            edges = np.cumsum([w.shape[0] for w in taps])[:-1]
            before = [None] * len(taps) if state is None else jnp.split(state["conv"], edges, axis=-1)
            convolved = [
                short_conv(y, w, initial_state=s, segment_ids=ctx.segment_ids, count=ctx.count)
                for y, w, s in zip(qkv, taps, before, strict=True)
            ]
            qkv = [y for y, _ in convolved]
            new_state["conv"] = jnp.concatenate([final for _, final in convolved], axis=-1)
        else:
            qkv = [jax.nn.silu(y) for y in qkv]
        qkv = [checkpoint_name(y, MIXER_IN) for y in qkv]
        qk_width = cfg.num_heads * self.key_dim
        q, k, v = qkv if len(qkv) == 3 else jnp.split(qkv[0], [qk_width, 2 * qk_width], axis=-1)
        q = q.reshape(B, T, cfg.num_heads, self.key_dim)
        k = k.reshape(B, T, cfg.num_heads, self.key_dim)
        v = v.reshape(B, T, cfg.num_v_heads, self.value_dim)
        beta = jax.nn.sigmoid(upcast(b))
        if cfg.allow_neg_eigval:
            beta = 2.0 * beta
        return (q, k, v, ctx.unpadded(beta)), rest, new_state

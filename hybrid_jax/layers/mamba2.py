"""Mamba-2 mixer (arXiv:2405.21060).

Shapes: B batch, T time, D model, I inner (expand x D), H heads, P head channels, G groups, N state, W taps.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec

from hybrid_jax.kernels import dispatch
from hybrid_jax.kernels.mamba2 import ssd
from hybrid_jax.kernels.precision import upcast
from hybrid_jax.layers.context import MIXER_IN, Context
from hybrid_jax.layers.conv import ShortConv, short_conv
from hybrid_jax.layers.gates import a_log_init, dt_bias_init
from hybrid_jax.layers.linear import Linear, matmul
from hybrid_jax.layers.norm import RMSNorm, gate_then_norm


class Mamba2(nnx.Module):
    """in_proj gives [z | x | B | C | dt]; (x, B, C) = silu(conv + bias); dt = softplus(dt + dt_bias);
    y = SSD(x, dt, -exp(A_log), B, C) + D x; out = W_o group_rms(y silu(z)). Gates and state in fp32.
    """

    def __init__(self, cfg, hidden_size: int, norm_eps: float, *, std: float, out_std: float, rngs: nnx.Rngs):
        self.cfg = cfg
        self.inner = cfg.expand * hidden_size
        self.heads = self.inner // cfg.head_dim
        conv_width = self.inner + 2 * cfg.n_groups * cfg.state_size
        self.in_proj = Linear(hidden_size, self.inner + conv_width + self.heads, std=std, rngs=rngs)
        self.conv1d = ShortConv(conv_width, cfg.conv_size, bias=True, rngs=rngs)
        self.dt_bias = nnx.Param(dt_bias_init(rngs, self.heads))
        self.A_log = nnx.Param(a_log_init(rngs, self.heads))
        self.D = nnx.Param(jnp.ones((self.heads,)))
        self.norm = RMSNorm(self.inner, norm_eps)
        self.out_proj = Linear(self.inner, hidden_size, std=out_std, rngs=rngs)

    def init_state(self, batch: int, max_length: int, dtype) -> dict[str, jax.Array]:
        """Recurrent state [B, H, P, N] fp32 and the last W-1 inputs of the convolution."""
        del max_length
        cfg = self.cfg
        conv_width = self.inner + 2 * cfg.n_groups * cfg.state_size
        return {
            "ssm": jnp.zeros((batch, self.heads, cfg.head_dim, cfg.state_size), jnp.float32),
            "conv": jnp.zeros((batch, cfg.conv_size - 1, conv_width), dtype),
        }

    def __call__(self, x: jax.Array, ctx: Context, state: dict | None = None):
        """x [B, T, D] -> ([B, T, D], new state)."""
        cfg = self.cfg
        Bsz, T, _ = x.shape
        G, N = cfg.n_groups, cfg.state_size
        widths = [self.inner, self.inner, G * N, G * N, self.heads]
        edges = np.cumsum(widths)[:-1]
        taps: Any = self.conv1d.weight[...]
        bias: Any = self.conv1d.bias[...]
        before: Any = None if state is None else state["conv"]
        if dispatch.splits_weights():  # each of z, x, B, C and dt by heads
            parts = jnp.split(self.in_proj.weight[...], edges, axis=1)
            by_heads = PartitionSpec(None, dispatch.TENSOR_AXIS)
            z, *xbc, dt = (matmul(x, w, self.in_proj.spec, by_heads) for w in parts)
            inner = np.cumsum(widths[1:3])
            taps, bias = jnp.split(taps, inner), jnp.split(bias, inner)
            before = [None] * 3 if before is None else jnp.split(before, inner, axis=-1)
        else:
            z, joined, dt = jnp.split(self.in_proj(x), edges[[0, 3]], axis=-1)
            xbc, taps, bias, before = [joined], [taps], [bias], [before]
        convolved = [
            short_conv(y, w, b, initial_state=s, segment_ids=ctx.segment_ids, count=ctx.count)
            for y, w, b, s in zip(xbc, taps, bias, before, strict=True)
        ]
        xbc = [checkpoint_name(y, MIXER_IN) for y, _ in convolved]
        conv_state = jnp.concatenate([final for _, final in convolved], axis=-1)
        u, B, C = xbc if len(xbc) == 3 else jnp.split(xbc[0], np.cumsum(widths[1:3]), axis=-1)
        dt = ctx.unpadded(jax.nn.softplus(upcast(dt) + self.dt_bias[...]))
        y, ssm_state = ssd(
            u.reshape(Bsz, T, self.heads, cfg.head_dim),
            dt,
            -jnp.exp(self.A_log[...]),
            B.reshape(Bsz, T, G, N),
            C.reshape(Bsz, T, G, N),
            self.D[...],
            initial_state=None if state is None else state["ssm"],
            segment_ids=ctx.segment_ids,
            chunk_size=cfg.chunk_size,
            backend=ctx.backend,
        )
        y = gate_then_norm(y.reshape(Bsz, T, self.inner), z, self.norm.weight[...], self.norm.eps, G)
        return self.out_proj(y), {"ssm": ssm_state, "conv": conv_state}

"""Grouped-query attention (arXiv:2305.13245) as in Llama, Qwen2.5, Qwen3 and Qwen3.5.

Shapes: B batch, T time, S cached time, D model, H heads, K head channels.
"""

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from hybrid_jax.kernels.attention import attention
from hybrid_jax.kernels.attention.cached import attention_cached
from hybrid_jax.kernels.precision import accumulator
from hybrid_jax.layers import cache
from hybrid_jax.layers.context import MIXER_IN, Context
from hybrid_jax.layers.linear import Linear
from hybrid_jax.layers.norm import RMSNorm
from hybrid_jax.layers.rotary import rotate


class GQA(nnx.Module):
    """Causal softmax attention with num_kv_heads <= num_heads; optional q/k norms, biases and output gate.

    With output_gate, q_proj gives [query | gate] a head and the output is multiplied by sigmoid(gate)
    (Qwen3.5). Parameters carry Hugging Face's names (weights [in, out]).
    """

    def __init__(self, cfg, hidden_size: int, norm_eps: float, *, std: float, out_std: float, rngs: nnx.Rngs):
        self.cfg = cfg
        q_width = cfg.num_heads * cfg.head_dim * (2 if cfg.output_gate else 1)
        kv_width = cfg.num_kv_heads * cfg.head_dim
        self.q_proj = Linear(hidden_size, q_width, std=std, bias=cfg.bias, rngs=rngs)
        self.k_proj = Linear(hidden_size, kv_width, std=std, bias=cfg.bias, rngs=rngs)
        self.v_proj = Linear(hidden_size, kv_width, std=std, bias=cfg.bias, rngs=rngs)
        if cfg.qk_norm:
            self.q_norm = RMSNorm(cfg.head_dim, norm_eps)
            self.k_norm = RMSNorm(cfg.head_dim, norm_eps)
        self.o_proj = Linear(cfg.num_heads * cfg.head_dim, hidden_size, std=out_std, rngs=rngs)

    def init_state(self, batch: int, max_length: int, dtype) -> dict[str, jax.Array]:
        """Keys and values [B, num_kv_heads, S, K]."""
        shape = (batch, self.cfg.num_kv_heads, max_length, self.cfg.head_dim)
        return {"k": jnp.zeros(shape, dtype), "v": jnp.zeros(shape, dtype)}

    def __call__(self, x: jax.Array, ctx: Context, state: dict | None = None):
        """x [B, T, D] -> ([B, T, D], new state)."""
        cfg = self.cfg
        B, T, _ = x.shape
        H, K = cfg.num_heads, cfg.head_dim
        q = self.q_proj(x).reshape(B, T, H, -1)
        k = self.k_proj(x).reshape(B, T, cfg.num_kv_heads, K)
        v = self.v_proj(x).reshape(B, T, cfg.num_kv_heads, K)
        q, gate = q[..., :K], q[..., K:]
        if cfg.qk_norm:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k = rotate(q, cfg.rope, ctx.positions), rotate(k, cfg.rope, ctx.positions)
        if state is None:
            q, k, v = (checkpoint_name(a, MIXER_IN) for a in (q, k, v))
            o = attention(q, k, v, scale=K**-0.5, segment_ids=ctx.segment_ids, backend=ctx.attention)
        else:
            state = kept = {"k": cache.append(state["k"], k, ctx), "v": cache.append(state["v"], v, ctx)}

            def read(start, length):
                return cache.read(kept["k"], start, length), cache.read(kept["v"], start, length)

            o = attention_cached(q, ctx.positions, read, kept["k"].shape[2], K**-0.5)
        if cfg.output_gate:
            compute = accumulator(o.dtype)
            o = (o.astype(compute) * jax.nn.sigmoid(gate.astype(compute))).astype(o.dtype)
        return self.o_proj(o.reshape(B, T, H * K)), state

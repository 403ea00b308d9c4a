"""Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434), with and without query compression.

Shapes: B batch, T time, S cached time, D model, H heads, N nope channels, R rope channels, V value channels,
L kv latent.
"""

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from hybrid_jax.kernels.attention import attention
from hybrid_jax.layers.context import MIXER_IN, Context
from hybrid_jax.layers.linear import Linear, together
from hybrid_jax.layers.norm import RMSNorm
from hybrid_jax.layers.rotary import rotate


class MLA(nnx.Module):
    """Causal softmax attention whose keys and values come from one latent a token; one rotated key for all heads.

    A head's query is [nope | rope], its key [nope | the shared rope key], its value V wide; the scale is
    (N + R)^-0.5. Parameters carry the names of Hugging Face's deepseek_v3 (weights [in, out]).
    """

    def __init__(self, cfg, hidden_size: int, norm_eps: float, *, std: float, out_std: float, rngs: nnx.Rngs):
        self.cfg = cfg
        q_width = cfg.num_heads * (cfg.qk_nope_head_dim + cfg.qk_rope_head_dim)
        if cfg.q_lora_rank:
            self.q_a_proj = Linear(hidden_size, cfg.q_lora_rank, std=std, rngs=rngs)
            self.q_a_layernorm = RMSNorm(cfg.q_lora_rank, norm_eps)
            self.q_b_proj = Linear(cfg.q_lora_rank, q_width, std=std, rngs=rngs)
        else:
            self.q_proj = Linear(hidden_size, q_width, std=std, rngs=rngs)
        self.kv_a_proj_with_mqa = Linear(hidden_size, cfg.kv_lora_rank + cfg.qk_rope_head_dim, std=std, rngs=rngs)
        self.kv_a_layernorm = RMSNorm(cfg.kv_lora_rank, norm_eps)
        kv_width = cfg.num_heads * (cfg.qk_nope_head_dim + cfg.v_head_dim)
        self.kv_b_proj = Linear(cfg.kv_lora_rank, kv_width, std=std, rngs=rngs)
        self.o_proj = Linear(cfg.num_heads * cfg.v_head_dim, hidden_size, std=out_std, rngs=rngs)

    def init_state(self, batch: int, max_length: int, dtype) -> dict[str, jax.Array]:
        """The compressed cache: normalised latents [B, S, L] and rotated shared keys [B, S, R]."""
        return {
            "latent": jnp.zeros((batch, max_length, self.cfg.kv_lora_rank), dtype),
            "k_rope": jnp.zeros((batch, max_length, self.cfg.qk_rope_head_dim), dtype),
        }

    def __call__(self, x: jax.Array, ctx: Context, state: dict | None = None):
        """x [B, T, D] -> ([B, T, D], new state)."""
        cfg = self.cfg
        B, T, _ = x.shape
        N, R, V, H = cfg.qk_nope_head_dim, cfg.qk_rope_head_dim, cfg.v_head_dim, cfg.num_heads
        down = self.q_a_proj if cfg.q_lora_rank else self.q_proj
        q, kv = together(x, [down, self.kv_a_proj_with_mqa])
        if cfg.q_lora_rank:
            q = self.q_b_proj(self.q_a_layernorm(q))
        q = q.reshape(B, T, H, N + R)
        latent, k_rope = kv[..., : cfg.kv_lora_rank], kv[..., cfg.kv_lora_rank :]
        latent = self.kv_a_layernorm(latent)
        k_rope = rotate(k_rope[:, :, None], cfg.rope, ctx.positions)[:, :, 0]
        q = jnp.concatenate([q[..., :N], rotate(q[..., N:], cfg.rope, ctx.positions)], axis=-1)
        offset: int | jax.Array = 0
        if state is not None and ctx.length is not None:
            offset = ctx.length
            latent = jax.lax.dynamic_update_slice_in_dim(state["latent"], latent, offset, axis=1)
            k_rope = jax.lax.dynamic_update_slice_in_dim(state["k_rope"], k_rope, offset, axis=1)
            state = {"latent": latent, "k_rope": k_rope}
        S = latent.shape[1]
        kv = self.kv_b_proj(latent).reshape(B, S, H, N + V)
        k_rope = jnp.broadcast_to(k_rope[:, :, None], (B, S, H, R))
        k = jnp.concatenate([kv[..., :N], k_rope], axis=-1)
        q, k, v = (checkpoint_name(a, MIXER_IN) for a in (q, k, kv[..., N:]))
        o = attention(
            q,
            k,
            v,
            scale=(N + R) ** -0.5,
            segment_ids=ctx.segment_ids,
            q_offset=offset,
            backend=ctx.attention,
        )
        return self.o_proj(o.reshape(B, T, H * V)), state

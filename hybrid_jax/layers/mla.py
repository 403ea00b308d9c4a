"""Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434), with and without query compression.

Shapes: B batch, T time, S cached time, J of it read at once, D model, H heads, N nope channels, R rope channels,
V value channels, L kv latent.
"""

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from hybrid_jax.kernels.attention import attention
from hybrid_jax.kernels.attention.cached import attention_cached
from hybrid_jax.kernels.precision import einsum
from hybrid_jax.layers import cache
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
        """The compressed cache [B, 1, S, L + R]: the normalised latent and the rotated shared key of each token."""
        width = self.cfg.kv_lora_rank + self.cfg.qk_rope_head_dim
        return {"latent": jnp.zeros((batch, 1, max_length, width), dtype)}

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
        if state is None:
            q, k, v = (checkpoint_name(a, MIXER_IN) for a in (q, *self._keys_and_values(latent, k_rope)))
            scale = (N + R) ** -0.5
            o = attention(q, k, v, scale=scale, segment_ids=ctx.segment_ids, backend=ctx.attention)
        else:
            new = jnp.concatenate([latent, k_rope], axis=-1)[:, :, None]
            state = {"latent": cache.append(state["latent"], new, ctx)}
            o = self._attend(q, state["latent"], ctx)
        return self.o_proj(o.reshape(B, T, H * V)), state

    def _keys_and_values(self, latent: jax.Array, k_rope: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Of latents [B, T, L] and rotated shared keys [B, T, R]: keys [B, T, H, N + R], values [B, T, H, V]."""
        cfg = self.cfg
        N, H = cfg.qk_nope_head_dim, cfg.num_heads
        B, T, R = k_rope.shape
        kv = self.kv_b_proj(latent).reshape(B, T, H, N + cfg.v_head_dim)
        k_rope = jnp.broadcast_to(k_rope[:, :, None], (B, T, H, R))
        return jnp.concatenate([kv[..., :N], k_rope], axis=-1), kv[..., N:]

    def _attend(self, q: jax.Array, latent: jax.Array, ctx: Context) -> jax.Array:
        """q [B, T, H, N + R] against the cache [B, 1, S, L + R] -> [B, T, H, V].

        Few queries are taken into the latents' space, q_nope W_uk, and their results out of it by W_uv, so that the
        latents serve all heads as keys and values (arXiv:2405.04434, section 2.1.2): per cached token and head
        2 (L + R) products a query. For many queries it takes fewer to expand the latents, L (N + V) and N + R + V a
        query, which is then done for one block of the cache after another.
        """
        cfg = self.cfg
        N, R, V, H, L = (
            cfg.qk_nope_head_dim, cfg.qk_rope_head_dim, cfg.v_head_dim, cfg.num_heads, cfg.kv_lora_rank
        )  # fmt: skip
        T, S = q.shape[1], latent.shape[2]
        scale = (N + R) ** -0.5
        if 2 * (L + R) * T > (N + R + V) * T + L * (N + V):

            def expand(start, length):
                block = cache.read(latent, start, length)[:, 0]
                return tuple(z.swapaxes(1, 2) for z in self._keys_and_values(block[..., :L], block[..., L:]))

            return attention_cached(q, ctx.positions, expand, S, scale)

        def read(start, length):
            block = cache.read(latent, start, length)
            return block, block  # as values with R columns too many: leaving them out would be a copy

        up = self.kv_b_proj.weight[...].reshape(L, H, N + V)
        q_latent = einsum("bthn,lhn->bthl", q[..., :N], up[..., :N], dtype=q.dtype).astype(q.dtype)
        o = attention_cached(jnp.concatenate([q_latent, q[..., N:]], axis=-1), ctx.positions, read, S, scale)
        return einsum("bthl,lhv->bthv", o[..., :L], up[..., N:], dtype=o.dtype).astype(o.dtype)

"""Multi-head latent attention with MLPs, as transformers' deepseek_v3 with every layer dense; what kimi_linear shares
with it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from hybrid_jax.config import Config, MLAConfig, ModelConfig, RopeConfig
from hybrid_jax.errors import UserError
from hybrid_jax.interop import blocks
from hybrid_jax.interop.formats import Format, Reader
from hybrid_jax.interop.table import Rule, linear, same

LATENT_EPS = 1e-6  # of the norms of the latents, in no config


class _DeepseekV3(Format):
    name, library, architecture = "deepseek_v3", "transformers", "DeepseekV3ForCausalLM"

    def fits(self, config: Config) -> str:
        model, mla = config.model, config.model.mla
        if reason := blocks.unpaired(model.layout, "*"):
            return reason
        if mla.rope.style == "none" or not mla.qk_rope_head_dim:
            return "has rotary positions, and model.mla.rope.style is none or qk_rope_head_dim 0"
        if mla.rope.rotary_fraction != 1.0:
            return "rotates all of qk_rope_head_dim, and model.mla.rope.rotary_fraction is less than 1"
        return blocks.other_eps(config, "mla", LATENT_EPS)

    def to_config(self, config: Config) -> dict[str, Any]:
        model = config.model
        layers = len(model.layout) // 2
        return {
            "vocab_size": model.vocab_size,
            "hidden_size": model.hidden_size,
            "intermediate_size": model.intermediate_size,
            "num_hidden_layers": layers,
            "first_k_dense_replace": layers,
            "num_nextn_predict_layers": 0,
            "hidden_act": "silu",
            "attention_bias": False,
            "max_position_embeddings": config.train.sequence_length,
            "initializer_range": model.initializer_range,
            "rms_norm_eps": model.norm_eps,
            "rope_interleave": model.mla.rope.style == "interleaved",
            "tie_word_embeddings": model.tie_word_embeddings,
            **write_mla(model.mla),
            **blocks.write_rope(model.mla.rope),
        }

    def from_config(self, values: Reader) -> ModelConfig:
        values.only("hidden_act", "silu", "swish", default="silu")
        values.only("attention_bias", False, default=False)
        layers = values.size("num_hidden_layers")
        if values.get("first_k_dense_replace", 3) < layers:
            raise UserError(f"{values.where}: first_k_dense_replace: our models have no mixture of experts")
        style = "interleaved" if values.flag("rope_interleave", True) else "half"
        return ModelConfig(
            pattern="*-" * layers,
            vocab_size=values.size("vocab_size"),
            hidden_size=values.size("hidden_size"),
            intermediate_size=values.size("intermediate_size"),
            norm_eps=values.number("rms_norm_eps", 1e-6),
            tie_word_embeddings=values.flag("tie_word_embeddings", False),
            initializer_range=values.number("initializer_range", 0.02),
            mla=read_mla(values, blocks.read_rope(values, style)),
        )

    def top(self, model: ModelConfig) -> Iterator[Rule]:
        return blocks.top(model, "model.embed_tokens.weight", "model.norm.weight")

    def sublayer(self, model: ModelConfig, number: int, symbol: str) -> Iterator[Rule]:
        layer = f"model.layers.{number // 2}."
        if symbol == "-":
            yield from blocks.mlp(layer, "post_attention_layernorm")
            return
        yield same(f"{layer}input_layernorm.weight", "norm.weight")
        yield from latent_attention(model.mla, f"{layer}self_attn.")


def latent_attention(mla: MLAConfig, prefix: str) -> Iterator[Rule]:
    """Ours has the names of deepseek_v3."""
    query = ("q_a_proj", "q_b_proj") if mla.q_lora_rank else ("q_proj",)
    for name in (*query, "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"):
        yield linear(f"{prefix}{name}", f"mixer.{name}")
    for name in ("q_a_layernorm",) * bool(mla.q_lora_rank) + ("kv_a_layernorm",):
        yield same(f"{prefix}{name}.weight", f"mixer.{name}.weight")


def write_mla(mla: MLAConfig) -> dict[str, Any]:
    """The sizes."""
    return {
        "num_attention_heads": mla.num_heads,
        "num_key_value_heads": mla.num_heads,
        "q_lora_rank": mla.q_lora_rank or None,
        "kv_lora_rank": mla.kv_lora_rank,
        "qk_nope_head_dim": mla.qk_nope_head_dim,
        "qk_rope_head_dim": mla.qk_rope_head_dim,
        "v_head_dim": mla.v_head_dim,
    }


def read_mla(values: Reader, rope: RopeConfig) -> MLAConfig:
    """The sizes. Raises UserError."""
    return MLAConfig(
        num_heads=values.size("num_attention_heads"),
        q_lora_rank=values.size("q_lora_rank") if values.get("q_lora_rank") else 0,
        kv_lora_rank=values.size("kv_lora_rank", 512),
        qk_nope_head_dim=values.size("qk_nope_head_dim", 128),
        qk_rope_head_dim=values.size("qk_rope_head_dim", 64),
        v_head_dim=values.size("v_head_dim", 128),
        rope=rope,
        norm_eps=LATENT_EPS,
    )


DEEPSEEK_V3 = _DeepseekV3()

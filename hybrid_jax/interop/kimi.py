"""Kimi Delta Attention and multi-head latent attention without positions, as transformers' kimi_linear.

All its MLPs dense: the format has mixtures of experts too, our models have not.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from hybrid_jax.config import Config, KDAConfig, MLAConfig, ModelConfig, RopeConfig
from hybrid_jax.errors import UserError
from hybrid_jax.interop import blocks
from hybrid_jax.interop.deepseek import LATENT_EPS, latent_attention, read_mla, write_mla
from hybrid_jax.interop.fla import projections
from hybrid_jax.interop.formats import Format, Reader
from hybrid_jax.interop.table import Reshape, Rule, linear, same

_TYPES = {"K": "linear_attention", "*": "full_attention"}


class _KimiLinear(Format):
    name, library, architecture = "kimi_linear", "transformers", "KimiLinearForCausalLM"
    renamed = ((r"\.block_sparse_moe\.", ".mlp."),)

    def fits(self, config: Config) -> str:
        model, kda, mla = config.model, config.model.kda, config.model.mla
        if reason := blocks.unpaired(model.layout, "K*"):
            return reason
        if "*" not in model.layout:  # its class cannot make a cache for such a stack
            return "has attention in some layer"
        if "K" in model.layout:
            if kda.v_head_dim != kda.head_dim:
                return f"has values as wide as keys, and model.kda.expand_v is {kda.expand_v:g}"
            if kda.num_v_heads != kda.num_heads:
                return "has as many value heads as key heads (model.kda.num_v_heads)"
            if kda.gate_bias:
                return "has no bias on the output gate (model.kda.gate_bias)"
            if kda.lower_bound:
                return "has no bound on the decay (model.kda.lower_bound)"
            if kda.allow_neg_eigval:
                return "does not double beta (model.kda.allow_neg_eigval)"
            if not kda.use_short_conv:
                return "has short convolutions (model.kda.use_short_conv)"
            if reason := blocks.other_eps(config, "kda"):
                return reason
        if mla.rope.style != "none":
            return f"has attention without positions, and model.mla.rope.style is {mla.rope.style}"
        if not mla.qk_rope_head_dim:
            return "shares some key dims between heads (model.mla.qk_rope_head_dim)"
        return blocks.other_eps(config, "mla", LATENT_EPS)

    def to_config(self, config: Config) -> dict[str, Any]:
        model, kda = config.model, config.model.kda
        mixers = model.layout[::2]
        values: dict[str, Any] = {
            "vocab_size": model.vocab_size,
            "hidden_size": model.hidden_size,
            "intermediate_size": model.intermediate_size,
            "num_hidden_layers": len(mixers),
            "hidden_act": "silu",
            "model_max_length": config.train.sequence_length,
            "initializer_range": model.initializer_range,
            "rms_norm_eps": model.norm_eps,
            "tie_word_embeddings": model.tie_word_embeddings,
            # The defaults are not the layers of any released model: both are always written.
            "layer_types": [_TYPES[symbol] for symbol in mixers],
            "mlp_layer_types": ["dense"] * len(mixers),
            **write_mla(model.mla),
        }
        if "K" in mixers:
            values |= {
                "linear_head_dim": kda.head_dim,
                "linear_num_heads": kda.num_heads,
                "linear_conv_kernel_dim": kda.conv_size,
            }
        return values

    def from_config(self, values: Reader) -> ModelConfig:
        values.only("hidden_act", "silu", "swish", default="silu")
        values.only("attention_bias", False, default=False)
        linear_part = Reader(values.get("linear_attn_config", {}), values.where)
        layers = values.size("num_hidden_layers")
        dense = values.get("mlp_layer_types", ["dense"] * values.get("first_k_dense_replace", 1) + ["sparse"] * layers)
        if set(dense[:layers]) != {"dense"}:
            raise UserError(f"{values.where}: mlp_layer_types: our models have no mixture of experts")
        symbols = {value: symbol for symbol, value in _TYPES.items()}
        types = values.get("layer_types") or _one_indexed(linear_part, layers)
        if len(types) != layers or not set(types) <= set(symbols):
            raise UserError(f"{values.where}: layer_types: expected {layers} of {', '.join(symbols)}, got {types}")
        mixers = "".join(symbols[kind] for kind in types)
        kda = KDAConfig(gate_bias=False)
        if "K" in mixers:
            heads = linear_part.size("num_heads", values.get("linear_num_heads", 32))
            kda = KDAConfig(
                num_heads=heads,
                num_v_heads=heads,
                head_dim=linear_part.size("head_dim", values.get("linear_head_dim", 128)),
                conv_size=linear_part.size("short_conv_kernel_size", values.get("linear_conv_kernel_dim", 4)),
                gate_bias=False,
            )
        mla = read_mla(values, RopeConfig(style="none")) if "*" in mixers else MLAConfig()
        return ModelConfig(
            pattern="".join(f"{symbol}-" for symbol in mixers),
            vocab_size=values.size("vocab_size"),
            hidden_size=values.size("hidden_size"),
            intermediate_size=values.size("intermediate_size"),
            norm_eps=values.number("rms_norm_eps", 1e-5),
            tie_word_embeddings=values.flag("tie_word_embeddings", False),
            initializer_range=values.number("initializer_range", 0.02),
            kda=kda,
            mla=mla,
        )

    def top(self, model: ModelConfig) -> Iterator[Rule]:
        yield from blocks.top(model, "model.embed_tokens.weight", "model.norm.weight")
        if model.tie_word_embeddings:  # the class ties nothing, whatever the config says
            yield Rule("lm_head.weight", ("embed.weight",), copy=True)

    def sublayer(self, model: ModelConfig, number: int, symbol: str) -> Iterator[Rule]:
        layer = f"model.layers.{number // 2}."
        if symbol == "-":
            yield from blocks.mlp(layer, "post_attention_layernorm")
            return
        yield same(f"{layer}input_layernorm.weight", "norm.weight")
        prefix = f"{layer}self_attn."
        if symbol == "*":
            yield from latent_attention(model.mla, prefix)
            return
        yield from projections(prefix, use_short_conv=True)
        yield same(f"{prefix}A_log", "mixer.A_log", Reshape((1, 1, -1, 1)))
        for name in ("f_a_proj", "f_b_proj", "g_a_proj", "g_b_proj"):
            yield linear(f"{prefix}{name}", f"mixer.{name}")


def _one_indexed(linear_part: Reader, layers: int) -> list[str]:
    """The layer types of a released checkpoint, which counts layers from 1."""
    full = linear_part.get("full_attn_layers")
    if full is None:
        raise UserError(f"{linear_part.where}: has neither layer_types nor linear_attn_config.full_attn_layers")
    return [_TYPES["*" if number in full else "K"] for number in range(1, layers + 1)]


KIMI_LINEAR = _KimiLinear()

"""Gated DeltaNet and gated grouped-query attention with MLPs, as the text model of transformers' qwen3_5."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from hybrid_jax.config import Config, GDNConfig, GQAConfig, ModelConfig
from hybrid_jax.errors import UserError
from hybrid_jax.interop import blocks
from hybrid_jax.interop.formats import Format, Reader
from hybrid_jax.interop.table import MinusOne, Rule, conv, joined, linear, same

_TYPES = {"G": "linear_attention", "A": "full_attention"}


class _Qwen35Text(Format):
    name, library, architecture = "qwen3_5_text", "transformers", "Qwen3_5ForCausalLM"

    def fits(self, config: Config) -> str:
        model, gdn, gqa = config.model, config.model.gdn, config.model.gqa
        if reason := blocks.unpaired(model.layout, "GA"):
            return reason
        if "G" in model.layout:
            if not gdn.use_gate:
                return "has an output gate (model.gdn.use_gate)"
            if gdn.allow_neg_eigval:
                return "does not double beta (model.gdn.allow_neg_eigval)"
            if not gdn.use_short_conv:
                return "has short convolutions (model.gdn.use_short_conv)"
            if reason := blocks.other_eps(config, "gdn"):
                return reason
        if "A" in model.layout:
            if not gqa.output_gate:
                return "has a gate on the attention's output (model.gqa.output_gate)"
            if not gqa.qk_norm:
                return "has norms on q and k (model.gqa.qk_norm)"
            if gqa.bias:
                return "has no biases on q, k and v (model.gqa.bias)"
            if gqa.rope.style != "half":
                return f"rotates half-split pairs, and model.gqa.rope.style is {gqa.rope.style}"
            return blocks.other_eps(config, "gqa")
        return ""

    def to_config(self, config: Config) -> dict[str, Any]:
        model, gdn, gqa = config.model, config.model.gdn, config.model.gqa
        mixers = model.layout[::2]
        values: dict[str, Any] = {
            "vocab_size": model.vocab_size,
            "hidden_size": model.hidden_size,
            "intermediate_size": model.intermediate_size,
            "num_hidden_layers": len(mixers),
            "layer_types": [_TYPES[symbol] for symbol in mixers],
            "hidden_act": "silu",
            "attention_bias": False,
            "max_position_embeddings": config.train.sequence_length,
            "initializer_range": model.initializer_range,
            "rms_norm_eps": model.norm_eps,
            "tie_word_embeddings": model.tie_word_embeddings,
        }
        if "G" in mixers:
            values |= {
                "linear_conv_kernel_dim": gdn.conv_size,
                "linear_key_head_dim": gdn.head_dim,
                "linear_value_head_dim": gdn.v_head_dim,
                "linear_num_key_heads": gdn.num_heads,
                "linear_num_value_heads": gdn.num_v_heads,
            }
        if "A" in mixers:
            rope = blocks.write_rope(gqa.rope)
            rope["rope_parameters"]["partial_rotary_factor"] = gqa.rope.rotary_fraction  # its default is 0.25
            values |= {
                "num_attention_heads": gqa.num_heads,
                "num_key_value_heads": gqa.num_kv_heads,
                "head_dim": gqa.head_dim,
                **rope,
            }
        return values

    def from_config(self, values: Reader) -> ModelConfig:
        values.only("hidden_act", "silu", "swish", default="silu")
        values.only("attention_bias", False, default=False)
        layers = values.size("num_hidden_layers")
        every = values.size("full_attention_interval", 4)
        default = [_TYPES["G" if (number + 1) % every else "A"] for number in range(layers)]
        types, symbols = values.get("layer_types", default), {value: symbol for symbol, value in _TYPES.items()}
        if len(types) != layers or not set(types) <= set(symbols):
            raise UserError(f"{values.where}: layer_types: expected {layers} of {', '.join(symbols)}, got {types}")
        mixers = "".join(symbols[kind] for kind in types)
        gdn, gqa = GDNConfig(), GQAConfig()
        if "G" in mixers:
            key, value = values.size("linear_key_head_dim", 128), values.size("linear_value_head_dim", 128)
            gdn = GDNConfig(
                num_heads=values.size("linear_num_key_heads", 16),
                num_v_heads=values.size("linear_num_value_heads", 32),
                head_dim=key,
                expand_v=value / key,
                conv_size=values.size("linear_conv_kernel_dim", 4),
            )
        if "A" in mixers:
            gqa = GQAConfig(
                num_heads=values.size("num_attention_heads"),
                num_kv_heads=values.size("num_key_value_heads", 4),
                head_dim=values.size("head_dim", 256),
                qk_norm=True,
                output_gate=True,
                rope=blocks.read_rope(values, "half", fraction=0.25),
            )
        return ModelConfig(
            pattern="".join(f"{symbol}-" for symbol in mixers),
            vocab_size=values.size("vocab_size"),
            hidden_size=values.size("hidden_size"),
            intermediate_size=values.size("intermediate_size"),
            norm_eps=values.number("rms_norm_eps", 1e-6),
            tie_word_embeddings=values.flag("tie_word_embeddings", False),
            initializer_range=values.number("initializer_range", 0.02),
            gdn=gdn,
            gqa=gqa,
        )

    def top(self, model: ModelConfig) -> Iterator[Rule]:
        for rule in blocks.top(model, "model.embed_tokens.weight", "model.norm.weight"):
            yield _one_less(rule) if rule.theirs == "model.norm.weight" else rule

    def sublayer(self, model: ModelConfig, number: int, symbol: str) -> Iterator[Rule]:
        layer = f"model.layers.{number // 2}."
        if symbol == "-":
            norm, *rest = blocks.mlp(layer, "post_attention_layernorm")
            yield _one_less(norm)
            yield from rest
            return
        yield _one_less(same(f"{layer}input_layernorm.weight", "norm.weight"))
        if symbol == "A":
            for name in "qkvo":
                yield linear(f"{layer}self_attn.{name}_proj", f"mixer.{name}_proj")
            for name in ("q_norm", "k_norm"):
                yield _one_less(same(f"{layer}self_attn.{name}.weight", f"mixer.{name}.weight"))
            return
        prefix = f"{layer}linear_attn."
        yield joined(f"{prefix}in_proj_qkv", *(f"mixer.{name}_proj" for name in "qkv"))
        for theirs, ours in (("in_proj_z", "g_proj"), ("in_proj_b", "b_proj"), ("in_proj_a", "a_proj")):
            yield linear(f"{prefix}{theirs}", f"mixer.{ours}")
        yield conv(f"{prefix}conv1d", *(f"mixer.{name}_conv1d" for name in "qkv"))
        yield same(f"{prefix}A_log", "mixer.A_log")
        yield same(f"{prefix}dt_bias", "mixer.dt_bias")
        yield same(f"{prefix}norm.weight", "mixer.o_norm.weight")
        yield linear(f"{prefix}out_proj", "mixer.o_proj")


def _one_less(rule: Rule) -> Rule:
    """Of a norm that is applied as 1 + w."""
    return Rule(rule.theirs, rule.ours, (MinusOne(),))


QWEN3_5_TEXT = _Qwen35Text()

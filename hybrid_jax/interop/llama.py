"""Dense stacks, `A-` repeated, as transformers' llama, qwen2 and qwen3.

The three differ in their attention: qwen2 has biases on q, k and v, qwen3 norms on q and k.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from hybrid_jax.config import Config, GQAConfig, ModelConfig
from hybrid_jax.interop import blocks
from hybrid_jax.interop.formats import Format, Reader
from hybrid_jax.interop.table import HalfSplit, Rule, Step, linear, same


class Dense(Format):
    """llama, qwen2 or qwen3, by name."""

    library = "transformers"

    def __init__(self, name: str, architecture: str):
        self.name, self.architecture = name, architecture
        self.bias, self.qk_norm = name == "qwen2", name == "qwen3"

    def fits(self, config: Config) -> str:
        model, gqa = config.model, config.model.gqa
        if reason := blocks.unpaired(model.layout, "A"):
            return reason
        if gqa.qk_norm != self.qk_norm:
            return "has norms on q and k (model.gqa.qk_norm)" if self.qk_norm else "has no norms on q and k"
        if gqa.bias != self.bias:
            return "has biases on q, k and v (model.gqa.bias)" if self.bias else "has no biases on q, k and v"
        if gqa.output_gate:
            return "has no gate on the attention's output (model.gqa.output_gate)"
        if gqa.rope.style == "none":
            return "has rotary positions, and model.gqa.rope.style is none"
        if gqa.rope.rotary_fraction != 1.0:
            return "rotates whole heads, and model.gqa.rope.rotary_fraction is less than 1"
        if model.hidden_size % gqa.num_heads:
            return f"needs a hidden_size that num_heads {gqa.num_heads} divides"
        if self.name == "qwen2" and gqa.head_dim * gqa.num_heads != model.hidden_size:
            return f"has heads of hidden_size / num_heads dims, and model.gqa.head_dim is {gqa.head_dim}"
        return blocks.other_eps(config, "gqa") if self.qk_norm else ""

    def to_config(self, config: Config) -> dict[str, Any]:
        model, gqa = config.model, config.model.gqa
        values = {
            "vocab_size": model.vocab_size,
            "hidden_size": model.hidden_size,
            "intermediate_size": model.intermediate_size,
            "num_hidden_layers": len(model.layout) // 2,
            "num_attention_heads": gqa.num_heads,
            "num_key_value_heads": gqa.num_kv_heads,
            "head_dim": gqa.head_dim,
            "hidden_act": "silu",
            "max_position_embeddings": config.train.sequence_length,
            "initializer_range": model.initializer_range,
            "rms_norm_eps": model.norm_eps,
            "tie_word_embeddings": model.tie_word_embeddings,
            **blocks.write_rope(gqa.rope),
        }
        if self.name != "qwen2":
            values["attention_bias"] = False
        if self.name == "llama":
            values["mlp_bias"] = False
        else:
            values["use_sliding_window"] = False
        return values

    def from_config(self, values: Reader) -> ModelConfig:
        values.only("hidden_act", "silu", "swish", default="silu")
        values.only("attention_bias", False, default=False)
        values.only("mlp_bias", False, default=False)
        values.only("use_sliding_window", False, default=False)
        heads, width = values.size("num_attention_heads"), values.size("hidden_size")
        return ModelConfig(
            pattern="A-" * values.size("num_hidden_layers"),
            vocab_size=values.size("vocab_size"),
            hidden_size=width,
            intermediate_size=values.size("intermediate_size"),
            norm_eps=values.number("rms_norm_eps", 1e-6),
            tie_word_embeddings=values.flag("tie_word_embeddings", False),
            initializer_range=values.number("initializer_range", 0.02),
            gqa=GQAConfig(
                num_heads=heads,
                num_kv_heads=values.size("num_key_value_heads", heads),
                head_dim=values.size("head_dim", 128 if self.name == "qwen3" else width // heads),
                qk_norm=self.qk_norm,
                bias=self.bias,
                rope=blocks.read_rope(values, "half"),
            ),
        )

    def top(self, model: ModelConfig) -> Iterator[Rule]:
        return blocks.top(model, "model.embed_tokens.weight", "model.norm.weight")

    def sublayer(self, model: ModelConfig, number: int, symbol: str) -> Iterator[Rule]:
        layer = f"model.layers.{number // 2}."
        if symbol == "-":
            yield from blocks.mlp(layer, "post_attention_layernorm")
            return
        yield same(f"{layer}input_layernorm.weight", "norm.weight")
        yield from attention(model, f"{layer}self_attn.")


def attention(model: ModelConfig, prefix: str) -> Iterator[Rule]:
    """Grouped-query attention, its rotary pairs half-split whatever ours are. Rotates whole heads if they are not."""
    gqa = model.gqa

    def turned(heads: int) -> tuple[Step, ...]:
        return (HalfSplit(heads),) if gqa.rope.style == "interleaved" else ()

    heads = {"q": gqa.num_heads, "k": gqa.num_kv_heads}
    for name in "qkv":
        steps = turned(heads[name]) if name in heads else ()
        yield linear(f"{prefix}{name}_proj", f"mixer.{name}_proj", *steps)
        if gqa.bias:
            yield same(f"{prefix}{name}_proj.bias", f"mixer.{name}_proj.bias", *steps)
    if gqa.qk_norm:
        for name in "qk":
            yield same(f"{prefix}{name}_norm.weight", f"mixer.{name}_norm.weight", *turned(1))
    yield linear(f"{prefix}o_proj", "mixer.o_proj")


LLAMA = Dense("llama", "LlamaForCausalLM")
QWEN2 = Dense("qwen2", "Qwen2ForCausalLM")
QWEN3 = Dense("qwen3", "Qwen3ForCausalLM")

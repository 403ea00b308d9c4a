"""Stacks of Mamba2 alone as `mamba2`: one model_type, tensor names and sizes that two libraries read.

transformers and flash-linear-attention differ in the name of the epsilon, and in what they take where a key is
missing: all of it is written.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from hybrid_jax.config import Config, Mamba2Config, ModelConfig
from hybrid_jax.interop import blocks
from hybrid_jax.interop.formats import Format, Reader
from hybrid_jax.interop.table import Rule, conv, linear, same
from hybrid_jax.pattern import NAMES


class _Mamba2(Format):
    name, library, architecture = "mamba2", "transformers", "Mamba2ForCausalLM"

    def fits(self, config: Config) -> str:
        layout = config.model.layout
        other = next((number for number, symbol in enumerate(layout, 1) if symbol != "S"), 0)
        if other:
            return f"has Mamba2 mixers and nothing else, and sublayer {other} is {NAMES[layout[other - 1]]}"
        if not config.model.mamba2.pre_norm:
            return "has a norm before each mixer (model.mamba2.pre_norm)"
        return blocks.other_eps(config, "mamba2")

    def to_config(self, config: Config) -> dict[str, Any]:
        model, mamba2 = config.model, config.model.mamba2
        return {
            "vocab_size": model.vocab_size,
            "hidden_size": model.hidden_size,
            "num_hidden_layers": len(model.layout),
            "state_size": mamba2.state_size,
            "num_heads": model.hidden_size * mamba2.expand // mamba2.head_dim,
            "head_dim": mamba2.head_dim,
            "n_groups": mamba2.n_groups,
            "expand": mamba2.expand,
            "conv_kernel": mamba2.conv_size,
            "chunk_size": mamba2.chunk_size,
            "hidden_act": "silu",
            "use_bias": False,
            "use_conv_bias": True,
            "rmsnorm": True,
            "norm_before_gate": False,
            "layer_norm_epsilon": model.norm_eps,
            "norm_eps": model.norm_eps,
            "residual_in_fp32": True,
            "max_position_embeddings": config.train.sequence_length,  # it has no limit: for those that ask
            "rescale_prenorm_residual": model.rescale_out_proj,
            "initializer_range": model.initializer_range,
            "tie_word_embeddings": model.tie_word_embeddings,
        }

    def from_config(self, values: Reader) -> ModelConfig:
        for key, wanted in (("use_bias", False), ("use_conv_bias", True), ("rmsnorm", True), ("D_has_hdim", False)):
            values.only(key, wanted, default=wanted)
        values.only("norm_before_gate", False, default=False)
        values.only("hidden_act", "silu", "swish", default="silu")
        lowest, highest = values.get("time_step_limit", values.get("dt_limit", (0.0, float("inf"))))
        if lowest or _finite(highest):
            values.only("time_step_limit", None)
        theirs = "norm_eps" in values.values and "layer_norm_epsilon" not in values.values
        return ModelConfig(
            pattern="S" * values.size("num_hidden_layers"),
            vocab_size=values.size("vocab_size"),
            hidden_size=values.size("hidden_size"),
            norm_eps=values.number("norm_eps" if theirs else "layer_norm_epsilon", 1e-5),
            tie_word_embeddings=values.flag("tie_word_embeddings", False),
            initializer_range=values.number("initializer_range", 0.1),
            rescale_out_proj=values.flag("rescale_prenorm_residual", False),
            mamba2=Mamba2Config(
                state_size=values.size("state_size", 128),
                head_dim=values.size("head_dim", 64),
                n_groups=values.size("n_groups", 1 if theirs else 8),
                expand=values.size("expand", 2),
                conv_size=values.size("conv_kernel", 4),
                chunk_size=values.size("chunk_size", 256),
                norm_eps=0.0,
            ),
        )

    def top(self, model: ModelConfig) -> Iterator[Rule]:
        return blocks.top(model, "backbone.embeddings.weight", "backbone.norm_f.weight")

    def sublayer(self, model: ModelConfig, number: int, symbol: str) -> Iterator[Rule]:
        layer = f"backbone.layers.{number}."
        yield same(f"{layer}norm.weight", "norm.weight")
        yield linear(f"{layer}mixer.in_proj", "mixer.in_proj")
        yield conv(f"{layer}mixer.conv1d", "mixer.conv1d")
        yield same(f"{layer}mixer.conv1d.bias", "mixer.conv1d.bias")
        for name in ("A_log", "D", "dt_bias", "norm.weight"):
            yield same(f"{layer}mixer.{name}", f"mixer.{name}")
        yield linear(f"{layer}mixer.out_proj", "mixer.out_proj")


def _finite(limit: Any) -> bool:
    """Whether the upper end of a step's range is one; transformers writes infinity as {"__float__": "Infinity"}."""
    return isinstance(limit, int | float) and limit != float("inf")


MAMBA2 = _Mamba2()

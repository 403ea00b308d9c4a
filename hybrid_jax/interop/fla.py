"""Stacks of Gated DeltaNet or of Kimi Delta Attention with MLPs, as flash-linear-attention's gated_deltanet and kda."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from hybrid_jax.config import Config, GDNConfig, KDAConfig, ModelConfig
from hybrid_jax.errors import UserError
from hybrid_jax.interop import blocks
from hybrid_jax.interop.formats import Format, Reader
from hybrid_jax.interop.table import Rule, conv, linear, same


class _Delta(Format):
    library = "flash-linear-attention"
    symbol: str
    section: str

    def fits(self, config: Config) -> str:
        return blocks.unpaired(config.model.layout, self.symbol) or blocks.other_eps(config, self.section)

    def to_config(self, config: Config) -> dict[str, Any]:
        model = config.model
        delta: GDNConfig | KDAConfig = getattr(model, self.section)
        return {
            "attn_mode": "chunk",
            "vocab_size": model.vocab_size,
            "hidden_size": model.hidden_size,
            "intermediate_size": model.intermediate_size,
            "hidden_act": "swish",
            "num_hidden_layers": len(model.layout) // 2,
            "num_heads": delta.num_heads,
            "num_v_heads": delta.num_v_heads,
            "head_dim": delta.head_dim,
            "expand_v": delta.expand_v,
            "conv_size": delta.conv_size,
            "use_short_conv": delta.use_short_conv,
            "allow_neg_eigval": delta.allow_neg_eigval,
            "norm_eps": model.norm_eps,
            "attn": None,
            "max_position_embeddings": config.train.sequence_length,
            "initializer_range": model.initializer_range,
            "tie_word_embeddings": model.tie_word_embeddings,
            "fuse_linear_cross_entropy": False,
        }

    def _model(self, values: Reader, symbol: str) -> dict[str, Any]:
        values.only("attn", None)
        values.only("attnres_block_size", None)
        values.only("hidden_act", "swish", "silu", default="swish")
        width = values.size("hidden_size")
        # As the library derives it where it is not given.
        inner = 256 * -(-int(width * values.size("hidden_ratio", 4) * 2 / 3) // 256)
        return dict(
            pattern=f"{symbol}-" * values.size("num_hidden_layers"),
            vocab_size=values.size("vocab_size"),
            hidden_size=width,
            intermediate_size=values.size("intermediate_size", inner),
            norm_eps=values.number("norm_eps", 1e-6),
            tie_word_embeddings=values.flag("tie_word_embeddings", False),
            initializer_range=values.number("initializer_range", 0.02),
        )

    def _delta(self, values: Reader, head_dim: int, heads: int, expand_v: float) -> dict[str, Any]:
        heads = values.size("num_heads", heads)
        return dict(
            num_heads=heads,
            num_v_heads=values.size("num_v_heads", heads),
            head_dim=values.size("head_dim", head_dim),
            expand_v=values.number("expand_v", expand_v),
            conv_size=values.size("conv_size", 4),
            use_short_conv=values.flag("use_short_conv", True),
            allow_neg_eigval=values.flag("allow_neg_eigval", False),
        )

    def top(self, model: ModelConfig) -> Iterator[Rule]:
        return blocks.top(model, "model.embeddings.weight", "model.norm.weight")

    def sublayer(self, model: ModelConfig, number: int, symbol: str) -> Iterator[Rule]:
        layer = f"model.layers.{number // 2}."
        if symbol == "-":
            yield from blocks.mlp(layer, "mlp_norm")
            return
        yield same(f"{layer}attn_norm.weight", "norm.weight")
        yield from projections(f"{layer}attn.", getattr(model, self.section).use_short_conv)
        yield from self.gates(model, f"{layer}attn.")

    def gates(self, model: ModelConfig, prefix: str) -> Iterator[Rule]:
        raise NotImplementedError


def projections(prefix: str, use_short_conv: bool) -> Iterator[Rule]:
    """What both mixers have: q, k, v, beta, decay vectors, output norm and projection."""
    for name in "qkv":
        yield linear(f"{prefix}{name}_proj", f"mixer.{name}_proj")
        if use_short_conv:
            yield conv(f"{prefix}{name}_conv1d", f"mixer.{name}_conv1d")
    yield linear(f"{prefix}b_proj", "mixer.b_proj")
    yield same(f"{prefix}dt_bias", "mixer.dt_bias")
    yield same(f"{prefix}o_norm.weight", "mixer.o_norm.weight")
    yield linear(f"{prefix}o_proj", "mixer.o_proj")


class _GatedDeltaNet(_Delta):
    name, architecture, symbol, section = "gated_deltanet", "GatedDeltaNetForCausalLM", "G", "gdn"

    def to_config(self, config: Config) -> dict[str, Any]:
        return {**super().to_config(config), "use_gate": config.model.gdn.use_gate}

    def from_config(self, values: Reader) -> ModelConfig:
        values.only("output_gate_activation", "swish", "silu", default="swish")
        gdn = GDNConfig(**self._delta(values, 256, 6, 2.0), use_gate=values.flag("use_gate", True))
        return ModelConfig(**self._model(values, "G"), gdn=gdn)

    def gates(self, model: ModelConfig, prefix: str) -> Iterator[Rule]:
        yield linear(f"{prefix}a_proj", "mixer.a_proj")
        yield same(f"{prefix}A_log", "mixer.A_log")
        if model.gdn.use_gate:
            yield linear(f"{prefix}g_proj", "mixer.g_proj")


class _KDA(_Delta):
    name, architecture, symbol, section = "kda", "KDAForCausalLM", "K", "kda"

    def fits(self, config: Config) -> str:
        if reason := super().fits(config):
            return reason
        return "" if config.model.kda.gate_bias else "has a bias on the output gate (model.kda.gate_bias)"

    def to_config(self, config: Config) -> dict[str, Any]:
        bound = config.model.kda.lower_bound
        return {**super().to_config(config), "safe_gate": bool(bound), "lower_bound": bound or None}

    def from_config(self, values: Reader) -> ModelConfig:
        bound = values.number("lower_bound", 0.0)
        if values.flag("safe_gate", False) and not bound:
            raise UserError(f"{values.where}: safe_gate without a lower_bound, which it needs")
        kda = KDAConfig(**self._delta(values, 128, 16, 1.0), lower_bound=bound)
        return ModelConfig(**self._model(values, "K"), kda=kda)

    def gates(self, model: ModelConfig, prefix: str) -> Iterator[Rule]:
        yield same(f"{prefix}A_log", "mixer.A_log")
        for name in "fg":
            yield linear(f"{prefix}{name}_proj.0", f"mixer.{name}_a_proj")
            yield linear(f"{prefix}{name}_proj.1", f"mixer.{name}_b_proj")
        yield same(f"{prefix}g_proj.1.bias", "mixer.g_b_proj.bias")


GATED_DELTANET = _GatedDeltaNet()
KDA = _KDA()

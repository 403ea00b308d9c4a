"""What several formats say alike: rules of sublayers and keys of config.json."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

from hybrid_jax.config import Config, ModelConfig, RopeConfig
from hybrid_jax.errors import UserError
from hybrid_jax.interop.formats import Reader
from hybrid_jax.interop.table import Rule, linear, same
from hybrid_jax.pattern import NAMES


def unpaired(layout: str, mixers: str) -> str:
    """Why a stack is no row of layers, each one of `mixers` and then an MLP; "" if it is."""
    names = " or ".join(NAMES[symbol] for symbol in mixers)
    for number in range(0, len(layout), 2):
        mixer, mlp = layout[number], layout[number + 1 : number + 2]
        if mixer not in mixers:
            return f"has {names} and then an MLP in each layer, and sublayer {number + 1} is {NAMES[mixer]}"
        if mlp != "-":
            what = f"sublayer {number + 2} is {NAMES[mlp]}" if mlp else "the last one has none"
            return f"has an MLP after each mixer, and {what}"
    return ""


def top(model: ModelConfig, embed: str, norm: str, head: str = "lm_head.weight") -> Iterator[Rule]:
    """Embedding, final norm, and a head if it is not the embedding."""
    yield same(embed, "embed.weight")
    yield same(norm, "norm.weight")
    if not model.tie_word_embeddings:
        yield same(head, "lm_head.weight")


def mlp(layer: str, norm: str, name: str = "mlp") -> Iterator[Rule]:
    """A SwiGLU with its norm. layer: "model.layers.3."."""
    yield same(f"{layer}{norm}.weight", "norm.weight")
    for projection in ("gate_proj", "up_proj", "down_proj"):
        yield linear(f"{layer}{name}.{projection}", f"mlp.{projection}")


def other_eps(config: Config, section: str, wanted: float | None = None) -> str:
    """Why one epsilon for all norms, or `wanted`, does not do for model.`section`; "" if it does."""
    eps = config.model.norm_eps_of(getattr(config.model, section))
    if wanted is None and eps != config.model.norm_eps:
        return f"has one epsilon for all norms, and that of model.{section} is {eps:g} beside {config.model.norm_eps:g}"
    if wanted is not None and eps != wanted:
        return f"has an epsilon of {wanted:g} in it, and that of model.{section} is {eps:g}"
    return ""


# ---- rotary positions ----------------------------------------------------------


def write_rope(rope: RopeConfig) -> dict[str, Any]:
    """As transformers 5 reads it (rope_parameters) and, beside it, as older readers do."""
    parameters: dict[str, Any] = {"rope_type": "default", "rope_theta": rope.theta}
    if rope.yarn_factor > 1.0:
        parameters |= {
            "rope_type": "yarn",
            "factor": rope.yarn_factor,
            "original_max_position_embeddings": rope.yarn_original_max_position,
            "beta_fast": rope.yarn_beta_fast,
            "beta_slow": rope.yarn_beta_slow,
        }
    if rope.llama3_factor > 1.0:
        parameters |= {
            "rope_type": "llama3",
            "factor": rope.llama3_factor,
            "original_max_position_embeddings": rope.llama3_original_max_position,
            "high_freq_factor": rope.llama3_high_rotations,
            "low_freq_factor": rope.llama3_low_rotations,
        }
    if rope.rotary_fraction != 1.0:
        parameters["partial_rotary_factor"] = rope.rotary_fraction
    written = {"rope_parameters": parameters, "rope_theta": rope.theta}
    if parameters["rope_type"] != "default":
        written["rope_scaling"] = {key: value for key, value in parameters.items() if key != "rope_theta"}
    return written


def read_rope(reader: Reader, style: str, fraction: float = 1.0) -> RopeConfig:
    """The rotary positions of a config.json. Raises UserError for a scaling that is neither YaRN's nor Llama 3.1's.

    fraction: of the head dims that rotate, where the file does not say it.
    """
    found = {**reader.get("rope_scaling", {}), **reader.get("rope_parameters", {})}
    for key, default in (("rope_theta", 10000.0), ("partial_rotary_factor", fraction)):
        found.setdefault(key, reader.get(key, default))
    inner = Reader(found, reader.where)
    longest = reader.get("max_position_embeddings")
    kind = found.get("rope_type", found.get("type", "default"))
    rope = RopeConfig(
        style=style, theta=inner.number("rope_theta"), rotary_fraction=inner.number("partial_rotary_factor")
    )
    if kind == "default":
        return rope
    if kind == "llama3":
        return dataclasses.replace(
            rope,
            llama3_factor=inner.number("factor"),
            llama3_original_max_position=inner.size("original_max_position_embeddings", longest),
            llama3_high_rotations=inner.number("high_freq_factor"),
            llama3_low_rotations=inner.number("low_freq_factor"),
        )
    inner.only("truncate", True, default=True)
    if kind != "yarn" or any(found.get(key) is not None for key in ("mscale", "mscale_all_dim", "attention_factor")):
        raise UserError(f"{reader.where}: rope_type {kind!r} as it is there is not something that our models can be")
    return dataclasses.replace(
        rope,
        yarn_factor=inner.number("factor"),
        yarn_original_max_position=inner.size("original_max_position_embeddings", longest),
        yarn_beta_fast=inner.number("beta_fast", 32.0),
        yarn_beta_slow=inner.number("beta_slow", 1.0),
    )

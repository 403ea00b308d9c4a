"""Any stack under our own names, with the files that run it in PyTorch beside the weights (trust_remote_code)."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hybrid_jax import config as config_lib
from hybrid_jax.config import Config, ModelConfig
from hybrid_jax.errors import UserError
from hybrid_jax.interop import blocks
from hybrid_jax.interop.formats import Format, Reader
from hybrid_jax.interop.table import Rule, conv, linear, same
from hybrid_jax.model import Model
from hybrid_jax.optimizer import leaf_paths

FILES = ("configuration_hybrid.py", "modeling_hybrid.py", "mixers_hybrid.py", "recurrences_hybrid.py")
_SECTIONS = {"mla": "*", "gqa": "A", "gdn": "G", "kda": "K", "mamba2": "S"}
# Keys that change nothing about what a model of a given layout computes; they stand under "training".
_TRAINING = (
    "pattern",
    "num_layers",
    "attention_ratio",
    "mixer",
    "scan_layers",
    "remat",
    "remat_layers",
    "loss_chunk_tokens",
    "z_loss",
)
_TOP = tuple(
    field.name for field in dataclasses.fields(ModelConfig) if field.name not in (*_TRAINING, *_SECTIONS)
)  # fmt: skip


class _Hybrid(Format):
    name, library, architecture = "hybrid_jax", "transformers", "HybridForCausalLM"

    def fits(self, config: Config) -> str:
        return ""

    def to_config(self, config: Config) -> dict[str, Any]:
        values, default = config_lib.to_dict(config.model), config_lib.to_dict(ModelConfig())
        layout = config.model.layout
        used = [name for name, symbol in _SECTIONS.items() if symbol in layout or values[name] != default[name]]
        return {
            "auto_map": {
                "AutoConfig": "configuration_hybrid.HybridConfig",
                "AutoModel": "modeling_hybrid.HybridModel",
                "AutoModelForCausalLM": "modeling_hybrid.HybridForCausalLM",
            },
            "layout": layout,
            "num_hidden_layers": len(layout),
            **{name: values[name] for name in (*_TOP, *used)},
            "max_position_embeddings": config.train.sequence_length,
            "training": {name: values[name] for name in _TRAINING},
        }

    def from_config(self, values: Reader) -> ModelConfig:
        layout = values.get("layout")
        if not isinstance(layout, str):
            raise UserError(f"{values.where}: layout: expected text such as '*-G-G-', got {layout!r}")
        found = {name: values.get(name) for name in (*_TOP, *_SECTIONS) if values.get(name) is not None}
        model = self._model({**values.get("training", {}), **found}, values.where)
        if (model.pattern or model.num_layers) and model.layout == layout:
            return model
        return self._model({**found, "pattern": layout}, values.where)

    def _model(self, values: dict[str, Any], where: str) -> ModelConfig:
        try:
            return config_lib.from_dict({"model": values}).model
        except UserError as error:
            raise UserError(f"{where}: {error}") from None

    def top(self, model: ModelConfig) -> Iterator[Rule]:
        return blocks.top(model, "model.embed_tokens.weight", "model.norm.weight")

    def sublayer(self, model: ModelConfig, number: int, symbol: str) -> Iterator[Rule]:
        for name, rank in _parameters(model)[number]:
            theirs = f"model.layers.{number}.{name}"
            if rank == 1:
                yield same(theirs, name)
            else:
                matrix = conv if "conv1d" in name else linear
                yield matrix(theirs.removesuffix(".weight"), name.removesuffix(".weight"))

    def files(self) -> list[Path]:
        return [Path(__file__).with_name(name) for name in FILES]


@functools.lru_cache(maxsize=1)
def _parameters(model: ModelConfig) -> list[list[tuple[str, int]]]:
    """For each sublayer (name, rank) of its parameters, in which stacked arrays count without the stacked axis."""
    made = Model(model)
    params = made.abstract_params()
    return [
        [(name, len(x.shape) - (index >= 0)) for name, x in leaf_paths(params[where[0]][where[1]])]
        for _, where, index in made.sublayers
    ]


HYBRID = _Hybrid()

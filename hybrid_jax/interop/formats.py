"""The formats that a model can be written in and read from, and which of them holds a given one."""

from __future__ import annotations

import abc
import dataclasses
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from hybrid_jax import config_checks
from hybrid_jax.config import Config, ModelConfig
from hybrid_jax.errors import UserError
from hybrid_jax.interop.table import Entry, Rule, expand

FINE_TUNING_LENGTH = 2048  # of an imported model's config, where the model was trained on more


class Format(abc.ABC):
    """A config.json of one model_type with its tensors.

    name: of --format, and the model_type. library: whose classes load it. architecture: the class.
    renamed: tensors by other names that some writers give them, as (regular expression, replacement).
    """

    name: str
    library: str
    architecture: str
    renamed: tuple[tuple[str, str], ...] = ()

    @abc.abstractmethod
    def fits(self, config: Config) -> str:
        """The first thing about the model that this format cannot say; "" if it can say all."""

    @abc.abstractmethod
    def to_config(self, config: Config) -> dict[str, Any]:
        """config.json, but for special tokens and dtype. Only for a config that `fits`."""

    @abc.abstractmethod
    def from_config(self, values: Reader) -> ModelConfig:
        """The model of a config.json. Raises UserError for what our models cannot be; see `Reader`."""

    @abc.abstractmethod
    def top(self, model: ModelConfig) -> Iterable[Rule]:
        """The rules of what is in no sublayer."""

    @abc.abstractmethod
    def sublayer(self, model: ModelConfig, number: int, symbol: str) -> Iterable[Rule]:
        """The rules of the sublayer `number`, counted from 0."""

    def entries(self, config: Config) -> list[Entry]:
        """One entry a tensor, in the order in which the model computes."""
        model = config.model
        return expand(model, self.top(model), lambda number, symbol: self.sublayer(model, number, symbol))

    def canonical(self, name: str) -> str:
        """The name by which the table knows a tensor."""
        for pattern, replacement in self.renamed:
            name = re.sub(pattern, replacement, name)
        return name

    def files(self) -> list[Path]:
        """Files that have to lie beside the weights, as a modeling file."""
        return []

    def __str__(self) -> str:
        return self.name


@dataclasses.dataclass(frozen=True)
class Reader:
    """A config.json being read: every key that changes what a model computes is asked for, or refused.

    where: the file, for messages.
    """

    values: Mapping[str, Any]
    where: str

    def get(self, key: str, default: Any = None) -> Any:
        """The value of a key, `default` where it is missing or null."""
        value = self.values.get(key)
        return default if value is None else value

    def size(self, key: str, default: int | None = None) -> int:
        """A positive whole number. Raises UserError."""
        value = self.get(key, default)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise UserError(f"{self.where}: {key}: expected a positive whole number, got {value!r}")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """A number. Raises UserError."""
        value = self.get(key, default)
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise UserError(f"{self.where}: {key}: expected a number, got {value!r}")
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        """True or false. Raises UserError."""
        value = self.get(key, default)
        if not isinstance(value, bool):
            raise UserError(f"{self.where}: {key}: expected true or false, got {value!r}")
        return value

    def only(self, key: str, *allowed: Any, default: Any = None) -> None:
        """Raises UserError unless the key is one of `allowed` (its default where it is missing or null)."""
        value = self.get(key, default)
        if value not in allowed:
            raise UserError(f"{self.where}: {key} {value!r} is not something that our models can be")


def known() -> list[Format]:
    """All formats, the most widely read first: the first that fits is `auto`. The last one holds every model."""
    from hybrid_jax.interop import deepseek, fla, kimi, llama, mamba2, qwen3_5
    from hybrid_jax.interop.hybrid.format import HYBRID

    return [
        llama.LLAMA,
        llama.QWEN2,
        llama.QWEN3,
        mamba2.MAMBA2,
        fla.GATED_DELTANET,
        fla.KDA,
        kimi.KIMI_LINEAR,
        deepseek.DEEPSEEK_V3,
        qwen3_5.QWEN3_5_TEXT,
        HYBRID,
    ]


def named(name: str) -> Format:
    """The format called `name`. Raises UserError for one that is not known."""
    for one in known():
        if one.name == name:
            return one
    raise UserError(f"--format: {name!r} is not one of auto, {', '.join(map(str, known()))}")


def choose(config: Config, name: str = "auto") -> Format:
    """The format `name`, or for "auto" the first that holds the model.

    Raises UserError if `name` cannot, naming what it cannot say and a format that can.
    """
    holding = next(one for one in known() if not one.fits(config))
    if name == "auto":
        return holding
    wanted = named(name)
    if reason := wanted.fits(config):
        raise UserError(f"--format: {name} cannot hold this model: it {reason}; use --format {holding}")
    return wanted


def read_config(values: Mapping[str, Any], where: str) -> tuple[Format, Config]:
    """The format and the Config of a config.json, its data not named yet.

    Raises UserError for a model_type that is not known and for what our models cannot be.
    """
    name = values.get("model_type")
    found = next((one for one in known() if one.name == name), None)
    if found is None:
        raise UserError(f"{where}: model_type {name!r} cannot be imported; there are {', '.join(map(str, known()))}")
    reader = Reader(values, where)
    model = found.from_config(reader)
    try:
        config_checks.check_model(model)
    except UserError as error:
        raise UserError(f"{where}: {error}") from None
    length = values.get("max_position_embeddings", values.get("model_max_length"))
    default = Config()
    known_length = length if isinstance(length, int) and length > 0 else FINE_TUNING_LENGTH
    train = dataclasses.replace(default.train, sequence_length=min(known_length, FINE_TUNING_LENGTH))
    return found, dataclasses.replace(default, model=model, train=train)

"""config.checkpoint.init_from: parameters of another run, an imported one say, for the first step of this one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

from hybrid_jax import manifest, schema, trained
from hybrid_jax.config import Config, ModelConfig, to_dict
from hybrid_jax.errors import UserError
from hybrid_jax.model import Params

_KEY = "config.checkpoint.init_from"
_SECTIONS = {"mla": "*", "gqa": "A", "gdn": "G", "kda": "K", "mamba2": "S"}
# Of the model: how the layout is written and computed, and what only training looks at.
_FREE = (
    "pattern", "num_layers", "attention_ratio", "mixer", "scan_layers", "remat", "remat_layers",
    "loss_chunk_tokens", "z_loss", "initializer_range", "rescale_out_proj",
)  # fmt: skip


def read(config: Config, wanted: Params, log: Callable[[str], None]) -> tuple[Params, dict[str, Any]]:
    """(the parameters, on the shardings of `wanted`, a tree of ShapeDtypeStructs; where they are from, as JSON).

    `log` gets a line about that, and one for each key of the model that is another one there. Raises UserError where
    there is no such checkpoint, or it is of a model with other parameters.
    """
    try:
        found = trained.open(config.checkpoint.init_from, log=log)
    except UserError as error:
        raise UserError(f"{_KEY}: {error}") from None
    there, here = found.config.model, config.model
    lines = schema.mismatches(found.abstract_params(), wanted)
    if there.layout != here.layout:
        lines = [f"its pattern is {there.layout}, this one's {here.layout}"]
    if lines:
        more = f" (and {len(lines) - 2} more)" if len(lines) > 2 else ""
        raise UserError(f"{_KEY}: {found.folder} is of another model: {'; '.join(lines[:2])}{more}")
    log(f"parameters  those of {found.folder}")
    for line in differences(there, here):
        log(f"note: {line}")
    params = found.params(sharding=jax.tree.map(lambda x: x.sharding, wanted))
    listed = found.folder / manifest.NAME
    crc = manifest.checksum(listed) if listed.exists() else None
    return params, {"run": str(found.run), "step": found.step, "crc_of_its_list_of_files": crc}


def differences(there: ModelConfig, here: ModelConfig) -> list[str]:
    """Lines about what makes the same parameters another function."""
    old, new = to_dict(there), to_dict(here)
    lines = []
    for name in new:
        if name in _FREE or (name in _SECTIONS and _SECTIONS[name] not in here.layout):
            continue
        if old[name] != new[name]:
            parts = [key for key in new[name] if old[name][key] != new[name][key]] if name in _SECTIONS else []
            for key in parts:
                lines.append(f"config.model.{name}.{key} is {new[name][key]!r} and was {old[name][key]!r} there")
            if not parts:
                lines.append(f"config.model.{name} is {new[name]!r} and was {old[name]!r} there")
    return lines

"""A trained model as a folder that other libraries load: weights, config.json, tokenizer, model card."""

from __future__ import annotations

import dataclasses
import itertools
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from hybrid_jax.data import run_tokenizer
from hybrid_jax.data.interface import Tokenizer
from hybrid_jax.data.tokenizer import IdTokenizer
from hybrid_jax.errors import UserError
from hybrid_jax.interop import folder, formats, model_card
from hybrid_jax.interop.formats import Format
from hybrid_jax.interop.shards import DTYPES, ShardWriter
from hybrid_jax.interop.table import Entry, Leaf
from hybrid_jax.progress import Progress
from hybrid_jax.trained import Trained

_DTYPES = {np.dtype(dtype).name: name for name, dtype in DTYPES.items()}  # "float32": "F32"
DTYPE_NAMES = tuple(_DTYPES)
_SLACK = 2**20  # bytes of what lies beside the weights


@dataclasses.dataclass(frozen=True)
class Exported:
    """What was written. files: of weights."""

    out: Path
    format: Format
    files: tuple[str, ...]
    parameters: int
    bytes: int
    has_tokenizer: bool


def export(
    trained: Trained, out: Path, *, format_name: str, dtype: str, max_shard_bytes: int, overwrite: bool
) -> Exported:
    """Writes `out`, whole or not at all. Raises UserError."""
    chosen = formats.choose(trained.config, format_name)
    folder.check_free(out, overwrite, "config.json")
    tokenizer = trained.tokenizer()
    entries = chosen.entries(trained.config)
    shapes = {entry.theirs: entry.shape for entry in entries}
    total = sum(int(np.prod(shape)) for shape in shapes.values()) * DTYPES[_DTYPES[dtype]].itemsize
    with folder.appearing(out, total + _SLACK) as scratch:
        with (
            ShardWriter(scratch, shapes, _DTYPES[dtype], max_shard_bytes) as writer,
            Progress("export", writer.total_bytes, "B") as progress,
        ):
            for entry, arrays in _arrays(trained, entries):
                tensor = entry.to_theirs(arrays)
                writer.write(entry.theirs, tensor)
                progress.add(tensor.size * writer.dtype.itemsize)
        ids = _special_ids(trained, tokenizer)
        _write_json(scratch / "config.json", _config(chosen, trained, dtype, ids))
        _write_json(scratch / "generation_config.json", {"_from_model_config": True, **ids})
        has_tokenizer = _write_tokenizer(trained, tokenizer, scratch)
        for file in chosen.files():
            shutil.copyfile(file, scratch / file.name)
        (scratch / "README.md").write_text(model_card.text(trained, chosen, dtype), encoding="utf-8")
    parameters = sum(int(np.prod(shape)) for shape in trained.shapes.values())
    return Exported(out, chosen, tuple(writer.files), parameters, writer.total_bytes, has_tokenizer)


def _arrays(trained: Trained, entries: list[Entry]) -> Iterator[tuple[Entry, list[np.ndarray]]]:
    """Each entry with the arrays it is made of. What lies together in the checkpoint is read together, once."""

    def paths(entry: Entry) -> tuple[str, ...]:
        return tuple(leaf.path for leaf in entry.ours)

    def order(entry: Entry) -> tuple[tuple[str, ...], bool, int]:
        return paths(entry), entry.copy, _index(entry.ours[0])

    for wanted, group in itertools.groupby(sorted(entries, key=order), key=lambda entry: (paths(entry), entry.copy)):
        same = list(group)
        if same[0].ours[0].index is None:
            for entry in same:
                yield entry, [trained.read(path) for path in wanted[0]]
        else:
            for entry, *arrays in zip(same, *(trained.layers(path) for path in wanted[0]), strict=True):
                yield entry, arrays


def _index(leaf: Leaf) -> int:
    return -1 if leaf.index is None else leaf.index


def _config(chosen: Format, trained: Trained, dtype: str, ids: dict[str, Any]) -> dict[str, Any]:
    return {
        "architectures": [chosen.architecture],
        "model_type": chosen.name,
        "dtype": dtype,
        "torch_dtype": dtype,  # as older readers call it
        **chosen.to_config(trained.config),
        **ids,
        "use_cache": True,
    }


def _special_ids(trained: Trained, tokenizer: Tokenizer) -> dict[str, Any]:
    """Our models know one special id, which ends a document."""
    end = tokenizer.end_of_document
    return {
        "bos_token_id": None,
        "eos_token_id": end if end < trained.config.model.vocab_size else None,
        "pad_token_id": None,
    }


def _write_tokenizer(trained: Trained, tokenizer: Tokenizer, scratch: Path) -> bool:
    """The tokenizer's files; False for a run whose ids have no text."""
    if isinstance(tokenizer, IdTokenizer):
        return False
    carried = trained.run / run_tokenizer.FOLDER
    for file in sorted(carried.iterdir()) if carried.is_dir() else []:
        if file.is_file() and file.name != run_tokenizer.RECORD:
            shutil.copyfile(file, scratch / file.name)
    return True


def _write_json(path: Path, values: dict[str, Any]) -> None:
    path.write_text(json.dumps(values, indent=2, allow_nan=False) + "\n", encoding="utf-8")


def dtype_name(text: str) -> str:
    """One of DTYPE_NAMES. Raises UserError."""
    if text not in _DTYPES:
        raise UserError(f"--dtype: {text!r} is not one of {', '.join(DTYPE_NAMES)}")
    return text

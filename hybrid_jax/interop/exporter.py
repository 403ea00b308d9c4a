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

from hybrid_jax import progress
from hybrid_jax.data import run_tokenizer
from hybrid_jax.data import tokenizer as tokenizers
from hybrid_jax.data.interface import Tokenizer
from hybrid_jax.errors import UserError
from hybrid_jax.interop import folder, formats, model_card
from hybrid_jax.interop.formats import Format
from hybrid_jax.interop.shards import DTYPES, ShardWriter
from hybrid_jax.interop.table import Entry, Leaf
from hybrid_jax.interop.tokenizer import files as tokenizer_files
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
    trained: Trained,
    out: Path,
    *,
    format_name: str = "auto",
    dtype: str = "float32",
    max_shard_bytes: int,
    tokenizer_name: str = "",
    overwrite: bool = False,
) -> Exported:
    """Writes `out`, whole or not at all.

    format_name: one of formats.known, or auto. dtype: one of DTYPE_NAMES. tokenizer_name: a tokenizer.json, or a folder
    with one, in place of the run's; "none" leaves it out. Raises UserError.
    """
    chosen = formats.choose(trained.config, format_name)
    folder.check_free(out, overwrite, _is_export, "an exported model")
    tokenizer, beside = _tokenizer(trained, tokenizer_name)
    entries = chosen.entries(trained.config)
    shapes = {entry.theirs: entry.shape for entry in entries}
    total = sum(int(np.prod(shape)) for shape in shapes.values()) * DTYPES[_DTYPES[dtype]].itemsize
    count = progress.Count(line := progress.Line("export"), len(entries), total, "tensors")
    with folder.appearing(out, total + _SLACK) as scratch:
        try:
            with ShardWriter(scratch, shapes, _DTYPES[dtype], max_shard_bytes) as writer:
                for entry, arrays in _arrays(trained, entries):
                    tensor = entry.to_theirs(arrays)
                    writer.write(entry.theirs, tensor)
                    count.add(tensor.size * writer.dtype.itemsize)
        finally:
            line.close()
        ids = _special_ids(trained, tokenizer)
        _write_json(scratch / "config.json", _config(chosen, trained, dtype, ids))
        _write_json(scratch / "generation_config.json", {"_from_model_config": True, **ids})
        for name, content in beside.items():
            (scratch / name).write_bytes(content)
        for file in chosen.files():
            shutil.copyfile(file, scratch / file.name)
        (scratch / "README.md").write_text(model_card.text(trained, chosen, dtype), encoding="utf-8")
    parameters = sum(int(np.prod(shape)) for shape in trained.shapes.values())
    return Exported(out, chosen, tuple(writer.files), parameters, writer.total_bytes, bool(beside))


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


def _special_ids(trained: Trained, tokenizer: Tokenizer | None) -> dict[str, Any]:
    """Our models know one special id, which ends a document."""
    end = tokenizer.end_of_document if tokenizer else None
    known = end is not None and end < trained.config.model.vocab_size
    return {"bos_token_id": None, "eos_token_id": end if known else None, "pad_token_id": None}


def _tokenizer(trained: Trained, name: str) -> tuple[Tokenizer | None, dict[str, bytes]]:
    """The tokenizer, and {name: content} of its files: none for ids without text. Those that came with an imported
    model are as they were. Raises UserError."""
    if name == "none":
        return None, {}
    if name:
        try:
            given: Tokenizer = tokenizers.load(name)
        except UserError as error:
            raise UserError(f"--tokenizer: {error}") from None
        if given.vocab_size > trained.config.model.vocab_size:
            raise UserError(
                f"--tokenizer: {name} has {given.vocab_size:,} ids and the model {trained.config.model.vocab_size:,}; "
                "give the one that the model was trained with"
            )
        return given, _encoded(given)
    try:
        tokenizer = trained.tokenizer()
        carried = trained.run / run_tokenizer.FOLDER
        found = [file for file in carried.iterdir() if file.is_file()] if carried.is_dir() else []
        if {file.name for file in found} <= {run_tokenizer.RECORD, run_tokenizer.DEFINITION}:
            return tokenizer, _encoded(tokenizer)
        return tokenizer, {file.name: file.read_bytes() for file in found if file.name != run_tokenizer.RECORD}
    except UserError as error:
        raise UserError(
            f"{error}; or name its tokenizer.json by --tokenizer, or leave it out by --tokenizer none"
        ) from None


def _encoded(tokenizer: Tokenizer) -> dict[str, bytes]:
    return {name: text.encode() for name, text in tokenizer_files(tokenizer).items()}


def _is_export(out: Path) -> bool:
    try:
        return "model_type" in json.loads((out / "config.json").read_bytes()) and not (out / "checkpoints").exists()
    except (OSError, ValueError, TypeError):
        return False


def _write_json(path: Path, values: dict[str, Any]) -> None:
    path.write_text(json.dumps(values, indent=2, allow_nan=False) + "\n", encoding="utf-8")


def dtype_name(text: str) -> str:
    """One of DTYPE_NAMES. Raises UserError."""
    if text not in _DTYPES:
        raise UserError(f"--dtype: {text!r} is not one of {', '.join(DTYPE_NAMES)}")
    return text

"""The tokenizer of a run, in its folder: RUN/tokenizer/, so that a run can be read where its data is not.

hybrid_jax.json     kind (bytes, bpe or ids), vocab_size, end_of_document, bytes_per_token (null: not known)
tokenizer.json      of a bpe: its definition, as the `tokenizers` package reads it
others              of the same tokenizer, for Hugging Face: carried along with an imported model, never read here
"""

import json
import math
import os
import shutil
from pathlib import Path
from typing import Any

from hybrid_jax.data import tokenizer as tokenizers
from hybrid_jax.data.interface import Tokenizer
from hybrid_jax.data.tokenizer import BpeTokenizer, ByteTokenizer, IdTokenizer
from hybrid_jax.errors import UserError

FOLDER, RECORD, DEFINITION = "tokenizer", "hybrid_jax.json", "tokenizer.json"
_KINDS: dict[str, type] = {"bytes": ByteTokenizer, "bpe": BpeTokenizer, "ids": IdTokenizer}


def write(run: Path, tokenizer: Tokenizer) -> None:
    """Makes RUN/tokenizer/ say `tokenizer`; files of another one are removed from it. Raises OSError."""
    folder = run / FOLDER
    definition = tokenizer.bpe.to_str() if isinstance(tokenizer, BpeTokenizer) else ""
    if folder.is_dir() and not _is(folder, definition):
        shutil.rmtree(folder)
    folder.mkdir(exist_ok=True)
    if definition and not (folder / DEFINITION).exists():
        _replace(folder / DEFINITION, definition)
    ratio = tokenizer.bytes_per_token
    record = {
        "kind": next(name for name, kind in _KINDS.items() if isinstance(tokenizer, kind)),
        "vocab_size": tokenizer.vocab_size,
        "end_of_document": tokenizer.end_of_document,
        "bytes_per_token": None if math.isnan(ratio) else ratio,
    }
    _replace(folder / RECORD, json.dumps(record, indent=1) + "\n")


def read(run: Path) -> Tokenizer | None:
    """The tokenizer that RUN/tokenizer/ says; None where there is no such record. Raises UserError if it is damaged."""
    folder = run / FOLDER
    try:
        record: dict[str, Any] = json.loads((folder / RECORD).read_bytes())
        ratio = record["bytes_per_token"]
        size, end, kind = int(record["vocab_size"]), int(record["end_of_document"]), _KINDS[record["kind"]]
    except FileNotFoundError:
        return None
    except OSError as error:
        raise UserError(f"{folder / RECORD}: {error.strerror or error}") from None
    except (ValueError, TypeError, KeyError):
        raise UserError(f"{folder / RECORD}: is damaged; remove {folder} to go by the run's data instead") from None
    ratio = math.nan if ratio is None else float(ratio)
    if kind is BpeTokenizer:
        file, definition = tokenizers.read_definition(folder / DEFINITION)
        return BpeTokenizer(tokenizers.from_definition(definition, str(file)), size, end, ratio)
    return kind(size, end, ratio)


def _is(folder: Path, definition: str) -> bool:
    """Whether the tokenizer.json in the folder, or none for "", is this definition."""
    file = folder / DEFINITION
    if not file.exists() or not definition:
        return not file.exists() and not definition
    try:
        return tokenizers.from_definition(file.read_text(encoding="utf-8"), str(file)).to_str() == definition
    except (OSError, ValueError, UserError):
        return False


def _replace(path: Path, text: str) -> None:
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.write_text(text, encoding="utf-8")
    os.replace(temporary, path)

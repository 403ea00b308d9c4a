"""PREFIX.json beside a token store: what hybrid_jax.data.prepare made it from, and with which tokenizer.

format, version             FORMAT and VERSION below
documents, tokens           of the store; tokens count the end-of-document ids
text_bytes                  UTF-8 bytes of its documents
loss_mask                   whether PREFIX.mask.bin belongs to it
learnt_tokens               with a loss mask: how many of the tokens it has as targets
split                       "all", or with --validation_fraction "train" or "validation"
files                       bytes and crc32 of PREFIX.bin, PREFIX.idx and PREFIX.mask.bin, by their ending
empty, replaced             documents of the input left out without a token; with bytes that are no UTF-8, replaced
dtype                       of PREFIX.bin
tokenizer                   name (--tokenizer), sha256 of PREFIX.tokenizer.json beside this file (there is none for
                            "bytes"), vocab_size, end_of_document (null if it has none), bytes_per_token; of one
                            of the hub also revision, a commit; of --train_tokenizer also trained_on, bytes of text
options, sources            what was asked for, and the input: path, bytes and digest of each file or data set
"""

import json
import os
from pathlib import Path
from typing import Any

from hybrid_jax.errors import UserError

FORMAT, VERSION = "hybrid_jax token store", 2
ENDINGS = (".mask.bin", ".bin", ".tokenizer.json", ".json", ".idx")  # a store is there when its index is, the last


def path_of(prefix: str | Path) -> Path:
    """PREFIX.json of a store, which may also be named by its .bin or .idx."""
    return Path(stem(prefix) + ".json")


def stem(prefix: str | Path) -> str:
    """PREFIX of a store that is named so, or by its .bin or .idx."""
    return os.path.expanduser(prefix).removesuffix(".idx").removesuffix(".bin")


def tokenizer_path(prefix: str | Path) -> Path:
    """PREFIX.tokenizer.json."""
    path = path_of(prefix)
    return path.with_name(f"{path.name.removesuffix('.json')}.tokenizer.json")


def read(prefix: str | Path) -> dict[str, Any] | None:
    """The manifest of a store; None if there is none, or a file of that name that is no manifest. Raises UserError
    for one that is damaged or of another version."""
    path = path_of(prefix)
    remedy = "prepare the store again, or remove this file to train on ids without text"
    try:
        found = json.loads(path.read_bytes())
    except FileNotFoundError:
        return None
    except OSError as error:
        raise UserError(f"{path}: {error.strerror or error}; {remedy}") from None
    except ValueError:
        raise UserError(f"{path}: is no JSON, so damaged if it is a store's manifest; {remedy}") from None
    if not isinstance(found, dict) or found.get("format") != FORMAT:
        return None
    if found.get("version") != VERSION:
        raise UserError(f"{path}: is a manifest of version {found.get('version')}, not {VERSION}; {remedy}")
    return found


def check_sizes(prefix: str | Path, about: dict[str, Any]) -> None:
    """Raises UserError for a file that is not there, or has not the size that the manifest says, if it says one."""
    try:
        sizes = {ending: int(file["bytes"]) for ending, file in about.get("files", {}).items()}
    except (AttributeError, KeyError, TypeError, ValueError):
        raise UserError(f"{path_of(prefix)}: does not say how large the store's files are; copy it again") from None
    for ending, expected in sizes.items():
        path = Path(stem(prefix) + ending)
        if not path.is_file():
            raise UserError(f"{path}: no such file; it is a part of the store and has to be copied with it")
        if (size := path.stat().st_size) != expected:
            raise UserError(
                f"{path}: has {size} bytes, {path_of(prefix).name} says {expected}; copy the files of one store"
            )

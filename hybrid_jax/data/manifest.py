"""PREFIX.json beside a token store: what hybrid_jax.data.prepare made it from, and with which tokenizer.

format, version             FORMAT and VERSION below
documents, tokens           of the store; tokens count the end-of-document ids
text_bytes                  UTF-8 bytes of its documents
empty, replaced             documents left out without a token; with bytes that are no UTF-8, replaced
dtype                       of PREFIX.bin
tokenizer                   name (--tokenizer), sha256 of PREFIX.tokenizer.json beside this file (there is none for
                            "bytes"), vocab_size, end_of_document (null if it has none), bytes_per_token
options, sources            what was asked for, and the input: path, bytes and digest of each file or data set
"""

import json
import os
from pathlib import Path
from typing import Any

from hybrid_jax.errors import UserError

FORMAT, VERSION = "hybrid_jax token store", 2  # the version also of the parts that prepare keeps


def path_of(prefix: str | Path) -> Path:
    """PREFIX.json of a store, which may also be named by its .bin or .idx."""
    return Path(os.path.expanduser(prefix).removesuffix(".idx").removesuffix(".bin") + ".json")


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
        raise UserError(f"{path}: {error.strerror or error}") from None
    except ValueError:
        raise UserError(f"{path}: is no JSON, so damaged if it is a store's manifest; {remedy}") from None
    if not isinstance(found, dict) or found.get("format") != FORMAT:
        return None
    if found.get("version") != VERSION:
        raise UserError(f"{path}: is a manifest of version {found.get('version')}, not {VERSION}; {remedy}")
    return found

"""The tokenizer of hybrid_jax.data.prepare: bytes, a file, one of the Hugging Face hub, or one trained on the input."""

import dataclasses
import hashlib
from collections.abc import Callable
from pathlib import Path

import numpy as np

from hybrid_jax.data import tokenizer
from hybrid_jax.data.tokenizer import END_NAMES, ByteTokenizer
from hybrid_jax.errors import UserError


@dataclasses.dataclass(frozen=True)
class Vocabulary:
    """definition: the content of a tokenizer.json, "" for bytes. end_of_document is None if it has none."""

    name: str
    definition: str
    size: int
    end_of_document: int | None

    @property
    def dtype(self) -> np.dtype:
        """Of ids on disk, as StoreWriter chooses it."""
        return np.dtype("<u2" if self.size < 2**16 else "<i4")

    @property
    def sha256(self) -> str:
        return hashlib.sha256((self.definition or "bytes").encode()).hexdigest()

    def encoder(self) -> Callable[[list[str]], list[np.ndarray]]:
        """Texts to integers [length] each: all of the text and nothing else, whatever it spells."""
        if not self.definition:
            return lambda texts: [np.frombuffer(text.encode(), np.uint8) for text in texts]
        bpe = tokenizer.from_definition(self.definition, self.name)
        return lambda texts: [
            np.asarray(e.ids, self.dtype) for e in bpe.encode_batch_fast(texts, add_special_tokens=False)
        ]


def vocabulary(name: str, eod_token: str, append_eod: bool) -> Vocabulary:
    """Of --tokenizer: `bytes`, a tokenizer.json or a folder with one. Raises UserError for a file that is not
    there or is none, and if documents shall end with a token that it does not have."""
    if name == "bytes":
        if eod_token:
            raise UserError("--eod_token: 'bytes' ends documents with the id 256; leave it out")
        return Vocabulary(name, "", ByteTokenizer.vocab_size, ByteTokenizer.end_of_document)
    try:
        path, definition = tokenizer.read_definition(name)
        return _of(definition, name, path, eod_token, append_eod)
    except UserError as error:
        raise error if str(error).startswith("--") else UserError(f"--tokenizer: {error}") from None


def _of(definition: str, name: str, path: Path, eod_token: str, append_eod: bool) -> Vocabulary:
    bpe = tokenizer.from_definition(definition, name)
    if eod_token:
        end = bpe.token_to_id(eod_token)
        if end is None:
            raise UserError(f"--eod_token: {eod_token!r} is not in the vocabulary of {path}")
    else:
        end = next(iter(tokenizer.end_tokens(bpe)), None)
    if append_eod and end is None:
        raise UserError(
            f"--eod_token: {path} has none of {', '.join(END_NAMES)}; name its end-of-document token, "
            "or give --no-append_eod"
        )
    return Vocabulary(name, definition, tokenizer.vocab_size(bpe), end)

"""The tokenizer of hybrid_jax.data.prepare: bytes, a file, one of the Hugging Face hub, or one trained on the input."""

import dataclasses
import hashlib
import itertools
from array import array
from collections.abc import Callable
from pathlib import Path

import numpy as np

from hybrid_jax.data import tokenizer
from hybrid_jax.data.tokenizer import END_NAMES, ByteTokenizer
from hybrid_jax.errors import UserError

# Texts to (ids of all of them end to end, how many there are of each).
Encoder = Callable[[list[str]], tuple[np.ndarray, list[int]]]

_CACHED_WORDS = 2**15  # `tokenizers` keeps 10,000 pieces that it has split before; more make it faster


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

    def encoder(self) -> Encoder:
        """Encodes all of each text and nothing else, whatever it spells."""
        if not self.definition:
            return _encode_bytes
        bpe = tokenizer.from_definition(self.definition, self.name)
        if hasattr(bpe.model, "_resize_cache"):
            bpe.model._resize_cache(_CACHED_WORDS)

        def encode(texts: list[str]) -> tuple[np.ndarray, list[int]]:
            encodings = bpe.encode_batch_fast(texts, add_special_tokens=False)
            ids = list(itertools.chain.from_iterable([e.ids for e in encodings]))
            return np.frombuffer(array("I", ids), np.uint32), [len(e) for e in encodings]  # much the fastest way

        return encode


def _encode_bytes(texts: list[str]) -> tuple[np.ndarray, list[int]]:
    raw = [text.encode() for text in texts]
    return np.frombuffer(b"".join(raw), np.uint8), [len(text) for text in raw]


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

"""The tokenizer of hybrid_jax.data.prepare: bytes, a file, one of the Hugging Face hub, or one trained on the input."""

import dataclasses
import hashlib
import itertools
import os
from array import array
from collections.abc import Callable
from typing import Any

import numpy as np

from hybrid_jax.data import hub, tokenizer
from hybrid_jax.data.plan import Earlier
from hybrid_jax.data.tokenizer import END_NAMES, ByteTokenizer
from hybrid_jax.errors import UserError

# Texts to (ids of all of them end to end, how many there are of each).
Encoder = Callable[[list[str]], tuple[np.ndarray, list[int]]]

_CACHED_WORDS = 2**15  # `tokenizers` keeps 10,000 pieces that it has split before; more make it faster


@dataclasses.dataclass(frozen=True)
class Vocabulary:
    """definition: the content of a tokenizer.json, "" for bytes, None of one that is still to be trained.
    end_of_document is None if it has none. origin: more for the manifest, see hybrid_jax.data.manifest."""

    name: str
    definition: str | None
    size: int
    end_of_document: int | None
    origin: dict[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def dtype(self) -> np.dtype:
        """Of ids on disk, as StoreWriter chooses it."""
        return np.dtype("<u2" if self.size < 2**16 else "<i4")

    @property
    def sha256(self) -> str | None:
        return None if self.definition is None else hashlib.sha256((self.definition or "bytes").encode()).hexdigest()

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


def vocabulary(name: str, eod_token: str, append_eod: bool, earlier: Earlier) -> Vocabulary:
    """Of --tokenizer: `bytes`, a tokenizer.json or a folder with one, or else a model of the hub, which is asked only
    if nothing is kept of earlier.

    Raises UserError for a file that is not there or is none, for what the hub does not give, and if documents shall end
    with a token that it does not have.
    """
    if name == "bytes":
        if eod_token:
            raise UserError("--eod_token: 'bytes' ends documents with the id 256; leave it out")
        return Vocabulary(name, "", ByteTokenizer.vocab_size, ByteTokenizer.end_of_document)
    origin: dict[str, Any] = {}
    where = name
    try:
        if os.path.exists(os.path.expanduser(name)) or not hub.is_name(name):
            path, definition = tokenizer.read_definition(name)
            where = str(path)
        elif definition := earlier.definition(name):
            origin = earlier.origin
        else:
            definition, origin = _of_hub(name)
        return _of(definition, name, where, eod_token, append_eod, origin)
    except UserError as error:
        raise error if str(error).startswith("--") else UserError(f"--tokenizer: {error}") from None


def _of_hub(name: str) -> tuple[str, dict[str, Any]]:
    try:
        path, commit = hub.tokenizer(name)
    except UserError as error:
        raise UserError(f"no such file or folder here, and of the hub {error}") from None
    return tokenizer.read_definition(path)[1], {"revision": commit}


def _of(definition: str, name: str, where: str, eod_token: str, append_eod: bool, origin: dict[str, Any]) -> Vocabulary:
    bpe = tokenizer.from_definition(definition, name)
    if eod_token:
        end = bpe.token_to_id(eod_token)
        if end is None:
            raise UserError(f"--eod_token: {eod_token!r} is not in the vocabulary of {where}")
    else:
        end = next(iter(tokenizer.end_tokens(bpe)), None)
    if append_eod and end is None:
        raise UserError(
            f"--eod_token: {where} has none of {', '.join(END_NAMES)}; name its end-of-document token, "
            "or give --no-append_eod"
        )
    return Vocabulary(name, definition, tokenizer.vocab_size(bpe), end, origin)

"""What the trainer sees of any data source."""

import hashlib
from collections.abc import Mapping, Sequence
from typing import Protocol

import numpy as np


class Tokenizer(Protocol):
    """Text to ids and back. Ids lie in [0, vocab_size); one of them, `end_of_document`, is never made from
    text."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def end_of_document(self) -> int: ...

    @property
    def bytes_per_token(self) -> float:
        """Mean bytes of text per token of the split it was opened with: nats/byte = nats/token / this. NaN where it is
        not known."""
        ...

    def encode(self, text: str) -> list[int]: ...

    def decode(self, ids: Sequence[int]) -> str: ...


class Documents(Protocol):
    """Tokens of documents end to end, and where each lies, by number from 0 in stored order."""

    @property
    def tokens(self) -> np.ndarray:
        """[N], any integers."""
        ...

    @property
    def num_documents(self) -> int: ...

    def lengths(self, numbers: np.ndarray) -> np.ndarray:
        """Tokens of each of these documents, int64 as `numbers`; 0 for an empty one."""
        ...

    def scan(self, first: int, end: int) -> np.ndarray:
        """As `lengths` of the documents first, first + 1, ..., end - 1, for whoever goes through all of them."""
        ...

    def first_tokens(self, numbers: np.ndarray) -> np.ndarray:
        """Index into `tokens` of the first token of each, int64 as `numbers`."""
        ...


class Batches(Protocol):
    """Batches by index: row r of step s is a pure function of (seed, s, r), whoever asks for it and in which
    order."""

    def batch(self, step: int, rows: Sequence[int], global_batch_size: int) -> dict[str, np.ndarray]:
        """Rows of the global batch of a step.

        Returns int32 arrays [len(rows), T]: `tokens`; `targets` (the next token, -1 where masked);
        `segment_ids` (documents of a row count from 1; 0 is padding); `positions` (from 0 in each segment).
        Raises ValueError for a row outside [0, global_batch_size) or a negative step.
        """
        ...


class Dataset(Batches, Protocol):
    """What a data source is: batches, and what there is to say about them."""

    @property
    def tokenizer(self) -> Tokenizer: ...

    @property
    def identity(self) -> dict[str, str]:
        """The named parts of what decides a sample: content, tokenizer, split, lengths, order, weights. A part that
        is not known is left out. What does not change a sample, such as where the content lies, is not in it."""
        ...

    @property
    def fingerprint(self) -> str:
        """Hex digest of `identity`."""
        ...

    @property
    def description(self) -> str:
        """One line."""
        ...

    @property
    def num_tokens(self) -> int:
        """Tokens of the split, end-of-document tokens included; 0 = endless."""
        ...

    @property
    def num_windows(self) -> int:
        """Windows of a pass over the split; 0 = endless."""
        ...


def fingerprint(identity: Mapping[str, str]) -> str:
    """Hex digest, whatever the order of the parts."""
    return hashlib.blake2b(repr(sorted(identity.items())).encode(), digest_size=16).hexdigest()


def check_rows(step: int, rows: Sequence[int], global_batch_size: int) -> np.ndarray:
    """Window numbers [len(rows)] int64 of these rows in the endless stream of windows."""
    index = np.asarray(rows, np.int64)
    if step < 0 or index.ndim != 1 or (index.size and not 0 <= index.min() <= index.max() < global_batch_size):
        raise ValueError(f"step {step}, rows {rows}: outside a global batch of {global_batch_size} rows")
    return step * global_batch_size + index

"""Documents packed into windows by index arithmetic: no iterator state, any row of any step at once.

B rows, T window length. Window w of an epoch holds stream positions [w*T, w*T + T], its last token only a
target, so that a pass predicts every token once; the stream is all documents end to end, in an order of the
epoch.
"""

import functools
import hashlib
from collections.abc import Sequence

import numpy as np

from hybrid_jax.data.interface import Tokenizer, check_rows
from hybrid_jax.data.tokenizer import TokenStore

_EPOCHS_KEPT = 3
_DOCUMENTS, _WINDOWS, _VALIDATION = 1, 2, 3  # separate random streams


def permutation(size: int, *entropy: int) -> np.ndarray:
    """A permutation of range(size), int64, decided by the numbers alone.

    Made from raw Philox output, which numpy guarantees to keep; `Generator.permutation` may change between
    versions.
    """
    raw = np.random.Philox(np.random.SeedSequence([e % 2**64 for e in entropy])).random_raw(size)
    return np.argsort(raw, kind="stable")


def finish(tokens_BT1: np.ndarray, segments_BT1: np.ndarray, isolate_documents: bool) -> dict[str, np.ndarray]:
    """Batch of rows of T+1 tokens whose documents are numbered from 1 (0 = padding). See `Dataset.batch`."""
    if not isolate_documents:
        segments_BT1 = (segments_BT1 > 0).astype(np.int32)
    segments_BT, next_BT = segments_BT1[:, :-1], segments_BT1[:, 1:]
    targets_BT = np.where((segments_BT == next_BT) & (next_BT > 0), tokens_BT1[:, 1:], -1)
    place_T = np.arange(segments_BT.shape[1], dtype=np.int32)
    first_BT = np.ones(segments_BT.shape, bool)
    first_BT[:, 1:] = segments_BT[:, 1:] != segments_BT[:, :-1]
    positions_BT = place_T - np.maximum.accumulate(np.where(first_BT, place_T, 0), axis=1)
    batch = {
        "tokens": tokens_BT1[:, :-1],
        "targets": targets_BT,
        "segment_ids": segments_BT,
        "positions": positions_BT,
    }
    return {name: np.ascontiguousarray(array, np.int32) for name, array in batch.items()}


class PackedDataset:
    """A `Dataset` over a token store.

    Training: documents and windows are shuffled anew each epoch by (seed, epoch); the tokens after an epoch's
    last whole window, less than one window, sit that epoch out. Validation: documents in stored order and one
    order of windows, the same for every seed; all tokens, the last window padded; steps past the end are
    padding only.
    """

    def __init__(
        self,
        store: TokenStore,
        tokenizer: Tokenizer,
        *,
        sequence_length: int,
        seed: int,
        training: bool,
        isolate_documents: bool,
        description: str,
        documents: np.ndarray | None = None,
        content: bytes = b"",
    ):
        """documents: numbers of the store's documents that belong to the split, none of them empty, int64
        [documents] (None = all). content: with them, a digest of the tokens, which may be too many to read."""
        self.store = store
        self.tokenizer = tokenizer
        self.isolate_documents = isolate_documents
        self.description = description
        self._documents = documents
        self.num_tokens = len(store.tokens) if documents is None else int(self._lengths().sum())
        self._length = sequence_length
        self._seed = seed
        self._training = training
        predicted = self.num_tokens - 1
        self.num_windows = max(1, predicted // sequence_length if training else -(-predicted // sequence_length))
        self._order = functools.lru_cache(maxsize=_EPOCHS_KEPT)(self._make_order)  # safe between threads
        digest = hashlib.blake2b(digest_size=16)
        identity = (
            "packing 1",
            tokenizer.vocab_size,
            sequence_length,
            seed * training,
            training,
            isolate_documents,
        )
        digest.update(repr(identity).encode())
        digest.update(store.starts.astype("<i8").tobytes())
        if documents is None:
            digest.update(np.ascontiguousarray(store.tokens, store.tokens.dtype.newbyteorder("<")).data)
        else:
            digest.update(documents.astype("<i8").tobytes() + content)
        self.fingerprint = digest.hexdigest()

    def batch(self, step: int, rows: Sequence[int], global_batch_size: int) -> dict[str, np.ndarray]:
        """See `Dataset.batch`."""
        windows = check_rows(step, rows, global_batch_size)
        shape = (len(windows), self._length + 1)
        tokens_BT1 = np.full(shape, self.tokenizer.end_of_document, np.int32)
        segments_BT1 = np.zeros(shape, np.int32)
        for row, window in enumerate(windows.tolist()):
            epoch, index = divmod(window, self.num_windows)
            if epoch == 0 or self._training:
                self._fill(tokens_BT1[row], segments_BT1[row], epoch, index)
        return finish(tokens_BT1, segments_BT1, self.isolate_documents)

    def predicted(self, num_windows: int = 0) -> np.ndarray:
        """Which stored tokens are targets in the first windows of validation (0 = all of them), bool
        [num_tokens]."""
        if self._training:
            raise ValueError("only of a validation split: in training it differs by epoch")
        if self._documents is not None:
            raise ValueError("only of a store that holds nothing but its split")
        _, _, window_order = self._order(0)
        mask = np.zeros(self.num_tokens, bool)
        for w in window_order[: num_windows or None].tolist():
            mask[w * self._length + 1 : (w + 1) * self._length + 1] = True
        if self.isolate_documents:
            mask[self.store.starts[:-1]] = False
        return mask

    def _fill(self, tokens: np.ndarray, segments: np.ndarray, epoch: int, index: int) -> None:
        document_order, bounds, window_order = self._order(epoch)
        begin = int(window_order[index]) * self._length
        end = min(begin + self._length + 1, self.num_tokens)
        first, last = np.searchsorted(bounds, [begin, end - 1], side="right") - 1
        lengths = np.minimum(bounds[first + 1 : last + 2], end) - np.maximum(bounds[first : last + 1], begin)
        to_store = self.store.starts[document_order[first : last + 1]] - bounds[first : last + 1]
        tokens[: end - begin] = self.store.tokens[np.arange(begin, end) + np.repeat(to_store, lengths)]
        segments[: end - begin] = np.repeat(np.arange(1, len(lengths) + 1), lengths)

    def _make_order(self, epoch: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """(stored document at each place, stream bounds of the places, stored window at each place)."""
        lengths = self._lengths()
        if self._training:
            documents = permutation(len(lengths), _DOCUMENTS, self._seed, epoch)
            windows = permutation(self.num_windows, _WINDOWS, self._seed, epoch)
        else:
            documents = np.arange(len(lengths))
            windows = permutation(self.num_windows, _VALIDATION)
        bounds = np.concatenate([[0], np.cumsum(lengths[documents])])
        return documents if self._documents is None else self._documents[documents], bounds, windows

    def _lengths(self) -> np.ndarray:
        """Tokens of each document of the split."""
        starts, documents = self.store.starts, self._documents
        return np.diff(starts) if documents is None else starts[documents + 1] - starts[documents]

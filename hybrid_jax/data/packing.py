"""Documents packed into windows by index arithmetic: no iterator state, any row of any step at once.

B rows, T window length. Window w of an epoch holds stream positions [w*T, w*T + T], its last token only a
target, so that a pass predicts every token once; the stream is all documents end to end, in an order of the
epoch. What is kept of an order is the stream position of every _BLOCK-th place in it: the documents of a block
are found again when a window needs them.
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from hybrid_jax.data.interface import Documents, Tokenizer, check_rows, fingerprint
from hybrid_jax.data.shuffle import Shuffle

_EPOCHS_KEPT = 3
_DOCUMENTS, _WINDOWS, _VALIDATION = 1, 2, 3  # separate random streams
_BLOCK = 64  # documents
_CHUNK = 2**16  # documents looked at in one go


class _Order(NamedTuple):
    documents: Shuffle | None  # at each place; None = in stored order
    bounds: np.ndarray  # stream position at which each block of places begins, and the end: int64 [blocks + 1]
    windows: Shuffle


def finish(
    tokens_BT1: np.ndarray, segments_BT1: np.ndarray, isolate_documents: bool, learn_BT1: np.ndarray | None = None
) -> dict[str, np.ndarray]:
    """Batch of rows of T+1 tokens whose documents are numbered from 1 (0 = padding). See `Dataset.batch`.

    learn_BT1: bool, which tokens may be targets (None = all)."""
    if not isolate_documents:
        segments_BT1 = (segments_BT1 > 0).astype(np.int32)
    segments_BT, next_BT = segments_BT1[:, :-1], segments_BT1[:, 1:]
    predicted_BT = (segments_BT == next_BT) & (next_BT > 0)
    if learn_BT1 is not None:
        predicted_BT &= learn_BT1[:, 1:]
    targets_BT = np.where(predicted_BT, tokens_BT1[:, 1:], -1)
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
    """A `Dataset` over stored tokens.

    Training: documents and windows are shuffled anew each epoch by (seed, epoch), each over the whole split;
    the tokens after an epoch's last whole window, less than one window, sit that epoch out. Validation:
    documents in stored order and one order of windows, the same for every seed; all tokens, the last window
    padded; steps past the end are padding only.

    In memory, beside what the arguments hold: an eighth of a byte a document for each order that is kept, and up
    to 16 MiB of tables (see `Shuffle`); and for a store that is mapped, the pages of it that batches have touched.
    """

    def __init__(
        self,
        store: Documents,
        tokenizer: Tokenizer,
        *,
        sequence_length: int,
        seed: int,
        training: bool,
        isolate_documents: bool,
        description: str,
        source: dict[str, str],
        documents: np.ndarray | Callable[[np.ndarray], np.ndarray] | None = None,
        learn: np.ndarray | None = None,
    ):
        """documents: which of the store's belong to the split, as their numbers, int64 [documents], ascending, or as
        a function that says of numbers which of them do, bool (None = all); at least one token. learn: uint8 [N], 0
        for a token of the store that is no target (None = all are). source: the parts of `Dataset.identity` that say
        where tokens come from."""
        self.store = store
        self.tokenizer = tokenizer
        self.isolate_documents = isolate_documents
        self.description = description
        self._documents = documents
        self._learn = learn
        self._length = sequence_length
        self._seed = seed
        self._training = training
        self._ours = documents if callable(documents) else None
        self._numbers = documents if isinstance(documents, np.ndarray) else None
        self._count = store.num_documents if self._numbers is None else len(self._numbers)
        self.num_tokens = sum(int(lengths.sum()) for _, lengths in self._scan())
        predicted = self.num_tokens - 1
        self.num_windows = max(1, predicted // sequence_length if training else -(-predicted // sequence_length))
        self._order = functools.lru_cache(maxsize=_EPOCHS_KEPT)(self._make_order)  # safe between threads
        self.identity = source | {
            "the order of the data (train.seed)": f"packing 2, {f'seed {seed}' if training else 'validation'}",
            "train.sequence_length": str(sequence_length),
            "data.isolate_documents": str(isolate_documents),
        }

    @property
    def fingerprint(self) -> str:
        return fingerprint(self.identity)

    def batch(self, step: int, rows: Sequence[int], global_batch_size: int) -> dict[str, np.ndarray]:
        """See `Dataset.batch`."""
        windows = check_rows(step, rows, global_batch_size)
        shape = (len(windows), self._length + 1)
        tokens_BT1 = np.full(shape, self.tokenizer.end_of_document, np.int32)
        segments_BT1 = np.zeros(shape, np.int32)
        learn_BT1 = None if self._learn is None else np.zeros(shape, bool)
        epochs, indices = np.divmod(windows, self.num_windows)
        for epoch in np.unique(epochs).tolist():
            if epoch == 0 or self._training:
                at = np.flatnonzero(epochs == epoch)
                self._fill(at, epoch, indices[at], tokens_BT1, segments_BT1, learn_BT1)
        return finish(tokens_BT1, segments_BT1, self.isolate_documents, learn_BT1)

    def predicted(self, num_windows: int = 0) -> np.ndarray:
        """Which stored tokens are targets in the first windows of validation (0 = all of them), bool
        [num_tokens]."""
        if self._training:
            raise ValueError("only of a validation split: in training it differs by epoch")
        if self._documents is not None:
            raise ValueError("only of a store that holds nothing but its split")
        mask = np.zeros(self.num_tokens, bool)
        windows = self._order(0).windows(np.arange(min(num_windows or self.num_windows, self.num_windows)))
        for w in windows.tolist():
            mask[w * self._length + 1 : (w + 1) * self._length + 1] = True
        if self.isolate_documents:
            numbers = np.arange(self._count)
            mask[self.store.first_tokens(numbers[self.store.lengths(numbers) > 0])] = False
        return mask

    def _fill(
        self,
        rows: np.ndarray,
        epoch: int,
        indices: np.ndarray,
        tokens_BT1: np.ndarray,
        segments_BT1: np.ndarray,
        learn_BT1: np.ndarray | None,
    ) -> None:
        """Writes these windows of an epoch to these rows. R rows, P places in the order, D pieces of documents."""
        order = self._order(epoch)
        begin_R = order.windows(indices) * self._length
        end_R = np.minimum(begin_R + self._length + 1, self.num_tokens)
        first_R, last_R = (np.searchsorted(order.bounds, at, side="right") - 1 for at in (begin_R, end_R - 1))
        count_R = np.minimum((last_R + 1) * _BLOCK, self._count) - first_R * _BLOCK
        numbers_P = self._at(order.documents, _ranges(first_R * _BLOCK, count_R))
        lengths_P = self._lengths(numbers_P)
        row_P = np.repeat(np.arange(len(rows)), count_R)
        before_P = np.cumsum(lengths_P) - lengths_P
        before_P += (order.bounds[first_R] - before_P[np.cumsum(count_R) - count_R])[row_P]  # now in the stream
        from_P = np.maximum(before_P, begin_R[row_P])
        size_P = np.minimum(before_P + lengths_P, end_R[row_P]) - from_P
        kept = np.flatnonzero(size_P > 0)
        row_D, size_D = row_P[kept], size_P[kept]
        first_D = self.store.first_tokens(numbers_P[kept]) + (from_P - before_P)[kept]
        place = _ranges(first_D, size_D)
        segment_D = np.arange(1, len(kept) + 1) - np.searchsorted(row_D, row_D)
        inside = np.arange(self._length + 1) < (end_R - begin_R)[:, None]
        filled = [(tokens_BT1, self.store.tokens[place]), (segments_BT1, np.repeat(segment_D, size_D))]
        if learn_BT1 is not None and self._learn is not None:
            filled.append((learn_BT1, self._learn[place] != 0))
        for array, values in filled:
            if inside.all():
                array[rows] = values.reshape(inside.shape)
            else:  # the last window, or a split shorter than one: the rest stays padding
                array[np.repeat(rows, end_R - begin_R), np.nonzero(inside)[1]] = values

    def _make_order(self, epoch: int) -> _Order:
        if not self._training:
            return _Order(None, self._block_bounds(lambda numbers: numbers), Shuffle(self.num_windows, _VALIDATION))
        documents = Shuffle(self._count, _DOCUMENTS, self._seed, epoch)
        windows = Shuffle(self.num_windows, _WINDOWS, self._seed, epoch)
        return _Order(documents, self._block_bounds(documents.inverse()), windows)

    def _block_bounds(self, place_of: Callable[[np.ndarray], np.ndarray]) -> np.ndarray:
        """place_of: in the order, of documents by their place in stored order. Documents are gone through as they are
        stored, so that nothing of the store has to stay in memory."""
        sums = np.zeros(-(-self._count // _BLOCK) + 1, np.int64)
        for first, lengths in self._scan():
            places = place_of(np.arange(first, first + len(lengths)))
            np.add.at(sums, places // _BLOCK + 1, lengths)
        return np.cumsum(sums)

    def _scan(self) -> Iterator[tuple[int, np.ndarray]]:
        """(place in stored order of the first, tokens in the split) of the split's documents, in pieces."""
        first = 0
        for at in range(0, self.store.num_documents, _CHUNK):
            end = min(at + _CHUNK, self.store.num_documents)
            lengths = self.store.scan(at, end)
            if self._ours is not None:
                lengths *= self._ours(np.arange(at, end))
            elif self._numbers is not None:
                last = int(np.searchsorted(self._numbers, end))
                lengths = lengths[self._numbers[first:last] - at]
            yield first, lengths
            first += len(lengths)

    def _at(self, documents: Shuffle | None, places: np.ndarray) -> np.ndarray:
        """Numbers in the store of the documents at these places of an order."""
        if documents is not None:
            places = documents(places)
        return places if self._numbers is None else self._numbers[places]

    def _lengths(self, numbers: np.ndarray) -> np.ndarray:
        """Tokens that each of these documents has in the split."""
        lengths = self.store.lengths(numbers)
        return lengths if self._ours is None else lengths * self._ours(numbers)


def _ranges(first: np.ndarray, count: np.ndarray) -> np.ndarray:
    """first[0], first[0] + 1, ... of count[0] numbers, then those of first[1], and so on: int64."""
    ends = np.cumsum(count)
    return np.arange(ends[-1]) + np.repeat(first - (ends - count), count)

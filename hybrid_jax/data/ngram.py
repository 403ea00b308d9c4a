"""Interpolated Witten-Bell n-gram model: the loss that a trained model must beat to have learnt more than
counting.

With c(h) tokens and t(h) distinct tokens seen after history h, and h' the history without its oldest token:

    p(w | h) = (c(h, w) + t(h) p(w | h')) / (c(h) + t(h)),    p(w | no history) interpolates with 1 / V

(Witten and Bell 1991; Chen and Goodman 1998, section 2.4). An unseen history leaves p(w | h').
N tokens, V vocabulary.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np

from hybrid_jax.data.interface import Dataset
from hybrid_jax.data.packing import PackedDataset
from hybrid_jax.data.tokenizer import TokenStore
from hybrid_jax.errors import UserError

MAX_ORDER = 5


@dataclasses.dataclass(frozen=True)
class _Counts:
    """Sorted n-grams and sorted histories, each n-gram a number in base V with the newest token last."""

    grams: np.ndarray
    gram_counts: np.ndarray
    histories: np.ndarray
    history_counts: np.ndarray
    history_types: np.ndarray


@dataclasses.dataclass(frozen=True)
class WittenBell:
    """A fitted model; make one with `fit`."""

    vocab_size: int
    counts: tuple[_Counts, ...]  # of order 1, 2, ...

    @property
    def order(self) -> int:
        return len(self.counts)

    def probabilities(self, tokens_N: np.ndarray, starts: np.ndarray) -> np.ndarray:
        """Of each token given the tokens before it in its document, float64 [N]. starts [documents + 1] as in
        `TokenStore`."""
        p_N = np.full(len(tokens_N), 1 / self.vocab_size)
        for order, counts in enumerate(self.counts, 1):
            if not len(counts.grams):  # every document was shorter
                continue
            grams, at = _grams(tokens_N, starts, order, self.vocab_size)
            index, seen = _find(counts.histories, grams // grams.dtype.type(self.vocab_size))
            total, types = counts.history_counts[index], counts.history_types[index]
            gram_index, gram_seen = _find(counts.grams, grams)
            count = np.where(gram_seen, counts.gram_counts[gram_index], 0)
            p_N[at] = np.where(seen, (count + types * p_N[at]) / (total + types), p_N[at])
        return p_N

    def distribution(self, history: Sequence[int]) -> np.ndarray:
        """Of the next token after a history within a document, float64 [V]."""
        length = len(history) + 1
        documents = np.empty((self.vocab_size, length), np.int64)
        documents[:, :-1], documents[:, -1] = history, np.arange(self.vocab_size)
        starts = np.arange(self.vocab_size + 1) * length
        return self.probabilities(documents.ravel(), starts)[length - 1 :: length]


def fit(tokens_N: np.ndarray, starts: np.ndarray, *, order: int, vocab_size: int) -> WittenBell:
    """Counts all n-grams up to `order` that lie within a document.

    Raises UserError for an order outside 1..5, or one whose n-grams do not fit 63 bits at this vocabulary.
    """
    if not 1 <= order <= MAX_ORDER:
        raise UserError(f"config.eval.ngram_order: {order}: must be 0 (none) or 1 to {MAX_ORDER}")
    if vocab_size**order > 2**63:
        fits = max(k for k in range(1, MAX_ORDER) if vocab_size**k <= 2**63)
        raise UserError(f"config.eval.ngram_order: {order}: at most {fits} with {vocab_size} tokens")
    return WittenBell(
        vocab_size,
        tuple(_count(_grams(tokens_N, starts, k, vocab_size)[0], vocab_size) for k in range(1, order + 1)),
    )


def nats_per_token(train: Dataset, validation: Dataset, order: int, num_windows: int = 0) -> float:
    """Mean loss on the targets of the first `num_windows` validation windows (0 = all), fitted on training.

    Its history never crosses a document end when the datasets isolate documents, as for the model; unlike the
    model it also sees the history before a window's first token. Raises UserError for a source without stored
    text.
    """
    if not (isinstance(train, PackedDataset) and isinstance(validation, PackedDataset)):
        raise UserError("config.eval.ngram_order: needs text to count; set it to 0 for data.source 'synthetic'")
    model = fit(*_documents(train), order=order, vocab_size=train.tokenizer.vocab_size)
    p_N = model.probabilities(*_documents(validation))
    return float(-np.log(p_N[validation.predicted(num_windows)]).mean())


def _documents(dataset: PackedDataset) -> tuple[np.ndarray, np.ndarray]:
    """(tokens, where a document starts, and the end) of a data set in memory."""
    store = dataset.store
    if not isinstance(store, TokenStore):
        raise UserError("config.eval.ngram_order: counts in memory, where a token store need not fit; set it to 0")
    return store.tokens, store.starts if dataset.isolate_documents else store.starts[[0, -1]]


def _grams(tokens_N: np.ndarray, starts: np.ndarray, order: int, vocab_size: int) -> tuple[np.ndarray, np.ndarray]:
    """N-grams within documents and where they end: ([M], indices [M]). The smallest dtype sorts fastest."""
    dtype = np.dtype(np.uint32 if vocab_size**order <= 2**32 else np.int64)
    if len(tokens_N) < order:
        return np.empty(0, dtype), np.empty(0, np.int64)
    grams: np.ndarray = tokens_N[: len(tokens_N) - order + 1].astype(dtype)
    for k in range(1, order):
        grams *= vocab_size
        grams += tokens_N[k : len(tokens_N) - order + 1 + k].astype(dtype)
    inside = np.ones(len(tokens_N), bool)
    for k in range(order - 1):
        inside[np.minimum(starts[:-1] + k, len(tokens_N) - 1)] = False
    inside = inside[order - 1 :]
    return grams[inside], np.flatnonzero(inside) + order - 1


def _count(grams: np.ndarray, vocab_size: int) -> _Counts:
    unique, counts = np.unique(grams, return_counts=True)
    history = unique // unique.dtype.type(vocab_size)
    first = np.flatnonzero(np.concatenate([[True], history[1:] != history[:-1]])[: len(history)])
    return _Counts(
        grams=unique,
        gram_counts=counts,
        histories=history[first],
        history_counts=np.add.reduceat(counts, first) if len(first) else counts,
        history_types=np.diff(np.append(first, len(history))),
    )


def _find(sorted_: np.ndarray, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(a valid index into sorted_, whether the value is there)."""
    index = np.minimum(np.searchsorted(sorted_, values), len(sorted_) - 1)
    return index, sorted_[index] == values

"""Where batches come from: text of the standard library, files or token stores of the user, or a synthetic
process.

`open(config.data, sequence_length=2048, vocab_size=32000, seed=42).batch(step, rows=range(8),
global_batch_size=8)` is a step's batch; see `Dataset` for what is in it.
"""

import sys

if "hybrid_jax.data.prepare" in sys.orig_argv:  # python -m, whose imports begin here: Ctrl-C gives no traceback
    try:
        from hybrid_jax import signals

        signals.AT_ONCE.listen()
    except KeyboardInterrupt:
        print("\nCtrl-C: stopped", file=sys.stderr)
        raise SystemExit(130) from None

import dataclasses
import hashlib
from collections.abc import Iterable
from typing import TYPE_CHECKING

from hybrid_jax.data import stores
from hybrid_jax.data.interface import Dataset, Tokenizer
from hybrid_jax.data.packing import PackedDataset
from hybrid_jax.data.prefetch import prefetch
from hybrid_jax.data.sources import Corpus, Document, files, held_out, python_library, size, with_validation
from hybrid_jax.data.synthetic import SyntheticDataset
from hybrid_jax.data.tokenizer import BpeTokenizer, ByteTokenizer, TokenStore, cached_bpe
from hybrid_jax.errors import UserError

if TYPE_CHECKING:
    from hybrid_jax.config import Config, DataConfig

_FIRST_WINDOWS = 4096  # of training, among which one must have something to learn

__all__ = ["Dataset", "Tokenizer", "dry_run", "open", "open_splits", "prefetch"]


def open(data: "DataConfig", *, sequence_length: int, vocab_size: int, seed: int, split: str = "train") -> Dataset:
    """The training or validation split of the configured source, cut into windows of sequence_length tokens.

    vocab_size is the model's; every id is checked to lie below it. Raises UserError, naming the key, for a
    source that is not there, a vocabulary that is too small, or a split without text.
    """
    return _open(data, sequence_length, vocab_size, seed, split, {})


def _open(
    data: "DataConfig", sequence_length: int, vocab_size: int, seed: int, split: str, already: dict[str, stores.Opened]
) -> Dataset:
    if split not in ("train", "validation"):
        raise ValueError(f"split {split!r}: 'train' or 'validation'")
    training = split == "train"
    if data.source == "synthetic":
        return SyntheticDataset(
            vocab_size=vocab_size,
            sequence_length=sequence_length,
            seed=seed,
            training=training,
            isolate_documents=data.isolate_documents,
        )
    if data.source == "store":
        return stores.open(data, sequence_length, vocab_size, seed, training, already)
    corpus = _corpus(data)
    documents = corpus.train if training else corpus.validation
    _require(documents, data, corpus)
    tokenizer, store = _tokenize(data, corpus, training, vocab_size)
    largest = int(store.tokens.max())
    if largest >= vocab_size:  # a lookup would clamp it or give NaN, in silence
        raise UserError(f"config.model.vocab_size: {vocab_size}: the data holds token id {largest}")
    return PackedDataset(
        store,
        tokenizer,
        sequence_length=sequence_length,
        seed=seed,
        training=training,
        isolate_documents=data.isolate_documents,
        description=(
            f"{corpus.description}: {len(documents):,} {split} documents, {len(store.tokens):,} tokens "
            f"({data.tokenizer}, {tokenizer.vocab_size:,} ids, {tokenizer.bytes_per_token:.2f} bytes a token)"
        ),
        source={
            "data.source": data.source,
            "the text": _digest(d.digest for d in documents),
            "data.validation_fraction": held_out(data),
            "the size of the text": size(len(documents), len(store.tokens)),
            "the tokenizer": data.tokenizer if data.tokenizer == "bytes" else f"bpe {_digest([store.tokens.data])}",
        },
    )


def open_splits(config: "Config") -> tuple[Dataset, Dataset | None]:
    """The training split of a run, and the validation split if it validates. Raises UserError as `open` does."""
    train, already = config.train, dict[str, stores.Opened]()

    def one(split: str) -> Dataset:
        return _open(config.data, train.sequence_length, config.model.vocab_size, train.seed, split, already)

    training, batches = one("train"), config.eval.batches
    none = "is a target, as its documents have one token or a loss mask hides them"
    looked_at = min(training.num_windows or _FIRST_WINDOWS, _FIRST_WINDOWS)
    if not _has_targets(training, looked_at):
        raise UserError(f"config.data.path: no token of the first {looked_at} rows of training {none}; give other data")
    if not batches:
        return training, None
    validation = one("validation")
    if not _has_targets(validation, batches * train.global_batch_size):
        raise UserError(
            f"config.eval.batches: no token of the first {batches} batches of validation {none}; hold out more, or set "
            "it to 0"
        )
    return training, validation


def _has_targets(dataset: Dataset, windows: int) -> bool:
    """Whether there is one among the first of its windows."""
    pieces = (range(at, min(at + 8, windows)) for at in range(0, windows, 8))
    return any((dataset.batch(0, rows, windows)["targets"] >= 0).any() for rows in pieces)


def dry_run(config: "Config") -> str:
    """What --dry_run says of the data, in lines. Opens it all, but for a text source it trains no tokenizer.

    Raises UserError as `open` does; a store that is not named yet is only said.
    """
    if config.data.source == "store" and not config.data.path.strip(", "):
        return f"data        none yet: {stores.missing(config.data)}"
    if config.data.source in ("store", "synthetic"):
        opened = [dataset.description for dataset in open_splits(config) if dataset is not None]
    else:
        corpus = _corpus(config.data)
        opened = [f"{corpus.description}: {len(corpus.train):,} train documents"]
        if config.eval.batches:
            opened.append(f"{len(corpus.validation):,} validation documents")
            _require(corpus.validation, config.data, corpus)
    return "\n".join(f"{'' if number else 'data':<12}{line}" for number, line in enumerate(opened))


def _require(documents: list[Document], data: "DataConfig", corpus: Corpus) -> None:
    if not documents:
        raise UserError(
            f"config.data.validation_fraction: {data.validation_fraction} leaves no document of "
            f"{corpus.description} for validation; raise it, or set config.eval.batches=0"
        )


def _digest(parts: Iterable[bytes | memoryview]) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for part in parts:
        digest.update(part)
    return digest.hexdigest()


def _corpus(data: "DataConfig") -> Corpus:
    if data.source == "python":
        return python_library(data.validation_fraction)
    if data.source == "files":
        if data.validation_path:
            return with_validation(files(data.path, 0.0), files(data.validation_path, 0.0, "validation_path"))
        return files(data.path, data.validation_fraction)
    raise UserError(f"config.data.source: {data.source!r}: must be python, files, store or synthetic")


def _tokenize(
    data: "DataConfig", corpus: Corpus, training: bool, vocab_size: int
) -> tuple[ByteTokenizer | BpeTokenizer, TokenStore]:
    documents = corpus.train if training else corpus.validation
    if data.tokenizer == "bytes":
        tokenizer = ByteTokenizer()
        if tokenizer.vocab_size > vocab_size:
            raise UserError(
                f"config.model.vocab_size: {vocab_size}: config.data.tokenizer 'bytes' needs at least "
                f"{tokenizer.vocab_size}"
            )
        return tokenizer, tokenizer.store(documents)
    if data.tokenizer == "bpe":
        if data.bpe_vocab_size > vocab_size:
            raise UserError(
                f"config.data.bpe_vocab_size: {data.bpe_vocab_size}: "
                f"more than config.model.vocab_size, {vocab_size}; lower the one or raise the other"
            )
        bpe, store = cached_bpe(corpus.train, documents, data.bpe_vocab_size, data.cache_dir)
        size = sum(len(d.text) for d in documents)
        return dataclasses.replace(bpe, bytes_per_token=size / len(store.tokens)), store
    raise UserError(f"config.data.tokenizer: {data.tokenizer!r}: must be bytes or bpe")

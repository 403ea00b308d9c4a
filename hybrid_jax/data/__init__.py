"""Where batches come from: text of the standard library, files or token stores of the user, or a synthetic
process.

`open(config.data, sequence_length=2048, vocab_size=32000, seed=42).batch(step, rows=range(8),
global_batch_size=8)` is a step's batch; see `Dataset` for what is in it.
"""

import dataclasses
from typing import TYPE_CHECKING

from hybrid_jax.data import mixture
from hybrid_jax.data.interface import Dataset, Tokenizer
from hybrid_jax.data.packing import PackedDataset
from hybrid_jax.data.prefetch import prefetch
from hybrid_jax.data.sources import Corpus, files, python_library, split_store
from hybrid_jax.data.store import StoreReader
from hybrid_jax.data.synthetic import SyntheticDataset
from hybrid_jax.data.tokenizer import BpeTokenizer, ByteTokenizer, IdTokenizer, TokenStore, cached_bpe
from hybrid_jax.errors import UserError

if TYPE_CHECKING:
    from hybrid_jax.config import DataConfig

__all__ = ["Dataset", "Tokenizer", "open", "prefetch"]


def open(data: "DataConfig", *, sequence_length: int, vocab_size: int, seed: int, split: str = "train") -> Dataset:
    """The training or validation split of the configured source, cut into windows of sequence_length tokens.

    vocab_size is the model's; every id is checked to lie below it. Raises UserError, naming the key, for a
    source that is not there, a vocabulary that is too small, or a split without text.
    """
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
        return _open_store(data, sequence_length, vocab_size, seed, training)
    corpus = _corpus(data)
    documents = corpus.train if training else corpus.validation
    if not documents:
        raise UserError(
            f"config.data.validation_fraction: {data.validation_fraction} leaves no document of "
            f"{corpus.description} for validation; raise it, or set config.eval.batches=0"
        )
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
    )


def _open_store(data: "DataConfig", sequence_length: int, vocab_size: int, seed: int, training: bool) -> Dataset:
    """In memory: 16 bytes a document, and 16 more for each epoch whose order is kept; the tokens are mapped."""
    parts = mixture.parse(data.path)
    opened = [_open_reader(part.prefix, vocab_size) for part in parts]
    as_bytes = ByteTokenizer()
    written_as_bytes = data.tokenizer == "bytes" and max(largest for _, largest in opened) < as_bytes.vocab_size
    tokenizer: ByteTokenizer | IdTokenizer
    if written_as_bytes and as_bytes.vocab_size <= vocab_size:
        tokenizer, samples = as_bytes, "samples as bytes"
    else:
        tokenizer, samples = IdTokenizer(vocab_size=vocab_size, end_of_document=vocab_size - 1), "samples as ids"
    split = "train" if training else "validation"
    packed, counts = [], []
    for number, (part, (reader, _)) in enumerate(zip(parts, opened, strict=True)):
        starts, ours, held_out = split_store(reader.starts(), data.validation_fraction)
        documents = ours if training else held_out
        if not len(documents):
            raise UserError(
                f"config.data.validation_fraction: {data.validation_fraction} leaves no document of {reader.bin} for "
                "validation; raise it, or set config.eval.batches=0"
            )
        tokens = int((starts[documents + 1] - starts[documents]).sum())
        counts.append(f"{len(documents):,} {split} documents, {tokens:,} tokens")
        packed.append(
            PackedDataset(
                TokenStore(reader.tokens, starts),
                tokenizer,
                sequence_length=sequence_length,
                seed=seed if len(parts) == 1 else mixture.part_seed(seed, number),
                training=training,
                isolate_documents=data.isolate_documents,
                description=f"{part.prefix} (token store, {reader.dtype}): {counts[-1]} ({samples})",
                documents=documents,
                content=reader.digest(),
            )
        )
    if len(parts) == 1:
        return packed[0]
    weights = [part.weight for part in parts]
    whole = mixture.whole_weights(weights)
    named = [
        part.prefix + f" {100 * weight / sum(whole):.4g}%" * training + f" ({count})"
        for part, weight, count in zip(parts, whole, counts, strict=True)
    ]
    tokens = sum(part.num_tokens for part in packed)
    return mixture.MixtureDataset(
        packed,
        weights,
        seed=seed,
        training=training,
        description=f"{len(parts)} token stores, {tokens:,} tokens ({samples}): {'; '.join(named)}",
    )


def _open_reader(prefix: str, vocab_size: int) -> tuple[StoreReader, int]:
    """The store and the largest of its ids that were looked at."""
    try:
        reader = StoreReader(prefix)
    except UserError as error:
        raise UserError(f"config.data.path: {error}") from None
    try:
        # The trainer looks at the ids of each batch, so a large store is not read through before the first;
        # but a batch is int32, in which a wider id could pass for another.
        return reader, reader.check_ids(vocab_size, sample=reader.dtype.itemsize <= 4)
    except UserError as error:
        raise UserError(f"config.model.vocab_size: {error}") from None


def _corpus(data: "DataConfig") -> Corpus:
    if data.source == "python":
        return python_library(data.validation_fraction)
    if data.source == "files":
        return files(data.path, data.validation_fraction)
    if data.source == "fineweb_edu":
        raise UserError(
            "config.data.source: no prepared set of 'fineweb_edu' is here and this version cannot make one; "
            "add ':smoke' to the config, or set config.data.path and config.data.source to your text (files) or to a "
            "token store (store)"
        )
    raise UserError(f"config.data.source: {data.source!r}: must be python, files, store, synthetic or fineweb_edu")


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

"""The data set that config.data.path names: a token store, or a mixture of several."""

import dataclasses
import math
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from hybrid_jax.data import manifest, mixture, shuffle
from hybrid_jax.data.interface import Dataset, Documents, Tokenizer
from hybrid_jax.data.packing import PackedDataset
from hybrid_jax.data.sources import PIECE, Split, held_out, size, split_store
from hybrid_jax.data.store import StoreReader
from hybrid_jax.data.tokenizer import BpeTokenizer, ByteTokenizer, IdTokenizer, TokenStore, from_manifest
from hybrid_jax.errors import UserError

if TYPE_CHECKING:
    from hybrid_jax.config import DataConfig


@dataclasses.dataclass(frozen=True)
class Opened:
    """A checked store.

    split: into training and validation. largest: of its ids that were looked at. digest: hex, of documents and ids.
    mask: hex digest of its loss mask, "" without one. tokenizer and the hash of its definition: what made it, None and
    "" where no manifest says so.
    """

    reader: StoreReader
    split: Split
    largest: int
    digest: str
    mask: str
    tokenizer: ByteTokenizer | BpeTokenizer | None
    tokenizer_hash: str


def open(
    data: "DataConfig",
    sequence_length: int,
    vocab_size: int,
    seed: int,
    training: bool,
    already: dict[str, Opened],
) -> Dataset:
    """A split of the stores. In memory: what `PackedDataset` says, and up to 8 MiB of document numbers a store; ids,
    and what PREFIX.idx says of documents, stay in the files, which are mapped. already: stores opened for the other
    split, by prefix; those opened here join it.

    Raises UserError, naming the key, for what cannot be opened or trained on.
    """
    separate = not training and bool(data.validation_path)
    path = data.validation_path if separate else data.path
    if not separate and not path.strip(", "):
        raise UserError(missing(data))
    parts = mixture.parse(path, key := "validation_path" if separate else "path")
    fraction = 0.0 if data.validation_path else data.validation_fraction
    for part in parts:
        if part.prefix not in already:
            already[part.prefix] = _open_checked(part.prefix, vocab_size, fraction, key)
    opened = [already[part.prefix] for part in parts]
    if separate:
        _check_apart(data, opened, already)
    split = "train" if training else "validation"
    chosen = [_choose(store, fraction, training or separate) for store in opened]
    for store, documents in zip(opened, chosen, strict=True):
        if not documents.tokens:
            raise UserError(
                f"config.data.validation_fraction: {data.validation_fraction} leaves no document of "
                f"{store.reader.bin} for {split}; "
                + ("lower it" if training else "raise it, or set config.eval.batches=0")
            )
    tokenizer, samples = _tokenizer(data, opened, [documents.tokens for documents in chosen], vocab_size)
    packed, counts = [], []
    for number, (store, documents) in enumerate(zip(opened, chosen, strict=True)):
        source = {
            "data.source": data.source,
            "the tokens of data.path": store.digest,
            "the loss mask of data.path": store.mask or "none",
            "data.validation_fraction": held_out(data),
            "the size of data.path": size(documents.num_documents, documents.tokens),
        }
        if len(parts) == 1:  # of several, the mixture says it
            source["the number of stores in data.path"] = "1"
        if store.tokenizer_hash:
            source["the tokenizer"] = store.tokenizer_hash
        dataset = PackedDataset(
            documents.of,
            tokenizer,
            sequence_length=sequence_length,
            seed=seed if len(parts) == 1 else mixture.part_seed(seed, number),
            training=training,
            isolate_documents=data.isolate_documents,
            description="",
            documents=documents.which,
            learn=store.reader.learn,
            source=source,
        )
        masked = ", loss mask" * bool(store.mask)
        counts.append(f"{documents.num_documents:,} {split} documents, {documents.tokens:,} tokens{masked}")
        packed.append(dataset)
    if len(parts) == 1:
        packed[0].description = f"{parts[0].prefix} (token store, {opened[0].reader.dtype}): {counts[0]} ({samples})"
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


def missing(data: "DataConfig") -> str:
    """What to do about an empty config.data.path, in one line."""
    if not data.prepare:
        return "config.data.path: empty; data.source 'store' needs PREFIX of a pair PREFIX.bin and PREFIX.idx"
    return (
        f"config.data.path: empty; make this recipe's data with `python -m hybrid_jax.data.prepare {data.prepare} "
        "--output PREFIX` and give --config.data.path=PREFIX, or add ':smoke' to the config to run without it"
    )


def _check_apart(data: "DataConfig", validation: list[Opened], already: dict[str, Opened]) -> None:
    """Raises UserError for a store that is trained on and validated on, under one name or two, and for two
    tokenizers."""
    trained = [part.prefix for part in mixture.parse(data.path)]
    for store in validation:
        for prefix in trained:
            same_file = os.path.realpath(f"{manifest.stem(prefix)}.idx") == os.path.realpath(store.reader.idx)
            if same_file or (prefix in already and already[prefix].digest == store.digest):
                raise UserError(
                    f"config.data.validation_path: {store.reader.bin} is in config.data.path too, as {prefix}, so it "
                    "would be validated on what it was trained on; name another store, or leave it empty for "
                    "data.validation_fraction"
                )
            about = manifest.read(prefix)
            if about and store.tokenizer_hash and about["tokenizer"]["sha256"] != store.tokenizer_hash:
                raise UserError(
                    f"config.data.validation_path: {store.reader.bin} was made with another tokenizer than {prefix}; "
                    "prepare both with the same one"
                )


class _Chosen(NamedTuple):
    """Documents of a split; `which` as PackedDataset takes it."""

    of: Documents
    which: np.ndarray | Callable[[np.ndarray], np.ndarray]
    num_documents: int
    tokens: int


def _choose(store: Opened, fraction: float, ours: bool) -> _Chosen:
    """ours: of training, or of a store that holds nothing out."""
    reader, split = store.reader, store.split
    if fraction > 0 and sum(split.documents) == 1 and reader.num_tokens > 1:  # an only one is cut
        cut = min(max(round(reader.num_tokens * (1 - fraction)), 1), reader.num_tokens - 1)
        halves = TokenStore(reader.tokens, np.asarray([0, cut, reader.num_tokens]))
        return _Chosen(halves, np.asarray([0 if ours else 1]), 1, cut if ours else reader.num_tokens - cut)
    count, tokens = (of[0 if ours else 1] for of in (split.documents, split.tokens))
    which = split.trained_on if ours else split.held_out
    # A list of numbers where it is short: orders of these documents alone. Runs go on by them, so this stays as it is.
    listed = (reader.num_documents if ours else count) <= shuffle.TABLE
    return _Chosen(reader, _numbers(reader, which) if listed else which, count, tokens)


def _numbers(reader: StoreReader, which: Callable[[np.ndarray], np.ndarray]) -> np.ndarray:
    """Of the documents with tokens of which `which` holds, int64, ascending."""
    found = []
    for at in range(0, reader.num_documents, PIECE):
        numbers = np.flatnonzero(reader.scan(at, min(at + PIECE, reader.num_documents))) + at
        found.append(numbers[which(numbers)])
    return np.concatenate(found)


def _tokenizer(data: "DataConfig", opened: list[Opened], tokens: list[int], vocab_size: int) -> tuple[Tokenizer, str]:
    """(tokenizer, how samples are written, in words). tokens: of the split in each store.

    The one that the stores' manifests name, with the bytes per token of all the split if all of them say it; else
    bytes where all ids may be bytes, and numbers where not.
    """
    known = [store for store in opened if store.tokenizer is not None]
    for store in known:
        if store.tokenizer_hash != known[0].tokenizer_hash:
            raise UserError(
                f"config.data.path: {store.reader.bin} was made with another tokenizer than {known[0].reader.bin}; "
                "prepare both with the same one"
            )
    if known and known[0].tokenizer is not None:
        ratio = math.nan
        if len(known) == len(opened):
            sizes = [n * t.tokenizer.bytes_per_token for n, t in zip(tokens, opened, strict=True) if t.tokenizer]
            ratio = sum(sizes) / sum(tokens)
        return dataclasses.replace(known[0].tokenizer, bytes_per_token=ratio), "samples as text"
    as_bytes = ByteTokenizer()
    if data.tokenizer == "bytes" and max(store.largest for store in opened) < as_bytes.vocab_size <= vocab_size:
        return as_bytes, "samples as bytes"
    return IdTokenizer(vocab_size=vocab_size, end_of_document=vocab_size - 1), "samples as ids"


def _open_checked(prefix: str, vocab_size: int, fraction: float, key: str) -> Opened:
    try:
        reader = StoreReader(prefix)
        mask = reader.check_mask()
        made_by, tokenizer_hash = from_manifest(prefix), ""
        about = manifest.read(prefix)
        if about is not None:
            tokenizer_hash = about["tokenizer"]["sha256"]
            if about.get("tokens") != reader.num_tokens:
                raise UserError(
                    f"{manifest.path_of(prefix)}: is of another store: it counts {about.get('tokens')} tokens, "
                    f"{reader.bin.name} has {reader.num_tokens}; copy the files of one store"
                )
            if about.get("loss_mask") and not mask:
                raise UserError(
                    f"{reader.mask}: no such file; it is the store's loss mask and has to be copied with it"
                )
            manifest.check_sizes(prefix, about)
        if made_by is not None and not 0 < made_by.bytes_per_token < math.inf:
            raise UserError(
                f"{manifest.path_of(prefix)}: says {made_by.bytes_per_token} bytes a token, which cannot be; prepare "
                "the store again"
            )
    except UserError as error:
        raise UserError(f"config.data.{key}: {error}") from None
    if made_by is not None and (needed := max(made_by.vocab_size, made_by.end_of_document + 1)) > vocab_size:
        raise UserError(
            f"config.model.vocab_size: {vocab_size}: the tokenizer of {reader.bin} has {needed} ids; set it to at "
            "least that many"
        )
    try:
        # The trainer looks at the ids of each batch, so a large store is not read through before the first;
        # but a batch is int32, in which a wider id could pass for another.
        largest = reader.check_ids(vocab_size, sample=reader.dtype.itemsize <= 4)
    except UserError as error:
        raise UserError(f"config.model.vocab_size: {error}") from None
    split = split_store(reader, fraction)
    return Opened(reader, split, largest, reader.digest().hex(), mask, made_by, tokenizer_hash)

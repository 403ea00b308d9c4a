"""Token stores on disk, in the format of Megatron-Core's indexed dataset: PREFIX.bin and PREFIX.idx.

PREFIX.bin is the ids of all documents end to end. PREFIX.idx, little-endian and without padding:

    magic              9 bytes     MMIDIDX, two zero bytes
    version            uint64      1
    dtype code         uint8       of the ids in PREFIX.bin, see DTYPES
    sequences          uint64      S
    document index     uint64      its length, documents + 1
    sizes              int32 [S]   tokens of each sequence
    pointers           int64 [S]   byte of PREFIX.bin at which each sequence starts
    document index     int64 [documents + 1]   first sequence of each document, and S

PREFIX.mask.bin, which is ours and may be absent, is one byte for each id of PREFIX.bin: 1 if the loss counts it
as a target, 0 if not, as in the prompts of fine-tuning.

A document is any number of sequences that follow each other; here, as Megatron's preprocess_data writes them
unless it splits sentences, one, and none if it is empty. Multimodal datasets append S modes, int8: not read.
"""

import contextlib
import hashlib
import os
import uuid
import zlib
from array import array
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import BinaryIO

import numpy as np

from hybrid_jax.data.manifest import stem
from hybrid_jax.data.store_index import CHUNK, DTYPES, HEADER, LONGEST, MAGIC, POINTER, SIZE, VERSION, Index, read
from hybrid_jax.errors import UserError
from hybrid_jax.manifest import checksum

_LEARN = np.dtype("u1")
_BLOCK_BYTES, _BLOCKS = 2**16, 2**12  # of a sample of the ids


class StoreReader:
    """A store, memory-mapped. Whoever goes through all of it reads it instead: what was mapped counts as memory in use.

    tokens: read-only [num_tokens], the ids of all documents end to end, of dtype `dtype`; slices of it read
    only themselves. learn: with PREFIX.mask.bin, its content, uint8 [num_tokens], else None. Raises UserError,
    naming the file, for a missing one, another format, files that do not agree with each other, and a store
    without tokens.
    """

    def __init__(self, prefix: str | Path):
        prefix = stem(prefix)
        self.idx, self.bin = Path(f"{prefix}.idx"), Path(f"{prefix}.bin")
        self.mask = Path(f"{prefix}.mask.bin")
        for path in (self.idx, self.bin):
            if not path.is_file():
                kind = "is a folder" if path.is_dir() else "is no plain file" if path.exists() else "no such file"
                raise UserError(
                    f"{path}: {kind}; a token store is a pair PREFIX.bin and PREFIX.idx, named by PREFIX"
                    f"{_stores_in(Path(prefix))}"
                )
        try:
            self._index = index = Index(self.idx, self.bin)
            self.dtype, self.num_documents, self.num_tokens = index.dtype, index.documents, index.tokens
            if not self.num_tokens:
                raise UserError(f"{self.bin}: holds no token")
            self._sizes = _mapped(index.file, SIZE, index.sizes_at, index.sequences)
            self._pointers = _mapped(index.file, POINTER, index.pointers_at, index.sequences)
            self._documents = _mapped(index.file, POINTER, index.documents_at, index.documents + 1)
            self.tokens = _mapped(self.bin, self.dtype, 0, self.num_tokens)
            self.learn = self._map_mask() if self.mask.exists() else None
        except OSError as error:
            raise UserError(f"{error.filename or self.idx}: {error.strerror or error}") from None

    def document(self, number: int) -> np.ndarray:
        """Its tokens, a read-only view [length]. Raises IndexError outside [0, num_documents)."""
        if not 0 <= number < self.num_documents:
            raise IndexError(f"document {number}: the store has {self.num_documents}")
        begin, end = self._first_tokens(self._documents[number : number + 2])
        return self.tokens[begin:end]

    def lengths(self, numbers: np.ndarray) -> np.ndarray:
        """Tokens of each of these documents, int64. Looks at 4 bytes of PREFIX.idx for each, or, in a store with
        documents of no or of several sequences, at 16."""
        if self._index.one_sequence_each:
            return self._sizes[numbers].astype(np.int64)
        return self._first_tokens(self._documents[numbers + 1]) - self._first_tokens(self._documents[numbers])

    def scan(self, first: int, end: int) -> np.ndarray:
        """As `lengths` of the documents first, first + 1, ..., end - 1. Maps nothing of PREFIX.idx."""
        return self._index.lengths(first, end)

    def first_tokens(self, numbers: np.ndarray) -> np.ndarray:
        """Index into `tokens` of the first token of each of these documents, int64."""
        return self._first_tokens(numbers if self._index.one_sequence_each else self._documents[numbers])

    def check_ids(self, vocab_size: int, *, sample: bool = False) -> int:
        """The largest id. Raises UserError for one outside [0, vocab_size).

        Reads all of PREFIX.bin in pieces, or, with `sample`, what `digest` reads of it.
        """
        largest = 0
        for at, tokens in self._blocks(sample):
            low, high = int(tokens.min()), int(tokens.max())
            if low < 0 or high >= vocab_size:
                place = int(np.argmax((tokens < 0) | (tokens >= vocab_size)))
                raise UserError(
                    f"{self.bin}: token {at + place} is the id {tokens[place]}, not one of {vocab_size}; "
                    "the vocabulary must be that of the tokenizer that made the store"
                )
            largest = max(largest, high)
        return largest

    def digest(self) -> bytes:
        """Of documents and ids: all of PREFIX.idx, and PREFIX.bin up to 256 MiB; of a larger one 4,096 blocks of
        64 KiB, evenly spaced, the first and the last among them."""
        digest = hashlib.blake2b(digest_size=16)
        self._index.file.seek(0)
        while piece := self._index.file.read(CHUNK):
            digest.update(piece)
        for _, tokens in self._blocks(sample=True):
            digest.update(tokens.data)
        return digest.digest()

    def check_mask(self) -> str:
        """Hex digest of as much of PREFIX.mask.bin as `digest` reads of PREFIX.bin, "" without one. Raises UserError
        for a value that is neither 0 nor 1, and for a mask without a 1."""
        if self.learn is None:
            return ""
        digest, any_learnt = hashlib.blake2b(digest_size=16), False
        for at, values in self._blocks(sample=True, path=self.mask, dtype=_LEARN):
            if values.max() > 1:
                place = int(np.argmax(values > 1))
                raise UserError(f"{self.mask}: byte {at + place} is {values[place]}, neither 0 nor 1; write it again")
            any_learnt |= bool(values.any())
            digest.update(values.data)
        if not any_learnt:
            raise UserError(f"{self.mask}: holds no 1, so there is no token to learn; write it again")
        return digest.hexdigest()

    def _map_mask(self) -> np.ndarray:
        if not self.mask.is_file():
            raise UserError(f"{self.mask}: is a folder, not the loss mask of {self.bin.name}; remove it")
        self._index.compare_size(self.mask, self.mask.stat().st_size, self.num_tokens)
        return _mapped(self.mask, _LEARN, 0, self.num_tokens)

    def _first_tokens(self, sequences: np.ndarray) -> np.ndarray:
        """Of sequences given by number; the number after the last one stands for the end."""
        pointers = self._pointers[np.minimum(sequences, self._index.sequences - 1)]
        return np.where(sequences < self._index.sequences, pointers // self.dtype.itemsize, self.num_tokens)

    def _blocks(
        self, sample: bool, path: Path | None = None, dtype: np.dtype | None = None
    ) -> Iterator[tuple[int, np.ndarray]]:
        """(first token, values) of the blocks of PREFIX.bin, or of another file with a value a token."""
        path, dtype = path or self.bin, dtype or self.dtype
        length = _BLOCK_BYTES // dtype.itemsize
        if sample and self.num_tokens > _BLOCKS * length:
            places = np.linspace(0, self.num_tokens - length, _BLOCKS, dtype=np.int64).tolist()
        else:
            length *= 64
            places = list(range(0, self.num_tokens, length))
        with path.open("rb") as file:
            for at in places:
                yield at, read(file, path, dtype, at * dtype.itemsize, min(length, self.num_tokens - at))


class StoreWriter:
    """Writes a store document by document, in memory that does not grow with it; use it as a context manager.

    Both files have temporary names in the folder of `prefix` until the block ends without an exception; then
    PREFIX.bin gets its name, and PREFIX.idx after it. Ids are uint16 for vocabularies under 65,536, else
    int32. With `masked`, which of the ids are learnt goes into PREFIX.mask.bin. Raises UserError for a
    vocabulary that int32 cannot number, for files that are there already and what cannot be written, and at
    the end for a store without tokens, or a masked one without a token to learn.

    files: after the block, bytes and crc32 of each file, by its ending (".bin").
    """

    def __init__(self, prefix: str | Path, *, vocab_size: int, masked: bool = False):
        if not 1 <= vocab_size <= 2**31:
            raise UserError(f"vocabulary of {vocab_size}: a token store holds 1 to {2**31} different ids")
        prefix = stem(prefix)
        if not os.path.basename(prefix):
            raise UserError(
                f"{prefix!r}: names no file; give a token store a name, such as {os.path.join(prefix, 'corpus')}"
            )
        self.idx, self.bin, self.mask = (Path(f"{prefix}.{ending}") for ending in ("idx", "bin", "mask.bin"))
        for file in (self.idx, self.bin, self.mask):
            if file.exists():
                raise UserError(f"{file}: is there already; remove it, or write the store under another name")
        self.vocab_size = vocab_size
        self.code = 8 if vocab_size < 2**16 else 4
        self.dtype = np.dtype(DTYPES[self.code])
        self.num_tokens = 0
        self.num_documents = 0
        self.files: dict[str, dict[str, int]] = {}
        self._crcs = [0, 0, 0]  # of the ids, the index, the mask
        self._uncut = 0  # tokens that belong to no document yet
        self._empty = array("q")  # numbers of the documents without tokens
        token = uuid.uuid4().hex[:8]
        self._final = [self.bin, self.idx, *([self.mask] if masked else [])]
        self._scratch = [file.with_name(f".{file.name}.{token}.tmp") for file in self._final]
        self._any_learnt = not masked
        self._files: list[BinaryIO] = []
        self._entered = False

    def append(self, tokens: np.ndarray, learn: np.ndarray | None = None) -> None:
        """One document: integers [length], which may be 0, and of a masked store, bool [length], which of them are
        learnt. Raises UserError for an id outside the vocabulary, a document over 2^31 - 1 tokens, or a full
        disk."""
        self.extend(tokens, np.asarray([len(tokens)]), learn)

    def extend(self, tokens: np.ndarray, sizes: np.ndarray, learn: np.ndarray | None = None) -> None:
        """Documents end to end: integers [N], and the integers [documents] that cut them and sum to N; of a masked
        store also `learn`, bool [N].

        Raises UserError as `append` does; nothing of the call is then in the store, a full disk apart.
        """
        tokens, sizes = (np.asarray(x) if len(x) else np.empty(0, np.int64) for x in (tokens, sizes))
        self._check_sizes(sizes, self._uncut + len(tokens))
        self._write(tokens, learn, sizes)
        self.cut(sizes)

    def write(self, tokens: np.ndarray, learn: np.ndarray | None = None) -> None:
        """Ids of documents that are not whole yet, as of `extend`; `cut` says later where they end."""
        self._write(np.asarray(tokens), learn, None)

    def cut(self, sizes: np.ndarray) -> None:
        """Integers [documents] that cut the ids written since the last cut, and sum to as many."""
        sizes = np.asarray(sizes) if len(sizes) else np.empty(0, np.int64)
        self._check_sizes(sizes, self._uncut)
        with self._errors():
            self._files[1].write(np.ascontiguousarray(sizes[sizes > 0], SIZE).data)
        self._empty.extend((self.num_documents + np.flatnonzero(sizes == 0)).tolist())
        self.num_documents += len(sizes)
        self._uncut = 0

    def _write(self, tokens: np.ndarray, learn: np.ndarray | None, sizes: np.ndarray | None) -> None:
        if not self._entered:
            raise ValueError("StoreWriter: use it in a with block, whose end gives the files their names")
        if tokens.ndim != 1 or tokens.dtype.kind not in "iu":
            raise ValueError(
                "tokens: are no array of integers, of one dimension; for text as bytes, np.frombuffer(text, np.uint8)"
            )
        if (learn is not None) != (len(self._final) == 3):
            raise ValueError("learn: is given for every document of a store made with masked=True, and for no other")
        if learn is not None:
            learn = np.asarray(learn) if len(learn) else np.empty(0, bool)
            if learn.dtype != bool or learn.shape != tokens.shape:
                raise ValueError(f"learn: is no array of {len(tokens)} bools, one a token")
        if tokens.size and (tokens.min() < 0 or tokens.max() >= self.vocab_size):
            place = int(np.argmax((tokens < 0) | (tokens >= self.vocab_size)))
            more = 0 if sizes is None else int(np.searchsorted(np.cumsum(sizes), place, side="right"))
            raise UserError(
                f"{self.bin}: document {self.num_documents + more} has the id {tokens[place]}, not one of the "
                f"vocabulary's {self.vocab_size}"
            )
        with self._errors():
            self._put(0, np.ascontiguousarray(tokens, self.dtype))
            if learn is not None:
                self._put(2, np.ascontiguousarray(learn, _LEARN))
                self._any_learnt |= bool(learn.any())
        self.num_tokens += len(tokens)
        self._uncut += len(tokens)

    def _put(self, number: int, values: np.ndarray) -> None:
        self._files[number].write(values.data)
        self._crcs[number] = zlib.crc32(values.data, self._crcs[number])

    def _check_sizes(self, sizes: np.ndarray, tokens: int) -> None:
        if sizes.ndim != 1 or sizes.dtype.kind not in "iu":
            raise ValueError("sizes: are no array of integers, of one dimension")
        if (sizes.size and sizes.min() < 0) or int(sizes.sum()) != tokens:
            raise ValueError(f"sizes: do not cut {tokens} tokens")
        if sizes.size and sizes.max() > LONGEST:
            number = self.num_documents + int(np.argmax(sizes > LONGEST))
            raise UserError(f"{self.bin}: document {number} has {sizes.max()} tokens, over {LONGEST}; cut it in parts")

    def __enter__(self) -> "StoreWriter":
        with self._errors():
            for path in self._scratch:
                self._files.append(path.open("x+b"))
            # Sizes are the first table, so they can be written as they come; the counts are filled in at the end.
            self._files[1].write(bytes(HEADER.size))
        self._entered = True
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                with self._errors():
                    self._finish()
        finally:
            self._discard()

    def _finish(self) -> None:
        if self._uncut:
            raise ValueError(f"StoreWriter: {self._uncut} tokens belong to no document")
        if not self.num_tokens:
            raise UserError(f"{self.bin}: not written: no document with a token was added")
        if not self._any_learnt:
            raise UserError(f"{self.bin}: not written: its loss mask leaves no token to learn")
        index = self._files[1]
        sequences = self.num_documents - len(self._empty)
        sizes_end = HEADER.size + sequences * SIZE.itemsize
        index.flush()
        tokens = 0
        for at in range(0, sequences, CHUNK):
            count = min(CHUNK, sequences - at)
            sizes = read(index, self.idx, SIZE, HEADER.size + at * SIZE.itemsize, count)
            ends = tokens + np.cumsum(sizes, dtype=np.int64)
            index.seek(sizes_end + at * POINTER.itemsize)
            index.write(((ends - sizes) * self.dtype.itemsize).astype(POINTER).data)
            tokens = int(ends[-1])
        empty = np.asarray(self._empty, np.int64)
        for at in range(0, self.num_documents + 1, CHUNK):
            numbers = np.arange(at, min(at + CHUNK, self.num_documents + 1))
            index.write((numbers - np.searchsorted(empty, numbers)).astype(POINTER).data)
        index.seek(0)
        index.write(HEADER.pack(MAGIC, VERSION, self.code, sequences, self.num_documents + 1))
        for file in self._files:
            file.flush()
            os.fsync(file.fileno())
            file.close()
        self._crcs[1] = checksum(self._scratch[1])  # its header came last
        for path, scratch, crc in zip(self._final, self._scratch, self._crcs, strict=False):
            ending = path.name.removeprefix(self.bin.name.removesuffix(".bin"))
            self.files[ending] = {"bytes": scratch.stat().st_size, "crc32": crc}
        for number in (*range(2, len(self._final)), 0, 1):  # the index last: a store is there when its index is
            os.replace(self._scratch[number], self._final[number])

    @contextlib.contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            self._discard()
            raise UserError(f"{self.bin}: cannot be written: {error.strerror or error}") from None

    def _discard(self) -> None:
        for file in self._files:
            with contextlib.suppress(OSError):  # what a full disk left unwritten
                file.close()
        for path in self._scratch:
            with contextlib.suppress(OSError):
                path.unlink(missing_ok=True)


def _stores_in(folder: Path) -> str:
    """Of a prefix that is a folder: the stores in it, in words."""
    if not folder.is_dir():
        return ""
    found = sorted(path.name.removesuffix(".idx") for path in folder.glob("*.idx"))
    named = ", ".join(os.path.join(folder, name) for name in found[:3]) or "none"
    return f"; {folder} is a folder, stores in it: {named}{' and more' * (len(found) > 3)}"


def _mapped(file: Path | BinaryIO, dtype: np.dtype, offset: int, count: int) -> np.ndarray:
    """Read-only [count]; a plain array, whose slices are cheaper than np.memmap's."""
    return np.asarray(np.memmap(file, dtype, "r", offset, (count,)))

"""PREFIX.idx of a token store, in the format of Megatron-Core's indexed dataset; little-endian and without padding:

    magic              9 bytes     MMIDIDX, two zero bytes
    version            uint64      1
    dtype code         uint8       of the ids in PREFIX.bin, see DTYPES
    sequences          uint64      S
    document index     uint64      its length, documents + 1
    sizes              int32 [S]   tokens of each sequence
    pointers           int64 [S]   byte of PREFIX.bin at which each sequence starts
    document index     int64 [documents + 1]   first sequence of each document, and S

A document is any number of sequences that follow each other; here, as Megatron's preprocess_data writes them
unless it splits sentences, one, and none if it is empty. Multimodal datasets append S modes, int8: not read.
"""

import os
import struct
from array import array
from pathlib import Path
from typing import BinaryIO

import numpy as np

from hybrid_jax.errors import UserError

DTYPES = {1: "<u1", 2: "<i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}
SIZE, POINTER = np.dtype("<i4"), np.dtype("<i8")
HEADER = struct.Struct("<9sQBQQ")
LONGEST = 2**31 - 1  # a size is an int32
CHUNK = 2**20  # entries looked at in one go
_FLOATS = (6, 7)
_MAGIC = b"MMIDIDX\0\0"
_VERSION = 1


class Index:
    """A checked PREFIX.idx: opening it reads it once, in pieces, and keeps nothing of it but what it says of its parts.

    dtype: of the ids. num_sequences, num_documents, num_tokens: how many there are. one_sequence_each: whether every
    document is one sequence. size_at, pointer_at, document_at: bytes at which its tables begin. Raises UserError,
    naming the file, for another format, and for files that do not agree with each other.
    """

    def __init__(self, idx: Path, bin: Path):
        self.idx, self.bin = idx, bin
        with idx.open("rb") as file:
            self.dtype, self.num_sequences, self.num_documents = self._read_header(file)
            self.size_at = HEADER.size
            self.pointer_at = self.size_at + self.num_sequences * SIZE.itemsize
            self.document_at = self.pointer_at + self.num_sequences * POINTER.itemsize
            self.num_tokens = self._check_sequences(file)
            self.one_sequence_each = self._check_documents(file)

    def _read_header(self, file: BinaryIO) -> tuple[np.dtype, int, int]:
        """(dtype of the ids, sequences, documents)."""
        header = file.read(HEADER.size)
        if header[: len(_MAGIC)] != _MAGIC[: len(header)] or not header:
            raise UserError(f"{self.idx}: is not the index of a token store: it does not begin with MMIDIDX")
        if len(header) < HEADER.size:
            raise UserError(f"{self.idx}: is cut short within its header; write or copy the store again")
        _, version, code, sequences, index_length = HEADER.unpack(header)
        if version == int.from_bytes(_VERSION.to_bytes(8, "big"), "little"):
            raise UserError(f"{self.idx}: is big-endian, the format is little-endian; write the store again")
        if version != _VERSION:
            raise UserError(f"{self.idx}: has version {version} of the format; only version {_VERSION} can be read")
        if code in _FLOATS:
            raise UserError(f"{self.idx}: has dtype code {code}, floating-point numbers, which are no token ids")
        if code not in DTYPES:
            raise UserError(f"{self.idx}: has the unknown dtype code {code}; known are {', '.join(map(str, DTYPES))}")
        expected = HEADER.size + sequences * (SIZE.itemsize + POINTER.itemsize) + index_length * POINTER.itemsize
        size = os.fstat(file.fileno()).st_size
        if sequences and size == expected + sequences:
            raise UserError(f"{self.idx}: is multimodal (a mode for each sequence), which cannot be read; text can")
        self.compare_size(self.idx, size, expected)
        if not index_length:
            raise UserError(f"{self.idx}: has no document index, not even its first entry, 0; write it again")
        return np.dtype(DTYPES[code]), sequences, index_length - 1

    def _check_sequences(self, file: BinaryIO) -> int:
        """Tokens of all sequences, which must lie in PREFIX.bin without gaps."""
        there = self.bin.stat().st_size
        tokens = 0
        for at in range(0, self.num_sequences, CHUNK):
            count = min(CHUNK, self.num_sequences - at)
            sizes = read(file, self.idx, SIZE, self.size_at + at * SIZE.itemsize, count)
            pointers = read(file, self.idx, POINTER, self.pointer_at + at * POINTER.itemsize, count)
            if sizes.min() < 0:
                bad = int(np.argmax(sizes < 0))
                raise UserError(f"{self.idx}: sequence {at + bad} has {sizes[bad]} tokens; write the store again")
            ends = tokens + np.cumsum(sizes, dtype=np.int64)
            expected = (ends - sizes) * self.dtype.itemsize
            if not np.array_equal(pointers, expected):
                bad = int(np.argmax(pointers != expected))
                raise UserError(
                    f"{self.idx}: sequence {at + bad} starts at byte {pointers[bad]}, "
                    + (
                        f"outside the {there} of {self.bin.name}"
                        if not 0 <= pointers[bad] <= there
                        else f"but the sizes before it end at {expected[bad]}"
                    )
                    + "; write or copy the store again"
                )
            tokens = int(ends[-1])
        self.compare_size(self.bin, there, tokens * self.dtype.itemsize)
        return tokens

    def _check_documents(self, file: BinaryIO) -> bool:
        """Whether every document is one sequence."""
        last, one_each = 0, self.num_documents == self.num_sequences
        for at in range(0, self.num_documents + 1, CHUNK):
            count = min(CHUNK, self.num_documents + 1 - at)
            index = read(file, self.idx, POINTER, self.document_at + at * POINTER.itemsize, count)
            if at == 0 and index[0] != 0:
                raise UserError(f"{self.idx}: its document index begins with {index[0]}, not with 0; write it again")
            falls = np.diff(index, prepend=last) < 0
            if falls.any():
                bad = at + int(np.argmax(falls))
                raise UserError(f"{self.idx}: its document index falls at entry {bad}; write the store again")
            last = int(index[-1])
            one_each = one_each and bool((index == np.arange(at, at + count)).all())
        if last != self.num_sequences:
            raise UserError(
                f"{self.idx}: its document index ends at sequence {last}, not at {self.num_sequences}, "
                "the number of sequences; write the store again"
            )
        return one_each

    def compare_size(self, file: Path, size: int, expected: int) -> None:
        """Raises UserError where a file of the store has not the size that this makes it."""
        if size != expected:
            what = "is cut short" if size < expected else "goes on after its end"
            raise UserError(
                f"{file}: {what}: it has {size} bytes, {self.idx.name} makes it {expected}; write or copy it again"
            )


def finish(file: BinaryIO, path: Path, code: int, documents: int, empty: array) -> None:
    """Completes an index of which the sizes are written, behind room for the header. empty: numbers of the documents
    without tokens, in order."""
    itemsize = np.dtype(DTYPES[code]).itemsize
    sequences = documents - len(empty)
    sizes_end = HEADER.size + sequences * SIZE.itemsize
    file.flush()
    tokens = 0
    for at in range(0, sequences, CHUNK):
        count = min(CHUNK, sequences - at)
        sizes = read(file, path, SIZE, HEADER.size + at * SIZE.itemsize, count)
        ends = tokens + np.cumsum(sizes, dtype=np.int64)
        file.seek(sizes_end + at * POINTER.itemsize)
        file.write(((ends - sizes) * itemsize).astype(POINTER).data)
        tokens = int(ends[-1])
    gaps = np.asarray(empty, np.int64)
    for at in range(0, documents + 1, CHUNK):
        numbers = np.arange(at, min(at + CHUNK, documents + 1))
        file.write((numbers - np.searchsorted(gaps, numbers)).astype(POINTER).data)
    file.seek(0)
    file.write(HEADER.pack(_MAGIC, _VERSION, code, sequences, documents + 1))


def read(file: BinaryIO, path: Path, dtype: np.dtype, offset: int, count: int) -> np.ndarray:
    """[count] from byte `offset` on, in memory. Raises UserError where the file ends before."""
    file.seek(offset)
    raw = file.read(count * dtype.itemsize)
    if len(raw) < count * dtype.itemsize:
        raise UserError(f"{path}: became shorter while it was read; write or copy the store again")
    return np.frombuffer(raw, dtype)

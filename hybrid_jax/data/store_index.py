"""PREFIX.idx of a token store (store.py has the format): its header and tables, read in pieces and checked."""

import os
import struct
from pathlib import Path
from typing import BinaryIO

import numpy as np

from hybrid_jax.errors import UserError

DTYPES = {1: "<u1", 2: "<i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}
_FLOATS = (6, 7)
MAGIC = b"MMIDIDX\0\0"
VERSION = 1
HEADER = struct.Struct("<9sQBQQ")
SIZE, POINTER = np.dtype("<i4"), np.dtype("<i8")
LONGEST = 2**31 - 1  # a size is an int32
CHUNK = 2**18  # entries looked at in one go


class Index:
    """An open PREFIX.idx that agrees with itself and with the size of PREFIX.bin. Nothing of its tables is kept.

    dtype: of the ids. sequences, documents, tokens: how many there are. one_sequence_each: whether every document is
    one sequence. sizes_at, pointers_at, documents_at: the bytes at which its tables begin.

    Raises UserError, naming the file, for another format and files that do not agree; OSError.
    """

    def __init__(self, path: Path, bin: Path):
        self.path = path
        self.file = path.open("rb")  # stays open: the name may stand for another file later
        self.dtype, self.sequences, self.documents = self._read_header()
        self.sizes_at = HEADER.size
        self.pointers_at = self.sizes_at + self.sequences * SIZE.itemsize
        self.documents_at = self.pointers_at + self.sequences * POINTER.itemsize
        self.tokens = self._check_sequences(bin)
        self.one_sequence_each = self._check_documents()

    def table(self, dtype: np.dtype, table_at: int, first: int, count: int) -> np.ndarray:
        """[count] of a table, from its entry `first` on. Raises UserError where the file became shorter."""
        return read(self.file, self.path, dtype, table_at + first * dtype.itemsize, count)

    def lengths(self, first: int, end: int) -> np.ndarray:
        """Tokens of each of the documents first, first + 1, ..., end - 1, int64."""
        if self.one_sequence_each:
            return self.table(SIZE, self.sizes_at, first, end - first).astype(np.int64)
        cuts = self.table(POINTER, self.documents_at, first, end - first + 1)
        sizes = self.table(SIZE, self.sizes_at, int(cuts[0]), int(cuts[-1] - cuts[0]))
        ends = np.concatenate([np.zeros(1, np.int64), np.cumsum(sizes, dtype=np.int64)])
        return np.diff(ends[cuts - cuts[0]])

    def compare_size(self, file: Path, size: int, expected: int) -> None:
        if size != expected:
            what = "is cut short" if size < expected else "goes on after its end"
            raise UserError(
                f"{file}: {what}: it has {size} bytes, {self.path.name} makes it {expected}; write or copy it again"
            )

    def _read_header(self) -> tuple[np.dtype, int, int]:
        """(dtype of the ids, sequences, documents)."""
        header = self.file.read(HEADER.size)
        if header[: len(MAGIC)] != MAGIC[: len(header)] or not header:
            raise UserError(f"{self.path}: is not the index of a token store: it does not begin with MMIDIDX")
        if len(header) < HEADER.size:
            raise UserError(f"{self.path}: is cut short within its header; write or copy the store again")
        _, version, code, sequences, index_length = HEADER.unpack(header)
        if version == int.from_bytes(VERSION.to_bytes(8, "big"), "little"):
            raise UserError(f"{self.path}: is big-endian, the format is little-endian; write the store again")
        if version != VERSION:
            raise UserError(f"{self.path}: has version {version} of the format; only version {VERSION} can be read")
        if code in _FLOATS:
            raise UserError(f"{self.path}: has dtype code {code}, floating-point numbers, which are no token ids")
        if code not in DTYPES:
            raise UserError(f"{self.path}: has the unknown dtype code {code}; known are {', '.join(map(str, DTYPES))}")
        expected = HEADER.size + sequences * (SIZE.itemsize + POINTER.itemsize) + index_length * POINTER.itemsize
        size = os.fstat(self.file.fileno()).st_size
        if sequences and size == expected + sequences:
            raise UserError(f"{self.path}: is multimodal (a mode for each sequence), which cannot be read; text can")
        self.compare_size(self.path, size, expected)
        if not index_length:
            raise UserError(f"{self.path}: has no document index, not even its first entry, 0; write it again")
        return np.dtype(DTYPES[code]), sequences, index_length - 1

    def _check_sequences(self, bin: Path) -> int:
        """Tokens of all sequences, which must lie in PREFIX.bin without gaps."""
        there = bin.stat().st_size
        tokens = 0
        for at in range(0, self.sequences, CHUNK):
            count = min(CHUNK, self.sequences - at)
            sizes = self.table(SIZE, self.sizes_at, at, count)
            pointers = self.table(POINTER, self.pointers_at, at, count)
            if sizes.min() < 0:
                bad = int(np.argmax(sizes < 0))
                raise UserError(f"{self.path}: sequence {at + bad} has {sizes[bad]} tokens; write the store again")
            ends = tokens + np.cumsum(sizes, dtype=np.int64)
            expected = (ends - sizes) * self.dtype.itemsize
            if not np.array_equal(pointers, expected):
                bad = int(np.argmax(pointers != expected))
                raise UserError(
                    f"{self.path}: sequence {at + bad} starts at byte {pointers[bad]}, "
                    + (
                        f"outside the {there} of {bin.name}"
                        if not 0 <= pointers[bad] <= there
                        else f"but the sizes before it end at {expected[bad]}"
                    )
                    + "; write or copy the store again"
                )
            tokens = int(ends[-1])
        self.compare_size(bin, there, tokens * self.dtype.itemsize)
        return tokens

    def _check_documents(self) -> bool:
        """Whether every document is one sequence."""
        last, one_each = 0, self.documents == self.sequences
        for at in range(0, self.documents + 1, CHUNK):
            count = min(CHUNK, self.documents + 1 - at)
            index = self.table(POINTER, self.documents_at, at, count)
            if at == 0 and index[0] != 0:
                raise UserError(f"{self.path}: its document index begins with {index[0]}, not with 0; write it again")
            falls = np.diff(index, prepend=last) < 0
            if falls.any():
                bad = at + int(np.argmax(falls))
                raise UserError(f"{self.path}: its document index falls at entry {bad}; write the store again")
            last = int(index[-1])
            one_each = one_each and bool((index == np.arange(at, at + count)).all())
        if last != self.sequences:
            raise UserError(
                f"{self.path}: its document index ends at sequence {last}, not at {self.sequences}, "
                "the number of sequences; write the store again"
            )
        return one_each


def read(file: BinaryIO, path: Path, dtype: np.dtype, offset: int, count: int) -> np.ndarray:
    """[count], in memory; threads may share the file. Raises UserError where it ends before."""
    raw, at = memoryview(bytearray(count * dtype.itemsize)), 0
    while at < len(raw):
        if not (got := os.preadv(file.fileno(), [raw[at:]], offset + at)):
            raise UserError(f"{path}: became shorter while it was read; write or copy the store again")
        at += got
    return np.frombuffer(raw, dtype)

"""Weights in safetensors files, one tensor at a time in either direction, so that no more than one is in memory.

A file is 8 bytes with the length of a header, the header, JSON padded by spaces ({name: {"dtype", "shape",
"data_offsets"}}, offsets from the header's end, without gaps), and the tensors' bytes, little-endian
(https://github.com/huggingface/safetensors, "Format"). Several files lie beside an index that says which tensor is in
which: model.safetensors.index.json.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import re
import struct
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from hybrid_jax.errors import UserError

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
DTYPES = {"F32": np.dtype(np.float32), "BF16": np.dtype(ml_dtypes.bfloat16), "F16": np.dtype(np.float16)}
_ALIGNMENT = 8  # of where the tensors begin
_LONGEST_HEADER = 100_000_000  # bytes, as the safetensors library has it
_BLOCK = 2**24  # bytes of a tensor that are converted at once
_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_UNITS |= {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}
Shape = tuple[int, ...]


def size_of(text: str) -> int:
    """Bytes of "5GB", "500MiB" or a plain number. Raises ValueError."""
    match = re.fullmatch(r"\s*([0-9.]+)\s*([KMGT]?I?B?)\s*", text.upper())
    if not match or match[2] not in _UNITS or not (size := int(float(match[1]) * _UNITS[match[2]])):
        raise ValueError(text)
    return size


# ---- writing -------------------------------------------------------------------


class ShardWriter:
    """The files of a model, to be filled in any order. Use as a context manager.

    shapes: of each tensor, in the order of the files. dtype: a key of DTYPES, of all of them. max_bytes: of tensors in
    a file; one that is larger has a file of its own. Raises OSError, as for a full disk.
    """

    def __init__(self, folder: Path, shapes: Mapping[str, Shape], dtype: str, max_bytes: int):
        self.dtype = DTYPES[dtype]
        self._sizes = {name: math.prod(shape) * self.dtype.itemsize for name, shape in shapes.items()}
        self.total_bytes = sum(self._sizes.values())
        shards = _split(self._sizes, max_bytes)
        self.files = [
            SINGLE if len(shards) == 1 else f"model-{number:05}-of-{len(shards):05}.safetensors"
            for number in range(1, len(shards) + 1)
        ]
        self._place: dict[str, tuple[int, int]] = {}  # (number of the file, offset in it)
        self._left = set(shapes)
        self._open: list[int] = []
        self._folder = folder
        for number, names in enumerate(shards):
            header = _header({name: shapes[name] for name in names}, dtype, self._sizes)
            descriptor = os.open(folder / self.files[number], os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
            self._open.append(descriptor)
            _write_at(descriptor, header, 0)
            offset = len(header)
            for name in names:
                self._place[name] = (number, offset)
                offset += self._sizes[name]

    def __enter__(self) -> ShardWriter:
        return self

    def __exit__(self, kind: type | None, *unused: object) -> None:
        try:
            if kind is None:
                self._finish()
        finally:
            for descriptor in self._open:
                os.close(descriptor)

    def write(self, name: str, tensor: np.ndarray) -> None:
        """The tensor `name`, fp32, rounded to nearest even a few rows at a time. Raises UserError for values beyond the
        dtype's range."""
        if tensor.size * self.dtype.itemsize != self._sizes[name]:
            raise ValueError(f"{name}: {tensor.shape} is not the shape that was declared")
        number, offset = self._place[name]
        rows = max(1, _BLOCK * len(tensor) // tensor.nbytes)
        for start in range(0, len(tensor), rows):
            block = tensor[start : start + rows]
            with np.errstate(over="ignore"):
                rounded = np.ascontiguousarray(block, self.dtype)
            if self.dtype != np.float32 and not np.isfinite(rounded).all():
                raise UserError(
                    f"--dtype: {name} has values up to {float(np.abs(block).max()):.4g}, which are more than "
                    f"{self.dtype.name} can hold; use bfloat16 or float32"
                )
            _write_at(self._open[number], rounded.reshape(-1).view(np.uint8).data, offset)
            offset += rounded.nbytes
        self._left.remove(name)

    def _finish(self) -> None:
        if self._left:
            raise ValueError(f"{len(self._left)} tensors were not written, such as {min(self._left)}")
        for descriptor in self._open:
            os.fsync(descriptor)
        if len(self.files) > 1:
            weight_map = {name: self.files[number] for name, (number, _) in self._place.items()}
            text = json.dumps({"metadata": {"total_size": self.total_bytes}, "weight_map": weight_map}, indent=2)
            (self._folder / INDEX).write_text(text + "\n", encoding="utf-8")


def _split(sizes: Mapping[str, int], max_bytes: int) -> list[list[str]]:
    shards: list[list[str]] = [[]]
    filled = 0
    for name, size in sizes.items():
        if shards[-1] and filled + size > max_bytes:
            shards.append([])
            filled = 0
        shards[-1].append(name)
        filled += size
    return shards


def _header(shapes: Mapping[str, Shape], dtype: str, sizes: Mapping[str, int]) -> bytes:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}  # readers refuse a file without it
    offset = 0
    for name, shape in shapes.items():
        end = offset + sizes[name]
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    return struct.pack("<Q", len(text)) + text


def _write_at(descriptor: int, content: bytes | memoryview, offset: int) -> None:
    view = memoryview(content)
    while view:
        written = os.pwrite(descriptor, view[: 2**30], offset)  # the system takes 2 GiB at most
        view, offset = view[written:], offset + written


# ---- reading -------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _Stored:
    file: Path
    dtype: str
    shape: Shape
    offset: int


class ShardReader:
    """The tensors of a folder: model.safetensors, the files that an index names, or all *.safetensors without one.

    Raises UserError, naming the file, for what is not there, damaged or contradicts itself. Only headers are read;
    `read` maps one tensor's bytes.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        self._stored: dict[str, _Stored] = {}
        indexed = _read_index(folder)
        files = sorted(set(indexed.values())) if indexed else _files(folder)
        for name in files:
            self._add(folder / name, {key for key, file in indexed.items() if file == name} if indexed else None)

    def _add(self, file: Path, promised: set[str] | None) -> None:
        found = _read_header(file)
        if promised is not None and (missing := sorted(promised - set(found))):
            raise UserError(f"{file}: has no tensor {missing[0]}, which {INDEX} places there{_more(missing)}")
        for name, stored in found.items():
            if name in self._stored:
                raise UserError(f"{file}: {name} is also in {self._stored[name].file.name}")
            self._stored[name] = stored

    @property
    def names(self) -> list[str]:
        return list(self._stored)

    def shape(self, name: str) -> Shape:
        return self._stored[name].shape

    def dtype(self, name: str) -> str:
        """As the file writes it, such as "BF16"."""
        return self._stored[name].dtype

    def where(self, name: str) -> Path:
        """The file that it is in."""
        return self._stored[name].file

    def read(self, name: str) -> np.ndarray:
        """The tensor in the dtype it is stored in: a read-only view of the file. Raises UserError if that is none of
        DTYPES."""
        stored = self._stored[name]
        if stored.dtype not in DTYPES:
            raise UserError(f"{stored.file}: {name} is {stored.dtype}; only {', '.join(DTYPES)} can be read")
        dtype = DTYPES[stored.dtype]
        raw = np.memmap(stored.file, np.uint8, "r", stored.offset, (math.prod(stored.shape) * dtype.itemsize,))
        return raw.view(dtype).reshape(stored.shape)


def _files(folder: Path) -> list[str]:
    names = sorted(path.name for path in folder.glob("*.safetensors"))
    if not names:
        pickled = next((path.name for path in [*folder.glob("*.bin"), *folder.glob("*.pt")]), "")
        hint = f"; {pickled} has to be saved as .safetensors first" if pickled else ""
        raise UserError(f"{folder}: holds no .safetensors file{hint}")
    return [SINGLE] if SINGLE in names else names


def _read_index(folder: Path) -> dict[str, str]:
    """The file of each tensor; {} without an index."""
    path = folder / INDEX
    if not path.exists():
        return {}
    try:
        weight_map = json.loads(path.read_text(encoding="utf-8"))["weight_map"]
        if not weight_map or any(Path(file).name != file for file in weight_map.values()):
            raise ValueError
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        raise UserError(f"{path}: is damaged: no weight_map of tensors and file names") from None
    for name, file in weight_map.items():
        if not (folder / file).is_file():
            raise UserError(f"{folder / file}: no such file; {INDEX} places {name} there")
    return weight_map


def _read_header(file: Path) -> dict[str, _Stored]:
    try:
        size = file.stat().st_size
        with file.open("rb") as opened:
            (length,) = struct.unpack("<Q", opened.read(8))
            if length > min(_LONGEST_HEADER, size - 8):
                raise UserError(f"{file}: is damaged or no safetensors file: a header of {length:,} bytes in {size:,}")
            header = json.loads(opened.read(length))
    except OSError as error:
        raise UserError(f"{file}: {error.strerror or error}") from None
    except (ValueError, struct.error):
        raise UserError(f"{file}: is damaged or no safetensors file: its header cannot be read") from None
    found = {}
    try:
        for name, about in header.items():
            if name != "__metadata__":
                begin, end = about["data_offsets"]
                found[name] = (_Stored(file, about["dtype"], tuple(about["shape"]), 8 + length + begin), begin, end)
        _check_offsets(file, found.values(), size - 8 - length)
    except (KeyError, TypeError, ValueError, AttributeError):
        raise UserError(f"{file}: is damaged or no safetensors file: its header is not one of tensors") from None
    return {name: stored for name, (stored, _, _) in found.items()}


def _check_offsets(file: Path, found: Iterable[tuple[_Stored, int, int]], data_bytes: int) -> None:
    """Raises UserError where bytes are missing, left over, or do not make up the tensors."""
    at = 0
    for stored, begin, end in sorted(found, key=lambda item: (item[1], item[2])):
        dtype = DTYPES.get(stored.dtype)
        wrong_size = dtype is not None and math.prod(stored.shape) * dtype.itemsize != end - begin
        if begin != at or end < begin or wrong_size:
            raise UserError(f"{file}: is damaged: its header's offsets do not fit its shapes")
        at = end
    if at != data_bytes:
        short = "is cut off" if data_bytes < at else "is damaged"
        raise UserError(f"{file}: {short}: it has {data_bytes:,} bytes of tensors, its header says {at:,}")


def _more(names: Sequence[str]) -> str:
    return f" (nor {len(names) - 1} more)" if len(names) > 1 else ""

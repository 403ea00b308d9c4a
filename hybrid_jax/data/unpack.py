"""Files as they are read: .gz and .zst unpacked, and one line for what goes wrong."""

import contextlib
import gzip
import io
import os
import zlib
from collections.abc import Iterator
from typing import Any, BinaryIO

from hybrid_jax.errors import UserError

PACKED = {".gz": "", ".zst": "zstandard"}  # and the package that reads it
_BLOCK = 2**20  # bytes unpacked ahead
_FRAME_BYTES = 2**11  # of a .zst given to the decompressor at once: a byte may become 2^15


def unpacked(path: str, raw: BinaryIO) -> BinaryIO:
    """`raw` itself, or what is packed in it. A .zst needs memory for the window that it was made with."""
    suffix = os.path.splitext(path)[1].lower()
    if suffix == ".gz":
        return gzip.GzipFile(fileobj=raw)  # type: ignore[return-value]
    if suffix == ".zst":
        return io.BufferedReader(_Zstandard(raw), _BLOCK)  # type: ignore[return-value]
    return raw


class _Zstandard(io.RawIOBase):
    """Decompressed frames, one after the other; unlike the package's own reader it notices a missing end."""

    def __init__(self, raw: BinaryIO):
        import zstandard

        self._raw, self._error = raw, zstandard.ZstdError
        self._make = zstandard.ZstdDecompressor(max_window_size=2**31).decompressobj
        self._frame: Any = None
        self._input = b""
        self._output = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._output:
            self._input = self._input or self._raw.read(_FRAME_BYTES)
            if not self._input:
                if self._frame is not None:
                    raise EOFError
                return 0
            self._frame = self._frame or self._make()
            try:
                self._output = memoryview(self._frame.decompress(self._input))
            except self._error as error:
                raise EOFError(str(error)) from None
            self._input = b""
            if self._frame.eof:
                self._input, self._frame = self._frame.unused_data, None
        count = min(len(buffer), len(self._output))
        buffer[:count], self._output = self._output[:count], self._output[count:]
        return count


@contextlib.contextmanager
def reading(path: str) -> Iterator[None]:
    """Raises UserError for what the system or a decompressor says meanwhile."""
    try:
        yield
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        why = str(error) or "it ends too early"
        raise UserError(f"{path}: is damaged and cannot be decompressed ({why}); copy or compress it again") from None
    except OSError as error:
        raise UserError(f"{path}: {error.strerror or error}") from None

"""Documents of local files, for hybrid_jax.data.prepare: which files an input names, their cut into parts of like
size, and their texts, read in pieces.

A text file is a document; so is a line of .jsonl and a row of .parquet, whose text is one field.
"""

import codecs
import contextlib
import dataclasses
import glob
import gzip
import hashlib
import importlib.util
import io
import json
import os
import zlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, BinaryIO

from hybrid_jax.errors import UserError

_TEXT, _LINES, _TABLE = (".txt", ".md", ".py"), ".jsonl", ".parquet"
_PACKED = {".gz": "", ".zst": "zstandard"}  # and the package that reads it
ACCEPTED = ".txt, .md, .py, .jsonl, these with .gz or .zst, .parquet"

PIECE_CHARACTERS = 2**18  # `tokenizers` needs about 200 bytes of memory for a character of text without spaces
_BLOCK = 2**20  # bytes read at once
_FILE_COST = 4096  # a part of many small files is kept small too
_SAMPLES, _SAMPLE_BYTES = 16, 4096


@dataclasses.dataclass(frozen=True)
class Source:
    """A file: its path as the user gave it, its bytes, and a digest of up to 16 evenly spaced blocks of 4 KiB."""

    path: str
    size: int
    digest: str


@dataclasses.dataclass(frozen=True)
class Span:
    """Bytes [start, end) of a file of `size` bytes: of .jsonl the lines that begin there, else the whole file."""

    path: str
    size: int
    start: int
    end: int


def find(inputs: Sequence[str]) -> list[str]:
    """The files that the inputs name, in their order, each once: folders and globs sorted, hidden ones left out.

    Raises UserError for an input without a file that can be read, a folder that cannot be listed, and for a file
    whose package is not installed.
    """
    found: dict[str, str] = {}
    for name in inputs:
        full = os.path.expanduser(name)
        if os.path.isdir(full):
            files = [f for f in _walk(full) if _kind(f)]
        elif os.path.isfile(full):
            files = [full]
            if not _kind(full):
                raise UserError(f"--input: {name}: this kind of file cannot be read ({ACCEPTED} can)")
        else:
            everything = sorted(f for f in glob.glob(full, recursive=True) if os.path.isfile(f))
            if not everything:
                raise UserError(f"--input: {name}: no such file or folder, and no file matches it")
            files = [f for f in everything if _kind(f)]
        if not files:
            raise UserError(f"--input: {name}: holds no file that can be read ({ACCEPTED} can)")
        for file in files:
            found.setdefault(os.path.realpath(file), file)
    for file in found.values():
        package = "pyarrow" if _kind(file) == _TABLE else _PACKED.get(os.path.splitext(file)[1].lower(), "")
        if package and importlib.util.find_spec(package) is None:
            raise UserError(f"{file}: needs a package that is not installed: pip install {package}")
    return list(found.values())


def sources(paths: Iterable[str]) -> list[Source]:
    """Sizes and digests of files. Raises UserError for one that cannot be read."""
    found = []
    for path in paths:
        with _errors(path), open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            digest = hashlib.blake2b(digest_size=16)
            last = max(size - _SAMPLE_BYTES, 0)
            for place in sorted({last * i // (_SAMPLES - 1) for i in range(_SAMPLES)}):
                file.seek(place)
                digest.update(file.read(_SAMPLE_BYTES))
            found.append(Source(path, size, digest.hexdigest()))
    return found


def cut(files: Sequence[Source], part_bytes: int) -> list[tuple[Span, ...]]:
    """Parts of about part_bytes, in order; one is larger where a file cannot be entered in its middle."""
    parts: list[tuple[Span, ...]] = []
    spans: list[Span] = []
    weight = 0
    for file in files:
        step = part_bytes if file.path.lower().endswith(_LINES) else max(file.size, 1)
        for start in range(0, max(file.size, 1), step):
            spans.append(Span(file.path, file.size, start, min(start + step, file.size)))
            weight += spans[-1].end - start + _FILE_COST
            if weight >= part_bytes:
                parts.append(tuple(spans))
                spans, weight = [], 0
    return [*parts, tuple(spans)] if spans else parts


class Reader:
    """Reads spans one after the other. bytes_read: of the files, so far; replaced: documents with bytes that are
    not UTF-8 or with half a surrogate pair, which become U+FFFD."""

    def __init__(self, text_field: str):
        self.text_field = text_field
        self.bytes_read = 0
        self.replaced = 0

    def documents(self, span: Span) -> Iterator[Iterable[str]]:
        """Each document as the `pieces` of its text, to be read before the next document is asked for.

        A byte order mark at the start of a file is left out; line ends stay as they are. A text file is held in
        memory by the block, a line or row whole. Raises UserError, with the line or row, for what has no text.
        """
        before = self.bytes_read
        with _errors(span.path):
            if _kind(span.path) == _TABLE:
                for text in self._rows(span, before):
                    yield pieces([text])
            else:
                with open(span.path, "rb") as raw:
                    if os.fstat(raw.fileno()).st_size != span.size:
                        raise UserError(f"{span.path}: changed while it was being prepared; start again")
                    stream = _unpacked(span.path, raw)
                    if _kind(span.path) == _LINES:
                        for text in self._lines(span, before, raw, stream):
                            yield pieces([text])
                    else:
                        yield pieces(self._text(span, before, raw, stream))
        self.bytes_read = before + span.end - span.start

    def rows(self, part: Any) -> Iterator[Iterable[str]]:
        """As `documents`, of a hub.Rows."""
        for number, value in enumerate(part.values, part.first + 1):
            try:
                text = self._value({self.text_field: value})
            except ValueError as error:
                raise UserError(f"{part.path}: row {number}: {error}") from None
            self.bytes_read += len(text.encode())
            yield pieces([text])

    def _text(self, span: Span, before: int, raw: BinaryIO, stream: BinaryIO) -> Iterator[str]:
        decoder = codecs.getincrementaldecoder("utf-8")()
        first, block = True, b"-"
        while block:
            with _errors(span.path):
                block = stream.read(_BLOCK)
            try:
                text = decoder.decode(block, not block)
            except UnicodeDecodeError:
                decoder.errors = "replace"
                self.replaced += 1
                text = decoder.decode(block, not block)
            self.bytes_read = before + raw.tell()
            if text:
                yield text.removeprefix("\ufeff") if first else text
                first = False

    def _lines(self, span: Span, before: int, raw: BinaryIO, stream: BinaryIO) -> Iterator[str]:
        packed = stream is not raw
        at = begin = _first_line(stream, span.start)
        number = 0
        while (packed or at < span.end) and (line := stream.readline()):
            number += 1
            if at == 0:
                line = line.removeprefix(codecs.BOM_UTF8)
                at = 1 if packed else raw.tell()
            else:
                at += len(line)
            self.bytes_read = before + max(min(raw.tell(), span.end) - span.start, 0)
            if not line.strip():
                continue
            try:
                text = self._decoded(line)
                record = json.loads(text)
                value = self._value(record) if isinstance(record, dict) else None
                if value is None:
                    raise ValueError("is not a JSON object")
            except (ValueError, RecursionError) as error:
                what = f"is not JSON: {error}" if isinstance(error, json.JSONDecodeError) else str(error)
                number += _line_ends(span.path, begin)
                raise UserError(f"{span.path}: line {number}: {what}; mend or remove the line") from None
            yield value

    def _value(self, record: dict[str, Any]) -> str:
        """The text of a record. Raises ValueError, whose message follows the name of the place."""
        field = self.text_field
        if field not in record:
            there = ", ".join(list(record)[:8]) or "none"
            raise ValueError(f"has no field {field!r} (its fields: {there}; --text_field names another)")
        if not isinstance(record[field], str):
            kinds = {type(None): "null", dict: "an object", list: "an array", bool: "true or false"}
            raise ValueError(f"its field {field!r} is {kinds.get(type(record[field]), 'a number')}, not a string")
        text: str = record[field]
        try:
            text.encode()
        except UnicodeEncodeError:  # "\ud800" alone is JSON but not text
            self.replaced += 1
            text = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
        return text

    def _decoded(self, line: bytes) -> str:
        try:
            return line.decode()
        except UnicodeDecodeError:
            self.replaced += 1
            return line.decode(errors="replace")

    def _rows(self, span: Span, before: int) -> Iterator[str]:
        import pyarrow
        import pyarrow.parquet

        row = 0
        try:
            with pyarrow.parquet.ParquetFile(span.path) as table:
                names = table.schema_arrow.names
                if self.text_field not in names:
                    self._value(dict.fromkeys(names))
                for batch in table.iter_batches(batch_size=256, columns=[self.text_field]):
                    for value in batch.column(0).to_pylist():
                        row += 1
                        yield self._value({self.text_field: value})
                    self.bytes_read = before + span.size * row // max(table.metadata.num_rows, 1)
        except (pyarrow.ArrowException, UnicodeDecodeError, OSError) as error:
            raise UserError(f"{span.path}: is not a whole .parquet file: {' '.join(str(error).split())}") from None
        except ValueError as error:
            place = f"row {row}: " if row else ""
            raise UserError(f"{span.path}: {place}{error}") from None


def pieces(chunks: Iterable[str]) -> Iterator[str]:
    """Text in at most PIECE_CHARACTERS each, cut where a byte-level BPE encodes pieces as it does the whole: between
    a line's end and a letter or digit, if the second half of a piece has such a place, else after a line end or
    anywhere."""
    text = ""
    for chunk in chunks:
        text += chunk
        start = 0
        while len(text) - start > PIECE_CHARACTERS:
            stop = _seam(text, start + PIECE_CHARACTERS // 2, start + PIECE_CHARACTERS)
            yield text[start:stop]
            start = stop
        text = text[start:]
    if text:
        yield text


def _seam(text: str, low: int, high: int) -> int:
    last, at = 0, high
    while (at := text.rfind("\n", low, at)) >= 0:
        last = last or at + 1
        if text[at + 1].isalnum() and not text[at - 1].isspace():
            return at + 1
    return last or high


def _kind(path: str) -> str:
    """ ".txt" of any text file, ".jsonl", ".parquet", or "" of a file that cannot be read."""
    stem, suffix = os.path.splitext(path.lower())
    if suffix == _TABLE:
        return _TABLE
    if suffix in _PACKED:
        suffix = os.path.splitext(stem)[1]
    return _TEXT[0] if suffix in _TEXT else _LINES if suffix == _LINES else ""


def _walk(root: str) -> list[str]:
    def failed(error: OSError) -> None:
        raise UserError(f"--input: {error.filename}: {error.strerror or error}") from None

    names = []
    for folder, subfolders, inside in os.walk(root, onerror=failed):
        subfolders[:] = [d for d in subfolders if d != "__pycache__" and not d.startswith(".")]
        names += [os.path.join(folder, n) for n in inside if not n.startswith(".")]
    return sorted(names)


def _unpacked(path: str, raw: BinaryIO) -> BinaryIO:
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
        self._input = self._output = b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._output:
            self._input = self._input or self._raw.read(2**16)  # a compressed byte may become 10^4
            if not self._input:
                if self._frame is not None:
                    raise EOFError
                return 0
            self._frame = self._frame or self._make()
            try:
                self._output = self._frame.decompress(self._input)
            except self._error as error:
                raise EOFError(str(error)) from None
            self._input = b""
            if self._frame.eof:
                self._input, self._frame = self._frame.unused_data, None
        count = min(len(buffer), len(self._output))
        buffer[:count], self._output = self._output[:count], self._output[count:]
        return count


def _first_line(stream: BinaryIO, start: int) -> int:
    """Byte of the first line that begins at `start` or after it; the stream is put there."""
    if not start:
        return 0
    at = stream.seek(start - 1)
    while piece := stream.readline(_BLOCK):
        at += len(piece)
        if piece.endswith(b"\n"):
            break
    return at


def _line_ends(path: str, end: int) -> int:
    """Line ends in the first `end` bytes of a file."""
    count = 0
    with open(path, "rb") as file:
        while end > 0 and (block := file.read(min(_BLOCK, end))):
            count += block.count(b"\n")
            end -= len(block)
    return count


@contextlib.contextmanager
def _errors(path: str) -> Iterator[None]:
    try:
        yield
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        why = str(error) or "it ends too early"
        raise UserError(f"{path}: is damaged and cannot be decompressed ({why}); copy or compress it again") from None
    except OSError as error:
        raise UserError(f"{path}: {error.strerror or error}") from None

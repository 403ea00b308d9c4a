"""Documents of local files, for hybrid_jax.data.prepare: their texts, read in pieces.

A text file is a document; so is a line of .jsonl and a row of .parquet, of which a `Field` or `Records` says what is
text.
"""

import codecs
import dataclasses
import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, BinaryIO, NamedTuple, Protocol

from hybrid_jax.data import records
from hybrid_jax.data.inputs import LINES, TABLE, Span, kind
from hybrid_jax.data.unpack import reading, unpacked
from hybrid_jax.errors import UserError

PIECE_CHARACTERS = 2**18  # `tokenizers` needs about 200 bytes of memory for a character of text without spaces
RECORD_BYTES = 2**25  # of a line or row, which is in memory whole, up to ten times
_BLOCK = 2**20  # bytes read at once
_ROWS = 8  # of .parquet read at once
_SEAM = re.compile(r"\S\n(?=[^\W_])")  # a line's end, before a letter or digit


class Take(Protocol):
    """What is text of a line or row: its parts in order, each with whether it is learnt; None is the end-of-document
    id. Raises ValueError, whose message follows the name of the place, where there is none."""

    def __call__(self, record: Any) -> list[tuple[str | None, bool]]: ...

    def columns(self, names: Sequence[str]) -> list[str]:
        """Those to be read of a table's. Raises ValueError."""


@dataclasses.dataclass(frozen=True)
class Field:
    """The string field that --text_field names."""

    name: str

    def __call__(self, record: Any) -> list[tuple[str | None, bool]]:
        if not isinstance(record, Mapping):
            raise ValueError("is not a JSON object")
        if self.name not in record:
            self.columns(list(record))
        text = record[self.name]
        if not isinstance(text, str):
            kinds = {type(None): "null", dict: "an object", list: "an array", bool: "true or false"}
            raise ValueError(f"its field {self.name!r} is {kinds.get(type(text), 'a number')}, not a string")
        return [(text, True)]

    def columns(self, names: Sequence[str]) -> list[str]:
        if self.name not in names:
            there = ", ".join(names[:8]) or "none"
            raise ValueError(f"has no field {self.name!r} (its fields: {there}; --text_field names another)")
        return [self.name]


class Records:
    """Prompts and responses, or messages; see hybrid_jax.data.records."""

    def __call__(self, record: Any) -> list[tuple[str | None, bool]]:
        try:
            return records.parts(record)
        except UserError as error:
            raise ValueError(str(error)) from None

    def columns(self, names: Sequence[str]) -> list[str]:
        found = [name for name in records.FIELDS if name in names]
        if not found:
            self({})
        return found


class Place(NamedTuple):
    """Of a document, as messages name it. number: of a line or row, counted from 1; of lines only those behind byte
    `begin` are counted."""

    path: str
    unit: str = ""
    number: int = 0
    begin: int = 0

    def __str__(self) -> str:
        if not self.unit:
            return self.path
        return f"{self.path}: {self.unit} {self.number + (_line_ends(self.path, self.begin) if self.begin else 0)}"


class Document(NamedTuple):
    """pieces: what `Take` gives, with texts cut as `pieces` does, to be read before the next document is asked for."""

    place: Place
    pieces: Iterable[tuple[str | None, bool]]


class Reader:
    """Reads spans one after the other. bytes_read: of the files, so far; replaced: documents with bytes that are
    not UTF-8 or with half a surrogate pair, which become U+FFFD."""

    def __init__(self, take: Take):
        self._take = take
        self.bytes_read = 0
        self.replaced = 0

    def documents(self, span: Span) -> Iterator[Document]:
        """A byte order mark at the start of a file is left out; line ends stay as they are. A text file is held in
        memory by the block, a line or row whole. Raises UserError, with the line or row, for what has no text, for a
        line or row of over RECORD_BYTES, and for a file that is changed meanwhile."""
        before = self.bytes_read
        with reading(span.path), open(span.path, "rb") as raw:
            _check_unchanged(span, raw)
            try:
                if kind(span.path) == TABLE:
                    yield from self._rows(span, before)
                elif kind(span.path) == LINES:
                    yield from self._lines(span, before, raw, unpacked(span.path, raw))
                else:
                    yield Document(Place(span.path), self._text(span, before, raw, unpacked(span.path, raw)))
            except UserError:
                _check_unchanged(span, raw)
                raise
            _check_unchanged(span, raw)
        self.bytes_read = before + span.end - span.start

    def rows(self, part: Any) -> Iterator[Document]:
        """As `documents`, of a streams.Rows."""
        for number, row in enumerate(part.values, part.first + 1):
            place = Place(part.path, "row", number)
            try:
                found = self._pieces(row)
            except ValueError as error:
                raise UserError(f"{place}: {error}") from None
            self.bytes_read += text_bytes(row)
            yield Document(place, found)

    def _pieces(self, record: Any) -> Iterator[tuple[str | None, bool]]:
        parts = self._take(record)
        for number, (text, learn) in enumerate(parts):
            if text is not None and not text.isascii():
                try:
                    text.encode()
                except UnicodeEncodeError:  # "\ud800" alone is JSON but not text
                    self.replaced += 1
                    parts[number] = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace"), learn
        return ((piece, learn) for text, learn in parts for piece in ((None,) if text is None else pieces((text,))))

    def _text(self, span: Span, before: int, raw: BinaryIO, stream: BinaryIO) -> Iterator[tuple[str, bool]]:
        def blocks() -> Iterator[str]:
            decoder = codecs.getincrementaldecoder("utf-8")()
            first, block = True, b"-"
            while block:
                with reading(span.path):
                    block = stream.read(_BLOCK)
                if first:
                    block = _without_mark(span.path, block)
                    first = False
                try:
                    text = decoder.decode(block, not block)
                except UnicodeDecodeError:
                    decoder.errors = "replace"
                    self.replaced += 1
                    text = decoder.decode(block, not block)
                self.bytes_read = before + raw.tell()
                if text:
                    yield text

        return ((piece, True) for piece in pieces(blocks()))

    def _lines(self, span: Span, before: int, raw: BinaryIO, stream: BinaryIO) -> Iterator[Document]:
        packed = stream is not raw
        at = begin = _first_line(stream, span.start, span.end)
        number = 0
        while (packed or at < span.end) and (line := stream.readline(RECORD_BYTES + 1)):
            number += 1
            place = Place(span.path, "line", number, begin)
            at += len(line)
            self.bytes_read = before + max(min(raw.tell() if packed else at, span.end) - span.start, 0)
            if len(line) > RECORD_BYTES and not line.endswith(b"\n"):
                raise UserError(f"{place}: has {_too_long()}")
            if number == 1 and not begin:
                line = _without_mark(span.path, line)
            if line.isspace():
                continue
            try:
                text = self._decoded(line)
                del line
                record = json.loads(text)
                del text
                found = self._pieces(record)
                del record
            except (ValueError, RecursionError) as error:
                what = f"is not JSON: {error}" if isinstance(error, json.JSONDecodeError) else str(error)
                raise UserError(f"{place}: {what}; mend or remove the line") from None
            yield Document(place, found)

    def _decoded(self, line: bytes) -> str:
        try:
            return line.decode()
        except UnicodeDecodeError:
            self.replaced += 1
            return line.decode(errors="replace")

    def _rows(self, span: Span, before: int) -> Iterator[Document]:
        import pyarrow
        import pyarrow.parquet

        place = Place(span.path)
        try:
            # Buffered, a column of a row group is read by the page; else all of it at once.
            with pyarrow.parquet.ParquetFile(span.path, pre_buffer=False, buffer_size=_BLOCK) as table:
                columns = self._take.columns(table.schema_arrow.names)
                first, groups = _row_groups(table.metadata, span)
                last = first + sum(table.metadata.row_group(group).num_rows for group in groups)
                _check_row_groups(table.metadata, groups, columns)
                row = first
                for batch in table.iter_batches(_ROWS, groups, columns, use_threads=False):
                    step = len(batch) if batch.nbytes <= RECORD_BYTES else 1
                    for at in range(0, len(batch), step):
                        rows = batch.slice(at, step)
                        place = Place(span.path, "row", row + 1)
                        if step == 1 and rows.nbytes > 2 * RECORD_BYTES:  # before there is a copy of it
                            raise ValueError(f"has {_too_long()}")
                        for record in rows.to_pylist():
                            row += 1
                            place = Place(span.path, "row", row)
                            if text_bytes(record) > RECORD_BYTES:
                                raise ValueError(f"has {_too_long()}")
                            yield Document(place, self._pieces(record))
                    self.bytes_read = before + (span.end - span.start) * (row - first) // max(last - first, 1)
        except (pyarrow.ArrowException, UnicodeDecodeError, OSError) as error:
            raise UserError(f"{span.path}: is not a whole .parquet file: {' '.join(str(error).split())}") from None
        except ValueError as error:
            raise UserError(f"{place}: {error}") from None


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


def text_bytes(value: Any) -> int:
    """Of all strings in a JSON value, about: a byte a character."""
    if isinstance(value, str):
        return len(value)
    if isinstance(value, dict):
        value = value.values()
    elif not isinstance(value, list):
        return 0
    return sum(map(text_bytes, value))


def _seam(text: str, low: int, high: int) -> int:
    for begin in (max(low, high - 4096), low):  # it is near in most texts
        last = max((found.end() for found in _SEAM.finditer(text, begin - 1, high + 1)), default=0)
        if last:
            return last
    return text.rfind("\n", low, high) + 1 or high


def _without_mark(path: str, first: bytes) -> bytes:
    """The first bytes of a file without a byte order mark."""
    if first.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):  # no UTF-8 has these bytes
        raise UserError(f"{path}: is UTF-16 or UTF-32, not UTF-8; convert it first (iconv -f UTF-16 -t UTF-8)")
    return first.removeprefix(codecs.BOM_UTF8)


def _too_long() -> str:
    return (
        f"over {RECORD_BYTES:,} bytes, more than is held in memory at once; make it a text file of its own (.txt), "
        "which is read by the block, or cut it in parts"
    )


def _check_unchanged(span: Span, file: BinaryIO) -> None:
    about = os.fstat(file.fileno())
    if (about.st_size, about.st_mtime_ns) != (span.size, span.modified):
        raise UserError(f"{span.path}: changed while it was being prepared; start again")


def _first_line(stream: BinaryIO, start: int, end: int) -> int:
    """Byte of the first line that begins at `start` or after it, or of any place behind `end`; the stream is put
    there."""
    if not start:
        return 0
    at = stream.seek(start - 1)
    while at < end and (piece := stream.readline(_BLOCK)):
        at += len(piece)
        if piece.endswith(b"\n"):
            break
    return at


def _row_groups(metadata: Any, span: Span) -> tuple[int, list[int]]:
    """(rows before them, numbers) of the row groups that begin in the span; one that says no place begins at 0."""
    first, found = 0, []
    for number in range(metadata.num_row_groups):
        group = metadata.row_group(number)
        column = group.column(0)
        begin = min(column.dictionary_page_offset or column.data_page_offset, column.data_page_offset)
        if span.start <= min(begin, span.size - 1) < span.end:
            found.append(number)
        elif not found:
            first += group.num_rows
    return first, found


def _check_row_groups(metadata: Any, groups: Sequence[int], columns: Sequence[str]) -> None:
    """Raises ValueError for one that has to hold a row of over RECORD_BYTES, before it is read into memory."""
    for number in groups:
        group = metadata.row_group(number)
        sizes = (group.column(i) for i in range(group.num_columns))
        size = sum(column.total_uncompressed_size for column in sizes if column.path_in_schema.split(".")[0] in columns)
        if size > 4 * RECORD_BYTES * max(group.num_rows, 1):  # as statistics and dictionaries are in it too
            raise ValueError(f"row group {number + 1} has a row of {_too_long()}")


def _line_ends(path: str, end: int) -> int:
    """Line ends in the first `end` bytes of a file."""
    count = 0
    with open(path, "rb") as file:
        while end > 0 and (block := file.read(min(_BLOCK, end))):
            count += block.count(b"\n")
            end -= len(block)
    return count

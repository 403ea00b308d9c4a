"""Rows of a data set, read in order by the process that was called, for hybrid_jax.data.prepare.

It cuts them into parts; each part says where the stream stood after it, so that an ended command goes on there.
"""

import abc
import argparse
import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

from hybrid_jax.data.documents import Take, text_bytes
from hybrid_jax.data.inputs import Source
from hybrid_jax.errors import UserError


@dataclasses.dataclass(frozen=True)
class Rows:
    """Rows first, first + 1, ... of a stream, with what was taken of them. after: its position behind the last one, as
    JSON."""

    path: str
    first: int
    values: tuple[dict[str, Any], ...]
    after: dict[str, Any]


class Stream(abc.ABC):
    """source: as a file's; size is that of all rows in bytes, 0 where it is not known; digest is of their content."""

    source: Source

    @abc.abstractmethod
    def rows(self, take: Take, position: dict[str, Any] | None) -> Iterator[dict[str, Any]]:
        """The rows from `position` (of Rows.after) on, with the columns to take. Raises UserError where there are
        none to take."""

    @abc.abstractmethod
    def position(self, row: int) -> dict[str, Any]:
        """Where `rows` stands, before that row: at least {"rows": row}."""

    @abc.abstractmethod
    def lost(self, row: int, error: Exception) -> UserError:
        """The line for an exception that `rows` raised when that row, counted from 0, was to be read."""

    def parts(self, take: Take, part_bytes: int, position: dict[str, Any] | None) -> Iterator[Rows]:
        """Parts of about part_bytes of text, from `position` on. Raises UserError as `rows` does, and `lost`."""
        first = position["rows"] if position else 0
        found: list[dict[str, Any]] = []
        size = 0
        try:
            for row in self.rows(take, position):
                found.append(row)
                size += text_bytes(row) + 64
                if size >= part_bytes:
                    after = self.position(first + len(found))
                    yield Rows(self.source.path, first, tuple(found), after)
                    first, found, size = after["rows"], [], 0
        except UserError:
            raise
        except Exception as error:  # of several HTTP packages, of file formats, or of a data set's own code
            raise self.lost(first + len(found), error) from None
        if found:
            yield Rows(self.source.path, first, tuple(found), self.position(first + len(found)))

    def sample(self, take: Take, part_bytes: int) -> Iterator[Rows]:
        """Parts for a sample of the rows: the first ones, where no others can be had without these."""
        return self.parts(take, part_bytes, None)

    def columns(self, take: Take, names: Sequence[str]) -> list[str]:
        """Those to take of the stream's. Raises UserError."""
        try:
            return take.columns(names)
        except ValueError as error:
            raise UserError(f"{self.source.path}: {error}") from None


def open_stream(options: argparse.Namespace, earlier: Sequence[Source]) -> Stream | None:
    """Of --dataset or --tfds, None without both. earlier: what was read when this command was given before."""
    from hybrid_jax.data.hub_stream import HubStream
    from hybrid_jax.data.tfds_stream import TfdsStream

    if options.dataset is not None:
        return HubStream(options.dataset, options.split, earlier)
    return None if options.tfds is None else TfdsStream(options.tfds, options.split, options.data_dir)


def missing_parts(
    stream: Stream, take: Take, part_bytes: int, whole: dict[int, dict[str, Any]]
) -> Iterator[tuple[int, tuple[Rows, ...]]]:
    """Numbers and rows of the parts that are not whole, read from behind the leading ones that are."""
    leading = 0
    while leading in whole:
        leading += 1
    position = whole[leading - 1]["after"] if leading else None
    for number, rows in enumerate(stream.parts(take, part_bytes, position), leading):
        if number not in whole:
            yield number, (rows,)


def one_line(error: Exception) -> str:
    """What an exception says, without its last full stop."""
    return " ".join(str(error).split()).rstrip(".") or type(error).__name__

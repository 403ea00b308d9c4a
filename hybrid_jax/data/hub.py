"""Rows of a Hugging Face data set, streamed, for hybrid_jax.data.prepare; the package `datasets` is imported here only.

The process that was called reads the rows and cuts them into parts; each part says where the stream stood after it,
so that an ended command goes on there.
"""

import dataclasses
from collections.abc import Iterator
from typing import Any

from hybrid_jax.data.documents import Take, text_bytes
from hybrid_jax.data.inputs import Source
from hybrid_jax.errors import UserError

_OFFLINE = "without network, download its .parquet files elsewhere and give them by --input"


@dataclasses.dataclass(frozen=True)
class Rows:
    """Rows first, first + 1, ... of a stream, with what was taken of them. after: its position behind the last one, as
    JSON."""

    path: str
    first: int
    values: tuple[dict[str, Any], ...]
    after: dict[str, Any]


class Stream:
    """NAME or NAME:CONFIG of the hub, or of a local folder, and one of its splits.

    Raises UserError without the package, for what is not there or gated, and without network.
    """

    def __init__(self, name: str, split: str):
        try:
            import datasets
        except ImportError:
            raise UserError("--dataset: needs a package that is not installed: pip install datasets") from None
        self.name, _, config = name.partition(":")
        self.split = split
        try:
            builder = datasets.load_dataset_builder(self.name, config or None)
            self._data = builder.as_streaming_dataset(split=split)
            described = (builder.info.splits or {}).get(split)
            size = getattr(described, "num_bytes", 0) or 0
            self._source = Source(f"{name}:{split}", size, str(builder.hash), "data set")
        except Exception as error:  # of the hub, of several HTTP packages, or of the data set's own code
            raise UserError(f"--dataset: {name}: {_one_line(error)}; {_remedy(self.name, error)}") from None

    @property
    def source(self) -> Source:
        """As a file's: size is that of all rows, 0 where the hub does not know it; digest is the revision."""
        return self._source

    def parts(self, take: Take, part_bytes: int, position: dict[str, Any] | None) -> Iterator[Rows]:
        """Parts of about part_bytes of text, from `position` (of Rows.after) on. Raises UserError where rows have no
        field that can be taken, and when the connection is lost."""
        path, data = self._source.path, self._data
        first = position["rows"] if position else 0
        values: list[dict[str, Any]] = []
        size = 0
        try:
            try:
                columns = take.columns(data.column_names or list(next(iter(data.take(1)), {})))
            except ValueError as error:
                raise UserError(f"{path}: {error}") from None
            data = data.select_columns(columns)  # of .parquet nothing else is then downloaded
            if position:
                data.load_state_dict(position["state"])
            for row in data:
                values.append(row)
                size += text_bytes(row)
                if size + 64 * len(values) >= part_bytes:
                    after = {"rows": first + len(values), "state": data.state_dict()}
                    yield Rows(path, first, tuple(values), after)
                    first, values, size = after["rows"], [], 0
        except UserError:
            raise
        except Exception as error:
            raise UserError(
                f"--dataset: {path}: reading stopped after row {first + len(values)}: {_one_line(error)}; "
                "give the same command again"
            ) from None
        if values:
            yield Rows(path, first, tuple(values), {"rows": first + len(values), "state": data.state_dict()})


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


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split()).rstrip(".") or type(error).__name__


def _remedy(name: str, error: Exception) -> str:
    if "gated" in str(error).lower() or "authenticat" in str(error).lower():
        return f"accept its terms at https://huggingface.co/datasets/{name} and run `hf auth login`"
    if isinstance(error, ValueError):
        return "mend --dataset NAME:CONFIG or --split"
    return _OFFLINE

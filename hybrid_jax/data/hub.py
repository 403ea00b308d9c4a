"""Rows of a Hugging Face data set, streamed, for hybrid_jax.data.prepare; the package `datasets` is imported here only.

The process that was called reads the rows and cuts them into parts; each part says where the stream stood after it,
so that an ended command goes on there.
"""

import dataclasses
from collections.abc import Iterator
from typing import Any

from hybrid_jax.data.documents import Source
from hybrid_jax.errors import UserError

_OFFLINE = "without network, download its .parquet files elsewhere and give them by --input"


@dataclasses.dataclass(frozen=True)
class Rows:
    """Rows first, first + 1, ... of a stream. after: its position behind the last one, as JSON."""

    path: str
    first: int
    values: tuple[Any, ...]
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
            self._source = Source(f"{name}:{split}", getattr(described, "num_bytes", 0) or 0, str(builder.hash))
        except Exception as error:  # of the hub, of several HTTP packages, or of the data set's own code
            raise UserError(f"--dataset: {name}: {_one_line(error)}; {_remedy(self.name, error)}") from None

    @property
    def source(self) -> Source:
        """As a file's: size is that of all rows, 0 where the hub does not know it; digest is the revision."""
        return self._source

    def parts(self, field: str, part_bytes: int, position: dict[str, Any] | None) -> Iterator[Rows]:
        """Parts of about part_bytes of text, from `position` (of Rows.after) on. Raises UserError for a field that no
        row has, and when the connection is lost."""
        path, data = self._source.path, self._data
        first = position["rows"] if position else 0
        values: list[Any] = []
        size = 0
        try:
            if data.column_names and field not in data.column_names:
                there = ", ".join(data.column_names)
                raise UserError(f"{path}: has no field {field!r} (its fields: {there}; --text_field names another)")
            data = data.select_columns([field])  # of .parquet nothing else is then downloaded
            if position:
                data.load_state_dict(position["state"])
            for row in data:
                values.append(row.get(field))
                size += len(values[-1]) if isinstance(values[-1], str) else 0
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
    stream: Stream, field: str, part_bytes: int, whole: dict[int, dict[str, Any]]
) -> Iterator[tuple[int, tuple[Rows, ...]]]:
    """Numbers and rows of the parts that are not whole, read from behind the leading ones that are."""
    leading = 0
    while leading in whole:
        leading += 1
    position = whole[leading - 1]["after"] if leading else None
    for number, rows in enumerate(stream.parts(field, part_bytes, position), leading):
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

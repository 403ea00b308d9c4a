"""Rows of a Hugging Face data set, streamed; the package `datasets` is imported here only."""

import importlib.util
import os
import re
from collections.abc import Iterator, Sequence
from typing import Any

from hybrid_jax.data import hub
from hybrid_jax.data.documents import Take
from hybrid_jax.data.inputs import Source
from hybrid_jax.data.streams import Stream, one_line
from hybrid_jax.errors import UserError

_COMMIT = re.compile("[0-9a-f]{40}")
_INSTEAD = "without network, download its .parquet files elsewhere and give them by --input"


class HubStream(Stream):
    """NAME or NAME:CONFIG of the hub, or of a local folder, and one of its splits.

    Of the hub, source.digest is a commit: the newest, or that of `earlier`, the sources of a command that is given
    again, which needs no network before rows are read. Raises UserError without the package, for what is not there
    or gated, and without network.
    """

    def __init__(self, name: str, split: str, earlier: Sequence[Source] = ()):
        if not _installed():
            raise UserError("--dataset: needs a package that is not installed: pip install datasets")
        self._name, _, self._config = name.partition(":")
        self._split = split
        self._data: Any = None
        path = f"{name}:{split}"
        folder = os.path.expanduser(self._name)
        if os.path.isfile(folder):
            raise UserError(f"--dataset: {folder}: is a file; give it by --input")
        known = [source for source in earlier if source.path == path and _COMMIT.fullmatch(source.digest)]
        if os.path.isdir(folder):
            builder = self._open(folder, None)
            self.source = self._described(builder, path, str(builder.hash))
        elif known:
            self.source = known[0]
        else:
            commit = self._newest()
            self.source = self._described(self._open(self._name, commit), path, commit)

    def rows(self, take: Take, position: dict[str, Any] | None) -> Iterator[dict[str, Any]]:
        if self._data is None:
            self._newest()  # which fails at once where the package would wait
            self._open(self._name, self.source.digest)
        names = self._data.column_names or list(next(iter(self._data.take(1)), {}))
        # Of .parquet nothing else is then downloaded.
        self._data = self._data.select_columns(self.columns(take, names))
        if position:
            self._data.load_state_dict(position["state"])
        return iter(self._data)

    def position(self, row: int) -> dict[str, Any]:
        return {"rows": row, "state": self._data.state_dict()}

    def lost(self, row: int, error: Exception) -> UserError:
        return UserError(
            f"--dataset: {self.source.path}: reading stopped after row {row}: {one_line(error)}; "
            "give the same command again"
        )

    def _newest(self) -> str:
        try:
            return hub.revision("dataset", self._name, _INSTEAD)
        except UserError as error:
            raise UserError(f"--dataset: {error}") from None

    def _open(self, name: str, commit: str | None) -> Any:
        """The package's builder; self._data becomes its rows."""
        datasets = _package()  # takes seconds, so not before the hub was asked
        try:
            with hub.quiet():
                builder = datasets.load_dataset_builder(name, self._config or None, revision=commit)
                self._data = builder.as_streaming_dataset(split=self._split)
        except Exception as error:  # of the package, of several HTTP packages, or of the data set's own files
            what = f"--dataset: {self._name}{':' * bool(self._config)}{self._config}: {one_line(error)}"
            if isinstance(error, ValueError):
                raise UserError(f"{what}; mend --dataset NAME:CONFIG or --split") from None
            raise UserError(f"{what}; {_INSTEAD if commit else 'give its files by --input'}") from None
        return builder

    def _described(self, builder: Any, path: str, digest: str) -> Source:
        about = (builder.info.splits or {}).get(self._split)
        return Source(path, getattr(about, "num_bytes", 0) or 0, digest, "data set")


def _installed() -> bool:
    try:
        return importlib.util.find_spec("datasets") is not None
    except ValueError:  # a module without a specification
        return True


def _package() -> Any:
    """Without the frameworks, which it would import where they are installed."""
    kept = {name: os.environ.get(name) for name in ("USE_TORCH", "USE_TF")}
    os.environ.update(dict.fromkeys(kept, "0"))
    try:
        import datasets
    finally:
        for name, value in kept.items():
            os.environ.pop(name)
            if value is not None:
                os.environ[name] = value
    return datasets

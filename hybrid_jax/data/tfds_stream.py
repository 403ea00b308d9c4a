"""Rows of a data set that tensorflow-datasets prepared on this machine, as ArrayRecord files.

Read through the package's random access, so without TensorFlow, which crashes beside ROCm: of an installed one this
process is kept from importing it. Preparing, converting and TFRecord files need TensorFlow, so an environment of their
own.
"""

import hashlib
import importlib.abc
import importlib.machinery
import importlib.util
import json
import os
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from hybrid_jax.data.documents import Take
from hybrid_jax.data.inputs import Source, sources
from hybrid_jax.data.shuffle import Shuffle
from hybrid_jax.data.streams import Rows, Stream, one_line
from hybrid_jax.errors import UserError

_NAME = re.compile(r"\w+(/[\w.-]+)?(:(\d+|\*)(\.(\d+|\*)){2})?")
_FORMAT = "array_record"
_READ, _SAMPLE = 256, 64  # rows read at once; in a part of a sample


class TfdsStream(Stream):
    """NAME, NAME/CONFIG or either with :VERSION, below data_dir, and one of its splits or a slice, as train[:10%].

    data_dir: None is that of the package: $TFDS_DATA_DIR or ~/tensorflow_datasets. source.digest is of the files' sizes
    and samples of them. Raises UserError without the package, and for what is not there, not whole, or stored in
    another format.
    """

    def __init__(self, name: str, split: str, data_dir: str | None = None):
        self._tfds, read_only_builder, record_module = _packages()
        folder = os.path.expanduser(data_dir or self._tfds.core.constants.get_default_data_dir())
        if "://" in folder:
            raise UserError(f"--data_dir: {folder}: is not on this machine; copy it here")
        if not _NAME.fullmatch(name):
            raise UserError(f"--tfds: {name!r}: is not NAME, NAME/CONFIG, NAME:VERSION or NAME/CONFIG:VERSION")
        if not os.path.isdir(folder):
            raise UserError(f"--data_dir: there is no folder {folder}; {_remedy(name, folder)}")
        try:
            builder = read_only_builder.builder_from_files(name, data_dir=folder)
        except self._tfds.core.DatasetNotFoundError:
            there = ", ".join(_prepared(folder)) or "nothing"
            raise UserError(f"--tfds: {name}: {folder} holds {there}; {_remedy(name, folder)}") from None
        except Exception as error:  # of several formats
            raise UserError(f"--tfds: {name}: {one_line(error)}; prepare it again") from None
        path = f"tfds:{builder.info.full_name}:{split}"
        formats = sorted(f.value for f in builder.info.available_file_formats())
        if _FORMAT not in formats:
            raise UserError(f"--tfds: {name}: {_of_format(formats, str(builder.data_dir))}")
        try:
            about = builder.info.splits[split]
            files = about.file_instructions
            if not files:
                raise ValueError(f"{split} has no row")
            raw = self._tfds.decode.DeserializeMethod.RAW_BYTES
            self._records = builder.as_data_source(split, file_format=_FORMAT, deserialize_method=raw)
        except ValueError as error:
            raise UserError(f"--tfds: {name}: {one_line(error)}; mend --split") from None
        except Exception as error:
            raise UserError(f"--tfds: {name}: {one_line(error)}; copy or prepare it again") from None
        self._features = builder.info.features
        digest = hashlib.blake2b(digest_size=16)
        for file in files:
            (found,) = sources([file.filename])
            reader = record_module.ArrayRecordReader(file.filename)
            if not reader.ok() or reader.num_records() != file.examples_in_shard:  # else what is missing reads as empty
                raise UserError(f"{file.filename}: does not hold its {file.examples_in_shard} rows; copy it again")
            what = (Path(found.path).name, found.size, found.digest, file.skip, file.take)
            digest.update(json.dumps(what).encode())
        splits = builder.info.splits.values()  # a slice does not know its bytes
        mean = sum(s.num_bytes for s in splits) / sum(s.num_examples for s in splits)
        self.source = Source(path, int(about.num_bytes or mean * len(self._records)), digest.hexdigest(), "data set")

    def rows(self, take: Take, position: dict[str, Any] | None) -> Iterator[dict[str, str]]:
        decode = self._decoder(take)
        count = len(self._records)
        for first in range(position["rows"] if position else 0, count, _READ):
            for record in self._records.__getitems__(list(range(first, min(first + _READ, count)))):
                yield decode(record)

    def position(self, row: int) -> dict[str, Any]:
        return {"rows": row}

    def lost(self, row: int, error: Exception) -> UserError:
        return UserError(f"--tfds: {self.source.path}: behind row {row}: {one_line(error)}; copy or prepare it again")

    def sample(self, take: Take, part_bytes: int) -> Iterator[Rows]:
        """Runs of rows from all over the data set."""
        decode = self._decoder(take)
        count = len(self._records)
        runs = -(-count // _SAMPLE)
        order = Shuffle(runs, 0)
        for place in range(runs):
            first = int(order(np.asarray([place]))[0]) * _SAMPLE
            rows = list(range(first, min(first + _SAMPLE, count)))
            try:
                found = tuple(decode(record) for record in self._records.__getitems__(rows))
            except Exception as error:
                raise self.lost(first, error) from None
            yield Rows(self.source.path, first, found, self.position(rows[-1] + 1))

    def _decoder(self, take: Take) -> Callable[[bytes], dict[str, str]]:
        """Of a record's bytes to the texts to take of it; of the other fields, as images, nothing is decoded. Bytes
        that are no UTF-8 become half surrogates, which readers of documents count and replace."""
        names = self.columns(take, sorted(name for name, feature in self._features.items() if _is_text(feature)))
        some = self._tfds.features.FeaturesDict({name: self._features[name] for name in names})

        def decode(record: bytes) -> dict[str, str]:
            found = some.deserialize_example_np(record)
            return {name: value.decode(errors="surrogateescape") for name, value in found.items()}

        return decode


def _is_text(feature: Any) -> bool:
    """One string or bytes a row."""
    return getattr(feature, "np_dtype", None) is np.dtype(object) and feature.shape == ()


def _remedy(name: str, folder: str) -> str:
    command = f"tfds build {name} --file_format={_FORMAT} --data_dir={folder}"
    return f"where TensorFlow is installed, prepare it: {command}"


def _of_format(formats: list[str], folder: str) -> str:
    if "parquet" in formats:
        return f"is stored as parquet; give --input {folder}/*.parquet"
    command = f"tfds convert_format --dataset_version_dir={folder} --out_file_format={_FORMAT}"
    return f"is stored as {', '.join(formats)}, which needs TensorFlow; where that is installed, convert it: {command}"


def _prepared(folder: str) -> list[str]:
    """NAME/CONFIG:VERSION of what lies below the folder, at most eight."""
    found = [path.parent for depth in ("*/*", "*/*/*") for path in Path(folder).glob(f"{depth}/dataset_info.json")]
    names = sorted(f"{'/'.join(path.relative_to(folder).parts[:-1])}:{path.name}" for path in found)
    return names[:8] + ["..."] * (len(names) > 8)


def _packages() -> tuple[Any, Any, Any]:
    if "tensorflow" not in sys.modules and importlib.util.find_spec("tensorflow") is not None:
        sys.meta_path.insert(0, _NoTensorFlow())
    try:
        import importlib_resources  # noqa: F401  # the package needs it and does not ask for it
        import tensorflow_datasets
        from array_record.python import array_record_module
        from tensorflow_datasets.core import read_only_builder
    except (ImportError, AttributeError):
        raise UserError("--tfds: needs packages that are not installed: pip install 'hybrid_jax[tfds]'") from None
    return tensorflow_datasets, read_only_builder, array_record_module


class _NoTensorFlow(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Makes `import tensorflow` an ImportError. Hiding it otherwise is not possible: packages look into sys.modules,
    where even a None says to them that it is there."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        return importlib.machinery.ModuleSpec(name, self) if name == "tensorflow" else None

    def exec_module(self, module: Any) -> None:
        raise ImportError("TensorFlow is not imported here: it crashes beside ROCm", name=module.__name__)

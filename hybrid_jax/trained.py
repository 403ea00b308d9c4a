"""A run's checkpoint, opened to be read only: what decoding, evaluation and export begin with.

    trained = trained.open("runs/gdn_300m")
    model, params = trained.model(), trained.params()

Nothing is locked, renamed or removed, so a run may be training into the folder.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint.experimental.v1 as ocp
import tensorstore

from hybrid_jax import checkpoint, data, manifest, orbax_log, pending, schema
from hybrid_jax import config as config_lib
from hybrid_jax.config import Config
from hybrid_jax.data import run_tokenizer
from hybrid_jax.data.interface import Tokenizer
from hybrid_jax.data.tokenizer import ByteTokenizer
from hybrid_jax.errors import UserError
from hybrid_jax.model import Model, Params
from hybrid_jax.optimizer import leaf_paths, path_str

_PARAMS = "params"
_PARTS_AT_ONCE = 4  # of an array, see checkpoint._PIECE


@dataclasses.dataclass(frozen=True)
class Trained:
    """One checkpoint of a run.

    run: the run's folder. folder: the checkpoint's. step: after how many updates. config: that the checkpoint was
    written with. meta: its record, see provenance.describe; `line` in it holds the step's numbers.
    Paths of parameters are those of optimizer.leaf_paths, such as "layers.0.mixer.A_log", in which arrays under
    "layers" are stacked over the repeats of the pattern's period.
    """

    run: Path
    folder: Path
    step: int
    config: Config
    meta: dict[str, Any]

    def model(self, compute_dtype: str = "", backend: str = "", attention: str = "") -> Model:
        """The model that the parameters are of; what is "" is as it was in training."""
        kernels, train = self.config.kernels, self.config.train
        return Model(
            self.config.model,
            backend or kernels.backend,
            compute_dtype or train.compute_dtype,
            attention or kernels.attention,
        )

    def tokenizer(self) -> Tokenizer:
        """What the run's samples are encoded by: as RUN/tokenizer/ says, else, of an older run, as its data does.

        Raises UserError where neither is there.
        """
        found = run_tokenizer.read(self.run)
        if found is not None:
            return found
        about, train = self.config.data, self.config.train
        if about.source in ("python", "files") and about.tokenizer == "bytes":
            return ByteTokenizer()
        try:
            return data.open(
                about,
                sequence_length=train.sequence_length,
                vocab_size=self.config.model.vocab_size,
                seed=train.seed,
            ).tokenizer
        except UserError as error:
            raise UserError(
                f"{self.run}: its tokenizer is in no folder {run_tokenizer.FOLDER}, and cannot be had from its data: "
                f"{error}"
            ) from None

    def abstract_params(self) -> Params:
        """The parameters as a tree of jax.ShapeDtypeStruct, fp32."""
        return self.model().abstract_params()

    @functools.cached_property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shape of each parameter by its path."""
        return {path: tuple(x.shape) for path, x in leaf_paths(self.abstract_params())}

    def params(self, dtype: Any = None, sharding: Any = None) -> Params:
        """The parameters, without moments; read one after the other, so the host holds one of them at a time.

        dtype: what they are converted to (None: fp32). sharding: a jax.sharding.Sharding or device for all of them, or
        a tree of these (None: the default device). Raises UserError as `read` does.
        """
        single = sharding is None or isinstance(sharding, jax.sharding.Sharding | jax.Device)
        where = {} if single else dict(leaf_paths(sharding))

        def one(key: tuple[Any, ...], _: Any) -> jax.Array:
            path = path_str(key)
            array = self.read(path)
            array = array if dtype is None else array.astype(dtype)
            place = sharding if single else where[path]
            return jnp.asarray(array) if place is None else jax.device_put(array, place)

        return jax.tree_util.tree_map_with_path(one, self.abstract_params())

    def read(self, path: str, index: int | None = None) -> np.ndarray:
        """The parameter `path` as fp32, or of a stacked one what stands at `index` of its leading axis.

        Only chunks that hold some of it are read. Raises UserError where the files are gone, damaged or hold values
        that are not finite, KeyError for a path that is not of this model.
        """
        return self._read(path, () if index is None else (index,))

    def layers(self, path: str) -> Iterator[np.ndarray]:
        """What stands along the leading axis of a stacked parameter, in order: as many at once as lie together in the
        files. Raises as `read` does."""
        count = self.shapes[path][0]
        together = self._array(path).chunk_layout.read_chunk.shape
        at_once = int(together[0] or 1) if together else 1
        for start in range(0, count, at_once):
            yield from self._read(path, (slice(start, min(start + at_once, count)),))

    def _read(self, path: str, index: tuple[int | slice, ...]) -> np.ndarray:
        stored = self._array(path)
        with self._reading(path):
            array = np.asarray(stored[index].read().result())
        if not all(np.isfinite(block).all() for block in _blocks(array)):
            raise UserError(f"{self.folder}: {path} holds values that are not finite; choose an older checkpoint")
        return array

    def _array(self, path: str) -> tensorstore.TensorStore:
        if path not in self.shapes:
            raise KeyError(path)
        base = f"file://{(self.folder / checkpoint.STATE).absolute()}/"
        kvstore = {"driver": "ocdbt", "base": base, "path": f"{_PARAMS}.{path}/"}
        with self._reading(path):
            return tensorstore.open(
                {"driver": "zarr3", "kvstore": kvstore}, open=True, read=True, context=_few_at_once()
            ).result()

    @contextlib.contextmanager
    def _reading(self, path: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # tensorstore raises many kinds
            gone = "" if self.folder.is_dir() else ": the run has removed it meanwhile; choose a newer one"
            raise UserError(f"{self.folder}: {path} cannot be read{gone or f': {pending.reason(error)}'}") from None


def _blocks(array: np.ndarray) -> Iterator[np.ndarray]:
    """The array in parts, so that what is computed of it stays small beside it."""
    rows = max(1, 2**24 * len(array) // max(array.nbytes, 1))
    return (array[start : start + rows] for start in range(0, len(array), rows))


@functools.cache
def _few_at_once() -> tensorstore.Context:
    """So that what is being decompressed stays small beside a large array."""
    limit = {"limit": _PARTS_AT_ONCE}
    return tensorstore.Context({"data_copy_concurrency": limit, "file_io_concurrency": limit})


def say(line: str) -> None:
    """One line on stderr."""
    print(line, file=sys.stderr, flush=True)


def open(run: str | Path, step: int = 0, log: Callable[[str], None] = say) -> Trained:
    """The checkpoint of `step`, or where that is 0 the newest whole one; damaged ones are passed over, and `log` gets
    a line for each.

    run: a run's folder, its checkpoints/ folder, or one checkpoint. Raises UserError for a folder that is none of these
    or not there, for an unfinished, damaged or missing checkpoint, and for one of another version's schema or model.
    """
    given = Path(run).expanduser()
    if not given.is_dir():
        raise UserError(f"{given}: {'is no folder' if given.exists() else 'no such folder'}; give that of a run")
    if checkpoint.TEMPORARY in given.name:
        raise UserError(f"{given}: is a checkpoint that was not written to its end; choose another, or give the run")
    if (given / "_CHECKPOINT_METADATA").exists() or (given / checkpoint.STATE).is_dir():
        return _open_one(given, step)
    folder = given / "checkpoints" if (given / "checkpoints").is_dir() else given
    steps = sorted(int(path.name) for path in folder.iterdir() if path.name.isdigit() and path.is_dir())
    if not steps:
        if folder == given and not (given / "config.json").exists():
            raise UserError(f"{given}: is not a run: it holds no checkpoints folder, and no checkpoint")
        if _writes_none(given / "config.json"):
            raise UserError(
                f"{given}: the run writes no checkpoint (config.checkpoint.every_steps is 0, as with ':smoke'); train "
                "one with --config.checkpoint.every_steps=N"
            )
        raise UserError(f"{folder}: holds no checkpoint; wait for the first one (config.checkpoint.every_steps)")
    if step:
        if step not in steps:
            raise UserError(f"{folder}: has no checkpoint {step}; there are {_listed(steps)}")
        return _open_one(folder / str(step), 0)
    passed = {}
    for newest in reversed(steps):
        try:
            found = _open_one(folder / str(newest), 0)
        except _Damaged as error:
            passed[newest] = error.why
            log(f"checkpoint {newest} cannot be read and is passed over ({error.why})")
            continue
        return found
    raise UserError(
        f"{folder}: none of the {len(passed)} checkpoints can be read "
        f"({'; '.join(f'{step}: {reason}' for step, reason in list(passed.items())[:3])})"
    )


class _Damaged(UserError):
    def __init__(self, folder: Path, why: str):
        super().__init__(f"{folder}: cannot be read: {why}; choose another checkpoint")
        self.why = why


def _open_one(folder: Path, step: int) -> Trained:
    """Raises _Damaged, and UserError for what an older checkpoint would not mend."""
    number = folder.absolute().name
    if step and number != str(step):
        raise UserError(f"{folder}: is one checkpoint and not that of step {step}; give the run instead")
    if why := manifest.damage(folder):
        raise _Damaged(folder, why)
    meta, saved = _index(folder)
    if not manifest.is_recorded(folder, meta):
        raise _Damaged(folder, "its record of the run, in _CHECKPOINT_METADATA, was changed")
    schema.check_version(folder, meta)
    if schema.version_of(meta) != schema.SCHEMA:
        raise UserError(
            f"{folder}: written by an older hybrid_jax (schema {schema.version_of(meta)}); go on with its run for a "
            "step, which writes a checkpoint of this version"
        )
    if not meta.get("config"):
        raise UserError(f"{folder}: its record of the run's config is missing, so it is not known what model it is of")
    try:
        config = config_lib.from_dict(meta["config"])
        shapes = {_PARAMS: Model(config.model).abstract_params()}
    except UserError as error:
        raise UserError(f"{folder}: this version cannot read its config: {error}") from None
    if lines := schema.mismatches({_PARAMS: saved.get(_PARAMS)}, shapes):
        more = f" (and {len(lines) - 2} more)" if len(lines) > 2 else ""
        raise UserError(f"{folder}: its arrays are not those of its config: {'; '.join(lines[:2])}{more}")
    run = folder.absolute().parent
    run = run.parent if run.name == "checkpoints" else run
    return Trained(run, folder, int(number) if number.isdigit() else 0, config, meta)


def _index(folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """(meta, the saved arrays' shapes and dtypes)."""
    if not (folder / "_CHECKPOINT_METADATA").exists():
        raise _Damaged(folder, "_CHECKPOINT_METADATA is missing")
    orbax_log.divert()
    try:
        found = ocp.metadata(folder.absolute())
    except Exception:  # orbax raises many kinds, by which file is damaged
        raise _Damaged(folder, "its index is damaged") from None
    saved: Any = found.metadata
    if isinstance(saved, dict) and set(saved) == {checkpoint.STATE}:
        saved = saved[checkpoint.STATE]
    if not isinstance(saved, dict):
        raise _Damaged(folder, "its index is damaged")
    return dict(found.custom_metadata or {}), saved


def _writes_none(config: Path) -> bool:
    """Whether this is the config of a run without checkpoints."""
    try:
        return json.loads(config.read_text(encoding="utf-8"))["checkpoint"]["every_steps"] == 0
    except (OSError, ValueError, LookupError, TypeError):
        return False


def _listed(steps: list[int]) -> str:
    if len(steps) <= 6:
        return ", ".join(map(str, steps))
    return f"{', '.join(map(str, steps[:2]))}, ..., {', '.join(map(str, steps[-3:]))} ({len(steps)} of them)"

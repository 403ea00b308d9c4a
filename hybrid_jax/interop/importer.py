"""A folder of another library's weights as a run, whose one checkpoint, 0, holds parameters and nothing else.

Training begins with it through config.checkpoint.init_from, which the run's config.json names.
"""

from __future__ import annotations

import collections
import dataclasses
import json
import re
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from hybrid_jax import checkpoint, progress, provenance
from hybrid_jax import config as config_lib
from hybrid_jax.config import Config
from hybrid_jax.data import run_tokenizer, tokenizer
from hybrid_jax.data.interface import Tokenizer
from hybrid_jax.data.tokenizer import BpeTokenizer, IdTokenizer
from hybrid_jax.errors import UserError
from hybrid_jax.interop import folder, formats
from hybrid_jax.interop.formats import Format
from hybrid_jax.interop.shards import DTYPES, ShardReader
from hybrid_jax.interop.table import Entry
from hybrid_jax.model import Model, Params
from hybrid_jax.optimizer import leaf_paths

# Beside tokenizer.json, what transformers keeps of a tokenizer.
_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    "chat_template.jinja",
    "generation_config.json",
)
_COMPUTED = re.compile(r"\.rotary_emb\.inv_freq$")  # older checkpoints store it: the config says it


@dataclasses.dataclass(frozen=True)
class Imported:
    """What a folder holds. params: fp32. dtypes: the stored ones, by number of tensors. config: its data and its
    folders are not named."""

    format: Format
    config: Config
    params: Params
    dtypes: Mapping[str, int]
    tokenizer: Tokenizer

    @property
    def parameters(self) -> int:
        return sum(x.size for _, x in leaf_paths(self.params))


def read(model: Path) -> Imported:
    """The model in the folder `model`. Raises UserError, naming the file."""
    if not model.is_dir():
        raise UserError(f"--model: {model}: {'is no folder' if model.exists() else 'no such folder'}")
    values = _read_config(model / "config.json")
    chosen, config = formats.read_config(values, str(model / "config.json"))
    reader = ShardReader(model)
    entries = chosen.entries(config)
    stored = _match(chosen, config, entries, reader)
    known = _tokenizer(model, values, config)
    dtypes = collections.Counter(reader.dtype(name) for name in stored.values())
    return Imported(chosen, config, _params(config, entries, stored, reader), dtypes, known)


def check_free(out: Path, overwrite: bool) -> None:
    """Raises UserError unless the run `out` can be written."""
    folder.check_free(out, overwrite, _is_import, "an imported run without further checkpoints")


def _is_import(out: Path) -> bool:
    checkpoints = out / "checkpoints"
    return checkpoints.is_dir() and [path.name for path in checkpoints.iterdir() if path.is_dir()] == ["0"]


def write(found: Imported, model: Path, out: Path, overwrite: bool) -> Config:
    """Makes the run `out`, whole or not at all, of what was found in `model`; returns the config that trains from it.

    Raises UserError.
    """
    check_free(out, overwrite)
    config = dataclasses.replace(
        found.config,
        workdir=f"{out}-tuned",
        data=dataclasses.replace(found.config.data, source="store", prepare=_how_to_prepare(out, found.tokenizer)),
        checkpoint=dataclasses.replace(found.config.checkpoint, init_from=str(out)),
    )
    source = {"format": found.format.name, "folder": str(model.absolute())}
    with folder.appearing(out, 4 * found.parameters) as scratch:
        _write_checkpoint(scratch / "checkpoints", config, found.params, source)
        text = json.dumps(config_lib.to_dict(config), indent=2) + "\n"
        (scratch / "config.json").write_text(text, encoding="utf-8")
        _write_tokenizer(model, scratch, found.tokenizer)
    return config


def _read_config(path: Path) -> dict[str, Any]:
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"--model: {path.parent} holds no config.json, so it is no model's folder") from None
    except OSError as error:
        raise UserError(f"{path}: {error.strerror or error}") from None
    except ValueError:
        raise UserError(f"{path}: is damaged: no JSON") from None
    if not isinstance(values, dict):
        raise UserError(f"{path}: is not the config of a model")
    return values


# ---- tensors -------------------------------------------------------------------


def _match(chosen: Format, config: Config, entries: list[Entry], reader: ShardReader) -> dict[str, str]:
    """The name in the files of each tensor of the table. Raises UserError where one is missing, left over or of
    another shape, and where a tied head is another matrix than the embedding."""
    found: dict[str, str] = {}
    for name in reader.names:
        canonical = chosen.canonical(name)
        if canonical in found:
            raise UserError(f"{reader.where(name)}: {name} and {found[canonical]} are one tensor by two names")
        if not _COMPUTED.search(canonical):
            found[canonical] = name
    if config.model.tie_word_embeddings:
        _check_tied(found, entries, reader)
    missing = [entry.theirs for entry in entries if entry.theirs not in found and not entry.copy]
    if missing:
        hint = "; is the head the embedding (tie_word_embeddings)?" if missing == ["lm_head.weight"] else ""
        raise UserError(f"{reader.folder}: has no tensor {_listed(missing)}, which config.json asks for{hint}")
    extra = sorted(set(found) - {entry.theirs for entry in entries})
    if extra:
        where = reader.where(found[extra[0]])
        raise UserError(f"{where}: holds {_listed([found[name] for name in extra])}, which config.json says nothing of")
    for entry in entries:
        if entry.theirs not in found:
            continue
        name = found[entry.theirs]
        if reader.shape(name) != entry.shape:
            raise UserError(
                f"{reader.where(name)}: {name} is {list(reader.shape(name))}, but config.json makes it "
                f"{list(entry.shape)}"
            )
        if reader.dtype(name) not in DTYPES:
            raise UserError(
                f"{reader.where(name)}: {name} is {reader.dtype(name)}; only {', '.join(DTYPES)} can be read"
            )
    return found


def _check_tied(found: dict[str, str], entries: list[Entry], reader: ShardReader) -> None:
    """Takes a head that repeats the embedding out of `found`."""
    head = found.get("lm_head.weight")
    embed = next(entry.theirs for entry in entries if entry.ours[0].path == "embed.weight")
    if head is None or embed not in found:
        return
    same = reader.shape(head) == reader.shape(found[embed]) and reader.dtype(head) == reader.dtype(found[embed])
    if not (same and np.array_equal(reader.read(head), reader.read(found[embed]))):
        raise UserError(
            f"{reader.where(head)}: {head} is not the embedding, which config.json says it is; set "
            "tie_word_embeddings to false there if the head is meant"
        )
    del found["lm_head.weight"]


def _params(config: Config, entries: list[Entry], stored: Mapping[str, str], reader: ShardReader) -> Params:
    """Our tree, fp32. Raises UserError for values that are not finite."""
    ours = {path: np.empty(x.shape, np.float32) for path, x in leaf_paths(Model(config.model).abstract_params())}
    line = progress.Line("import")
    wanted = [entry for entry in entries if not entry.copy]
    count = progress.Count(line, len(wanted), sum(x.nbytes for x in ours.values()), "tensors")
    try:
        for entry in wanted:
            name = stored[entry.theirs]
            tensor = reader.read(name).astype(np.float32)
            if not np.isfinite(tensor).all():
                raise UserError(f"{reader.where(name)}: {name} holds values that are not finite")
            for leaf, array in zip(entry.ours, entry.to_ours(tensor), strict=True):
                ours[leaf.path][() if leaf.index is None else leaf.index] = array
            count.add(tensor.nbytes)
    finally:
        line.close()
    return _tree(ours)


def _tree(flat: Mapping[str, np.ndarray]) -> Params:
    tree: Params = {}
    for path, array in flat.items():
        *parents, last = path.split(".")
        node = tree
        for parent in parents:
            node = node.setdefault(parent, {})
        node[last] = jnp.asarray(array)
    return tree


def _write_checkpoint(where: Path, config: Config, params: Params, source: dict[str, str]) -> None:
    failures: list[str] = []
    meta = {**provenance.describe(config, {}), "imported": source}
    with checkpoint.Checkpoints(where, 1, meta, failures.append) as checkpoints:
        checkpoints.save(0, {"params": params})
        checkpoints.wait()


def _listed(names: Iterable[str]) -> str:
    first, *more = names
    return f"{first} (nor {len(more)} more)" if more else first


# ---- tokenizer -----------------------------------------------------------------


def _tokenizer(model: Path, values: Mapping[str, Any], config: Config) -> Tokenizer:
    """The tokenizer.json of the folder; ids without text where there is none. Raises UserError."""
    named = values.get("eos_token_id")
    named = named[0] if isinstance(named, list) and named else named
    size = config.model.vocab_size
    end = named if isinstance(named, int) and 0 <= named < size else None
    if not (model / "tokenizer.json").is_file():
        return IdTokenizer(size, size - 1 if end is None else end)
    found = tokenizer.load(model / "tokenizer.json", end)
    if found.vocab_size > size:
        raise UserError(f"{model / 'tokenizer.json'}: has {found.vocab_size:,} ids, but config.json says {size:,}")
    return found


def _write_tokenizer(model: Path, run: Path, known: Tokenizer) -> None:
    run_tokenizer.write(run, known)
    if isinstance(known, BpeTokenizer):
        for name in _TOKENIZER_FILES:
            if (model / name).is_file():
                shutil.copyfile(model / name, run / run_tokenizer.FOLDER / name)


def _how_to_prepare(out: Path, known: Tokenizer) -> str:
    """Said where a store's path is asked for, see config.data.prepare."""
    given = f" --tokenizer {out / run_tokenizer.FOLDER}" if isinstance(known, BpeTokenizer) else ""
    return f"--input TEXTS{given}"

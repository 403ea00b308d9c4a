"""From `--config=configs/NAME.py[:variant]` or `--config=RUN/config.json`, and `--config.a.b=value`, to a validated
Config. No jax here."""

import dataclasses
import difflib
import inspect
import json
import sys
import traceback
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import ml_collections

from hybrid_jax.config import Config, DataConfig, resolve, typed_value, unknown_key
from hybrid_jax.errors import UserError


def split(spec: str) -> tuple[Path, str]:
    """("configs/x.py", "smoke") of "configs/x.py:smoke"; the variant is "" without a colon."""
    path, colon, variant = spec.rpartition(":")
    if colon and path.endswith(".py"):
        return Path(path), variant
    return Path(spec), ""


def split_overrides(arguments: Iterable[str]) -> tuple[list[str], list[tuple[str, str]]]:
    """(the arguments that are none, the --config.KEY=VALUE and --config.KEY VALUE as pairs). Raises UserError."""
    plain, overrides = [], []
    rest = iter(arguments)
    for argument in rest:
        name, equals, value = argument.partition("=")
        bare = name.lstrip("-")
        if not name.startswith("-") or not bare.startswith("config."):
            plain.append(argument)
            continue
        if not equals:
            value = next(rest, "--")
            if value.startswith("--"):
                raise UserError(f"{bare}: needs a value, as in --{bare}=VALUE")
        overrides.append((bare.removeprefix("config."), value))
    return plain, overrides


def load(spec: str, overrides: Iterable[tuple[str, str]] = ()) -> Config:
    """The Config of a file and of (path such as "model.mixer", text) pairs on top of it; workdir is always
    set.

    Raises UserError: no such file, an error inside it (with the line), an unknown key, a wrong type,
    impossible sizes.
    """
    path, variant = split(spec)
    values = _read_json(path) if path.suffix == ".json" else _run_file(path, variant).to_dict()
    overrides = list(overrides)
    for key, text in overrides:
        _override(values, key, text)
    if {"data.path", "data.source"} & {key for key, _ in overrides} == {"data.path"}:
        _read_path(values["data"])
    config = resolve(values)
    if not config.workdir:
        stem = path.absolute().parent.name if path.suffix == ".json" else path.stem
        name = f"{stem}-{variant}" if variant else stem
        parts = [part for part in (config.workspace, config.group, config.user, name) if part]
        config = dataclasses.replace(config, workdir="/".join(parts))
    return config


def _read_path(data: dict[str, Any]) -> None:
    """Has a path that was given alone read, where the config's own source would not: as files where there are such,
    else as a store."""
    if data["path"] and data.get("source", DataConfig.source) not in ("files", "store"):
        first = data["path"].split(",")[0]
        text = any(sign in first for sign in "*?[") or Path(first).expanduser().exists()
        data["source"] = "files" if text else "store"


def _read_json(path: Path) -> dict[str, Any]:
    """The config.json of a run. Raises UserError."""
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"--config: {path} does not exist; give the config.json of a run") from None
    except (OSError, ValueError) as error:
        raise UserError(f"--config: {path}: {getattr(error, 'strerror', None) or 'is no JSON'}") from None
    if not isinstance(values, dict) or "model_type" in values:
        raise UserError(f"--config: {path} is no run's config; python -m hybrid_jax.import_hf makes a run of a model")
    return values


def _run_file(path: Path, variant: str) -> ml_collections.ConfigDict:
    if path.is_dir() and (path / "config.json").is_file():
        raise UserError(f"--config: {path} is a folder, did you mean {path / 'config.json'}?")
    if path.is_dir():
        raise UserError(f"--config: {path} is a folder{_similar_file(path / path.name)}")
    if not path.is_file():
        raise UserError(f"--config: {path} does not exist{_similar_file(path)}")
    namespace: dict[str, Any] = {"__name__": path.stem, "__file__": str(path)}
    try:
        exec(compile(path.read_text(encoding="utf-8"), str(path), "exec"), namespace)
        get_config = namespace.get("get_config")
        if not callable(get_config):
            raise UserError("has no get_config(); define get_config(variant: str = '') that returns a ConfigDict")
        if variant and not inspect.signature(get_config).parameters:
            raise UserError(f"its get_config() takes no variant, so leave out ':{variant}'")
        config = get_config(variant) if variant else get_config()
        if not isinstance(config, ml_collections.ConfigDict):
            raise UserError(f"its get_config() returned {type(config).__name__}, not a ConfigDict")
    except UserError as error:
        raise UserError(f"{path}: {error}") from None
    except SyntaxError as error:
        raise UserError(f"{error.filename or path}, line {error.lineno}: {error.msg}") from None
    except (Exception, SystemExit) as error:
        lines = [frame.lineno for frame in traceback.extract_tb(sys.exc_info()[2]) if frame.filename == str(path)]
        where = f"{path}, line {lines[-1]}" if lines else str(path)
        reason = (str(error).strip().splitlines() or ["no message"])[0]
        raise UserError(f"{where}: {type(error).__name__}: {reason}") from None
    return config


def _similar_file(path: Path) -> str:
    folders = dict.fromkeys((path.parent, Path("configs")))
    files = [f for folder in folders for f in sorted(folder.glob("*.py")) if "def get_config(" in f.read_text("utf-8")]
    near = difflib.get_close_matches(path.stem, [file.stem for file in files], n=1)
    if near:
        return f", did you mean {next(file for file in files if file.stem == near[0])}?"
    names = ", ".join(str(file) for file in files)
    return f"; there are {names}" if names else "; give the path of a config file"


def _override(values: dict[str, Any], key: str, text: str) -> None:
    """Sets `key` (dotted) in the nested dict `values` to `text` read as the key's type."""
    section: Any = Config
    path = "config"
    *parents, last = key.split(".")
    for name in parents:
        field = _field(section, name, path)
        path, section = f"{path}.{name}", field.type
        if not dataclasses.is_dataclass(section):
            raise UserError(f"{path}: is a value and has no key {last!r}")
        values = values.setdefault(name, {})
    field = _field(section, last, path)
    path = f"{path}.{last}"
    if dataclasses.is_dataclass(field.type):
        keys = ", ".join(f.name for f in dataclasses.fields(field.type))
        raise UserError(f"{path}: is a section; set one of its keys, as in --{path}.KEY=VALUE ({keys})")
    values[last] = typed_value(field, _read(field.type, text), path)


def _field(section: Any, name: str, path: str) -> "dataclasses.Field[Any]":
    known = {field.name: field for field in dataclasses.fields(section)}
    if name not in known:
        raise unknown_key(path, name, list(known))
    return known[name]


def _read(kind: Any, text: str) -> Any:
    """`text` as `kind` where it is one; else as it is, for `typed_value` to complain about."""
    if kind is bool:
        return {"true": True, "1": True, "false": False, "0": False}.get(text.lower(), text)
    if kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            return text
    return text

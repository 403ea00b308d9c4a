"""Tasks by name, glob, file or folder, out of lm-evaluation-harness; what is wrong with each in one line.

Import after library.prepare.
"""

from __future__ import annotations

import dataclasses
import difflib
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import yaml

from hybrid_jax.errors import UserError

_SUFFIXES = (".yaml", ".yml")
_BUILDERS = ("json", "csv", "parquet", "arrow", "text", "pandas")  # of `datasets`, for files
_FEWSHOT_SEED = 1234  # as lm-evaluation-harness's own command


class TaskErrors(UserError):
    """A line for each task."""

    def __init__(self, lines: Sequence[str]):
        super().__init__("; ".join(lines))
        self.lines = tuple(lines)


@dataclasses.dataclass(frozen=True)
class Loaded:
    """tasks, groups: by name, as lm_eval.evaluator.evaluate takes them. shown: names of what was asked for."""

    tasks: dict[str, Any]
    groups: dict[str, Any]
    shown: list[str]


def is_local(name: str) -> bool:
    """Whether a name of --tasks is a file or folder."""
    return os.sep in name or name.endswith(_SUFFIXES) or os.path.isdir(name)


def files(name: str) -> list[Path]:
    """The task files that a local name stands for. Raises UserError for one that is not there or is no task file."""
    path = Path(name).expanduser()
    if path.is_dir():
        found = [file for file in sorted(path.rglob("*")) if file.suffix in _SUFFIXES and _kind(file)]
        if not found:
            raise UserError(f"--tasks: {name}: holds no .yaml file with the key 'task' or 'group'")
        return found
    if not path.is_file():
        raise UserError(f"--tasks: {name}: no such file or folder")
    if not _kind(path):
        raise UserError(f"--tasks: {name}: is no task: it has neither the key 'task' nor 'group'")
    return [path]


def needs_hub(names: Sequence[str]) -> bool:
    """Whether data or metrics of these tasks may have to come from the hub. Raises UserError as `files` does."""
    for name in names:
        if not is_local(name):
            return True
        for task in map(_read, files(name)):
            source = str(task.get("dataset_path", "json"))
            if source not in _BUILDERS and not os.path.exists(source):
                return True
            if any(metric.get("hf_evaluate") for metric in task.get("metric_list") or [] if isinstance(metric, dict)):
                return True
    return False


def load(names: Sequence[str], num_fewshot: int | None, say: Callable[[str], None]) -> Loaded:
    """Opens each task's data and makes ready its prompts, with `num_fewshot` examples (None: as the task says).

    Raises TaskErrors with a line for each name that cannot be had.
    """
    from lm_eval.tasks import TaskManager

    local = {name: files(name) for name in names if is_local(name)}
    groups = any(_kind(file) == "group" for found in local.values() for file in found)
    everything = len(local) < len(names) or groups  # a group may name any task
    if everything:
        say("listing the tasks of lm-evaluation-harness")
    folders = sorted({str(file.parent) for found in local.values() for file in found})
    manager = TaskManager(include_path=folders, include_defaults=everything)
    tasks: dict[str, Any] = {}
    all_groups: dict[str, Any] = {}
    shown: list[str] = []
    errors: list[str] = []
    for name in names:
        specs, error = ([str(file) for file in local[name]], "") if name in local else _known(name, manager.all_tasks)
        if error:
            errors.append(error)
        for spec in specs:
            say(f"opening {spec}")
            if error := _strangers(spec, manager.all_tasks) if name in local else "":
                errors.append(error)
                continue
            try:
                found = manager.load([spec])
            except Exception as raised:  # of the task's own code, of datasets, of the harness
                errors.append(_what(spec, raised))
                continue
            tasks |= found["tasks"]
            all_groups |= found.get("groups", {})
            inside = {child for children in found.get("group_map", {}).values() for child in children}
            tops = [top for top in (*found.get("groups", {}), *found["tasks"]) if top not in inside]
            for top in tops:
                whole = top in found["tasks"] or found["groups"][top].has_aggregation
                shown += [top] if whole else list(found["group_map"][top])
    errors += [_unfit(name, task) for name, task in tasks.items() if _unfit(name, task)]
    if errors:
        raise TaskErrors([f"--tasks: {line}" for line in dict.fromkeys(errors)])
    for task in tasks.values():
        fixed = task.get_config("num_fewshot")
        if fixed is None or (num_fewshot is not None and fixed != 0):  # 0 is a task's way to say that it has no others
            task.set_config(key="num_fewshot", value=num_fewshot or 0)
        task.set_fewshot_seed(seed=_FEWSHOT_SEED)
    return Loaded(tasks, all_groups, list(dict.fromkeys(shown)))


def _known(name: str, known: Sequence[str]) -> tuple[list[str], str]:
    """(the names that it stands for, what is wrong with it)."""
    if name in known:
        return [name], ""
    if any(sign in name for sign in "*?["):
        from lm_eval.utils import pattern_match

        found = pattern_match([name], known)
        return found, "" if found else f"{name}: no task of lm-evaluation-harness has such a name"
    near = difflib.get_close_matches(name, known, n=3)
    hint = f"did you mean {', '.join(near)}" if near else "`python -m lm_eval ls tasks` lists them"
    return [], f"{name}: unknown task; {hint}; a task of your own is given by its .yaml file or folder"


def _strangers(file: str, known: Sequence[str]) -> str:
    """What is wrong with the members of a group, which the harness would take for tasks of no content."""
    members = _read(Path(file)).get("task") if _kind(Path(file)) == "group" else None
    for member in members if isinstance(members, list) else []:
        if isinstance(member, str) and member not in known:
            return f"{file}: its member {_known(member, known)[1]}"
    return ""


def _what(name: str, error: Exception) -> str:
    """Why a task cannot be loaded, in a line."""
    chain = _chain(error)
    if type(error).__name__ == "DatasetGenerationError" and error.__cause__:  # says nothing itself
        error = error.__cause__  # type: ignore[assignment]
    said = " ".join(str(error).split()) or type(error).__name__
    if isinstance(error, KeyError):
        said = f"it names {said}, which is not there"
    if any(isinstance(e, ConnectionError) or "Offline" in type(e).__name__ for e in chain) or "on the Hub" in said:
        return (
            f"{name}: its data is not on this machine, and the Hugging Face hub cannot be reached; open it once where "
            "there is network and copy that machine's ~/.cache/huggingface, or give a task with local data"
        )
    if isinstance(error, StopIteration):
        return f"{name}: its data is empty; give one example a line"
    if type(error).__name__ == "ArrowInvalid":
        return f"{name}: its data is no JSON with one example a line: {said}"
    if isinstance(error, yaml.MarkedYAMLError):
        return f"{name}: is no valid YAML: {said}"
    return f"{name}: cannot be opened: {said if len(said) < 300 else said[:300] + ' ...'} ({type(error).__name__})"


def _chain(error: BaseException | None) -> list[BaseException]:
    found: list[BaseException] = []
    while error is not None and error not in found:
        found.append(error)
        error = error.__cause__ or error.__context__
    return found


def _unfit(name: str, task: Any) -> str:
    if getattr(task, "UNSAFE_CODE", False):
        return (
            f"{name}: runs code that the model writes; export the run, and use lm-evaluation-harness's own command "
            "with --confirm_run_unsafe_code where that may do no harm"
        )
    if getattr(task, "MULTIMODAL", False):
        return f"{name}: needs images or sound, which these models do not take"
    # The harness would fail on these after all is done.
    unknown = [metric for metric, of in getattr(task, "_metric_fn_list", {}).items() if of is None]
    if unknown and not task.get_config("process_results"):
        return f"{name}: its metric {unknown[0]!r} is none of lm-evaluation-harness"
    strange = [metric for metric, of in task.aggregation().items() if not callable(of)]
    return f"{name}: the aggregation of its metric {strange[0]!r} is none of lm-evaluation-harness" if strange else ""


class _Loader(yaml.SafeLoader):
    """Knows no tag, such as !function, and minds none."""


_Loader.add_multi_constructor("!", lambda loader, suffix, node: None)


def _read(file: Path) -> dict[str, Any]:
    """A task file's keys, functions left out. Raises UserError for one that is no YAML mapping."""
    try:
        found = yaml.load(file.read_bytes(), Loader=_Loader)
    except OSError as error:
        raise UserError(f"--tasks: {file}: {error.strerror or error}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UserError(f"--tasks: {file}: is no valid YAML: {' '.join(str(error).split())}") from None
    if not isinstance(found, dict):
        raise UserError(f"--tasks: {file}: is no task: it holds no keys")
    return found


def _kind(file: Path) -> str:
    """ "task" or "group"; "" for a file that others include."""
    found = _read(file)
    return next((key for key in ("group", "task") if key in found), "")

"""Results of an evaluation: as a person reads them, beside published ones, and as JSON."""

from __future__ import annotations

import datetime
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hybrid_jax.errors import UserError
from hybrid_jax.report import aligned

FORMAT, VERSION = "hybrid_jax evaluation", 1
FOLDER = "evaluation"  # of a run
ACCURACIES = ("acc", "acc_norm")

# {"num_fewshot", "documents", "version", "metrics": {name: {"value", "stderr"}}, ...}; a metric whose filter is not
# "none" is called "metric (filter)".
Task = dict[str, Any]
Published = Mapping[str, Mapping[str, Mapping[str, float]]]  # {source: {task: {metric: value}}}, as in milestones


def of_harness(found: Mapping[str, Any], **about: Any) -> dict[str, Task]:
    """The results of every task and group by name, out of what lm_eval.evaluator.evaluate returns.

    about: what else to say of each. Values that are no finite numbers are null.
    """
    tasks: dict[str, Task] = {}
    for name, values in found["results"].items():
        metrics: dict[str, dict[str, float | None]] = {}
        for key, value in values.items():
            metric, comma, kind = key.partition(",")
            if comma and not metric.endswith("_stderr"):
                stderr = values.get(f"{metric}_stderr,{kind}")
                called = metric if kind == "none" else f"{metric} ({kind})"
                metrics[called] = {"value": _number(value), "stderr": _number(stderr)}
        if metrics:
            tasks[name] = {
                "num_fewshot": found["n-shot"].get(name),
                "documents": values.get("sample_len") or values.get("sample_count"),
                "version": found["versions"].get(name),
                **about,
                "metrics": metrics,
            }
    return tasks


def _number(value: Any) -> float | None:
    try:
        return float(value) if math.isfinite(value) else None
    except TypeError:  # "N/A", for one
        return None


def average(scores: Mapping[str, Mapping[str, float]], metric: str, names: Sequence[str]) -> float | None:
    """The mean of these tasks, each counting the same; None for fewer than two, or where one lacks the metric."""
    values = [scores.get(name, {}).get(metric) for name in names]
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if 1 < len(known) == len(values) else None


def accuracies(tasks: Mapping[str, Task]) -> dict[str, dict[str, float]]:
    """{task: {"acc", "acc_norm"}} of the tasks that have them, as milestones hold them."""
    found = {
        name: {m: value for m in ACCURACIES if (value := task["metrics"].get(m, {}).get("value")) is not None}
        for name, task in tasks.items()
    }
    return {name: scores for name, scores in found.items() if scores}


def table(
    tasks: Mapping[str, Task], names: Sequence[str], published: Published | None = None, every_published: bool = False
) -> list[str]:
    """Lines: accuracies in the layout of the published ones, with these beside them, then what else was measured.

    names: the tasks to show, in this order. every_published: also tasks of which there is only what was published.
    Averages are over the tasks of which the first column has the metric, in every column that has all of these.
    """
    shown = {name: tasks[name] for name in names if name in tasks}
    ours = accuracies(shown)
    sources: dict[str, Mapping[str, Mapping[str, float]]] = {
        source: {name: scores for name, scores in of.items() if every_published or name in ours}
        for source, of in (published or {}).items()
    }
    sources = {source: of for source, of in sources.items() if of}
    rows_of = list(dict.fromkeys([*ours, *(name for of in sources.values() for name in of)]))
    lines: list[str] = []
    if rows_of:
        header = ["task"] + ["shots", "acc", "+-", "acc_norm", "+-"] * bool(ours)
        rows = [header + [f"{source} {metric}" for source in sources for metric in ACCURACIES]]
        for name in rows_of:
            row = [name]
            if ours:
                row.append(_shots(shown[name]) if name in shown else "")
                for metric in ACCURACIES:
                    values = shown[name]["metrics"].get(metric, {}) if name in shown else {}
                    row += [_four(values.get("value")), _four(values.get("stderr"))]
            rows.append(row + [_four(of.get(name, {}).get(metric)) for of in sources.values() for metric in ACCURACIES])
        first: Mapping[str, Mapping[str, float]] = ours or next(iter(sources.values()))
        over = {metric: [name for name in first if metric in first[name]] for metric in ACCURACIES}
        row = ["average"] + [""] * bool(ours)
        for metric in ACCURACIES * bool(ours):
            row += [_four(average(ours, metric, over[metric])), ""]
        row += [_four(average(of, metric, over[metric])) for of in sources.values() for metric in ACCURACIES]
        if any(row[1:]):
            rows.append(row)
        filled = [any(row[i] for row in rows[1:]) for i in range(len(rows[0]))]
        lines += aligned([[cell for cell, some in zip(row, filled, strict=True) if some] for row in rows])
    others = [
        (name, _shots(task), metric, _four(values["value"]), _four(values["stderr"]))
        for name, task in shown.items()
        for metric, values in task["metrics"].items()
        if metric not in ACCURACIES
    ]
    if others:
        lines += [""] * bool(lines) + aligned([("task", "shots", "metric", "value", "+-"), *others])
    return lines


def _shots(task: Task) -> str:
    return "" if task["num_fewshot"] is None else str(task["num_fewshot"])


def _four(value: float | None) -> str:
    return "" if value is None else f"{value:.4f}"


def read(path: Path) -> dict[str, Any]:
    """An earlier evaluation; {} where there is no such file. Raises UserError for a file that is none."""
    try:
        found = json.loads(path.read_bytes())
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise UserError(f"{path}: {error.strerror or error}") from None
    except ValueError:
        found = None
    if not isinstance(found, dict) or found.get("format") != FORMAT or found.get("version") != VERSION:
        raise UserError(f"{path}: is no evaluation that this version can add to; move it away")
    return found


def merged(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, Any]:
    """`new` with what only `old` has of the same model: its other tasks, its validations on other data."""
    if old.get("model") != new["model"]:
        return dict(new)
    return {**new, **{part: {**old.get(part, {}), **new.get(part, {})} for part in ("tasks", "validation")}}


def place(run: Path, step: int, limit: int | None) -> Path:
    """Where a run keeps the results of a checkpoint: apart, where they are of a part of the documents only."""
    return run / FOLDER / f"{step}{f'-limit{limit}' if limit else ''}.json"


def newest(run: Path) -> dict[str, Any]:
    """The evaluation of a run's newest checkpoint that has one, of all documents; {} where there is none."""
    found = {int(path.stem): path for path in (run / FOLDER).glob("*.json") if path.stem.isdigit()}
    return read(found[max(found)]) if found else {}


def as_json(model: Mapping[str, Any], command: str, **parts: Any) -> dict[str, Any]:
    """The content of a results file. model: what was evaluated. parts: "tasks", "validation" and more."""
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    return {"format": FORMAT, "version": VERSION, "date": now, "command": command, "model": dict(model), **parts}


def text(found: Mapping[str, Any]) -> str:
    return json.dumps(found, indent=1, allow_nan=False) + "\n"

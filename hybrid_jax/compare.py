"""A run beside published milestones: python -m hybrid_jax.compare runs/gdn_300m --to gdn_300m

Milestones are configs/milestones/NAME.json: losses by step and source, tokens per second, zero-shot
accuracies.
"""

import difflib
import json
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hybrid_jax import command
from hybrid_jax import config as config_lib
from hybrid_jax.errors import UserError
from hybrid_jax.evaluation import results
from hybrid_jax.metrics import course, read_jsonl
from hybrid_jax.report import aligned

FOLDERS = (Path(__file__).resolve().parent.parent / "configs" / "milestones", Path("configs") / "milestones")


def load_milestones(name: str, folders: Sequence[Path] = FOLDERS) -> dict[str, Any]:
    """The milestones of a config's name. Raises UserError, with the likeliest name, if there are none."""
    known = {path.stem: path for folder in folders for path in sorted(folder.glob("*.json"))}
    if name not in known:
        near = difflib.get_close_matches(name, known, n=1)
        hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(known)}"
        raise UserError(f"--to: nothing is published under {name!r}; {hint}")
    return json.loads(known[name].read_text(encoding="utf-8"))


def load_run(folder: Path) -> list[dict[str, Any]]:
    """The metrics of a run's folder, one dict a logged step, without what was rolled back.

    Raises UserError if there are none.
    """
    if not folder.is_dir():
        raise UserError(f"{folder}: no such run; give the folder that launch.py named as its output")
    lines, _ = course(read_jsonl(folder / "metrics.jsonl"))
    if not lines:
        raise UserError(f"{folder}: holds no metrics.jsonl with a step in it yet")
    return lines


def loss_at(lines: Sequence[dict[str, Any]], step: int) -> float | None:
    """The finite loss logged nearest to `step`, within 1% of it (or one step); None where there is none."""
    near = [line for line in lines if abs(line["step"] - step) <= max(1, step // 100) and line.get("loss") is not None]
    return min(near, key=lambda line: abs(line["step"] - step))["loss"] if near else None


def table(
    lines: Sequence[dict[str, Any]],
    milestones: dict[str, Any],
    tokens_per_step: int = 0,
    evaluation: dict[str, Any] | None = None,
) -> str:
    """The comparison as text. `tokens_per_step`: of the run, 0 if not known. `evaluation`: of the run, see results."""
    published = milestones["loss"]
    steps = sorted({int(step) for series in published.values() for step in series})
    header = ["step", "this run"]
    for source in published:
        header += [source, "difference"]
    rows = [header]
    for step in steps:
        ours = loss_at(lines, step)
        row = [f"{step:,}", "-" if ours is None else f"{ours:.4f}"]
        for series in published.values():
            theirs = series.get(str(step))
            row.append("" if theirs is None else f"{theirs:.4f}")
            row.append("" if theirs is None or ours is None else f"{ours - theirs:+.4f}")
        rows.append(row)
    last = lines[-1]["step"]
    text = [milestones["title"], "", *aligned(rows), ""]
    text += [f"{source}: {origin}" for source, origin in milestones["sources"].items()]
    text.append(f"This run is at step {last:,} of {milestones['steps']:,}; - where it has no loss near the step.")
    if tokens_per_step and tokens_per_step != milestones["tokens_per_step"]:
        text.append(
            f"Its step has {tokens_per_step:,} tokens, the published one {milestones['tokens_per_step']:,}: "
            "equal steps are not equal tokens."
        )
    return "\n".join([*text, *_speed(lines, milestones), *_zero_shot(evaluation or {}, milestones)])


def _speed(lines: Sequence[dict[str, Any]], milestones: dict[str, Any]) -> list[str]:
    rates = [line["tokens_per_second"] for line in lines if line.get("tokens_per_second")]
    rows = [("tokens per second", "all devices", "per device")]
    if rates:
        rows.append(("this run (median)", f"{statistics.median(rates):,.0f}", ""))
    for source, speed in milestones["tokens_per_second"].items():
        each, devices = speed["per_device"], speed["devices"]
        rows.append((f"{source} ({devices} devices)", f"{each * devices:,.0f}", f"{each:,.0f}"))
    return ["", *aligned(rows)] if len(rows) > 1 else []


def _zero_shot(evaluation: dict[str, Any], milestones: dict[str, Any]) -> list[str]:
    """Accuracies as published, beside those of the run's newest evaluation, if it has one."""
    tasks = evaluation.get("tasks", {})
    rows = results.table(tasks, list(tasks), milestones["zero_shot"], every_published=True)
    step = evaluation.get("model", {}).get("step")
    return ["", f"zero-shot{f' (this run at step {step:,})' if tasks and step else ', published'}", *rows]


def _config(folder: Path) -> dict[str, Any]:
    try:
        found = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _tokens_per_step(config: dict[str, Any]) -> int:
    train = config.get("train", {})
    return train.get("global_batch_size", 0) * train.get("sequence_length", 0)


def differing(config: dict[str, Any], name: str, sections: Sequence[str] = ("model", "data", "train")) -> list[str]:
    """Keys of a run's config, in these sections, that make its losses other than those of the config file `name`.

    Raises UserError where there is no such file.
    """
    from hybrid_jax import config_file

    want = config_lib.to_dict(config_file.load(str(FOLDERS[0].parent / f"{name}.py")))
    keys = [
        ("model", k) for k in want["model"] if k not in ("remat", "remat_layers", "scan_layers", "loss_chunk_tokens")
    ]
    keys += [("data", "source"), ("data", "tokenizer"), ("train", "sequence_length")]
    return [f"{s}.{k}" for s, k in keys if s in sections and config.get(s, {}).get(k) != want[s][k]]


def differences(config: dict[str, Any], name: str) -> list[str]:
    """A line about `differing` keys, if there are any."""
    if not config or not (FOLDERS[0].parent / f"{name}.py").exists():
        return []
    names = differing(config, name)
    return [f"Its config differs in {', '.join(names)}: the losses are not comparable."] if names else []


def of_model(config: dict[str, Any], folders: Sequence[Path] = FOLDERS[:1]) -> str:
    """The name under which something is published of the very model of this config; "" if nothing is."""
    names = [path.stem for folder in folders for path in sorted(folder.glob("*.json"))]
    return next((name for name in names if not differing(config, name, ["model"])), "")


def main(arguments: Sequence[str]) -> int:
    """The command; returns the exit code."""
    return command.main(run, arguments, "nothing was read to its end")


def run(arguments: Sequence[str]) -> int:
    parser = command.Parser("compare", __doc__)
    parser.add_argument("run", type=Path, help="the run's folder")
    parser.add_argument("--to", required=True, help="a config's name, such as gdn_300m")
    options = parser.parse_args(arguments)
    milestones = load_milestones(options.to)
    config = _config(options.run)
    evaluation = results.newest(options.run)
    print(table(load_run(options.run), milestones, _tokens_per_step(config), evaluation))
    for line in differences(config, options.to):
        print(line)
    sys.stdout.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

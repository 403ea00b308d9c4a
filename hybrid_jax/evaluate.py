"""Evaluates a run: python -m hybrid_jax.evaluate --checkpoint runs/gdn_300m --tasks arc_easy,hellaswag

Tasks are those of lm-evaluation-harness and files like them; --validation is the loss on the run's own validation data.
Results are shown beside published ones, where there are some of the same model, and kept in RUN/evaluation/STEP.json.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import shlex
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hybrid_jax import command, compare, output, platform, progress, signals
from hybrid_jax.errors import UserError
from hybrid_jax.evaluation import library, results
from hybrid_jax.report import aligned

if TYPE_CHECKING:
    from lm_eval.api.model import TemplateLM

    from hybrid_jax.data.interface import Tokenizer
    from hybrid_jax.trained import Trained


@dataclasses.dataclass
class Found:
    """model: what was evaluated, JSON-ready. tasks, validation: by name. shown: tasks of the table, in order."""

    model: dict[str, Any]
    published: results.Published
    tasks: dict[str, results.Task] = dataclasses.field(default_factory=dict)
    shown: list[str] = dataclasses.field(default_factory=list)
    validation: dict[str, dict[str, Any]] = dataclasses.field(default_factory=dict)


def run(arguments: Sequence[str]) -> int:
    """Everything between the command line and the exit code. Raises UserError."""
    options = parser().parse_args(arguments)
    _check(options)
    options.tasks = _names(options.tasks)
    if options.tasks:
        library.require("--tasks", *(("torch", "transformers", "accelerate") if options.model else ()))
        library.prepare(options.tasks)
    if options.output is not None:
        output.check("--output", options.output)
    published = compare.load_milestones(options.to)["zero_shot"] if options.to else {}
    line = progress.Line("evaluate")
    began = time.monotonic()
    own: Path | None = None
    if options.model:
        found = _of_folder(options, published, line)
    else:
        chosen = platform.prepare(options.platform)
        platform.check_backend(chosen)
        if warning := platform.unused_gpu(chosen, platform.installed_plugins(), platform.visible_hardware()):
            line.say(f"warning: {warning}")
        remedy = "lower --batch_size or --max_length, or take --dtype=bfloat16 or more devices"
        with command.logged(line.say):
            found, own = command.within_memory(lambda: _of_checkpoint(options, published, line), remedy)
    line.say(f"done in {time.monotonic() - began:,.0f} s")
    print("\n".join(_report(found)), flush=True)
    said = shlex.join(["python", "-m", "hybrid_jax.evaluate", *arguments])
    content = results.as_json(found.model, said, tasks=found.tasks, validation=found.validation)
    if options.output is not None:
        _write(options.output, content, line)
    if own:
        _write(own, results.merged(results.read(own), content), line)
    return 0


def _write(path: str | Path, content: dict[str, Any], line: progress.Line) -> None:
    try:
        output.write(path, results.text(content))
    except OSError as error:
        raise UserError(f"{path}: cannot be written: {error.strerror or error}") from None
    line.say(f"wrote {path}")


def _check(options: argparse.Namespace) -> None:
    """What can be said of the options alone. Raises UserError."""
    if bool(options.checkpoint) == bool(options.model):
        raise UserError("--checkpoint: give it, a run's folder, or --model, an exported folder; one of the two")
    for name in ("validation", "data", "step", "tokenizer", "batches"):
        if options.model and getattr(options, name):
            raise UserError(f"--{name}: is about a run, and --model is an exported folder; give --checkpoint instead")
    if not (options.tasks or options.validation or options.data):
        raise UserError("--tasks: name some, as arc_easy,hellaswag, or ask for --validation")
    for name, least in (
        ("limit", 1),
        ("batch_size", 1),
        ("max_length", 2),
        ("step", 1),
        ("num_fewshot", 0),
        ("batches", 0),
    ):
        if (value := getattr(options, name)) is not None and value < least:
            raise UserError(f"--{name}: {value} is less than {least}")


def _names(text: str) -> list[str]:
    return list(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))


# ---- a run's checkpoint ----


def _of_checkpoint(
    options: argparse.Namespace, published: results.Published, line: progress.Line
) -> tuple[Found, Path | None]:
    """(what was found, where the run keeps it, if it can)."""
    import jax

    from hybrid_jax import config as config_lib
    from hybrid_jax import flops, sharding, trained
    from hybrid_jax.config import MeshConfig

    opened = trained.open(options.checkpoint, options.step or 0, line.say)
    own = _own_file(opened, options, line)
    cfg = opened.config
    name = options.to or compare.of_model(config_lib.to_dict(cfg))
    dtype = options.dtype or cfg.train.compute_dtype
    parameters = flops.parameter_count(cfg.model)
    devices = jax.devices()
    line.say(
        f"{opened.run} at step {opened.step:,}: {parameters:,} parameters, {dtype}, on {len(devices)} x "
        f"{devices[0].device_kind}" + f"; published: {name}" * bool(name)
    )
    record = opened.folder / "files.json"
    digest = hashlib.sha256(record.read_bytes()).hexdigest()[:16] if record.exists() else ""
    about = {"run": opened.run.name, "step": opened.step, "parameters": parameters, "files": digest}
    found = Found(about, published or (compare.load_milestones(name)["zero_shot"] if name else {}))
    # What may fail comes before what takes long: data, tokenizer and tasks, then the parameters.
    losses = [_dataset(opened, prefix) for prefix in [""] * options.validation + [options.data] * bool(options.data)]
    tokenizer = _tokenizer(opened, options.tokenizer) if options.tasks else None
    tasks = _load(options, line)
    window = options.max_length or cfg.train.sequence_length
    if tokenizer:
        from hybrid_jax.evaluation import harness
        from hybrid_jax.evaluation.scoring import Scorer

        harness.check(tasks, window)
    mesh = sharding.make_mesh(MeshConfig(), devices)
    line.say("reading the parameters")
    params = opened.params(sharding=sharding.replicated(mesh))
    if losses:
        found.validation = _losses(opened, options, losses, dtype, params, mesh, line)
    if tokenizer:
        model = opened.model(dtype, backend="auto", attention="auto")  # of this machine, not the run's
        scorer = Scorer(model, params, mesh, window, options.batch_size or 0)
        of_harness = harness.CheckpointLM(scorer, tokenizer, line)
        _run_tasks(of_harness, tasks, options, found, compute_dtype=dtype, window=window)
        if scorer.truncated:
            line.say(
                f"note: {scorer.truncated:,} requests were longer than the window of {window:,} tokens and lost their "
                "beginning (--max_length sets it)"
            )
    return found, own


def _own_file(opened: Trained, options: argparse.Namespace, line: progress.Line) -> Path | None:
    """Where the run keeps results; None where it cannot be written and --output is given. Raises UserError."""
    path = results.place(opened.run, opened.step, options.limit)
    try:
        path.parent.mkdir(exist_ok=True)
        output.check("--output", str(path))
        results.read(path)
    except (UserError, OSError) as error:
        why = error if isinstance(error, UserError) else f"cannot write {path}: {error.strerror}"
        if not options.output:
            raise UserError(f"{why}; give --output FILE to write only there") from None
        line.say(f"note: results go to --output only: {why}")
        return None
    return path


def _tokenizer(opened: Trained, given: str) -> Tokenizer:
    """Raises UserError where the run has none that makes ids of text."""
    from hybrid_jax.data import tokenizer

    if given:
        found = tokenizer.load(given)
        if found.vocab_size > opened.config.model.vocab_size:
            raise UserError(
                f"--tokenizer: {given} has {found.vocab_size:,} ids, and the model {opened.config.model.vocab_size:,}: "
                "it is another's"
            )
        return found
    own = opened.tokenizer()
    if isinstance(own, tokenizer.IdTokenizer):
        raise UserError(
            f"--tasks: {opened.run} was trained on ids without a tokenizer, and tasks are text; name its "
            "tokenizer.json with --tokenizer"
        )
    return own


def _dataset(opened: Trained, prefix: str) -> Any:
    from hybrid_jax.evaluation import perplexity

    return perplexity.open_dataset(opened.config, prefix, opened.meta.get("data_identity", {}))


def _losses(
    opened: Trained, options: argparse.Namespace, datasets: Sequence[Any], dtype: str, params: Any, mesh: Any, line: Any
) -> dict[str, dict[str, Any]]:
    from hybrid_jax.config import KernelsConfig
    from hybrid_jax.evaluation import perplexity

    train = dataclasses.replace(opened.config.train, compute_dtype=dtype)
    cfg = dataclasses.replace(opened.config, train=train, kernels=KernelsConfig())  # this machine's, not the run's
    batches = opened.config.eval.batches if options.batches is None else options.batches
    found = {}
    for number, dataset in enumerate(datasets):
        every = dataset.num_windows  # 0: endless
        windows = batches * train.global_batch_size or every
        if not windows:
            raise UserError("--batches: this data has no end; say how many")
        windows = min(windows, every or windows)
        loss = perplexity.loss(cfg, params, mesh, dataset, windows, options.batch_size or 0, line)
        name = "validation" if options.validation and not number else options.data
        about = {"compute_dtype": dtype, "sequence_length": train.sequence_length}
        found[name] = about | perplexity.as_dict(loss, windows, dataset.description)
    return found


# ---- an exported folder ----


def _of_folder(options: argparse.Namespace, published: results.Published, line: progress.Line) -> Found:
    where = Path(options.model).expanduser()
    if not (where / "config.json").is_file():
        what = "is no folder of a model: it holds no config.json" if where.is_dir() else "no such folder"
        raise UserError(f"--model: {where}: {what}; `python -m hybrid_jax.export` makes one")
    tasks = _load(options, line)
    line.say(f"opening {where}")
    from hybrid_jax.evaluation import folder

    model = folder.open(
        where,
        line,
        batch_size=options.batch_size or 0,
        max_length=options.max_length or 0,
        dtype=options.dtype,
    )
    dtype = str(model.model.dtype).removeprefix("torch.")
    line.say(f"{options.model}: {model.parameters:,} parameters, {dtype}, on {model.device}")
    found = Found({"folder": Path(options.model).name, "parameters": model.parameters}, published)
    _run_tasks(model, tasks, options, found, compute_dtype=dtype, window=model.max_length)
    return found


# ---- both ----


def _load(options: argparse.Namespace, line: progress.Line) -> Any:
    if not options.tasks:
        return None
    from hybrid_jax.evaluation import tasks

    return tasks.load(options.tasks, options.num_fewshot, line.say)


def _run_tasks(model: TemplateLM, tasks: Any, options: argparse.Namespace, found: Found, **about: Any) -> None:
    from hybrid_jax.evaluation import harness

    about |= {"limit": options.limit}
    found.tasks = results.of_harness(harness.run(model, tasks, options.limit), **about)
    found.shown = tasks.shown


def _report(found: Found) -> list[str]:
    """What a person reads."""
    lines = []
    if found.validation:
        rows = [["data", "windows", "tokens", "nats/token", "perplexity", "nats/byte", "bits/byte"]]
        for name, loss in found.validation.items():
            per_byte = [f"{loss[key]:.4f}" if key in loss else "" for key in ("nats_per_byte", "bits_per_byte")]
            counts = [f"{loss['windows']:,}", f"{loss['tokens']:,}"]
            rows.append([name, *counts, f"{loss['nats_per_token']:.4f}", f"{loss['perplexity']:.4g}", *per_byte])
        lines += aligned(rows)
    if found.tasks:
        lines += [""] * bool(lines) + results.table(found.tasks, found.shown, found.published)
    return lines


def parser() -> command.Parser:
    made = command.Parser("evaluate", __doc__)
    add = made.add_argument
    add("--checkpoint", default="", metavar="RUN", help="a run's folder, or one of its checkpoints")
    add("--step", type=int, metavar="N", help="of the run's checkpoints (default: the newest)")
    add("--model", default="", metavar="DIR", help="an exported folder in place of a run, by torch; runs its code")
    add("--tasks", default="", metavar="A,B", help="names of lm-evaluation-harness, .yaml files, folders of these")
    add("--limit", type=int, metavar="N", help="the first documents of each task only")
    add("--num_fewshot", type=int, metavar="N", help="examples in each prompt (default: as the task says, else 0)")
    add("--validation", action="store_true", help="the loss on the run's own validation data")
    add("--data", default="", metavar="PREFIX", help="the loss on another token store, all of it")
    add("--batches", type=int, metavar="N", help="of the run's size, for losses (default: as in training; 0: all)")
    add("--batch_size", type=int, metavar="N", help="rows at once over all devices (default: as many as seem to fit)")
    add("--max_length", type=int, metavar="N", help="window in tokens (default: that of training)")
    add("--dtype", default="", choices=("bfloat16", "float32"), help="of activations and matmuls (default: as trained)")
    add("--tokenizer", default="", metavar="FILE", help="tokenizer.json of a run that was trained on ids alone")
    add("--output", metavar="FILE", help="write the results to this file, too")
    add("--to", default="", metavar="NAME", help="whose published results to show (default: those of the same model)")
    add("--platform", choices=platform.REQUESTS, default="", help="default: JAX_PLATFORMS, else a GPU if there is one")
    return made


def main(arguments: Sequence[str]) -> int:
    """The command; returns the exit code: 2 for a mistake of the user, 130 for Ctrl-C."""
    return command.main(run, arguments, "nothing is written")


if __name__ == "__main__":
    signals.AT_ONCE.listen()
    sys.exit(main(sys.argv[1:]))

"""README.md of an exported model: what it is, how it was trained, how it is loaded."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from hybrid_jax import flops, pattern
from hybrid_jax.interop.formats import Format
from hybrid_jax.trained import Trained

RESULTS = "evaluation"  # folder of a run, in which hybrid_jax.evaluate keeps STEP.json


def text(trained: Trained, chosen: Format, dtype: str) -> str:
    """Markdown with the front matter that Hugging Face's hub reads."""
    config, line = trained.config, trained.meta.get("line", {})
    model, optimizer, train = config.model, config.optimizer, config.train
    rows = [
        ("parameters", f"{flops.parameter_count(model):,}"),
        ("stack", f"`{pattern.draw(model.layout)}`"),
        ("vocabulary", f"{model.vocab_size:,}"),
    ]
    if imported := trained.meta.get("imported"):
        rows.append(("origin", f"imported from a model in the format `{imported['format']}`"))
    else:
        rows += [
            ("steps", f"{trained.step:,} of {train.steps:,}"),
            ("tokens", f"{int(line['tokens']):,}" if "tokens" in line else "not recorded"),
            ("batch", f"{train.global_batch_size:,} rows of {train.sequence_length:,} tokens"),
            ("learning rate", f"{optimizer.learning_rate:g} to {optimizer.min_learning_rate:g}, cosine"),
            ("warm-up", f"{optimizer.warmup_steps:,} steps"),
            ("AdamW", f"betas {optimizer.b1:g}, {optimizer.b2:g}; weight decay {optimizer.weight_decay:g}"),
            ("compute", f"{train.compute_dtype}; parameters and moments float32"),
            ("training loss", _loss(line.get("loss"))),
        ]
    if begun := trained.meta.get("init_from"):
        rows.append(("begun with", f"the parameters of `{Path(begun['run']).name}` after step {begun['step']:,}"))
    if "validation_loss" in line:
        rows.append(("validation loss", _loss(line["validation_loss"])))
    parts = [
        "---",
        f"library_name: {chosen.library}",
        "tags:",
        *(f"- {tag}" for tag in dict.fromkeys(("hybrid_jax", chosen.name))),
        "---",
        "",
        f"# {trained.run.name}",
        "",
        f"A language model trained with hybrid_jax. Weights in {dtype}, format `{chosen.name}` of {chosen.library}.",
        "",
        "| | |",
        "|---|---|",
        *(f"| {name} | {value} |" for name, value in rows),
        "",
        *_evaluation(trained),
        "## Use",
        "",
        "```python",
        *(["import fla  # pip install flash-linear-attention"] * (chosen.library == "flash-linear-attention")),
        "from transformers import AutoModelForCausalLM, AutoTokenizer",
        "",
        f'model = AutoModelForCausalLM.from_pretrained("PATH"{_remote(chosen)})',
        f'tokenizer = AutoTokenizer.from_pretrained("PATH"{_remote(chosen)})',
        "```",
        "",
    ]
    return "\n".join(parts)


def _loss(loss: Any) -> str:
    if not isinstance(loss, int | float):
        return "not recorded"
    return f"{loss:.4f} nats a token (perplexity {math.exp(min(loss, 700)):.4g})"


def _remote(chosen: Format) -> str:
    return ", trust_remote_code=True" if chosen.files() else ""


def _evaluation(trained: Trained) -> list[str]:
    """A table of what hybrid_jax.evaluate has found of this checkpoint."""
    try:
        tasks = json.loads((trained.run / RESULTS / f"{trained.step}.json").read_text(encoding="utf-8"))["tasks"]
        rows = [
            f"| {name} | {task['num_fewshot']} | {metric} | {found['value']:.4f} | {_four(found['stderr'])} |"
            for name, task in tasks.items()
            for metric, found in task["metrics"].items()
            if found["value"] is not None
        ]
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return []
    header = ["## Evaluation", "", "| task | shots | metric | value | +- |", "|---|---|---|---|---|"]
    return [*header, *rows, ""] if rows else []


def _four(value: float | None) -> str:
    return "" if value is None else f"{value:.4f}"

"""Small tasks of lm-evaluation-harness with their data beside them, as a user would write them."""

import json
import random
from pathlib import Path

WORDS = "apple river stone cloud table green house light paper music".split()


def _write(path: Path, head: dict, rows: list[dict]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    data = path.with_suffix(".jsonl")
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = {
        "task": path.stem,
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": str(data)},
        "test_split": "train",
        "fewshot_split": "train",
        **head,
    }
    path.write_text("".join(f"{key}: {json.dumps(value)}\n" for key, value in config.items()))  # JSON is YAML
    return path


def _metric(name: str) -> dict:
    return {"metric": name, "aggregation": "mean", "higher_is_better": True}


def write_choice(folder: Path, name: str, rows: int = 8, **head: object) -> Path:
    """A multiple-choice task, its choices of one to three words."""
    draw = random.Random(0)
    data = [
        {
            "question": f"What follows {' '.join(draw.choices(WORDS, k=1 + i % 5))}?",
            "choices": [" ".join(draw.choices(WORDS, k=1 + n % 3)) for n in range(4)],
            "answer": draw.randrange(4),
        }
        for i in range(rows)
    ]
    settings = {
        "output_type": "multiple_choice",
        "doc_to_text": "Question: {{question}}\nAnswer:",
        "doc_to_target": "answer",
        "doc_to_choice": "{{choices}}",
        "metric_list": [_metric("acc"), _metric("acc_norm")],
        "metadata": {"version": 1.0},
    }
    return _write(folder / f"{name}.yaml", settings | head, data)


def write_answers(folder: Path, name: str, rows: int = 4, **generation: object) -> Path:
    """A task whose answers are written."""
    draw = random.Random(1)
    data = [{"question": " ".join(draw.choices(WORDS, k=2 + i)), "answer": draw.choice(WORDS)} for i in range(rows)]
    settings = {
        "output_type": "generate_until",
        "doc_to_text": "{{question}}",
        "doc_to_target": "{{answer}}",
        "generation_kwargs": {"until": ["."], "max_gen_toks": 8, "do_sample": False, **generation},
        "metric_list": [_metric("exact_match")],
    }
    return _write(folder / f"{name}.yaml", settings, data)

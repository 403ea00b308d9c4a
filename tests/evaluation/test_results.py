"""Tables and files of results."""

import json

import pytest

from hybrid_jax.errors import UserError
from hybrid_jax.evaluation import results


def task(shots=0, **metrics):
    """metric=(value, stderr)"""
    named = {
        name.replace("__", " "): dict(zip(("value", "stderr"), pair, strict=True)) for name, pair in metrics.items()
    }
    return {"num_fewshot": shots, "documents": 10, "version": 1.0, "metrics": named}


TASKS = {
    "arc_easy": task(acc=(0.5, 0.01), acc_norm=(0.4, 0.02)),
    "race": task(acc=(0.3, None)),
    "gsm8k": task(5, exact_match__strict=(0.125, 0.001), perplexity=(None, None)),
}
PUBLISHED = {
    "MI355X": {"arc_easy": {"acc": 0.4764, "acc_norm": 0.4285}, "race": {"acc": 0.2498}, "piqa": {"acc": 0.6}},
    "FLA": {"arc_easy": {"acc": 0.45}},
}


def test_the_table_has_published_values_beside_ours():
    assert results.table(TASKS, ["race", "arc_easy", "gsm8k", "nothing"], PUBLISHED) == [
        "task      shots     acc      +-  acc_norm      +-  MI355X acc  MI355X acc_norm  FLA acc",
        "---------------------------------------------------------------------------------------",
        "race          0  0.3000                                0.2498",
        "arc_easy      0  0.5000  0.0100    0.4000  0.0200      0.4764           0.4285   0.4500",
        "average          0.4000                                0.3631",  # FLA has one of the two
        "",
        "task   shots              metric   value      +-",
        "------------------------------------------------",
        "gsm8k      5  exact_match strict  0.1250  0.0010",
        "gsm8k      5          perplexity",
    ]


def test_all_that_is_published_where_that_is_asked_for():
    lines = results.table({}, [], PUBLISHED, every_published=True)
    assert lines[2].split() == ["arc_easy", "0.4764", "0.4285", "0.4500"]
    assert [line.split()[0] for line in lines[2:]] == ["arc_easy", "race", "piqa", "average"]
    assert lines[-1].split() == ["average", "0.4421"]
    assert results.table({}, [], {}) == []


def test_out_of_what_the_harness_returns():
    found = {
        "results": {
            "one": {"alias": "1", "sample_len": 7, "acc,none": 0.5, "acc_stderr,none": 0.1, "f1,none": float("nan")},
            "two": {"sample_len": 3, "exact_match,strict": 1, "exact_match_stderr,strict": "N/A"},
            "group of no average": {"alias": "g"},
        },
        "n-shot": {"one": 0, "two": 5},
        "versions": {"one": 1.0, "two": "Yaml"},
    }
    got = results.of_harness(found, limit=7)
    assert list(got) == ["one", "two"]
    assert got["one"]["metrics"] == {"acc": {"value": 0.5, "stderr": 0.1}, "f1": {"value": None, "stderr": None}}
    assert (got["one"]["documents"], got["one"]["limit"], got["two"]["num_fewshot"]) == (7, 7, 5)
    assert got["two"]["metrics"] == {"exact_match (strict)": {"value": 1.0, "stderr": None}}
    json.loads(results.text(results.as_json({"step": 1}, "command", tasks=got)))


def test_a_file_grows_by_what_is_of_the_same_model(tmp_path):
    model = {"run": "r", "step": 5, "files": "abc"}
    old = results.as_json(
        model, "first", tasks={"one": task(acc=(0.1, 0.1)), "two": task(acc=(0.2, 0.1))}, validation={}
    )
    new = results.as_json(
        model, "second", tasks={"two": task(acc=(0.3, 0.1))}, validation={"validation": {"tokens": 1}}
    )
    both = results.merged(old, new)
    assert both["command"] == "second" and results.accuracies(both["tasks"]) == {
        "one": {"acc": 0.1},
        "two": {"acc": 0.3},
    }
    assert results.merged(both, old)["validation"] == {"validation": {"tokens": 1}}
    assert results.merged(old, new | {"model": {**model, "files": "of another run"}})["tasks"] == new["tasks"]
    assert results.merged({}, new) == new
    path = results.place(tmp_path, 5, None)
    assert results.read(path) == {} and results.newest(tmp_path) == {}
    path.parent.mkdir()
    for step, content in ((5, old), (12, new)):
        results.place(tmp_path, step, None).write_text(results.text(content))
    results.place(tmp_path, 13, 2).write_text(results.text(old))
    assert results.newest(tmp_path) == new  # one of a few documents does not count
    for content in ("[]", "{", '{"format": "another"}', json.dumps(new | {"version": 9})):
        path.write_text(content)
        with pytest.raises(UserError, match=r"5.json: is no evaluation that this version can add to; move it away"):
            results.read(path)

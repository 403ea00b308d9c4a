"""A checkpoint's adapter against lm-evaluation-harness's own: the same run exported, by torch and transformers."""

import importlib.util
import json
import random

import jax
import jax.numpy as jnp
import pytest

from hybrid_jax import evaluate, export, progress, sharding, trained
from hybrid_jax.config import MeshConfig
from hybrid_jax.errors import UserError
from hybrid_jax.evaluation import library, results, tasks
from hybrid_jax.evaluation.scoring import Scorer
from tests.evaluation.test_harness import bpe, instances
from tests.models import drawn
from tests.tiny import tiny_config
from tests.written import write_run
from tests.written_tasks import WORDS, write_answers, write_choice

pytestmark = [pytest.mark.torch, pytest.mark.lm_eval]
if importlib.util.find_spec("accelerate") is None or importlib.util.find_spec("transformers") is None:
    pytestmark.append(pytest.mark.skip(reason="transformers is not installed"))

LINE = progress.Line("test")
WINDOW = 64


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run of a hybrid, and its export beside it, which brings its own modeling code."""
    folder = tmp_path_factory.mktemp("hybrid")
    cfg = tiny_config(folder / "run", model__pattern="*-G-", model__vocab_size=320, train__sequence_length=WINDOW)
    model = trained.Model(cfg.model)
    found = write_run(
        cfg,
        jax.tree.map(jnp.asarray, drawn(model)),
        tokenizer=bpe(text=" ".join(WORDS) + " Question: What follows? Answer:"),
    )
    assert export.main(["--checkpoint", str(found), "--out", str(folder / "exported")]) == 0
    return found


@pytest.fixture(scope="module")
def both(run):
    """(ours, the harness's)"""
    library.prepare([])
    from hybrid_jax.evaluation import folder as folder_lib
    from hybrid_jax.evaluation import harness

    opened = trained.open(run)
    mesh = sharding.make_mesh(MeshConfig(), jax.devices()[:1])
    scorer = Scorer(opened.model(), opened.params(), mesh, WINDOW, 1)
    ours = harness.CheckpointLM(scorer, opened.tokenizer(), LINE)
    theirs = folder_lib.open(run.parent / "exported", LINE, batch_size=8, max_length=0, dtype="float32")
    assert theirs.max_length == WINDOW and theirs.prefix_token_id == ours.prefix_token_id
    return ours, theirs


def test_the_same_answers_to_the_same_tasks(both, tmp_path):
    from hybrid_jax.evaluation import harness

    write_choice(tmp_path, "choice")
    write_choice(tmp_path, "shots", num_fewshot=1)
    write_answers(tmp_path, "answers")
    found = [
        harness.run(lm, tasks.load([str(tmp_path)], None, lambda line: None), None, log_samples=True) for lm in both
    ]
    ours, theirs = (results.of_harness(f) for f in found)
    assert ours == theirs and set(ours) == {"choice", "shots", "answers"}
    scores = 0
    for task in ("choice", "shots"):
        for ours, theirs in zip(*(f["samples"][task] for f in found), strict=True):
            assert ours["arguments"] == theirs["arguments"] and ours["doc_id"] == theirs["doc_id"]
            for (a,), (b,) in zip(ours["resps"], theirs["resps"], strict=True):
                assert a[0] == pytest.approx(b[0], abs=1e-3) and a[1] == b[1]
                scores += 1
    assert scores == 2 * 8 * 4
    written = [[sample["resps"][0][0] for sample in f["samples"]["answers"]] for f in found]
    assert written[0] == written[1] and all(written[0])


def test_the_same_scores_at_the_edges(both):
    # No period in it: of equal inputs whose continuations differ in length the harness scores the shorter ones wrong.
    long = " ".join(random.Random(3).choices(WORDS, k=80))
    longer = " ".join(random.Random(4).choices(WORDS, k=160))
    asked = [
        ("", "apple"),
        ("apple ", "river stone"),
        (long, " cloud"),
        (long, " table green"),
        ("apple", " river"),
    ] * 2
    ours, theirs = (lm.loglikelihood(instances("loglikelihood", asked)) for lm in both)
    for a, b in zip(ours, theirs, strict=True):
        assert a[0] == pytest.approx(b[0], abs=1e-3) and a[1] == b[1]
    assert len(both[0].tok_encode(long)) > WINDOW
    texts = [("apple river",), (long,), (longer,), ("",)]
    ours, theirs = (lm.loglikelihood_rolling(instances("loglikelihood_rolling", texts)) for lm in both)
    assert ours == pytest.approx(theirs, abs=1e-3) and ours[2] < ours[1] < ours[0] < ours[3] == 0


def test_the_command_says_the_same_of_both(run, tmp_path, capsys):
    choice, out = write_choice(tmp_path, "choice"), tmp_path / "out.json"
    found = []
    for which in (["--checkpoint", str(run)], ["--model", str(run.parent / "exported")]):
        assert evaluate.main([*which, "--tasks", str(choice), "--output", str(out)]) == 0
        found.append((capsys.readouterr().out, json.loads(out.read_text())))
    assert found[0][0] == found[1][0]
    assert found[0][1]["tasks"] == found[1][1]["tasks"]
    assert found[0][1]["model"]["parameters"] == found[1][1]["model"]["parameters"]


def test_a_folder_that_cannot_be_opened(tmp_path, run):
    from hybrid_jax.evaluation import folder as folder_lib

    (tmp_path / "config.json").write_text('{"model_type": "no_such_model"}')
    with pytest.raises(UserError, match=r"--model: .* cannot be opened: .*no_such_model") as error:
        folder_lib.open(tmp_path, LINE, batch_size=1, max_length=0, dtype="")
    assert "\n" not in str(error.value)
    (tmp_path / "config.json").write_bytes((run.parent / "exported" / "config.json").read_bytes())
    with pytest.raises(UserError, match=r"--model: .* cannot be opened: "):
        folder_lib.open(tmp_path, LINE, batch_size=1, max_length=0, dtype="")

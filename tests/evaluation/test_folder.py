"""A checkpoint's adapter against lm-evaluation-harness's own, by torch and transformers on the same parameters."""

import importlib.util
import json
import random
import shutil

import jax
import pytest
import tokenizers
from safetensors.numpy import load_file

from hybrid_jax import progress, sharding
from hybrid_jax.config import MeshConfig
from hybrid_jax.data import tokenizer
from hybrid_jax.errors import UserError
from hybrid_jax.evaluation import library, results, tasks
from hybrid_jax.evaluation.scoring import Scorer
from hybrid_jax.model import Model
from tests.evaluation.test_harness import instances
from tests.test_golden_models import GOLDEN, config_of, tree_of
from tests.written_tasks import WORDS, write_answers, write_choice

pytestmark = [pytest.mark.torch, pytest.mark.lm_eval]
if importlib.util.find_spec("accelerate") is None:
    pytestmark.append(pytest.mark.skip(reason="accelerate is not installed"))

LINE = progress.Line("test")
WINDOW = 64


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The llama of tests/golden as a Hugging Face folder, with a tokenizer of its 97 ids."""
    found = tmp_path_factory.mktemp("llama")
    for name in ("config.json", "model.safetensors"):
        shutil.copy(GOLDEN / "llama" / name, found / name)
    spoken = tokenizers.Tokenizer(tokenizers.models.BPE())
    spoken.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace(prepend_scheme="never")
    spoken.decoder = tokenizers.decoders.Metaspace(prepend_scheme="never")
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=96, special_tokens=["</s>"], show_progress=False)
    spoken.train_from_iterator([" ".join(WORDS), "Question: What follows? Answer:\n ."] * 3, trainer)
    spoken.save(str(found / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "</s>", "model_max_length": WINDOW}
    (found / "tokenizer_config.json").write_text(json.dumps(settings))
    return found


@pytest.fixture(scope="module")
def both(folder):
    """(ours, the harness's)"""
    library.prepare([])
    from hybrid_jax.evaluation import folder as folder_lib
    from hybrid_jax.evaluation import harness

    model = Model(config_of("llama"), "chunked", "float32", "chunked")
    params = tree_of(model, "llama", load_file(folder / "model.safetensors"), weights=True)
    mesh = sharding.make_mesh(MeshConfig(), jax.devices()[:1])
    ours = harness.CheckpointLM(Scorer(model, params, mesh, WINDOW, 8), tokenizer.load(folder), LINE)
    theirs = folder_lib.open(folder, LINE, batch_size=8, max_length=WINDOW, dtype="float32")
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


def test_a_folder_that_cannot_be_opened(tmp_path, folder):
    from hybrid_jax.evaluation import folder as folder_lib

    (tmp_path / "config.json").write_text('{"model_type": "no_such_model"}')
    with pytest.raises(UserError, match=r"--model: .* cannot be opened: .*no_such_model") as error:
        folder_lib.open(tmp_path, LINE, batch_size=1, max_length=0, dtype="")
    assert "\n" not in str(error.value)
    shutil.copy(folder / "config.json", tmp_path / "config.json")
    with pytest.raises(UserError, match=r"--model: .* cannot be opened: "):
        folder_lib.open(tmp_path, LINE, batch_size=1, max_length=0, dtype="")

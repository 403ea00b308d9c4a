"""The command: losses against those of training and by hand, tasks, files, and mistakes in one line."""

import dataclasses
import functools
import importlib.util
import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hybrid_jax import data, evaluate, train, trained
from hybrid_jax.data import prepare
from hybrid_jax.data.tokenizer import IdTokenizer
from hybrid_jax.metrics import read_jsonl
from hybrid_jax.model import Model
from tests import teacher
from tests.tiny import tiny_config
from tests.written import write_run
from tests.written_tasks import WORDS, write_answers, write_choice

SIZE, LENGTH, BATCHES = 4, 32, 3
MOST = 200  # windows of a store below


def store(folder, name, seed, *more):
    """A token store of random words."""
    draw = np.random.default_rng(seed)
    texts = folder / f"{name}.jsonl"
    documents = [" ".join(draw.choice(WORDS, draw.integers(1, 30))) for _ in range(40)]
    texts.write_text("".join(json.dumps({"text": text}) + "\n" for text in documents))
    arguments = ["--input", str(texts), "--output", str(folder / name), "--workers", "1", *more]
    assert prepare.main(arguments) == 0
    return folder / name


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run of two steps on a store of bytes, which validated at its end."""
    folder = tmp_path_factory.mktemp("run")
    cfg = tiny_config(
        folder / "run", model__pattern="A-", model__vocab_size=300, train__steps=2, train__global_batch_size=SIZE,
        train__sequence_length=LENGTH, data__source="store", data__path=str(store(folder, "corpus", 1)),
        data__validation_fraction=0.5, eval__batches=BATCHES, checkpoint__every_steps=2,
    )  # fmt: skip
    train.run(cfg)
    return folder / "run"


@pytest.fixture
def command(capsys):
    """Runs it: (exit code, lines of stdout, lines of stderr)."""

    def call(*arguments):
        code = evaluate.main([str(argument) for argument in arguments])
        said = capsys.readouterr()
        return code, said.out.splitlines(), said.err.splitlines()

    return call


@functools.partial(jax.jit, static_argnames="model")
def _logits(model, params, tokens, segments):
    return model.logits(params, tokens, segments)


def by_hand(run, about, windows, split="validation"):
    """(mean nats, tokens) of the first windows, in float64 and without this package's loss."""
    opened = trained.open(run)
    cfg = opened.config
    dataset = data.open(about, sequence_length=LENGTH, vocab_size=cfg.model.vocab_size, seed=0, split=split)
    params, total, count = opened.params(), 0.0, 0
    batch = dataset.batch(0, range(windows), windows)
    pad = ((0, MOST - windows), (0, 0))  # one shape to compile
    tokens, segments = (jnp.asarray(np.pad(batch[name], pad)) for name in ("tokens", "segment_ids"))
    logits = np.asarray(_logits(opened.model(), params, tokens, segments), np.float64)
    log_p = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    for row, place in zip(*np.nonzero(batch["targets"] >= 0), strict=True):
        total, count = total - log_p[row, place, batch["targets"][row, place]], count + 1
    return total / count, count


def test_validation_is_that_of_training(run, command):
    want = read_jsonl(run / "metrics.jsonl")[-1]
    code, printed, said = command("--checkpoint", run, "--validation")
    assert code == 0 and printed[0].split() == [
        "data",
        *"windows tokens nats/token perplexity nats/byte bits/byte".split(),
    ]
    assert said[0].startswith(f"evaluate: {run} at step 2: ") and said[-1] == f"evaluate: wrote {run}/evaluation/2.json"
    got = json.loads((run / "evaluation" / "2.json").read_text())["validation"]["validation"]
    assert got["nats_per_token"] == pytest.approx(want["validation_loss"], rel=1e-7)
    assert got["nats_per_byte"] == pytest.approx(want["validation_loss_per_byte"], rel=1e-7)
    assert got["windows"] == SIZE * BATCHES
    nats, tokens = by_hand(run, trained.open(run).config.data, SIZE * BATCHES)
    assert (got["nats_per_token"], got["tokens"]) == (pytest.approx(nats, abs=1e-5), tokens)
    assert got["perplexity"] == pytest.approx(math.exp(nats), rel=1e-5)
    assert got["bits_per_byte"] == pytest.approx(got["nats_per_byte"] / math.log(2))
    assert printed[2].split()[:4] == ["validation", str(SIZE * BATCHES), f"{tokens:,}", f"{nats:.4f}"]


def test_neither_rows_at_once_nor_the_end_of_the_data_matter(run, command, tmp_path):
    about = trained.open(run).config.data
    dataset = data.open(about, sequence_length=LENGTH, vocab_size=300, seed=0, split="validation")
    nats, tokens = by_hand(run, about, dataset.num_windows)
    out = tmp_path / "out.json"
    arguments = ["--checkpoint", run / "checkpoints" / "2", "--validation", "--batches", 0, "--output", out]
    assert command(*arguments, "--batch_size", 5)[0] == 0
    got = json.loads(out.read_text())["validation"]["validation"]
    assert dataset.num_windows % 5 and dataset.num_windows % SIZE
    assert (got["windows"], got["tokens"]) == (dataset.num_windows, tokens)
    assert got["nats_per_token"] == pytest.approx(nats, abs=1e-5)


def test_another_store(run, command, tmp_path):
    other = store(tmp_path, "other", 2)
    about = dataclasses.replace(trained.open(run).config.data, path="", validation_path=str(other))
    dataset = data.open(about, sequence_length=LENGTH, vocab_size=300, seed=0, split="validation")
    out = tmp_path / "out.json"
    assert command("--checkpoint", run, "--data", other, "--batches", 0, "--output", out)[0] == 0
    got = json.loads(out.read_text())["validation"][str(other)]
    nats, tokens = by_hand(run, about, dataset.num_windows)
    assert (got["nats_per_token"], got["tokens"]) == (pytest.approx(nats, abs=1e-5), tokens)
    assert got["nats_per_byte"] == pytest.approx(nats * 1.0 / dataset.tokenizer.bytes_per_token, rel=1e-5)
    (tmp_path / "words.json").write_text(_words())
    apart = store(tmp_path, "apart", 3, "--tokenizer", str(tmp_path / "words.json"))
    code, _, said = command("--checkpoint", run, "--data", apart)
    assert (code, said[-1]) == (
        2,
        f"error: --data: {apart} was made with another tokenizer than what the run was trained on",
    )
    code, _, said = command("--checkpoint", run, "--data", tmp_path / "none")
    assert code == 2 and said[-1].startswith(f"error: --data: {tmp_path}/none")


def _words():
    import tokenizers

    found = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({word: i for i, word in enumerate([*WORDS, "</s>"])}, "apple")
    )
    found.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    return found.to_str()


@pytest.mark.lm_eval
def test_tasks_are_shown_and_kept(run, command, tmp_path):
    choice, answers = write_choice(tmp_path, "choice"), write_answers(tmp_path, "answers")
    assert command("--checkpoint", run, "--validation")[0] == 0
    code, printed, said = command("--checkpoint", run, "--tasks", f"{choice},{answers}", "--to", "gdn_300m")
    assert code == 0, "\n".join(said)
    assert printed[0].split() == ["task", "shots", "acc", "+-", "acc_norm", "+-"]
    assert printed[2].split()[:2] == ["choice", "0"] and printed[6].split()[:3] == ["answers", "0", "exact_match"]
    assert not any("it/s" in line or "%|" in line for line in said)  # bars of the harness
    kept = json.loads((run / "evaluation" / "2.json").read_text())
    assert set(kept["tasks"]) == {"choice", "answers"} and "validation" in kept["validation"]
    assert kept["tasks"]["choice"]["documents"] == 8 and kept["tasks"]["choice"]["window"] == LENGTH
    acc = kept["tasks"]["choice"]["metrics"]["acc"]["value"]
    assert printed[2].split()[2] == f"{acc:.4f}" and acc * 8 == round(acc * 8)
    assert any("requests were longer than the window of 32 tokens and lost their beginning" in line for line in said)
    code, printed, _ = command("--checkpoint", run, "--tasks", choice, "--limit", 3, "--num_fewshot", 1)
    assert code == 0 and printed[2].split()[:2] == ["choice", "1"]
    few = json.loads((run / "evaluation" / "2-limit3.json").read_text())["tasks"]["choice"]
    assert (few["documents"], few["num_fewshot"], few["limit"]) == (3, 1, 3)
    assert json.loads((run / "evaluation" / "2.json").read_text()) == kept


@pytest.mark.lm_eval
def test_accuracy_is_that_of_hand_made_scores(run, command, tmp_path):
    """acc: the choice of the largest log-probability; acc_norm: by its characters."""
    choice = write_choice(tmp_path, "choice", rows=10)
    out = tmp_path / "out.json"
    assert command("--checkpoint", run, "--tasks", choice, "--output", out, "--max_length", 64)[0] == 0
    opened = trained.open(run)
    model, params, encode = opened.model(), opened.params(), opened.tokenizer().encode
    right = {"acc": [], "acc_norm": []}
    for line in choice.with_suffix(".jsonl").read_text().splitlines():
        row = json.loads(line)
        context = encode(f"Question: {row['question']}\nAnswer:")
        scores = np.asarray([teacher.score(model, params, context, encode(" " + c), 64)[0] for c in row["choices"]])
        right["acc"].append(int(scores.argmax()) == row["answer"])
        right["acc_norm"].append(int((scores / [len(c) for c in row["choices"]]).argmax()) == row["answer"])
    metrics = json.loads(out.read_text())["tasks"]["choice"]["metrics"]
    for name, hits in right.items():
        assert metrics[name]["value"] == np.mean(hits)
        assert metrics[name]["stderr"] == pytest.approx(np.std(hits, ddof=1) / math.sqrt(10))


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--validation"], "--checkpoint: give it, a run's folder, or --model"),
        (["--checkpoint", "{run}", "--model", "x", "--tasks", "a"], "one of the two"),
        (["--checkpoint", "{run}"], "--tasks: name some, as arc_easy,hellaswag, or ask for --validation"),
        (["--checkpoint", "{tmp}/none", "--validation"], "{tmp}/none: no such folder"),
        (["--checkpoint", "{tmp}", "--validation"], "{tmp}: is not a run"),
        (["--checkpoint", "{run}", "--validation", "--step", "7"], "has no checkpoint 7; there are 2"),
        (["--checkpoint", "{unfinished}", "--validation"], "was not written to its end"),
        (["--checkpoint", "{run}", "--validation", "--limit", "0"], "--limit: 0 is less than 1"),
        (["--checkpoint", "{run}", "--validation", "--batch_size", "-1"], "--batch_size: -1 is less than 1"),
        (["--checkpoint", "{run}", "--validation", "--batches", "few"], "--batches: invalid int value: 'few'"),
        (["--checkpoint", "{run}", "--validation", "--output", "{tmp}"], "--output: '{tmp}' is a folder, not a file"),
        (["--checkpoint", "{run}", "--validation", "--output", "/proc/x.json"], "--output: cannot write /proc/x.json"),
        (["--checkpoint", "{run}", "--validation", "--to", "gdn_30m"], "--to: nothing is published under 'gdn_30m'"),
        (["--model", "{tmp}", "--tasks", "a", "--step", "3"], "--step: is about a run, and --model is an exported"),
        (["--checkpoint", "{run}", "--tasks", "{tmp}/a.yaml"], "--tasks: {tmp}/a.yaml: no such file or folder"),
        (
            ["--checkpoint", "{run}", "--tasks", "{answers}", "--max_length", "8"],
            "answers of up to 8 tokens, which leaves",
        ),
        (["--checkpoint", "{ids}", "--tasks", "{task}"], "was trained on ids without a tokenizer, and tasks are text"),
        (["--checkpoint", "{ids}", "--tasks", "{task}", "--tokenizer", "{tmp}/t.json"], "t.json: No such file"),
        (["--checkpoint", "{ids}", "--validation", "--batches", "0"], "--batches: this data has no end; say how many"),
        (["--model", "{tmp}/none", "--tasks", "{task}"], "--model: {tmp}/none: no such folder"),
        (["--model", "{tmp}", "--tasks", "{task}"], "is no folder of a model: it holds no config.json"),
    ],
)
def test_mistakes_are_one_line(run, command, tmp_path, arguments, said, monkeypatch):
    if "--tasks" in arguments and importlib.util.find_spec("lm_eval") is None:
        pytest.skip("lm_eval is not installed")
    if "{task}" in arguments and "--model" in arguments and importlib.util.find_spec("accelerate") is None:
        pytest.skip("accelerate is not installed")
    places = {"run": str(run), "tmp": str(tmp_path), "unfinished": str(tmp_path / "5.orbax-checkpoint-tmp")}
    (tmp_path / "5.orbax-checkpoint-tmp").mkdir()
    if "{ids}" in arguments:
        cfg = tiny_config(tmp_path / "ids", model__pattern="A-")
        zeros = jax.tree.map(lambda x: jnp.zeros(x.shape), Model(cfg.model).abstract_params())
        places["ids"] = str(write_run(cfg, zeros, tokenizer=IdTokenizer(vocab_size=64, end_of_document=63)))
    if "{task}" in arguments:
        places["task"] = str(write_choice(tmp_path / "tasks", "choice"))
    if "{answers}" in arguments:
        places["answers"] = str(write_answers(tmp_path / "tasks", "answers"))
    code, printed, lines = command(*[argument.format(**places) for argument in arguments])
    errors = [line for line in lines if line.startswith("error: ")]
    assert (code, printed, len(errors), errors) == (2, [], 1, lines[-1:])
    assert said.format(**places) in errors[0]


def test_without_the_harness_tasks_are_refused_and_losses_are_not(run, command, monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *more: None if name == "lm_eval" else find(name, *more)
    )
    code, _, said = command("--checkpoint", run, "--tasks", "arc_easy")
    assert code == 2 and said[0].startswith("error: --tasks: needs lm-evaluation-harness, which is not installed for ")
    assert said[0].endswith('pip install "hybrid_jax[eval]"') and len(said) == 1
    assert command("--checkpoint", run, "--validation")[0] == 0


def test_a_run_that_cannot_be_written_to(run, command, tmp_path):
    """Told before the work; with --output it is only a note."""
    (run / "evaluation").mkdir(exist_ok=True)
    path = run / "evaluation" / "2.json"
    before = path.read_bytes() if path.exists() else None
    path.write_text("something else")
    try:
        code, _, said = command("--checkpoint", run, "--validation")
        assert code == 2 and "2.json: is no evaluation that this version can add to" in said[-1]
        assert not any("reading the parameters" in line for line in said)
        code, _, said = command("--checkpoint", run, "--validation", "--output", tmp_path / "out.json")
        assert code == 0 and any(line.startswith("evaluate: note: results go to --output only: ") for line in said)
        assert json.loads((tmp_path / "out.json").read_text())["validation"]["validation"]["tokens"] > 0
        assert path.read_text() == "something else"
    finally:
        path.unlink()
        if before:
            path.write_bytes(before)


def test_ctrl_c(run, command, monkeypatch):
    def interrupt(*unused, **also):
        raise KeyboardInterrupt

    monkeypatch.setattr(trained.Trained, "params", interrupt)
    kept = sorted((run / "evaluation").iterdir()) if (run / "evaluation").exists() else []
    code, printed, said = command("--checkpoint", run, "--validation")
    assert (code, printed, said[-1]) == (130, [], "stopped: nothing is written")
    assert sorted((run / "evaluation").iterdir()) == kept

"""Training from a token store: its split, its checks, and a run that resumes."""

import dataclasses
import math
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
import tokenizers

import launch
from hybrid_jax import data, metrics
from hybrid_jax.config import DataConfig
from hybrid_jax.data import prepare, sources
from hybrid_jax.data.store import StoreReader, StoreWriter
from hybrid_jax.data.tokenizer import TokenStore
from tests.data.test_store import ROOT, one_line, write
from tests.tiny import tiny_config


def open_store(prefix, *, split="train", length=8, vocab_size=70_000, seed=1, **settings):
    config = DataConfig(source="store", path=str(prefix), **settings)
    return data.open(config, sequence_length=length, vocab_size=vocab_size, seed=seed, split=split)


@pytest.mark.parametrize("isolate", [True, False])
def test_every_document_is_in_one_split_and_cut_as_text_is(tmp_path, isolate):
    rng = np.random.default_rng(0)
    lengths = rng.integers(0, 30, 200)
    starts = np.cumsum([0, *lengths])
    tokens = np.arange(1000, 1000 + starts[-1])  # a token tells where it came from
    with StoreWriter(tmp_path / "s", vocab_size=70_000) as writer:
        writer.extend(tokens, lengths)
    seen = []
    for split in ("train", "validation"):
        dataset = open_store(tmp_path / "s", split=split, validation_fraction=0.2, isolate_documents=isolate)
        batch = dataset.batch(0, range(dataset.num_windows), dataset.num_windows)
        assert f"{dataset.num_tokens:,} tokens" in dataset.description and split in dataset.description
        owner = np.searchsorted(starts, batch["tokens"] - 1000, side="right") - 1
        inside = batch["segment_ids"] > 0
        follows = inside[:, 1:] & (owner[:, 1:] == owner[:, :-1])
        if isolate:
            assert (np.diff(batch["segment_ids"], axis=1)[inside[:, 1:]] == ~follows[inside[:, 1:]]).all()
        else:
            assert batch["segment_ids"].max() == 1
        np.testing.assert_array_equal(batch["targets"][:, :-1][follows], batch["tokens"][:, 1:][follows])
        seen.append(set(owner[inside].tolist()))
        if split == "validation":  # every token: predicted, or first of its document
            counted = np.unique(np.concatenate([batch["tokens"][inside], batch["targets"][batch["targets"] >= 0]]))
            assert len(counted) == dataset.num_tokens == sum(lengths[d] for d in seen[1])
    assert not seen[0] & seen[1]
    assert seen[0] | seen[1] == set(np.flatnonzero(lengths).tolist())
    assert 20 < len(seen[1]) < 60


def in_memory(starts):
    return TokenStore(np.zeros(starts[-1], np.uint16), np.asarray(starts))


def test_added_documents_move_no_old_one():
    starts = np.arange(0, 5005, 5)
    few, many = np.arange(500), np.arange(1000)
    before = sources.split_store(in_memory(starts[:501]), 0.1).held_out(few)
    after = sources.split_store(in_memory(starts), 0.1)
    assert 30 < before.sum() < 70 and np.array_equal(after.held_out(few), before)
    assert after.documents == (1000 - after.held_out(many).sum(), after.held_out(many).sum())
    assert after.tokens == (5 * after.documents[0], 5 * after.documents[1])
    # Pinned, as a resumed run must see the same split: by SplitMix64, whose first output for 0 is published.
    assert splitmix64(0) == 0xE220A8397B1DCDAF
    assert np.flatnonzero(after.held_out(many)).tolist() == [d for d in range(1000) if splitmix64(d) < 0.1 * 2**64]


def splitmix64(seed):
    z = (seed + 0x9E3779B97F4A7C15) % 2**64
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    z = (z ^ z >> 27) * 0x94D049BB133111EB % 2**64
    return z ^ z >> 31


@pytest.mark.parametrize("fraction", [0.001, 0.5, 0.999])
@pytest.mark.parametrize("piece", [1, 2, 2**16])
def test_few_documents_still_fill_both_splits(tmp_path, fraction, piece, monkeypatch):
    monkeypatch.setattr(sources, "PIECE", piece)
    for number, lengths in enumerate(([3, 0, 2], [4, 4, 4], [0, 7, 0], [2])):
        prefix = tmp_path / str(number)
        write(prefix, [[1] * length for length in lengths], 10)
        both = [open_store(prefix, split=s, validation_fraction=fraction) for s in ("train", "validation")]
        assert min(dataset.num_tokens for dataset in both) > 0
        assert sum(dataset.num_tokens for dataset in both) == sum(lengths)
        assert [f" {dataset.num_tokens} tokens" in dataset.description for dataset in both] == [True, True]


def test_what_cannot_be_trained_on_is_one_line(tmp_path):
    write(tmp_path / "s", [[1, 2, 300], [4, 5]], 400)
    message = one_line(open_store, tmp_path / "s", vocab_size=300)
    assert message.startswith(f"config.model.vocab_size: {tmp_path}/s.bin: token 2 is the id 300, not one of 300")
    write(tmp_path / "t", [[1]], 400)
    message = one_line(open_store, tmp_path / "t", split="validation")
    assert message.startswith("config.data.validation_fraction: 0.05 leaves no document of")


def prepared(prefix, text, *arguments):
    """A store made by hybrid_jax.data.prepare, with its manifest."""
    Path(f"{prefix}.txt").write_text(text)
    made = ["--input", f"{prefix}.txt", "--output", str(prefix), *arguments]
    assert prepare.main(made) == 0
    return prefix


@pytest.fixture(scope="module")
def tokenizer_file(tmp_path_factory):
    bpe = tokenizers.Tokenizer(tokenizers.models.BPE())
    bpe.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=280, special_tokens=["</s>"], initial_alphabet=alphabet, show_progress=False
    )
    bpe.train_from_iterator([TEXT], trainer)
    file = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    bpe.save(str(file))
    return str(file)


TEXT = "the cat sat on the mat, the dog on the log\n" * 20


def test_a_store_with_a_manifest_is_text(tmp_path, tokenizer_file):
    a = prepared(tmp_path / "a", TEXT, "--tokenizer", tokenizer_file)
    b = prepared(tmp_path / "b", TEXT[100:300], "--tokenizer", tokenizer_file)
    dataset = open_store(a)
    assert "samples as text" in dataset.description
    assert dataset.tokenizer.decode(dataset.tokenizer.encode("the cat")) == "the cat"
    tokens = [StoreReader(prefix).num_tokens for prefix in (a, b)]
    assert dataset.tokenizer.bytes_per_token == pytest.approx(len(TEXT) / tokens[0])
    both = open_store(
        f"{a}:1,{b}:5", validation_path=str(prepared(tmp_path / "v", TEXT, "--tokenizer", tokenizer_file))
    )
    assert both.tokenizer.bytes_per_token == pytest.approx((len(TEXT) + 200) / sum(tokens))
    assert both.identity["the tokenizer"] == dataset.identity["the tokenizer"] != ""
    write(tmp_path / "plain", [[1, 2], [3]], 10)
    some = open_store(f"{a},{tmp_path}/plain")  # its text is not known, so bytes are not either
    assert (
        math.isnan(some.tokenizer.bytes_per_token) and some.tokenizer.decode([*some.tokenizer.encode("cat")]) == "cat"
    )


def test_a_manifest_that_does_not_fit_is_one_line(tmp_path, tokenizer_file):
    a = prepared(tmp_path / "a", TEXT, "--tokenizer", tokenizer_file)
    b = prepared(tmp_path / "b", TEXT[:300])
    for call, words in (
        (lambda: open_store(a, vocab_size=270), "config.model.vocab_size: 270: the tokenizer of"),
        (lambda: open_store(f"{a},{b}"), f"config.data.path: {b}.bin was made with another tokenizer than {a}.bin"),
        (
            lambda: open_store(a, split="validation", validation_path=str(b)),
            f"config.data.validation_path: {b}.bin was",
        ),
    ):
        assert one_line(call).startswith(words)
    shutil.copy(f"{b}.json", f"{tmp_path}/c.json")
    write(tmp_path / "c", [[1, 2], [3]], 257)
    assert f"{tmp_path}/c.json: is of another store: it counts" in one_line(open_store, tmp_path / "c")
    os.remove(f"{a}.tokenizer.json")
    assert one_line(open_store, a).startswith(f"config.data.path: {a}.tokenizer.json: no such file")


def test_validation_may_be_a_store_of_its_own(tmp_path):
    documents = [[n, n + 1, n + 2] for n in range(0, 60, 3)]
    write(tmp_path / "a", documents, 100)
    write(tmp_path / "v", [[70, 71], [72, 73, 74]], 100)
    settings = dict(validation_path=str(tmp_path / "v"), validation_fraction=0.5)
    train, validation = (open_store(tmp_path / "a", split=s, **settings) for s in ("train", "validation"))
    assert train.num_tokens == 60 and validation.num_tokens == 5  # nothing is held out of the one, all of the other
    assert set(validation.batch(0, [0], 1)["tokens"][0, :5].tolist()) == {70, 71, 72, 73, 74}
    assert train.identity["data.validation_fraction"] == "0, as data.validation_path is set"
    for path, words in (
        (f"{tmp_path}/missing", f"config.data.validation_path: {tmp_path}/missing.idx: no such file"),
        (f"{tmp_path}/./a.idx", f"config.data.validation_path: {tmp_path}/a.bin is in config.data.path too, as"),
        (f"{tmp_path}/v:0", f"config.data.validation_path: {tmp_path}/v: its weight 0 is not a number above 0"),
    ):
        message = one_line(open_store, tmp_path / "a", split="validation", validation_path=path)
        assert message.startswith(words), message


def test_a_validation_set_smaller_than_a_batch_is_padded_and_one_without_targets_refused(tmp_path):
    write(tmp_path / "s", [[1, 2, 3], [4, 5, 6]] * 20, 64)
    config = tiny_config(
        tmp_path / "run", data__source="store", data__path=str(tmp_path / "s"), data__validation_fraction=0.01,
        eval__batches=2,
    )  # fmt: skip
    _, validation = data.open_splits(config)
    targets = validation.batch(0, range(8), 8)["targets"]
    assert validation.num_windows == 1 and (targets >= 0).sum() == 2 and (targets[1:] == -1).all()
    write(tmp_path / "t", [[1], [4]] * 20, 64)
    settings = dataclasses.replace(config.data, validation_path=str(tmp_path / "t"))
    message = one_line(data.open_splits, dataclasses.replace(config, data=settings))
    assert message.startswith("config.eval.batches: no token of the first 2 batches of validation is a target")
    nothing = tiny_config(
        tmp_path / "run", data__source="store", data__path=str(tmp_path / "s"), data__validation_fraction=0.0
    )
    train, validation = data.open_splits(nothing)
    assert train.num_tokens == 120 and validation is None


def test_a_dry_run_opens_the_data(tmp_path, capsys):
    write(tmp_path / "s", [[1, 2, 3], [4, 5, 6]] * 20, 64)
    command = [f"--config={ROOT}/configs/gdn_300m.py", "--dry_run"]
    assert launch.main([*command, f"--config.data.path={tmp_path}/s"]) == 0
    assert f"data        {tmp_path}/s (token store, uint16): " in capsys.readouterr().out
    assert launch.main([*command, f"--config.data.path={tmp_path}/t"]) == 2
    error = "no such file; a token store is a pair PREFIX.bin and PREFIX.idx, named by PREFIX\n"
    assert capsys.readouterr() == ("", f"error: config.data.path: {tmp_path}/t.idx: {error}")
    assert launch.main(command) == 0  # sizes and costs need no data
    assert (
        "data        none yet: config.data.path: empty; make this recipe's data with `python" in capsys.readouterr().out
    )
    text = [f"--config={ROOT}/configs/tiny_hybrid.py", "--dry_run", "--config.data.source=files"]
    assert launch.main([*text, f"--config.data.path={tmp_path}/none"]) == 2
    assert "config.data.path:" in capsys.readouterr().err


def test_the_sample_is_written_as_bytes_only_where_the_ids_may_be_bytes(tmp_path):
    write(tmp_path / "bytes", [[*b"def f", 256], [*b"x = 1", 256]], 257)
    write(tmp_path / "ids", [[1, 2, 300], [4, 5]], 400)
    assert open_store(tmp_path / "bytes").tokenizer.decode([*b"abc"]) == "abc"
    assert open_store(tmp_path / "bytes", tokenizer="bpe").tokenizer.decode([97, 98]) == "97 98"
    assert open_store(tmp_path / "ids").tokenizer.decode([97, 300]) == "97 300"
    assert open_store(tmp_path / "ids").tokenizer.encode("") == []


def test_the_fingerprint_follows_everything_that_decides_a_sample(tmp_path):
    documents = [[1, 2, 3], [4, 5], [6], [7, 8]]
    for name, changed in {"a": [9], "b": [9], "c": [10]}.items():
        write(tmp_path / name, [*documents, changed], 11)
    write(tmp_path / "d", [[1, 2], [3, 4, 5], *documents[2:], [9]], 11)  # the same tokens, cut elsewhere
    base = open_store(tmp_path / "a").fingerprint
    assert open_store(tmp_path / "b").fingerprint == base
    others = [
        open_store(tmp_path / "c").fingerprint,
        open_store(tmp_path / "d").fingerprint,
        open_store(tmp_path / "a", validation_fraction=0.5).fingerprint,
        open_store(tmp_path / "a", length=4).fingerprint,
        open_store(tmp_path / "a", seed=2).fingerprint,
        open_store(tmp_path / "a", isolate_documents=False).fingerprint,
        open_store(tmp_path / "a", split="validation").fingerprint,
    ]
    assert len({base, *others}) == 8
    with pytest.raises(ValueError, match="nothing but its split"):
        open_store(tmp_path / "a", split="validation").predicted()


@pytest.fixture
def environment():
    """launch sets variables for the process it is in; here that is the test's."""
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)


def test_a_run_trains_from_a_store_and_resumes(tmp_path, capsys, environment):
    rng = np.random.default_rng(0)
    lengths = rng.integers(1, 90, 300)
    with StoreWriter(tmp_path / "s", vocab_size=320) as writer:
        writer.extend(np.arange(lengths.sum()) % 320, lengths)

    def run(folder, *overrides):
        arguments = [
            f"--config={ROOT}/configs/tiny_hybrid.py",
            "--platform=cpu",
            "--config.model.pattern=A-",
            "--config.model.hidden_size=32",
            "--config.model.intermediate_size=64",
            "--config.train.sequence_length=64",
            "--config.train.global_batch_size=4",
            "--config.optimizer.warmup_steps=1",
            "--config.optimizer.decay_steps=10",
            "--config.data.source=store",
            f"--config.data.path={tmp_path / 's'}",
            "--config.eval.batches=1",
            "--config.eval.ngram_order=0",
            "--config.eval.sample_tokens=3",
            "--config.eval.sample_prompt=",
            f"--config.workdir={tmp_path / folder}",
        ]
        code = launch.main([*arguments, *overrides])
        return code, *capsys.readouterr()

    code, out, _ = run("cut", "--config.train.steps=2")
    assert code == 0
    assert "s (token store, uint16): " in out and "train documents" in out and "validation after step 2" in out
    assert len((tmp_path / "cut" / "sample.txt").read_text().split()) == 3  # ids, as numbers
    code, out, _ = run("cut", "--config.train.steps=4")
    assert code == 0 and "restored checkpoint 2" in out
    assert "note:" not in out.replace("note: train.steps", "")  # the data is known to be the same
    assert run("straight", "--config.train.steps=4")[0] == 0
    losses = [
        [(line["step"], line["loss"]) for line in metrics.read_jsonl(tmp_path / name / "metrics.jsonl")]
        for name in ("cut", "straight")
    ]
    assert losses[0] == losses[1] and [step for step, _ in losses[0]] == [1, 2, 3, 4]

    for override, words in (
        ("--config.eval.ngram_order=3", "config.eval.ngram_order: 3, but n-grams are counted in memory"),
        ("--config.data.path=", "config.data.path: empty; data.source 'store' needs PREFIX of a pair"),
        (f"--config.data.path={tmp_path}/t", f"config.data.path: {tmp_path}/t.idx: no such file"),
        ("--config.model.vocab_size=300", f"config.model.vocab_size: {tmp_path}/s.bin: token 300 is the id 300"),
    ):
        code, _, err = run("wrong", override)
        assert code == 2
        assert [line for line in err.splitlines() if line.startswith("error: ")] == [err.strip().splitlines()[-1]]
        assert f"error: {words}" in err

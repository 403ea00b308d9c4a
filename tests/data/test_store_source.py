"""Training from a token store: its split, its checks, and a run that resumes."""

import os

import numpy as np
import pytest

import launch
from hybrid_jax import data, metrics
from hybrid_jax.config import DataConfig
from hybrid_jax.data import sources
from hybrid_jax.data.store import StoreWriter
from tests.data.test_store import ROOT, one_line, write


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


def test_added_documents_move_no_old_one():
    starts = np.arange(0, 5005, 5)
    _, _, before = sources.split_store(starts[:501], 0.1)
    _, train, after = sources.split_store(starts, 0.1)
    assert 30 < len(before) < 70
    assert after[after < 500].tolist() == before.tolist()
    assert sorted([*train, *after]) == list(range(1000))
    # Pinned, as a resumed run must see the same split: by SplitMix64, whose first output for 0 is published.
    assert splitmix64(0) == 0xE220A8397B1DCDAF
    assert after.tolist() == [d for d in range(1000) if splitmix64(d) < 0.1 * 2**64]


def splitmix64(seed):
    z = (seed + 0x9E3779B97F4A7C15) % 2**64
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    z = (z ^ z >> 27) * 0x94D049BB133111EB % 2**64
    return z ^ z >> 31


@pytest.mark.parametrize("fraction", [0.001, 0.5, 0.999])
def test_few_documents_still_fill_both_splits(fraction):
    for starts in ([0, 3, 3, 5], [0, 4, 8, 12], [0, 0, 7, 7], [0, 2]):
        cut, train, held_out = sources.split_store(np.asarray(starts), fraction)
        lengths = np.diff(cut)
        assert len(train) and len(held_out) and lengths[train].min() > 0 and lengths[held_out].min() > 0
        assert lengths[train].sum() + lengths[held_out].sum() == starts[-1]


def test_what_cannot_be_trained_on_is_one_line(tmp_path):
    write(tmp_path / "s", [[1, 2, 300], [4, 5]], 400)
    message = one_line(open_store, tmp_path / "s", vocab_size=300)
    assert message.startswith(f"config.model.vocab_size: {tmp_path}/s.bin: token 2 is the id 300, not one of 300")
    write(tmp_path / "t", [[1]], 400)
    message = one_line(open_store, tmp_path / "t", split="validation")
    assert message.startswith("config.data.validation_fraction: 0.05 leaves no document of")


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

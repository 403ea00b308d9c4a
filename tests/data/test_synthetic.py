import numpy as np
import pytest

from hybrid_jax import data
from hybrid_jax.config import DataConfig
from hybrid_jax.data.synthetic import END, SUCCESSORS
from hybrid_jax.errors import UserError


def make(vocab_size=64, *, seed=1, split="train", length=128, isolate=True):
    config = DataConfig(source="synthetic", isolate_documents=isolate)
    return data.open(config, sequence_length=length, vocab_size=vocab_size, seed=seed, split=split)


@pytest.mark.parametrize("vocab_size", [5, 64, 128_256])
def test_ids_fit_the_vocabulary_and_rows_are_packed(vocab_size):
    dataset = make(vocab_size)
    batch = dataset.batch(3, range(32), 32)
    tokens, targets, segments, positions = (batch[k] for k in ("tokens", "targets", "segment_ids", "positions"))
    assert tokens.min() >= 0 and max(tokens.max(), targets.max()) < vocab_size
    end = tokens == dataset.tokenizer.end_of_document
    assert end.any()
    steps = np.diff(segments, axis=1)
    assert np.array_equal(steps == 1, end[:, :-1]) and (segments[:, 0] == 1).all()
    assert np.array_equal(positions[:, 1:], np.where(steps == 1, 0, positions[:, :-1] + 1))
    assert np.array_equal(targets[:, :-1], np.where(end[:, :-1], -1, tokens[:, 1:]))
    assert np.array_equal(targets[:, -1] == -1, end[:, -1])


def test_without_isolation_a_row_is_one_segment():
    batch = make(isolate=False).batch(0, range(4), 4)
    assert (batch["segment_ids"] == 1).all() and (batch["targets"] >= 0).all()
    assert np.array_equal(batch["positions"], np.tile(np.arange(128), (4, 1)))
    assert np.array_equal(batch["tokens"], make().batch(0, range(4), 4)["tokens"])


def test_samples_are_a_function_of_seed_split_step_and_row():
    dataset = make()
    whole = dataset.batch(7, range(8), 8)["tokens"]
    for rows in (range(4), range(4, 8), [6, 1]):
        assert np.array_equal(make().batch(7, rows, 8)["tokens"], whole[list(rows)])
    assert len({row.tobytes() for row in whole}) == 8
    for other in (make(seed=2), make(split="validation")):
        assert not np.array_equal(other.batch(7, range(8), 8)["tokens"], whole)
        assert other.fingerprint != dataset.fingerprint
    assert make().fingerprint == dataset.fingerprint
    with pytest.raises(ValueError, match="outside a global batch"):
        dataset.batch(0, [8], 8)


def test_stated_best_loss_is_the_loss_of_the_true_process():
    dataset = make(split="validation", length=512)
    assert np.array_equal(dataset.successors_AS, make().successors_AS)  # both splits share the chain
    end_of_document = dataset.tokenizer.end_of_document
    batch = dataset.batch(0, range(200), 200)
    known = batch["targets"] >= 0
    last, target = batch["tokens"][known], batch["targets"][known]
    match = dataset.successors_AS[last] == target[:, None]
    p = np.where(target == end_of_document, END, (1 - END) * (match * np.array(SUCCESSORS)).sum(axis=1))
    assert p.min() > 0
    assert -np.log(p).mean() == pytest.approx(dataset.best_loss, abs=0.01)
    share = [(target == end_of_document).mean(), *(match[target != end_of_document]).mean(axis=0)]
    np.testing.assert_allclose(share, [END, *SUCCESSORS], atol=0.005)
    assert f"{dataset.best_loss:.4f}" in dataset.description


def test_its_tokenizer_writes_ids():
    t = make().tokenizer
    assert t.decode(t.encode("3 0 63")) == "3 0 63" and t.encode("") == []
    for text in ("hello", "64", "-1"):
        with pytest.raises(UserError, match="this tokenizer's source has no text; give ids below 64"):
            t.encode(text)


def test_a_vocabulary_too_small_is_an_error():
    with pytest.raises(UserError, match=r"config\.model\.vocab_size: 4"):
        make(4)

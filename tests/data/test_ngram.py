import math
import time
from collections import Counter, defaultdict

import numpy as np
import pytest

from hybrid_jax import data
from hybrid_jax.config import DataConfig
from hybrid_jax.data import ngram
from hybrid_jax.errors import UserError

# Documents 0 1 0 1 2 and 0 0: written out by hand below. V = 4.
TOKENS = np.array([0, 1, 0, 1, 2, 0, 0], np.uint16)
STARTS = np.array([0, 5, 7])


def test_unigrams_and_bigrams_by_hand():
    model = ngram.fit(TOKENS, STARTS, order=2, vocab_size=4)
    # 7 tokens, 3 kinds: p(w) = (c(w) + 3/4) / 10
    p1 = [4.75 / 10, 2.75 / 10, 1.75 / 10, 0.75 / 10]
    np.testing.assert_allclose(model.distribution([]), p1, rtol=1e-15)
    # after 0: 1 twice, 0 once (the second document); two kinds of three tokens
    after_0 = [(1 + 2 * p1[0]) / 5, (2 + 2 * p1[1]) / 5, 2 * p1[2] / 5, 2 * p1[3] / 5]
    np.testing.assert_allclose(model.distribution([0]), after_0, rtol=1e-15)
    # after 1: 0 once, 2 once
    after_1 = [(1 + 2 * p1[0]) / 4, 2 * p1[1] / 4, (1 + 2 * p1[2]) / 4, 2 * p1[3] / 4]
    np.testing.assert_allclose(model.distribution([1]), after_1, rtol=1e-15)
    # 2 ends a document: the 0 that follows it is of another one
    np.testing.assert_allclose(model.distribution([2]), p1, rtol=1e-15)
    np.testing.assert_allclose(model.distribution([3]), p1, rtol=1e-15)


def test_trigram_by_hand():
    model = ngram.fit(TOKENS, STARTS, order=3, vocab_size=4)
    after_1 = ngram.fit(TOKENS, STARTS, order=2, vocab_size=4).distribution([1])
    # after 0 1: 0 once, 2 once
    expected = [(1 + 2 * after_1[0]) / 4, 2 * after_1[1] / 4, (1 + 2 * after_1[2]) / 4, 2 * after_1[3] / 4]
    np.testing.assert_allclose(model.distribution([0, 1]), expected, rtol=1e-15)
    np.testing.assert_allclose(model.distribution([3, 1]), after_1, rtol=1e-15)
    np.testing.assert_allclose(model.distribution([2, 0, 1]), expected, rtol=1e-15)


def slow_probabilities(train, test, order, vocab_size):
    """The recursion with dictionaries, one token at a time."""
    followers = defaultdict(Counter)
    for document in train:
        for i, token in enumerate(document):
            for k in range(min(order - 1, i) + 1):
                followers[tuple(document[i - k : i])][token] += 1

    def p(token, history):
        lower = p(token, history[1:]) if history else 1 / vocab_size
        seen = followers.get(history)
        if not seen:
            return lower
        return (seen[token] + len(seen) * lower) / (sum(seen.values()) + len(seen))

    return [p(d[i], tuple(d[max(0, i - order + 1) : i])) for d in test for i in range(len(d))]


@pytest.mark.parametrize("order", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("vocab_size", [7, 700])  # 32-bit and 63-bit keys
def test_equals_a_token_by_token_count(order, vocab_size):
    rng = np.random.default_rng(order)

    def documents(n):
        return [(rng.integers(0, 6, rng.integers(1, 12)) * (vocab_size // 7)).tolist() for _ in range(n)]

    train, test = documents(60), documents(20)
    flat = [np.array([t for d in side for t in d], np.uint16) for side in (train, test)]
    starts = [np.concatenate([[0], np.cumsum([len(d) for d in side])]) for side in (train, test)]
    model = ngram.fit(flat[0], starts[0], order=order, vocab_size=vocab_size)
    expected = slow_probabilities(train, test, order, vocab_size)
    np.testing.assert_allclose(model.probabilities(flat[1], starts[1]), expected, rtol=1e-13)


@pytest.mark.parametrize("order", [1, 3, 5])
def test_probabilities_sum_to_one(order):
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, 40, 3000).astype(np.uint16) ** 2 // 60
    model = ngram.fit(tokens, np.array([0, 1000, 1001, 3000]), order=order, vocab_size=50)
    for history in ([], [3], [49, 49], tokens[10:14].tolist(), tokens[2000:2006].tolist()):
        p = model.distribution(history)
        assert p.min() > 0
        assert abs(p.sum() - 1) < 1e-12, history


def test_documents_shorter_than_the_order():
    model = ngram.fit(np.array([1, 2], np.uint16), np.array([0, 1, 2]), order=3, vocab_size=4)
    np.testing.assert_allclose(model.distribution([1, 2]), [0.125, 0.375, 0.375, 0.125])


@pytest.mark.parametrize("order, vocab_size", [(0, 257), (6, 257), (5, 128_256)])
def test_impossible_orders_name_the_key(order, vocab_size):
    with pytest.raises(UserError, match=r"config\.eval\.ngram_order"):
        ngram.fit(TOKENS, STARTS, order=order, vocab_size=vocab_size)


def opened(split, **settings):
    return data.open(DataConfig(**settings), sequence_length=256, vocab_size=300, seed=1, split=split)


def test_standard_library_at_its_known_loss_and_in_time():
    train, validation = opened("train"), opened("validation")
    begin = time.perf_counter()
    trigram = ngram.nats_per_token(train, validation, 3)
    seconds = time.perf_counter() - begin
    bigram = ngram.nats_per_token(train, validation, 2)
    assert 2.35 < bigram < 2.55, bigram
    assert 1.75 < trigram < 1.95, trigram
    assert seconds < 15, seconds
    part = ngram.nats_per_token(train, validation, 3, num_windows=64)
    targets = validation.batch(0, range(64), 64)["targets"]
    assert validation.predicted(64).sum() == (targets >= 0).sum()
    assert part != trigram and abs(part - trigram) < 0.5


def test_windows_that_are_not_isolated_count_over_document_ends():
    isolated = ngram.nats_per_token(opened("train"), opened("validation"), 2)
    joined = [opened(s, isolate_documents=False) for s in ("train", "validation")]
    assert joined[1].predicted().sum() == joined[1].num_tokens - 1
    assert isolated != ngram.nats_per_token(*joined, 2) == pytest.approx(isolated, abs=0.01)


def test_loss_is_the_mean_over_targets():
    train, validation = opened("train"), opened("validation")
    model = ngram.fit(train.store.tokens, train.store.starts, order=1, vocab_size=257)
    p = model.distribution([])
    targets = validation.batch(0, range(8), 8)["targets"]
    expected = -np.log(p[targets[targets >= 0]]).mean()
    assert math.isclose(ngram.nats_per_token(train, validation, 1, num_windows=8), expected, rel_tol=1e-12)


def test_synthetic_source_has_nothing_to_count():
    with pytest.raises(UserError, match=r"config\.eval\.ngram_order"):
        ngram.nats_per_token(opened("train", source="synthetic"), opened("validation", source="synthetic"), 3)

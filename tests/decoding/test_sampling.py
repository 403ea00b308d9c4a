"""Choosing tokens: against transformers' own processors, and how often what is drawn."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hybrid_jax.decoding.sampling import Sampling, choose, keep_top_k, keep_top_p, penalize, scores
from hybrid_jax.errors import UserError

B, V = 6, 97
RNG = np.random.default_rng(0)
LOGITS = (RNG.normal(size=(B, V)) * [[0.1], [1], [3], [10], [1], [1]]).astype(np.float32)
TEXTS = RNG.integers(0, V, (B, 20))


def seen_of(texts: np.ndarray) -> np.ndarray:
    seen = np.zeros((B, V), bool)
    np.put_along_axis(seen, texts, True, axis=1)
    return seen


@pytest.mark.torch
@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(0.7),
        Sampling(1.0, repetition_penalty=1.3),
        Sampling(1.0, repetition_penalty=0.8),
        Sampling(1.0, top_k=1),
        Sampling(1.0, top_k=10),
        Sampling(1.0, top_k=1000),
        Sampling(1.0, top_p=0.9),
        Sampling(1.0, top_p=0.1),
        Sampling(1.0, top_p=1e-6),
        Sampling(0.6, top_k=30, top_p=0.8, repetition_penalty=1.2),
    ],
    ids=str,
)
def test_as_transformers(sampling):
    """The scores from which a token is drawn: what their processors make of them, in their order."""
    torch = pytest.importorskip("torch")
    from transformers import LogitsProcessorList
    from transformers.generation import logits_process as theirs

    steps = [theirs.RepetitionPenaltyLogitsProcessor(sampling.repetition_penalty)]
    steps.append(theirs.TemperatureLogitsWarper(sampling.temperature))
    steps += [theirs.TopKLogitsWarper(sampling.top_k)] if sampling.top_k else []
    steps += [theirs.TopPLogitsWarper(sampling.top_p)] if sampling.top_p < 1 else []
    want = LogitsProcessorList(steps)(torch.tensor(TEXTS), torch.tensor(LOGITS)).numpy()
    got = np.asarray(scores(sampling, jnp.asarray(LOGITS), jnp.asarray(seen_of(TEXTS))))
    assert (np.isinf(got) == np.isinf(want)).all()
    np.testing.assert_allclose(got, want, rtol=1e-6)


def test_what_stays_is_as_likely_as_asked():
    """top_p keeps the fewest tokens whose probabilities reach it, by float64 sums; equal ones stay together."""
    for p in (0.2, 0.5, 0.9, 0.99):
        kept = np.isfinite(np.asarray(keep_top_p(jnp.asarray(LOGITS), p)))
        odds = np.exp(LOGITS - LOGITS.max(axis=1, keepdims=True), dtype=np.float64)
        odds /= odds.sum(axis=1, keepdims=True)
        for row, stays in zip(odds, kept, strict=True):
            order = np.sort(row)[::-1]
            assert stays.sum() == 1 + np.searchsorted(np.cumsum(order), p) and row[stays].min() > row[~stays].max()
    ties = jnp.asarray([[1.0, 1.0, 1.0, 0.0], [2.0, 2.0, 1.0, 1.0]])
    assert np.isfinite(keep_top_p(ties, 0.3)).tolist() == [[True] * 3 + [False], [True, True, False, False]]
    assert np.isfinite(keep_top_k(ties, 1)).tolist() == [[True] * 3 + [False], [True, True, False, False]]


def test_draws_follow_the_probabilities():
    """20,000 keys: the share of each token within five standard errors of its probability, and none left out."""
    logits = jnp.asarray([0.0, 1.0, -1.0, 2.0, 0.5])
    count = 20_000
    keys = jax.random.split(jax.random.key(1), count)
    draw = jax.jit(lambda rows: choose(Sampling(2.0, top_k=4), rows, None, keys))
    found = np.bincount(np.asarray(draw(jnp.tile(logits, (count, 1)))), minlength=5) / count
    odds = np.exp(np.asarray(logits) / 2) * [1, 1, 0, 1, 1]
    odds /= odds.sum()
    assert found[2] == 0 and (np.abs(found - odds) <= 5 * np.sqrt(odds * (1 - odds) / count)).all()


def test_zero_temperature_is_the_likeliest():
    keys = jax.random.split(jax.random.key(0), B)
    assert choose(Sampling(0.0), jnp.asarray(LOGITS), None, keys).tolist() == LOGITS.argmax(axis=1).tolist()
    seen = seen_of(LOGITS.argmax(axis=1)[:, None])
    punished = np.asarray(penalize(jnp.asarray(LOGITS), jnp.asarray(seen), 1e6)).argmax(axis=1)
    got = choose(Sampling(0.0, repetition_penalty=1e6), jnp.asarray(LOGITS), jnp.asarray(seen), keys).tolist()
    assert got == punished.tolist() and not (punished == LOGITS.argmax(axis=1)).any()


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"temperature": -0.1}, "temperature: -0.1 is not a number from 0 on"),
        ({"temperature": float("nan")}, "temperature: nan"),
        ({"temperature": float("inf")}, "temperature: inf"),
        ({"top_k": -1}, "top_k: -1 is negative"),
        ({"top_p": 0.0}, "top_p: 0.0 is not above 0 and at most 1"),
        ({"top_p": 1.5}, "top_p: 1.5"),
        ({"repetition_penalty": 0.0}, "repetition_penalty: 0.0 is not above 0"),
    ],
)
def test_what_cannot_be(values, words):
    with pytest.raises(UserError, match=words):
        Sampling(**values)

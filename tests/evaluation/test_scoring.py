"""Batched, padded scoring against each request alone, as tests/teacher.py computes it."""

import dataclasses

import jax
import numpy as np
import pytest

from hybrid_jax import sharding
from hybrid_jax.config import MeshConfig
from hybrid_jax.errors import UserError
from hybrid_jax.evaluation import scoring
from hybrid_jax.evaluation.scoring import Scorer
from hybrid_jax.model import Model
from tests import teacher
from tests.models import drawn
from tests.tiny import tiny_config

WINDOW = 64
CFG = tiny_config("/nonexistent", model__pattern="A-", model__vocab_size=61)
MODEL = Model(CFG.model, "chunked", "float32", "chunked")
RECURRENT = Model(dataclasses.replace(CFG.model, pattern="S"), "chunked", "float32", "chunked")


@pytest.fixture(scope="module")
def params():
    return drawn(MODEL)


@pytest.fixture(scope="module")
def mesh():
    return sharding.make_mesh(MeshConfig(), jax.devices()[:1])


def requests(seed=0):
    """Short, long and cut ones, with equal requests, shared inputs and several candidates."""
    rng = np.random.default_rng(seed)

    def ids(n):
        return rng.integers(0, CFG.model.vocab_size, n).tolist()

    found = [(ids(c), ids(k)) for c, k in [(1, 1), (1, 5), (20, 3), (40, 1), (63, 1), (60, 5), (64, 1), (80, 7)]]
    found += [(ids(150), ids(4)), (ids(3), ids(64)), (ids(5), [])]
    shared = ids(30)
    found += [(shared, [i]) for i in (4, 9, 4, 60)] + [(shared[:-2], [*shared[-2:], 9])]
    return [*found, found[2], found[8]]


def test_every_request_as_if_alone(params, mesh):
    asked = requests()
    context = [3, 1, 4, 1, 5]
    chosen = teacher.greedy(MODEL, params, context, 4, WINDOW, end=-1)
    asked += [(context, chosen), (context, [*chosen[:-1], (chosen[-1] + 1) % CFG.model.vocab_size])]
    seen = {}
    scorer = Scorer(MODEL, params, mesh, WINDOW, batch_size=4)
    got = scorer.score(asked, seen.__setitem__)
    want = [teacher.score(MODEL, params, *request, WINDOW) if request[1] else (0.0, True) for request in asked]
    np.testing.assert_allclose([value for value, _ in got], [value for value, _ in want], rtol=0, atol=2e-4)
    assert [greedy for _, greedy in got] == [greedy for _, greedy in want]
    assert (got[-2][1], got[-1][1]) == (True, False) and got[-2][0] > got[-1][0]
    assert [seen[number] for number in range(len(asked))] == got
    assert scorer.truncated == 4 and len(scorer._rows(asked)) == 12  # 20 requests, of which some share their inputs


def test_padding_leaves_recurrent_states_alone(mesh):
    """The last of these is as long as the padding; each of the others would see it."""
    params = drawn(RECURRENT, 1)
    asked = [([1] * n, [n % 61, 5]) for n in (1, 17, 40, 63)]
    got = Scorer(RECURRENT, params, mesh, WINDOW, batch_size=4).score(asked)
    want = [teacher.score(RECURRENT, params, *request, WINDOW)[0] for request in asked]
    np.testing.assert_allclose(values(got), want, rtol=0, atol=1e-4)


def short_ones(number, seed):
    rng = np.random.default_rng(seed)
    return [tuple(rng.integers(0, 61, n).tolist() for n in rng.integers(1, 30, 2)) for _ in range(number)]


def values(found):
    return np.asarray([value for value, _ in found])


def test_order_changes_nothing(params, mesh):
    asked = short_ones(12, seed=1)
    order = np.random.default_rng(2).permutation(len(asked))
    scorer = Scorer(MODEL, params, mesh, WINDOW, batch_size=4)
    straight, mixed = scorer.score(asked), scorer.score([asked[i] for i in order])
    np.testing.assert_allclose(values(mixed), values(straight)[order], rtol=0, atol=1e-4)
    assert len(set(values(straight).round(3))) == 12


def test_less_memory_than_hoped_for(params, mesh, monkeypatch):
    """Batches shrink, nothing is scored twice, and one row that does not fit is an error of one line."""
    asked = short_ones(12, seed=1)

    class Small(Scorer):
        room, sizes = 6, []

        def _dispatch(self, rows, size):
            self.sizes.append(size)
            if size > self.room or (size == 6 and self.sizes.count(6) == 2):  # the second of two batches, too
                raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory while trying to allocate")
            return super()._dispatch(rows, size)

    monkeypatch.setitem(scoring.TOKENS_AT_ONCE, "cpu", 16 * 64)
    seen = []
    got = Small(MODEL, params, mesh, WINDOW).score(asked, lambda number, score: seen.append(number))
    np.testing.assert_allclose(
        values(got), [teacher.score(MODEL, params, *request, WINDOW)[0] for request in asked], rtol=0, atol=2e-4
    )
    assert Small.sizes == [12, 6, 6, 4, 4, 4] and sorted(seen) == list(range(12))
    Small.room = 0
    with pytest.raises(UserError, match=r"one row of this model does not fit .* at 60 tokens; lower --max_length"):
        Small(MODEL, params, mesh, WINDOW).score([([1], [2] * 60)])
    with pytest.raises(UserError, match=r"--batch_size: this many rows do not fit .*; lower it"):
        Small(MODEL, params, mesh, WINDOW, batch_size=2).score(asked)


def test_few_shapes_and_no_batch_mostly_empty(mesh):
    scorer = Scorer(MODEL, {}, mesh, window=300, batch_size=8)
    rng = np.random.default_rng(0)
    asked = [([1] * int(n), [2]) for n in rng.integers(1, 400, 50)] + [([1, 2, 3], [i]) for i in range(5)]
    rows = scorer._rows(asked)
    batches = list(scorer._batches(rows))
    assert [i for numbers, _ in batches for i in numbers] == list(range(len(rows)))
    shapes = {(size, *scorer._key(rows[numbers[0]])) for numbers, size in batches}
    assert {length for _, length, _ in shapes} == {64, 128, 256, 300}
    assert len(shapes) == 5  # one for each length, and one for the row of five candidates
    for numbers, size in batches:
        assert len({scorer._key(rows[i]) for i in numbers}) == 1
        assert max(len(rows[i].inputs) for i in numbers) <= scorer._key(rows[numbers[0]])[0]
        assert len(numbers) <= size <= 8
    lengths = [scorer._key(rows[numbers[0]])[0] for numbers, _ in batches]
    assert lengths == sorted(lengths, reverse=True)
    assert sum(size for _, size in batches) < 1.2 * len(rows)


@pytest.mark.parametrize(
    ("request_", "said"),
    [
        (([], [1]), "a context without a token"),
        (([1], [2] * (WINDOW + 1)), "a continuation of 65 tokens is longer than the window of 64; raise --max_length"),
        (([1, 61], [2]), "the tokenizer makes the id 61, and the model has 61"),
        (([1], [-1]), "the id -1"),
    ],
)
def test_what_cannot_be_scored(params, mesh, request_, said):
    with pytest.raises(UserError, match=said):
        Scorer(MODEL, params, mesh, WINDOW).score([([1], [2]), request_])

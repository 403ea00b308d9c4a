"""Permutations by arithmetic: each number once, the same for ever, and no pattern that a statistic can see."""

import numpy as np
import pytest

from hybrid_jax.data import shuffle
from hybrid_jax.data.shuffle import Shuffle, permutation


@pytest.fixture
def no_table(monkeypatch):
    monkeypatch.setattr(shuffle, "TABLE", 0)


def test_shuffle_never_changes():
    """Pinned: a resumed run must see the same order under any numpy."""
    assert permutation(10, 1, 42, 0).tolist() == [0, 9, 6, 3, 1, 5, 2, 8, 4, 7]
    assert sorted(permutation(1000, 5).tolist()) == list(range(1000))
    assert permutation(50, 1, -1, 0).tolist() != permutation(50, 1, 1, 0).tolist()
    n = shuffle.TABLE + 1
    assert Shuffle(n, 1, 42, 0)(np.arange(6)).tolist() == [203012, 493619, 521876, 973627, 889758, 432692]
    assert Shuffle(2**40, 1, 42, 0)(np.asarray([0, 1, 2**40 - 1])).tolist() == [
        830031757893,
        698794459797,
        635899591146,
    ]


@pytest.mark.parametrize("size", [*range(1, 70), 1000, 4095, 4096, 4097, 99_999])
def test_every_number_once(size, no_table):
    order = Shuffle(size, 5, 1)(np.arange(size))
    assert order.dtype == np.int64 and np.array_equal(np.sort(order), np.arange(size))
    places = Shuffle(size, 5, 1).inverse()(order)
    assert places.dtype == np.int64 and np.array_equal(places, np.arange(size))


def test_a_table_below_and_arithmetic_above(monkeypatch):
    monkeypatch.setattr(shuffle, "TABLE", 100)
    assert np.array_equal(Shuffle(100, 3, 4)(np.arange(100)), permutation(100, 3, 4))
    assert np.array_equal(Shuffle(100, 3, 4).inverse()(permutation(100, 3, 4)), np.arange(100))
    large = Shuffle(101, 3, 4)
    assert not np.array_equal(large(np.arange(101)), permutation(101, 3, 4))
    order = large(np.arange(101))
    for places in ([7], [100, 0, 7], []):  # any places, in any order
        assert large(np.asarray(places, np.int64)).tolist() == order[places].tolist()


def chi_square(counts):
    """Of equal expectations, as its distance from the mean in standard deviations."""
    counts = np.asarray(counts, float)
    free, expected = counts.size - 1, counts.mean()
    return (((counts - expected) ** 2 / expected).sum() - free) / (2 * free) ** 0.5


def test_a_small_order_is_uniform_over_seeds(no_table):
    """Every number at every place, and every pair of numbers at the first two."""
    size, seeds = 12, 6000
    orders = np.stack([Shuffle(size, 7, seed)(np.arange(size)) for seed in range(seeds)])
    for place in range(size):
        assert abs(chi_square(np.bincount(orders[:, place], minlength=size))) < 5
    pairs = np.bincount(orders[:, 0] * size + orders[:, 1], minlength=size**2).reshape(size, size)
    assert pairs.diagonal().sum() == 0
    assert abs(chi_square(pairs[~np.eye(size, dtype=bool)])) < 5


def test_a_large_order_has_no_pattern():
    size = shuffle.TABLE + 3
    places = np.arange(size)
    order, following = (Shuffle(size, 1, 42, epoch)(places) for epoch in (0, 1))
    assert np.array_equal(np.sort(order), places)
    root = int(size**0.5)
    for array in (np.diff(order), order - following, order - places):
        for modulus in (2, 64, root, root + 1):
            counts = np.bincount(array % modulus, minlength=modulus)
            assert abs(chi_square(counts)) < 6, modulus
    squares = np.bincount(places * 64 // size * 64 + order * 64 // size, minlength=4096)
    assert abs(chi_square(squares)) < 6  # where a number goes does not tell where it came from
    for a, b in ((order[1:], order[:-1]), (order, following), (order, places)):
        assert abs(np.corrcoef(a, b)[0, 1]) * size**0.5 < 5
    assert (np.abs(np.diff(order)) == 1).sum() < 12  # 2 are expected
    assert (order == places).sum() < 8  # 1 is

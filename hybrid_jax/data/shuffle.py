"""Permutations decided by numbers alone, the same under any numpy, that need no array of their size."""

import functools
import math
from collections.abc import Callable

import numpy as np

TABLE = 2**20  # up to this size a permutation is a table
_ROUNDS = 8  # with 6, pairs of 12 numbers are not yet uniform over seeds
_MIX = (np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))  # of SplitMix64 (Steele, Lea and Flood 2014)
_HALF = np.uint64(32)


def permutation(size: int, *entropy: int) -> np.ndarray:
    """A permutation of range(size), int64, decided by the numbers alone: uniform over all of them.

    Made from raw Philox output, which numpy guarantees to keep; `Generator.permutation` may change between
    versions.
    """
    return np.argsort(_random(size, entropy), kind="stable")


class Shuffle:
    """A permutation of range(size), to be looked up at any places.

    Up to 2^20 it is `permutation`, a table of 8 bytes a number. Above, nothing is kept: it is a Feistel network
    of eight rounds over pairs of two numbers near the size's root, walked until it is inside (Black and Rogaway
    2002, methods 2 and 3). Such an order passes tests of uniformity but is one of 2^512, not any order.
    """

    def __init__(self, size: int, *entropy: int):
        """size: 1 to 2^62."""
        self.size = size
        self._table = permutation(size, *entropy) if size <= TABLE else None
        self._keys = _random(_ROUNDS, entropy)
        self._low = math.isqrt(size - 1) + 1
        self._high = -(-size // self._low)  # low * high is less than size + low: the walk hardly ever takes a step

    def __call__(self, places: np.ndarray) -> np.ndarray:
        """The numbers at these places, each in [0, size): int64 as `places`."""
        if self._table is not None:
            return self._table[places]
        return self._walk(places, backwards=False)

    def inverse(self) -> Callable[[np.ndarray], np.ndarray]:
        """A function that gives the places of numbers, int64 as they are."""
        if self._table is None:
            return functools.partial(self._walk, backwards=True)
        inverse = np.empty_like(self._table)
        inverse[self._table] = np.arange(self.size)
        return inverse.__getitem__

    def _walk(self, numbers: np.ndarray, backwards: bool) -> np.ndarray:
        numbers = self._step(numbers.astype(np.uint64), backwards)
        outside = np.flatnonzero(numbers >= self.size)
        while len(outside):
            numbers[outside] = self._step(numbers[outside], backwards)
            outside = outside[numbers[outside] >= self.size]
        return numbers.astype(np.int64)

    def _step(self, numbers: np.ndarray, backwards: bool) -> np.ndarray:
        """A permutation of range(low * high), uint64, or the one back. Each round adds a keyed hash of one half to the
        other, or subtracts it."""
        sizes = np.asarray([self._low, self._high], np.uint64)
        high, low = np.divmod(numbers, sizes[0])
        halves = [low, high]
        rounds = range(_ROUNDS)
        for number in reversed(rounds) if backwards else rounds:
            half, other, size = halves[number % 2], halves[1 - number % 2], sizes[number % 2]
            hashed = other ^ self._keys[number]
            hashed *= _MIX[0]
            hashed ^= hashed >> _HALF
            hashed *= _MIX[1]
            hashed >>= _HALF
            hashed *= size
            hashed >>= _HALF  # in [0, size)
            # Modulo size: what would be negative wraps to the largest.
            if backwards:
                half -= hashed
                np.minimum(half, half + size, out=half)
            else:
                half += hashed
                np.minimum(half, half - size, out=half)
        halves[1] *= sizes[0]
        return halves[0] + halves[1]


def _random(count: int, entropy: tuple[int, ...]) -> np.ndarray:
    """Uniform uint64 [count]."""
    return np.random.Philox(np.random.SeedSequence([e % 2**64 for e in entropy])).random_raw(count)

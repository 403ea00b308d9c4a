"""Several token stores as one data set: which of them a window comes from, and which of its own windows that is.

Stores are the leaves of a Huffman tree of their weights (Huffman 1952), so that each window is found by one
two-way choice a level. At a node with weights a and b below it, of its windows 0, 1, 2, ... the first n hold
floor((n a + phase) / (a + b)) for the first child, all in whole numbers: evenly spaced, as in systematic
sampling (Madow and Madow 1944). The seed draws the phases, so that over seeds each window falls to each store
with the probability of its share.

Bound: in any run of windows a child's count is less than 1 from its share of the node's count, so a store's is
less than 1 + r1 + r1 r2 + ... from its share of the run, r1, r2, ... the shares of the nodes on the way up to,
but without, a child of the root. A Huffman node's uncle is no lighter than the node: r1 r2 < 1/2, r3 r4 < 1/2,
..., and the sum is below 4 for any number of stores, below 2 for three, and 1 for two.
"""

import contextlib
import heapq
import math
import os
from collections.abc import Sequence
from fractions import Fraction
from typing import NamedTuple

import numpy as np

from hybrid_jax.data.interface import Dataset, Tokenizer, check_rows, fingerprint
from hybrid_jax.data.manifest import stem
from hybrid_jax.errors import UserError

_PHASES, _SEEDS = 4, 5  # random streams, apart from those of packing


class Part(NamedTuple):
    """One store of config.data.path; weight is finite and above 0."""

    prefix: str
    weight: float


class _Node(NamedTuple):
    """Of any n windows from the first, (n * weight + phase) // total belong to `first`."""

    weight: int
    total: int
    phase: int  # in [0, total)
    first: "_Node | int"  # an int is a store
    second: "_Node | int"


def parse(path: str, key: str = "path") -> list[Part]:
    """The stores of config.data.path (or another key of it), 'PREFIX:WEIGHT,PREFIX:WEIGHT,...'.

    A text that as a whole names files of a store is one prefix, whatever is in it. Else commas part the
    stores, and what follows a store's last colon is its weight if it is a number; without one it weighs 1.
    Raises UserError for a weight that is not above 0 and finite, for a store without a name, and for a store
    named twice.
    """
    if _is_store(path) or not set(",:") & set(path):
        return [Part(path if _is_store(path) else path.strip(), 1.0)]
    parts: list[Part] = []
    places = set()
    for number, text in enumerate(path.split(","), 1):
        part = _parse_part(text.strip())
        if not part.prefix:
            raise UserError(f"config.data.{key}: store {number} of {path!r} has no name; give PREFIX:WEIGHT for each")
        if not 0 < part.weight < math.inf:
            raise UserError(
                f"config.data.{key}: {part.prefix}: its weight {text.rpartition(':')[2].strip()} is not a number above "
                "0; give one, or leave the store out"
            )
        name, colon, weight = part.prefix.rpartition(":")
        if colon and _is_store(name) and not _is_store(part.prefix):
            raise UserError(f"config.data.{key}: {name}: its weight {weight!r} is not a number; give PREFIX:WEIGHT")
        place = os.path.realpath(stem(part.prefix) + ".idx")
        if place in places:
            raise UserError(
                f"config.data.{key}: {part.prefix}: named twice; name a store once, with the sum of its weights"
            )
        places.add(place)
        parts.append(part)
    return parts


def whole_weights(weights: Sequence[float]) -> list[int]:
    """The smallest whole numbers in the ratio of the weights, above 0, as they are written: of 0.7 and 0.3, 7
    and 3."""
    exact = [Fraction(str(w)) for w in weights]
    scale = math.lcm(*(w.denominator for w in exact))
    whole = [int(w * scale) for w in exact]
    divisor = math.gcd(*whole)
    return [w // divisor for w in whole]


def part_seed(seed: int, number: int) -> int:
    """The seed of the own order of a mixture's store `number`, below 2^64."""
    return int(np.random.SeedSequence([seed % 2**64, _SEEDS, number]).generate_state(1, np.uint64)[0])


class Schedule:
    """The store of each window of an endless stream, by arithmetic on its number; see the module's docstring.

    weights: whole numbers above 0, of any size. Nothing is counted or kept: two processes, or two calls in
    any order, agree.
    """

    def __init__(self, weights: Sequence[int], seed: int):
        heap: list[tuple[int, int, _Node | int]] = [(w, number, number) for number, w in enumerate(weights)]
        heapq.heapify(heap)
        for number in range(len(weights), 2 * len(weights) - 1):
            (weight, _, first), (other, _, second) = heapq.heappop(heap), heapq.heappop(heap)
            total = weight + other
            draw = int(np.random.Philox(np.random.SeedSequence([seed % 2**64, _PHASES, number])).random_raw())
            heapq.heappush(heap, (total, number, _Node(weight, total, draw * total >> 64, first, second)))
        self._root = heap[0][2]

    def locate(self, window: int) -> tuple[int, int]:
        """(number of its store, number of that store's windows before it)."""
        node = self._root
        while isinstance(node, _Node):
            before, rest = divmod(window * node.weight + node.phase, node.total)
            if rest + node.weight >= node.total:  # the count of `first` rises with this window
                node, window = node.first, before
            else:
                node, window = node.second, window - before
        return node, window


class MixtureDataset:
    """A `Dataset` made of the windows of several, in each part's own order and through its own epochs.

    Training: in any run of windows the count of a part's is less than 4 from its share of the weights.
    Validation: every window of every part once, in shares of their numbers of windows, so that the first
    batches stand for all parts; the order follows neither seed nor weights. Past the end there is padding only.
    """

    def __init__(
        self,
        parts: Sequence[Dataset],
        weights: Sequence[float],
        *,
        seed: int,
        training: bool,
        description: str,
    ):
        """parts: of one window length and tokenizer, and of the split that `training` says. weights: of each,
        finite and above 0, in any unit; validation does not use them."""
        self.tokenizer: Tokenizer = parts[0].tokenizer
        self.description = description
        self.num_tokens = sum(part.num_tokens for part in parts)
        self.num_windows = sum(part.num_windows for part in parts)
        self._parts = list(parts)
        whole = whole_weights(weights) if training else [part.num_windows for part in parts]
        self._schedule = Schedule(whole, seed * training)
        self.identity = _identity(parts, whole if training else [], seed)

    @property
    def fingerprint(self) -> str:
        return fingerprint(self.identity)

    def batch(self, step: int, rows: Sequence[int], global_batch_size: int) -> dict[str, np.ndarray]:
        """See `Dataset.batch`."""
        windows = check_rows(step, rows, global_batch_size).tolist()
        by_part: dict[int, tuple[list[int], list[int]]] = {}  # (rows, windows of the part)
        for row, window in enumerate(windows):
            number, own = self._schedule.locate(window)
            at, owns = by_part.setdefault(number, ([], []))
            at.append(row)
            owns.append(own)
        if not by_part:
            return self._parts[0].batch(0, [], 1)
        pieces = [self._parts[number].batch(0, owns, max(owns) + 1) for number, (_, owns) in by_part.items()]
        back = np.argsort(np.concatenate([at for at, _ in by_part.values()]))
        return {name: np.concatenate([piece[name] for piece in pieces])[back] for name in pieces[0]}


def _identity(parts: Sequence[Dataset], weights: Sequence[int], seed: int) -> dict[str, str]:
    """What is the same in all parts under its own name, the rest and the weights by number of store."""
    identity = {"the number of stores in data.path": str(len(parts))}
    for number, part in enumerate(parts, 1):
        of_store = f"store {number} of data.path"
        for name, value in part.identity.items():
            identity[name.replace("data.path", of_store)] = value
        if weights:
            identity[f"the weight of {of_store}"] = f"{weights[number - 1]} of {sum(weights)}"
    # Of the parts it is the seeds that this one makes.
    identity["the order of the data (train.seed)"] = "mixture 1, packing 2, " + (
        f"seed {seed}" if weights else "validation"
    )
    return identity


def _parse_part(text: str) -> Part:
    prefix, colon, weight = text.rpartition(":")
    if colon:
        with contextlib.suppress(ValueError):
            return Part(prefix.strip(), float(weight))
    return Part(text, 1.0)


def _is_store(prefix: str) -> bool:
    return any(os.path.isfile(stem(prefix) + ending) for ending in (".idx", ".bin"))

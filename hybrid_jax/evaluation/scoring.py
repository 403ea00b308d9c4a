"""Log-probabilities of given continuations, in batches of few shapes spread over all devices.

Shapes: B rows of a batch, T padded length, K candidates of a row. Padding stands at the right, where nothing that is
asked can see it, so attention and recurrent states are those of each text alone.
"""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from hybrid_jax import sharding
from hybrid_jax.errors import UserError
from hybrid_jax.kernels.dispatch import BATCH_AXES
from hybrid_jax.loss import IGNORE
from hybrid_jax.model import Model, Params

Pair = tuple[Sequence[int], Sequence[int]]  # ids of a context (at least one) and of what follows it
Score = tuple[float, bool]  # log-probability in nats, whether greedy decoding would give it

SHORTEST = 64  # the smallest padded length; the others are its doubles, and the window
MOST_CANDIDATES = 64  # of a row
TOKENS_AT_ONCE = {"cpu": 2**11}  # on a device, where no batch size is given
_TOKENS_AT_ONCE = 2**15  # elsewhere


@dataclasses.dataclass
class _Row:
    """One forward pass: `inputs` and the continuations of requests that have these in common."""

    inputs: tuple[int, ...]
    candidates: dict[tuple[int, ...], list[int]]  # continuation -> numbers of the requests that ask for it

    @property
    def width(self) -> int:
        return _doubled(len(self.candidates))


class Scorer:
    """Scores continuations with a model whose parameters lie whole on every device of a mesh.

    window: the longest input in tokens. batch_size: the most rows of a batch over all devices, one a device at
    least; 0 = as many as seem to fit, and fewer where the devices run out of memory.
    """

    def __init__(self, model: Model, params: Params, mesh: Mesh, window: int, batch_size: int = 0):
        self.model, self.params, self.mesh, self.window = model, params, mesh, window
        self._ways = sharding.batch_ways(mesh)
        self.batch_size = batch_size
        self._tokens = TOKENS_AT_ONCE.get(mesh.devices.flat[0].platform, _TOKENS_AT_ONCE) * self._ways
        self.truncated = 0  # requests that lost tokens at the left
        self.compile_seconds = 0.0
        self._shapes: set[tuple[int, ...]] = set()

    def score(
        self, requests: Sequence[Pair], done: Callable[[int, Score], None] = lambda number, score: None
    ) -> list[Score]:
        """(sum of the log-probabilities in nats, whether each token is the likeliest) of each continuation.

        A request longer than the window loses tokens of its context at the left. `done` is called with the number of
        each request and its score as soon as it is known, longest first. Raises UserError for a continuation longer
        than the window, an empty context and an id that the model does not have.
        """
        found: list[Score] = [(0.0, True)] * len(requests)
        rows = self._rows(requests)
        for number, (_, continuation) in enumerate(requests):
            if not continuation:
                done(number, found[number])
        while rows:
            left = set(range(len(rows)))
            try:
                for numbers, log_p, best in self._run(rows):
                    for at, place in enumerate(numbers):
                        row = rows[place]
                        for candidate, (continuation, asked) in enumerate(row.candidates.items()):
                            end = len(row.inputs)
                            span = slice(end - len(continuation), end)
                            value = float(log_p[at, span, candidate].sum(dtype=np.float64))
                            greedy = bool((best[at, span] == np.asarray(continuation)).all())
                            for number in asked:
                                found[number] = (value, greedy)
                                done(number, found[number])
                        left.discard(place)
                return found
            except jax.errors.JaxRuntimeError as error:
                if "RESOURCE_EXHAUSTED" not in str(error):
                    raise
                self._shrink(len(rows[min(left)].inputs))
                rows = [rows[place] for place in sorted(left)]
        return found

    def _shrink(self, length: int) -> None:
        """After running out of memory. Raises UserError where that cannot help."""
        if self.batch_size or self._tokens <= self._ways * self._padded(length):
            what = "this many rows do" if self.batch_size else "one row of this model does"
            remedy = "lower it, or leave it out" if self.batch_size else "lower --max_length, or take other devices"
            raise UserError(f"--batch_size: {what} not fit into the devices' memory at {length:,} tokens; {remedy}")
        self._tokens //= 2

    def _rows(self, requests: Sequence[Pair]) -> list[_Row]:
        """The distinct inputs, longest first."""
        by_inputs: dict[tuple[int, ...], dict[tuple[int, ...], list[int]]] = {}
        vocab_size = self.model.cfg.vocab_size
        for number, (context, continuation) in enumerate(requests):
            if not continuation:
                continue
            if not context:
                raise UserError("scoring: a context without a token; begin it with the end-of-document id")
            if len(continuation) > self.window:
                raise UserError(
                    f"a continuation of {len(continuation):,} tokens is longer than the window of {self.window:,}; "
                    "raise --max_length, which a model without attention may exceed, or leave its task out"
                )
            ids = (*context, *continuation)
            if not (0 <= min(ids) and max(ids) < vocab_size):
                bad = next(i for i in ids if not 0 <= i < vocab_size)
                raise UserError(f"the tokenizer makes the id {bad}, and the model has {vocab_size:,}: it is another's")
            self.truncated += len(ids) > self.window + 1
            inputs = ids[-(self.window + 1) : -1]
            by_inputs.setdefault(inputs, {}).setdefault(tuple(continuation), []).append(number)
        rows = []
        for inputs, candidates in by_inputs.items():
            items = list(candidates.items())
            rows += [
                _Row(inputs, dict(items[at : at + MOST_CANDIDATES])) for at in range(0, len(items), MOST_CANDIDATES)
            ]
        return sorted(rows, key=lambda row: (self._padded(len(row.inputs)), row.width, len(row.inputs)), reverse=True)

    def _padded(self, length: int) -> int:
        return min(max(SHORTEST, _doubled(length)), self.window)

    def _batches(self, rows: Sequence[_Row]) -> Iterator[tuple[range, int]]:
        """(numbers of rows that go together, B): one shape for each padded length and number of candidates."""
        start = 0
        while start < len(rows):
            key = self._key(rows[start])
            end = start
            while end < len(rows) and self._key(rows[end]) == key:
                end += 1
            most = max((self.batch_size or self._tokens // key[0]) // self._ways, 1) * self._ways
            batches = -(-(end - start) // most)
            size = -(-(end - start) // (batches * self._ways)) * self._ways
            yield from ((range(at, min(at + size, end)), size) for at in range(start, end, size))
            start = end

    def _key(self, row: _Row) -> tuple[int, int]:
        return self._padded(len(row.inputs)), row.width

    def _run(self, rows: Sequence[_Row]) -> Iterator[tuple[range, np.ndarray, np.ndarray]]:
        """(row numbers, log-probabilities [B, T, K], likeliest ids [B, T]) of each batch; one is always under way."""
        waiting: tuple[range, Any] | None = None
        for numbers, size in self._batches(rows):
            arrays = self._dispatch([rows[i] for i in numbers], size)
            if waiting:
                yield (waiting[0], *jax.device_get(waiting[1]))
            waiting = numbers, arrays
        if waiting:
            yield (waiting[0], *jax.device_get(waiting[1]))

    def _dispatch(self, rows: Sequence[_Row], size: int) -> tuple[jax.Array, jax.Array]:
        length, width = self._key(rows[0])
        tokens = np.zeros((size, length), np.int32)
        targets = np.full((size, length, width), IGNORE, np.int32)
        for at, row in enumerate(rows):
            end = len(row.inputs)
            tokens[at, :end] = row.inputs
            for candidate, continuation in enumerate(row.candidates):
                targets[at, end - len(continuation) : end, candidate] = continuation
        split = NamedSharding(self.mesh, PartitionSpec(BATCH_AXES))
        arrays = jax.device_put(tokens, split), jax.device_put(targets, split)
        began = time.monotonic()
        with jax.set_mesh(self.mesh):
            found = _log_probabilities(self.model, self.params, *arrays)
        if targets.shape not in self._shapes:  # only then does the call take time
            self._shapes.add(targets.shape)
            self.compile_seconds += time.monotonic() - began
        return found


@functools.partial(jax.jit, static_argnames="model")
def _log_probabilities(model: Model, params: Params, tokens: jax.Array, targets: jax.Array) -> Any:
    """`Model.log_probabilities`, the results whole on every device."""
    found = model.log_probabilities(params, tokens, targets)
    return jax.tree.map(lambda x: jax.lax.with_sharding_constraint(x, PartitionSpec()), found)


def _doubled(number: int) -> int:
    """The smallest power of two that is not below `number`."""
    return 1 << (number - 1).bit_length()

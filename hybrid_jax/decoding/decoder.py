"""Reads prompts and writes what follows, for several rows at once, in a few programs that serve every length.

A prompt is read in chunks, so that memory does not grow with it; what is written then takes the same memory and time a
token however long the row is, but for the keys that softmax attention keeps. Rows may be of different lengths: each
has its own count of tokens in every call, and what pads it to the longest changes nothing of it.

Shapes: B rows, T tokens of a chunk, V vocabulary.
"""

import dataclasses
import functools
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from hybrid_jax.decoding.sampling import Sampling, choose
from hybrid_jax.errors import UserError
from hybrid_jax.layers.rotary import MAX_POSITIONS
from hybrid_jax.model import Model, Params
from hybrid_jax.report import host_memory

CHUNKS = (32, 128, 512, 2048)  # tokens of a row that are read at once: a program each
_CHUNK_TOKENS = 16_384  # of all rows together, unless there are very many of them
_LEAST_CAPACITY = 256


@dataclasses.dataclass
class Timing:
    """Tokens and seconds of reading and of writing, without those of compiling."""

    read_tokens: int = 0
    read_seconds: float = 0.0
    written_tokens: int = 0
    write_seconds: float = 0.0
    compile_seconds: float = 0.0


def capacity_for(tokens: int) -> int:
    """Tokens that attention's cache is made for: at least `tokens`, by at most a quarter more, and of few sizes."""
    if tokens <= _LEAST_CAPACITY:
        return _LEAST_CAPACITY
    step = 2 ** (tokens - 1).bit_length() // 8
    return -(-tokens // step) * step


class Decoder:
    """A model, ready to decode, and the programs compiled for it so far.

    end: the id after which a row is done (-1: none). The parameters are copied, matrices into model.compute_dtype.
    """

    def __init__(self, model: Model, params: Params, end: int = -1):
        self.model, self.params = model.for_decoding(params)
        self.end = end
        self.timing = Timing()
        self.programs: dict[tuple, Any] = {}

    def call(self, key: tuple, fn: Callable, *args: Any, donate: tuple[int, ...] = ()) -> Any:
        """fn(params, *args), compiled once for a key, which has to tell all shapes; donate: numbers among args."""
        if key not in self.programs:
            began = time.perf_counter()
            program = jax.jit(fn, donate_argnums=[1 + i for i in donate])
            self.programs[key] = program.lower(self.params, *args).compile()
            self.timing.compile_seconds += time.perf_counter() - began
        return self.programs[key](self.params, *args)

    def clock(self) -> float:
        """Seconds that stand still while something is compiled."""
        return time.perf_counter() - self.timing.compile_seconds

    @functools.cached_property
    def grows(self) -> bool:
        """Whether states grow with what is read: there is softmax attention in the model."""
        return bool(set(self.model.cfg.layout) & set("*A"))

    def state_bytes(self, rows: int, capacity: int) -> tuple[int, int]:
        """(bytes of recurrent states, of attention's cache with room for `capacity` tokens) of so many rows."""

        def size(capacity: int) -> int:
            states = jax.eval_shape(functools.partial(self.model.init_state, rows, capacity))
            return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(states))

        constant = size(0)
        return constant, size(capacity) - constant

    def check_room(self, rows: int, tokens: int) -> None:
        """Raises UserError if `tokens` of a row cannot be decoded: positions end, or the cache would not fit."""
        rotates = {"*": self.model.cfg.mla.rope.style, "A": self.model.cfg.gqa.rope.style}
        turned = any(rotates.get(symbol, "none") != "none" for symbol in self.model.cfg.layout)
        if turned and tokens > MAX_POSITIONS:
            raise UserError(
                f"prompt and continuation are {tokens:,} tokens long, and positions end at {MAX_POSITIONS:,}; "
                "shorten the prompt or lower max_new_tokens"
            )
        _, needed = self.state_bytes(rows, capacity_for(tokens))
        device = jax.local_devices()[0]
        stats = device.memory_stats() or {}
        free = stats.get("bytes_limit", 0) - stats.get("bytes_in_use", 0) if device.platform != "cpu" else host_memory()
        if free and needed > free:
            raise UserError(
                f"attention's cache of {rows} x {tokens:,} tokens takes {needed:,} bytes, and there are {free:,}; "
                "shorten the prompt, lower max_new_tokens or batch_size"
            )

    def rows(self, numbers: Sequence[int], sampling: Sampling, seed: int = 0) -> "Rows":
        """Empty rows. What is sampled in one follows from the seed, its number and its text alone."""
        return Rows(self, numbers, sampling, seed)


class Rows:
    """Rows of text being read and written. `length` [B]: tokens of each that are in its states."""

    def __init__(self, decoder: Decoder, numbers: Sequence[int], sampling: Sampling, seed: int):
        self.decoder, self.sampling = decoder, sampling
        self.count = len(numbers)
        fold = jax.vmap(jax.random.fold_in, in_axes=(None, 0))
        self._keys = fold(jax.random.key(seed), jnp.asarray(numbers, jnp.uint32))
        self.reset()

    def reset(self) -> None:
        """Forgets everything, and gives its memory back."""
        self.length = np.zeros(self.count, np.int64)
        self.capacity = 0
        self.states: Params | None = None
        self._logits: jax.Array | None = None
        self._seen: jax.Array | None = None
        self._alive: np.ndarray = np.zeros(self.count, bool)
        self._unread: list[list[int]] = [[] for _ in range(self.count)]  # written ids that are in no state

    def reserve(self, tokens: int) -> None:
        """Room for rows of `tokens`. Raises UserError, as Decoder.check_room does."""
        model, B = self.decoder.model, self.count
        if self.states is not None and tokens <= self.capacity:
            return
        self.decoder.check_room(B, tokens)
        self.capacity = capacity_for(tokens)
        if self.states is None:
            self.states = model.init_state(B, self.capacity)
            self._logits = jnp.zeros((B, model.cfg.vocab_size), jnp.float32)
            if self.sampling.needs_seen:
                self._seen = jnp.zeros((B, model.cfg.vocab_size), bool)
        elif self.decoder.grows:
            larger = jax.eval_shape(functools.partial(model.init_state, B, self.capacity))

            def grow(x: jax.Array, like: jax.ShapeDtypeStruct) -> jax.Array:
                more = [(0, after - before) for before, after in zip(x.shape, like.shape, strict=True)]
                return jnp.pad(x, more) if any(n for _, n in more) else x

            self.states = jax.tree.map(grow, self.states, larger)

    def assume(self, tokens: int, more: int) -> None:
        """As if so many tokens, whose states are zero, had been read into each row: to time what follows."""
        self.reserve(tokens + more)
        self.length[:] = tokens
        self.states = {**self.states, "length": jnp.full(self.count, tokens, jnp.int32)}  # type: ignore[dict-item]
        self._alive[:] = True

    def read(
        self,
        texts: Sequence[Sequence[int]],
        more: int = 0,
        progress: Callable[[int, int], None] = lambda done, total: None,
        stop: Callable[[], bool] = lambda: False,
    ) -> bool:
        """Takes these ids into each row, after those that `write` has given and that no state holds yet.

        An empty list leaves its row as it is. more: tokens that are to be written then, so that there is room for them.
        progress: called with how many of how many tokens of the longest row have been read. stop: asked after each
        chunk; where it is true the rest is not read, and this returns False.
        Raises UserError for an id that is not in the vocabulary (before anything is read), and as `reserve` does.
        """
        decoder, B = self.decoder, self.count
        for number, ids in enumerate(texts):
            self._check_ids(ids, f"prompt {number + 1}" if B > 1 else "the prompt")
        texts = [[*before, *ids] if ids else [] for before, ids in zip(self._unread, texts, strict=True)]
        counts = np.array([len(ids) for ids in texts])
        total = int(counts.max())
        self.reserve(int((self.length + counts).max()) + more)
        self._unread = [[] if ids else before for before, ids in zip(self._unread, texts, strict=True)]
        began, done = decoder.clock(), 0
        sizes = [size for size in CHUNKS if size == CHUNKS[0] or size * B <= _CHUNK_TOKENS]
        while done < total:
            T = next((size for size in sizes if size >= total - done), sizes[-1])
            tokens = np.zeros((B, T), np.int32)
            for b, ids in enumerate(texts):
                part = ids[done : done + T]
                tokens[b, : len(part)] = part
            count = np.clip(counts - done, 0, T).astype(np.int32)
            self.states, self._logits, self._seen = jax.block_until_ready(
                decoder.call(
                    ("read", B, T, *self._shape), functools.partial(_read, decoder.model),
                    tokens, count, self.states, self._logits, self._seen, donate=(2, 3, 4),
                )
            )  # fmt: skip
            self.length += count
            done = min(done + T, total)
            decoder.timing.read_tokens += int(count.sum())
            progress(done, total)
            if done < total and stop():
                break
        self._alive = counts > 0
        decoder.timing.read_seconds += decoder.clock() - began
        return done == total

    def write(self, limits: Sequence[int], block: int = 1) -> Iterator[list[list[int]]]:
        """The tokens that follow, up to limits[b] of row b: each time the new ones of every row, `block` at most.

        A row ends with decoder.end, which is given too, at its limit, or after `end_row`. Only rows that something was
        read into since their end are written. The device computes a block ahead of what is given out: with block=1 no
        state is past what was, so that more can be read after it.
        """
        decoder, B = self.decoder, self.count
        most = np.where(self._alive, limits, 0)
        self._alive = most > 0
        if not self._alive.any():
            return
        began, written = decoder.clock(), [list[int]() for _ in range(B)]
        static = (B, self.sampling, *self._shape)
        first = functools.partial(_first, decoder.end, self.sampling)
        key_and_place = (self._keys, self.states["length"])  # type: ignore[index]
        left = jnp.asarray(most, jnp.int32)
        token, alive, left, self._seen = decoder.call(
            ("first", *static), first, self._logits, self._seen, *key_and_place, left, donate=(1,)
        )
        queue, to_go = [token[None]], int(most.max()) - 1
        step = functools.partial(_write, decoder.model, decoder.end, self.sampling, block)
        try:
            while queue:
                if to_go > 0:
                    out, self.states, token, alive, left, self._seen = decoder.call(
                        ("write", block, *static), step,
                        self.states, token, alive & self._alive, left, self._seen, self._keys, donate=(0, 1, 2, 3, 4),
                    )  # fmt: skip
                    queue.append(out)
                    to_go -= block
                new = [self._accept(column) if on else [] for on, column in
                       zip(self._alive, np.asarray(queue.pop(0)).T, strict=True)]  # fmt: skip
                for b, ids in enumerate(new):
                    written[b] += ids
                    if ids and (ids[-1] == decoder.end or len(written[b]) == most[b]):
                        self._alive[b] = False
                yield new
                if not self._alive.any():
                    return
        finally:
            decoder.timing.written_tokens += sum(map(len, written))
            decoder.timing.write_seconds += decoder.clock() - began
            self._alive[:] = False
            before, self.length = self.length, np.asarray(self.states["length"], np.int64)  # type: ignore[index]
            for b, ids in enumerate(written):
                if ids:  # an end is in no state and stays outside: nothing in training follows one
                    rest = ids[self.length[b] - before[b] :]
                    self._unread[b] = [i for i in rest if i != decoder.end]

    def end_row(self, row: int) -> None:
        """Called between what `write` gives: nothing more of this row."""
        self._alive[row] = False

    @property
    def _shape(self) -> tuple:
        return (self.sampling.needs_seen, self.capacity if self.decoder.grows else 0)

    @staticmethod
    def _accept(column: np.ndarray) -> list[int]:
        return [int(i) for i in column if i >= 0]

    def _check_ids(self, ids: Sequence[int], name: str) -> None:
        size = self.decoder.model.cfg.vocab_size
        for i in ids:
            if not 0 <= i < size:
                raise UserError(
                    f"{name} holds the id {i}, and the model's vocabulary has {size:,}; give the tokenizer that the "
                    "model was trained with"
                )


def _read(model: Model, params, tokens, count, states, logits, seen):
    new, states = model.step(params, tokens, states, count)
    logits = jnp.where((count > 0)[:, None], new, logits)
    if seen is not None:
        B, T = tokens.shape
        there = jnp.arange(T) < count[:, None]
        seen = seen.at[jnp.arange(B)[:, None], tokens].max(there)
    return states, logits, seen


def _pick(sampling: Sampling, logits, seen, keys, positions):
    """The next token of each row, whose place in the row is its part of the random key."""
    return choose(sampling, logits, seen, jax.vmap(jax.random.fold_in)(keys, positions))


def _note(seen, tokens, alive):
    return None if seen is None else seen.at[jnp.arange(tokens.shape[0]), tokens].max(alive)


def _first(end: int, sampling: Sampling, params, logits, seen, keys, positions, left):
    del params
    alive = left > 0
    token = _pick(sampling, logits, seen, keys, positions)
    seen = _note(seen, token, alive)
    return jnp.where(alive, token, -1), alive & (token != end) & (left > 1), left - 1, seen


def _write(model: Model, end: int, sampling: Sampling, block: int, params, states, token, alive, left, seen, keys):
    """`block` tokens a row [block, B], -1 where a row is done; and the rest of the arguments as they are then."""

    def step(carry, _):
        states, token, alive, left, seen = carry
        logits, states = model.step(params, jnp.maximum(token, 0)[:, None], states, alive.astype(jnp.int32))
        new = _pick(sampling, logits, seen, keys, states["length"])
        seen = _note(seen, new, alive)
        token, left = jnp.where(alive, new, -1), left - alive
        return (states, token, alive & (new != end) & (left > 0), left, seen), token

    (states, token, alive, left, seen), out = jax.lax.scan(step, (states, token, alive, left, seen), length=block)
    return out, states, token, alive, left, seen

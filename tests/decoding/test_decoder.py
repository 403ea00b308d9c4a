"""Decoding against the forward pass: chunks, rows of different lengths, ends, rows that go on, what states take."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from hybrid_jax.config import RopeConfig
from hybrid_jax.decoding import decoder as decoder_lib
from hybrid_jax.decoding.complete import continuation
from hybrid_jax.decoding.decoder import Decoder, _write, capacity_for
from hybrid_jax.decoding.sampling import Sampling
from hybrid_jax.errors import UserError
from hybrid_jax.layers.context import Context
from hybrid_jax.layers.mla import MLA
from hybrid_jax.model import Model
from tests.models import BASE, EVERY_KIND, drawn, model_of, rms_error, tokens_of

GREEDY, RANDOM = Sampling(temperature=0.0), Sampling(temperature=1.0, top_p=0.95)
LENGTH = 288


def ids_of(seed: int, length: int) -> list[int]:
    return tokens_of(seed, length).tolist()


@pytest.fixture(scope="module", autouse=True)
def quick_compilation():
    """Half the time of these tests; what is decoded is the same."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)
    jax.clear_caches()  # other tests compare bits


PROMPTS = [ids_of(n, n) for n in (5, 1, 31)]


def write(rows, prompts, limits, block=16) -> list[list[int]]:
    rows.read(prompts, max(limits))
    found: list[list[int]] = [[] for _ in prompts]
    for new in rows.write(limits, block):
        for ids, more in zip(found, new, strict=True):
            ids += more
    return found


class Decoded:
    """What a model of a pattern writes after PROMPTS, 256 tokens each, and its forward pass, by the recurrence."""

    def __init__(self, pattern: str):
        self.model = model_of(pattern)
        params = drawn(self.model)
        self.decoder = Decoder(self.model, params)
        self.written = write(self.decoder.rows(range(3), GREEDY), PROMPTS, [256] * 3)
        plain = dataclasses.replace(self.model, backend="reference", attention="reference")
        self._logits = functools.partial(jax.jit(plain.logits), params)

    def forward(self, rows: list[list[int]]) -> np.ndarray:
        """The logits [3, LENGTH, V] of 3 rows of up to LENGTH tokens."""
        return np.asarray(self._logits(np.array([row + [0] * (LENGTH - len(row)) for row in rows])))


@pytest.fixture(scope="module")
def every() -> Decoded:
    return Decoded(EVERY_KIND)


@pytest.fixture(scope="module")
def small() -> Decoder:
    model = model_of("*S")
    return Decoder(model, drawn(model))


@pytest.mark.parametrize("pattern", ["*-", "A-", "G-", "K-", "S-", EVERY_KIND])
def test_greedy_is_what_the_forward_pass_finds_likeliest(pattern, request):
    """256 tokens after prompts of 5, 1 and 31: each is the argmax of the logits of all that stands before it."""
    found = request.getfixturevalue("every") if pattern == EVERY_KIND else Decoded(pattern)
    rows = [prompt + ids for prompt, ids in zip(PROMPTS, found.written, strict=True)]
    for row, prompt, ids in zip(found.forward(rows).argmax(axis=-1), PROMPTS, found.written, strict=True):
        assert ids == row[len(prompt) - 1 : len(prompt) + 255].tolist()


def test_a_batch_is_what_each_row_is_alone(every):
    for prompt, ids in zip(PROMPTS, every.written, strict=True):
        assert write(every.decoder.rows([0], GREEDY), [prompt], [40]) == [ids[:40]]


def test_chunks_make_no_difference(every, monkeypatch):
    """Prompts of 150, 20 and 64 tokens in chunks of 32: the logits of the forward pass, which takes them whole."""
    monkeypatch.setattr(decoder_lib, "CHUNKS", (32,))
    prompts = [ids_of(n, n) for n in (150, 20, 64)]
    rows = every.decoder.rows(range(3), GREEDY)
    rows.read(prompts, 137)  # room as in `every`: its program is taken
    want = every.forward(prompts)[range(3), [149, 19, 63]]
    assert rms_error(rows._logits, want) < 1e-5 and rows.length.tolist() == [150, 20, 64]


def test_sampling_does_not_depend_on_the_batch(small):
    """The same ids for a row's number and text in any company, at any place, in blocks of any size and alone; others
    for another number or seed. No program is compiled anew for other lengths."""
    prompts, limits = [ids_of(n, n) for n in (1, 20, 31)], [40, 7, 23]
    together = write(small.rows([4, 5, 6], RANDOM), prompts, limits)
    assert [len(ids) for ids in together] == limits
    compiled = set(small.programs)
    again = write(small.rows([6, 4, 5], RANDOM), [prompts[2], prompts[0], ids_of(7, 27)], [23, 40, 3])
    assert again[:2] == [together[2], together[0]] and set(small.programs) == compiled
    for number, prompt, limit, ids in zip((4, 5, 6), prompts, limits, together, strict=True):
        assert write(small.rows([number], RANDOM), [prompt], [limit], block=1) == [ids]
    others = (
        write(small.rows([5, 6, 4], RANDOM), prompts, limits),
        write(small.rows([4, 5, 6], RANDOM, 1), prompts, limits),
    )
    assert all(a != b for other in others for a, b in zip(other, together, strict=True))


def test_an_end_ends_its_row(small):
    """The end id is the last that is given; the row's states stay as they were before it, and others go on."""
    prompts = [ids_of(1, 9), ids_of(2, 30), ids_of(3, 3)]
    free = write(small.rows([0, 1, 2], RANDOM), prompts, [30, 30, 1])
    end = next(i for i in free[0][4:] if i not in free[1])
    ended = Decoder(model_of("*S"), drawn(model_of("*S")), end)
    ended.programs = {key: program for key, program in small.programs.items() if key[0] == "read"}
    rows = ended.rows([0, 1, 2], RANDOM)
    stop = free[0].index(end)
    assert write(rows, prompts, [30, 30, 1]) == [free[0][: stop + 1], *free[1:]]
    assert rows.length.tolist() == [9 + stop, 30 + 29, 3]
    rows.read([[3], [], [4]])  # not after the end, which is in no state; after what a limit cut off
    assert rows.length.tolist() == [9 + stop + 1, 30 + 29, 3 + 2]


def test_a_row_goes_on(small, monkeypatch):
    """Read, write, read: as if all had been read at once, though the cache had to grow; whether a limit ended the
    first answer, whose last token is in no state then, or the caller, when it is."""
    monkeypatch.setattr(decoder_lib, "_LEAST_CAPACITY", 16)
    first, second = ids_of(1, 7), ids_of(2, 40)
    answers, logits = [], []
    for limit, in_states in ((5, 4), (9, 5)):
        rows = small.rows([0], GREEDY)
        rows.read([first], 5)
        before = rows.capacity
        answer: list[int] = []
        for (new,) in rows.write([limit]):
            answer += new
            if len(answer) == 5:
                rows.end_row(0)
        assert len(answer) == 5 and rows.length[0] == 7 + in_states
        rows.read([second], 9)
        assert rows.capacity > before and rows.length[0] == 52
        answers.append(answer)
        logits.append(rows._logits)
    assert answers[0] == answers[1]
    rows.reset()
    rows.read([first + answers[0] + second], 9)
    assert max(rms_error(got, rows._logits) for got in logits) < 1e-5


def test_reading_stops_between_chunks(small, monkeypatch):
    monkeypatch.setattr(decoder_lib, "CHUNKS", (32,))
    seen, stopped = [], iter([False, True])
    rows = small.rows([0], GREEDY)
    assert not rows.read([ids_of(1, 100)], 1, lambda done, total: seen.append((done, total)), lambda: next(stopped))
    assert seen == [(32, 100), (64, 100)] and rows.length[0] == 64
    assert list(rows.write([0])) == []


def test_states_of_recurrent_models_do_not_grow():
    """Bytes at 1,000 and 1,000,000 tokens: equal for the mixers; attention's are those of its latents, or of its keys
    and values, alone."""
    for pattern in ("G-", "K-", "S-", "G-K-S-"):
        decoder = object.__new__(Decoder)
        decoder.model = model_of(pattern)
        assert not decoder.grows
        constant, cache = decoder.state_bytes(3, 1_000)
        assert cache == 0 < constant and decoder.state_bytes(3, 1_000_000) == (constant, 0)
    for pattern, width in (("*-", BASE.mla.kv_lora_rank + BASE.mla.qk_rope_head_dim), ("A-", 2 * 2 * 8)):
        decoder.model = model_of(pattern)
        assert decoder.state_bytes(3, 1_000)[1] == 3 * 1_000 * width * 4
        half = decoder.model = dataclasses.replace(decoder.model, compute_dtype="bfloat16")
        assert decoder.state_bytes(3, 1_000)[1] == 3 * 1_000 * width * 2, half


def test_capacities():
    """Enough, at most a quarter too much, and few: at most four for each doubling."""
    found = [capacity_for(n) for n in range(1, 70_000)]
    assert all(n <= c <= max(256, 1.25 * n) for n, c in enumerate(found, 1))
    assert len(set(found)) <= 1 + 4 * 9


ROPES = {
    "interleaved": RopeConfig(),
    "half": RopeConfig(style="half", rotary_fraction=0.5),
    "none": RopeConfig(style="none"),
    "yarn": RopeConfig(yarn_factor=8.0, yarn_original_max_position=16, theta=100.0),
}


@pytest.mark.parametrize("rope", ROPES)
def test_absorbed_mla(rope, monkeypatch):
    """Many tokens against the cache of latents, expanded, and then one, absorbed: the training forward pass, which
    makes every key and value, to fp32 rounding."""
    cfg = dataclasses.replace(BASE.mla, rope=ROPES[rope], q_lora_rank=0 if rope == "yarn" else 16)
    graph, params = nnx.split(MLA(cfg, 32, 1e-6, std=0.3, out_std=0.3, rngs=nnx.Rngs(0)))
    x = jax.random.normal(jax.random.key(1), (1, 300, 32))
    places = jnp.arange(300)[None]
    want = np.asarray(jax.jit(lambda p, x: nnx.merge(graph, p)(x, Context(places))[0])(params, x))
    expanded = []
    keys_and_values = MLA._keys_and_values
    monkeypatch.setattr(MLA, "_keys_and_values", lambda *a: expanded.append(a[1].shape) or keys_and_values(*a))

    @jax.jit
    def step(p, x, places, state):
        return nnx.merge(graph, p)(x, Context(places), state)

    state, got, count = {"latent": jnp.zeros((1, 1, 300, 24))}, [], []
    for start, stop in ((0, 298), (298, 299), (299, 300)):
        y, state = step(params, x[:, start:stop], places[:, start:stop], state)
        got.append(np.asarray(y))
        count.append(len(expanded))
    assert count[0] > 0 and count[1:] == count[:1] * 2  # the first expands, and no other
    assert rms_error(np.concatenate(got, axis=1), want) < 1e-6


def test_continuation(small):
    model = model_of("*S")
    (ids,) = write(small.rows([0], RANDOM, seed=3), [[1, 2, 3]], [20], block=1)
    assert continuation(model, drawn(model), [1, 2, 3], 20, RANDOM, seed=3) == ids


def test_what_cannot_be_read(small, monkeypatch):
    rows = small.rows([0, 1], GREEDY)
    with pytest.raises(UserError, match=r"prompt 2 holds the id 61, and the model's vocabulary has 61; give the token"):
        rows.read([[1], [2, 61]])
    with pytest.raises(UserError, match="4,194,310 tokens long, and positions end at 4,194,304; shorten the prompt"):
        rows.read([[1] * 4_194_300, [2]], 10)
    monkeypatch.setattr(decoder_lib, "host_memory", lambda: 10_000)
    with pytest.raises(UserError, match=r"cache of 2 x 250 tokens takes 49,152 bytes, and there are 10,000; shorten"):
        rows.read([[1], [2]], 249)
    assert rows.states is None
    decoder = object.__new__(Decoder)
    decoder.model = Model(dataclasses.replace(BASE, pattern="G-"))
    decoder.check_room(1, 10**9)  # recurrent states have room for any length


@pytest.mark.parametrize("pattern", "*A")
def test_writing_costs_what_the_cache_takes(pattern):
    """A step's work for a cached token: of MLA 2 (L + R) products a head and query, where expanding keys and values
    would take L (N + V) a head more; of grouped queries 2 K. Its memory: scores, and no second copy of the cache."""
    jax.config.update("jax_disable_most_optimizations", False)  # whose memory it is about
    mla = dataclasses.replace(BASE.mla, kv_lora_rank=32, qk_nope_head_dim=16, v_head_dim=16)
    model = model_of(pattern, mla=mla)
    heads, width = (2, 32 + 8) if pattern == "*" else (4, 8)

    def cost(size: int, block: int) -> tuple[float, int]:
        states = jax.eval_shape(functools.partial(model.init_state, 1, size))
        keys = jax.eval_shape(lambda: jax.random.split(jax.random.key(0), 1))
        token, alive = jax.ShapeDtypeStruct((1,), jnp.int32), jax.ShapeDtypeStruct((1,), bool)
        write = jax.jit(functools.partial(_write, model, -1, GREEDY, block), donate_argnums=range(1, 6))
        program = write.lower(model.abstract_params(), states, token, alive, token, None, keys).compile()
        return program.cost_analysis()["flops"], program.memory_analysis().temp_size_in_bytes

    (few, _), (many, memory) = cost(4096, 1), cost(8192, 1)
    least = 4 * heads * width
    assert least <= (many - few) / 4096 < 1.3 * least, ((many - few) / 4096, least)
    cache = 4 * 8192 * (width if pattern == "*" else 2 * 2 * width)
    _, of_blocks = cost(8192, 16)
    assert max(memory, of_blocks) < 0.4 * cache, (memory, of_blocks, cache)

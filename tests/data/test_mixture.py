"""Mixtures of token stores: shares, order, epochs, validation, and what a path may say."""

import hashlib
import math
import os
import random
import re

import numpy as np
import pytest

from hybrid_jax import data
from hybrid_jax.config import DataConfig
from hybrid_jax.data import mixture
from hybrid_jax.data.interface import Dataset
from hybrid_jax.data.mixture import Part, Schedule, whole_weights
from hybrid_jax.data.store import StoreWriter
from hybrid_jax.errors import UserError
from tests.data.test_store import one_line, write

KEYS = ("tokens", "targets", "segment_ids", "positions")
WEIGHTS = [
    (0.7, 0.3),
    (0.5, 0.5),
    (0.9999, 1e-4),
    (0.6180339887498949, 0.3819660112501051),
    (5, 1e-4, 2, 1, 0.03),
    (1,) * 7,
    (1, 1, 2, 3, 5, 8, 13, 21, 34, 55),  # the deepest tree
]
MILLION = 10**6
LENGTH = 8


def open_path(path, *, split="train", seed=1, vocab_size=70_000, **settings) -> Dataset:
    config = DataConfig(source="store", path=path, **settings)
    return data.open(config, sequence_length=LENGTH, vocab_size=vocab_size, seed=seed, split=split)


def equal(a, b):
    return all(np.array_equal(a[k], b[k]) and a[k].dtype == b[k].dtype == np.int32 for k in KEYS)


def joined(batches):
    return {k: np.concatenate([b[k] for b in batches]) for k in KEYS}


def make(prefix, first, documents, seed=0):
    """A store of documents of 1 to 29 tokens, which count up from `first`: a token tells where it came from."""
    lengths = np.random.default_rng(seed).integers(1, 30, documents)
    with StoreWriter(prefix, vocab_size=70_000) as writer:
        writer.extend(np.arange(first, first + lengths.sum()), lengths)
    return first, first + int(lengths.sum())


@pytest.fixture
def stores(tmp_path):
    """(prefix, first token, token after the last) of three stores, the second a small one."""
    sizes = {"large": (1000, 400), "small": (20_000, 9), "other": (30_000, 150)}
    return [(str(tmp_path / name), *make(tmp_path / name, *of)) for name, of in sizes.items()]


def mixed(stores, weights=(0.6, 0.3, 0.1), **settings):
    named = [f"{s[0]}:{w}" for s, w in zip(stores, weights, strict=True)]
    return open_path(",".join(named), **settings)


def alone(stores, number, seed=1, **settings):
    return open_path(stores[number][0], seed=mixture.part_seed(seed, number), **settings)


# ---- the schedule ----


@pytest.mark.parametrize("weights", WEIGHTS)
def test_shares_of_any_run_of_windows_are_the_weights(weights):
    schedule = Schedule(whole_weights(weights), seed=5)
    located = np.asarray([schedule.locate(w) for w in range(MILLION)])
    bound = {2: 1, 3: 2}.get(len(weights), 4)
    for number, weight in enumerate(weights):
        share = weight / math.fsum(weights)
        at = located[:, 0] == number
        assert np.array_equal(located[at, 1], np.arange(at.sum()))  # its own windows, none lost or doubled
        counts = np.concatenate([[0], np.cumsum(at)])
        assert at.sum() > 0
        for run in (1, 7, 64, 1000, 4096, MILLION):
            assert np.abs(counts[run:] - counts[:-run] - run * share).max() < bound, (number, run)


def test_far_windows_need_no_count_from_the_start():
    weights = (5, 1e-4, 2, 1, 0.03)
    schedule, at = Schedule(whole_weights(weights), seed=5), 10**15
    owns = [{}, {}, {}, {}, {}]
    for window in range(at, at + 100_000):
        number, own = schedule.locate(window)
        assert own == owns[number].get("last", own - 1) + 1
        owns[number] = {"last": own}
        assert abs(own - window * weights[number] / math.fsum(weights)) < 4
    assert owns[0] and owns[2] and owns[3] and owns[4]


@pytest.mark.parametrize("weights", [(1e-300, 1e300), (5e-324, 1.7e308, 1.7e308)])
def test_extreme_weights_are_exact(weights):
    schedule = Schedule(whole_weights(weights), seed=0)
    assert len({schedule.locate(w)[0] for w in range(1000)}) == len(weights) - 1


def test_over_seeds_a_window_falls_to_each_store_with_its_share():
    share = np.asarray([0.5, 0.3, 0.15, 0.05])
    for window in (0, 1, 12_345):
        drawn = [Schedule(whole_weights(share), seed).locate(window)[0] for seed in range(2000)]
        assert np.abs(np.bincount(drawn, minlength=4) / 2000 - share).max() < 4 * 0.5 / math.sqrt(2000)


def test_the_schedule_never_changes():
    """Pinned: a resumed run must see the same order under any numpy."""
    schedule = Schedule([6, 3, 1], seed=42)
    assert [schedule.locate(w)[0] for w in range(20)] == [0, 1, 0, 1, 0, 0, 1, 0, 2, 0, 0, 1, 0, 1, 0, 0, 1, 0, 2, 0]
    assert mixture.part_seed(42, 1) == 14743095879896833507


def test_weights_become_the_smallest_whole_numbers():
    assert whole_weights([0.7, 0.3]) == whole_weights([70, 30.0]) == [7, 3]
    assert whole_weights([1, 1e-4]) == [10_000, 1]
    assert whole_weights([0.1, 0.2]) == [1, 2]


# ---- training ----


def test_each_store_runs_in_its_own_order_through_its_own_epochs(stores):
    dataset = mixed(stores)
    parts = [alone(stores, n) for n in range(3)]
    assert dataset.num_tokens == sum(p.num_tokens for p in parts)
    assert dataset.num_windows == sum(p.num_windows for p in parts)
    small = parts[1].num_windows
    count = math.ceil((3 * small + 1) / 0.3)  # at least 3 epochs of the small store
    batch = dataset.batch(0, range(count), count)
    owner = np.searchsorted([s[1] for s in stores], batch["tokens"][:, 0], side="right") - 1
    for number, part in enumerate(parts):
        first, end = stores[number][1:]
        got = {k: batch[k][owner == number] for k in KEYS}
        assert first <= got["tokens"].min() and got["tokens"].max() < end
        assert abs(len(got["tokens"]) - count * (0.6, 0.3, 0.1)[number]) < 2
        assert equal(got, part.batch(0, range(len(got["tokens"])), len(got["tokens"])))
    assert (owner == 1).sum() >= 3 * small and (owner == 0).sum() < parts[0].num_windows
    targets = batch["targets"][owner == 1][: 3 * small].reshape(3, -1)
    for epoch in targets:  # each token once an epoch
        assert len(set(epoch[epoch >= 0].tolist())) == (epoch >= 0).sum()


def test_a_row_is_a_pure_function_of_seed_step_and_row(stores):
    dataset = mixed(stores)
    steps = [dataset.batch(s, range(4), 4) for s in range(30)]
    queries = [(s, r) for s in range(30) for r in range(4)]
    random.Random(0).shuffle(queries)
    fresh = mixed(stores)
    for step, row in queries:
        assert equal(fresh.batch(step, [row], 4), {k: steps[step][k][[row]] for k in KEYS})
    assert equal(dataset.batch(3, [3, 0, 2], 4), {k: steps[3][k][[3, 0, 2]] for k in KEYS})
    assert equal(joined(steps[:2]), dataset.batch(0, range(8), 8))
    empty = dataset.batch(0, [], 4)
    assert all(empty[k].shape == (0, LENGTH) and empty[k].dtype == np.int32 for k in KEYS)
    with pytest.raises(ValueError, match="outside a global batch of 4"):
        dataset.batch(0, [4], 4)


@pytest.mark.parametrize("processes", [1, 2, 4, 8])
def test_global_batch_is_the_same_for_any_number_of_processes(stores, processes):
    share = 16 // processes
    parts = [mixed(stores).batch(5, range(p * share, (p + 1) * share), 16) for p in range(processes)]
    assert equal(joined(parts), mixed(stores).batch(5, range(16), 16))


def test_the_fingerprint_follows_everything_that_decides_a_sample(stores, tmp_path):
    base = mixed(stores).fingerprint
    assert mixed(stores, (6, 3, 1)).fingerprint == base
    assert equal(mixed(stores, (6, 3, 1)).batch(0, range(64), 64), mixed(stores).batch(0, range(64), 64))
    make(tmp_path / "changed", 30_000, 150, seed=1)
    others = [
        mixed(stores, (0.6, 0.29, 0.11)),
        mixed(stores, (0.3, 0.6, 0.1)),
        mixed(stores[::-1], (0.1, 0.3, 0.6)),
        mixed(stores, seed=2),
        mixed(stores, split="validation"),
        mixed(stores, isolate_documents=False),
        mixed([*stores[:2], (str(tmp_path / "changed"),)]),
        mixed(stores[:2], (0.6, 0.3)),
    ]
    assert len({base, *(d.fingerprint for d in others)}) == 9


def test_the_description_names_every_store(stores):
    parts = [alone(stores, n) for n in range(3)]
    tokens = f"{sum(p.num_tokens for p in parts):,}"
    description = mixed(stores, (6, 3, 1)).description
    assert description.startswith(f"3 token stores, {tokens} tokens (samples as ids): {stores[0][0]} 60% (")
    assert f"train documents, {parts[1].num_tokens:,} tokens); {stores[2][0]} 10% (" in description
    assert "\n" not in description
    validation = mixed(stores, split="validation").description
    assert f"{stores[0][0]} (" in validation and "%" not in validation and "validation documents" in validation


# ---- validation ----


def test_validation_is_every_token_of_every_store_once_whatever_the_weights(stores):
    dataset = mixed(stores, split="validation", validation_fraction=0.3)
    batch = dataset.batch(0, range(dataset.num_windows), dataset.num_windows)
    parts = [alone(stores, n, split="validation", validation_fraction=0.3) for n in range(3)]
    whole = [p.batch(0, range(p.num_windows), p.num_windows) for p in parts]
    targets = batch["targets"][batch["targets"] >= 0]
    assert np.array_equal(np.sort(targets), np.sort(np.concatenate([w["targets"][w["targets"] >= 0] for w in whole])))
    assert len(set(targets.tolist())) == len(targets)
    seen = np.concatenate([batch["tokens"][batch["segment_ids"] > 0], targets])
    assert len(set(seen.tolist())) == dataset.num_tokens == sum(p.num_tokens for p in parts)
    beyond = dataset.batch(1, range(dataset.num_windows), dataset.num_windows)
    assert (beyond["targets"] == -1).all() and (beyond["segment_ids"] == 0).all()

    for other in (mixed(stores, (1, 5, 9), split="validation", seed=7, validation_fraction=0.3),):
        assert equal(other.batch(0, range(dataset.num_windows), dataset.num_windows), batch)
        assert other.fingerprint == dataset.fingerprint
    quarter = dataset.num_windows // 4  # its first batches stand for all stores
    owner = np.searchsorted([s[1] for s in stores], batch["tokens"][:quarter, 0], side="right") - 1
    for number, part in enumerate(parts):
        assert abs((owner == number).sum() - quarter * part.num_windows / dataset.num_windows) < 2


# ---- the path ----


@pytest.mark.parametrize("split", ["train", "validation"])
def test_one_store_is_what_it_is_without_a_mixture(stores, split):
    plain = open_path(stores[0][0], split=split)
    for text in (f"{stores[0][0]}:0.25", f" {stores[0][0]} : 3 "):
        other = open_path(text, split=split)
        assert type(other) is type(plain) is data.PackedDataset
        assert (other.fingerprint, other.description) == (plain.fingerprint, plain.description)
        assert equal(other.batch(2, range(50), 50), plain.batch(2, range(50), 50))


def test_one_store_keeps_the_order_it_had(tmp_path):
    """Pinned before orders were made by blocks: a run on a store of this size must resume with the same samples."""
    lengths = 1 + np.arange(400) * 7919 % 29
    with StoreWriter(tmp_path / "s", vocab_size=70_000) as writer:
        writer.extend(np.arange(1000, 1000 + lengths.sum()), lengths)
    for split, digest in (("train", "dbaaf9f3b2b297d7"), ("validation", "e71d0b3542826f65")):
        dataset = open_path(f"{tmp_path}/s:2", split=split)
        batch = dataset.batch(0, range(2000), 2000)
        assert hashlib.sha256(b"".join(batch[k].tobytes() for k in KEYS)).hexdigest()[:16] == digest


def test_what_is_a_weight():
    assert mixture.parse("a:0.7,b:0.3") == [Part("a", 0.7), Part("b", 0.3)]
    assert mixture.parse("a, b:2e-4 ,/c d/e") == [Part("a", 1.0), Part("b", 2e-4), Part("/c d/e", 1.0)]
    assert mixture.parse("a:2:1,c:/b,d:x:3") == [Part("a:2", 1.0), Part("c:/b", 1.0), Part("d:x", 3.0)]
    assert mixture.parse("c:/b") == [Part("c:/b", 1.0)]
    assert mixture.parse(" a ") == [Part("a", 1.0)]


@pytest.mark.parametrize("weight", ["70%", "abc", "", "0.5.1"])
def test_a_mistyped_weight_is_not_a_missing_file(tmp_path, weight):
    write(tmp_path / "a", [[1, 2, 3], [4, 5]], 400)
    with pytest.raises(UserError, match=re.escape(f"/a: its weight {weight!r} is not a number; give PREFIX:WEIGHT")):
        mixture.parse(f"{tmp_path}/a:{weight},{tmp_path}/b")


@pytest.mark.parametrize("name", ["a:b", "a,b", "a:0.5", "a:0.5,b:nan", "a:0", ",", "a, b:"])
def test_text_that_names_a_store_as_a_whole_is_one_prefix(tmp_path, name, monkeypatch):
    write(tmp_path / name, [[1, 2, 3], [4, 5]], 400)
    for text in (f"{tmp_path}/{name}", f"{tmp_path}/{name}.bin", f"{tmp_path}/{name}.idx"):
        assert mixture.parse(text) == [Part(text, 1.0)]
    assert open_path(f"{tmp_path}/{name}").num_tokens in (2, 3)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert mixture.parse(f"~/{name}") == [Part(f"~/{name}", 1.0)]
    os.remove(f"{tmp_path}/{name}.bin")
    assert one_line(open_path, f"{tmp_path}/{name}").startswith(f"config.data.path: {tmp_path}/{name}.bin: no such")


@pytest.mark.parametrize(
    "path, words",
    [
        ("a:0,b", "config.data.path: a: its weight 0 is not a number above 0; give one, or leave the store out"),
        ("a,b:-0.5", "config.data.path: b: its weight -0.5 is not a number above 0; give one, or leave the store out"),
        ("a,b:nan", "config.data.path: b: its weight nan is not a number above 0; give one, or leave the store out"),
        (
            "a: 1e999 ",
            "config.data.path: a: its weight 1e999 is not a number above 0; give one, or leave the store out",
        ),
        ("a,", "config.data.path: store 2 of 'a,' has no name; give PREFIX:WEIGHT for each"),
        (":3,a", "config.data.path: store 1 of ':3,a' has no name; give PREFIX:WEIGHT for each"),
        ("a:1,b,./a.idx:2", "config.data.path: ./a.idx: named twice; name a store once, with the sum of its weights"),
    ],
)
def test_a_wrong_path_is_one_line(path, words):
    assert one_line(open_path, path) == words


def test_a_store_that_cannot_be_mixed_is_named(stores, tmp_path):
    write(tmp_path / "wide", [[1, 2, 3000], [4, 5]], 4000)
    message = one_line(open_path, f"{tmp_path}/wide,{stores[1][0]}:2", vocab_size=3001)
    assert message.startswith(f"config.model.vocab_size: {stores[1][0]}.bin: token 0 is the id 20000, not one of 3001;")
    message = one_line(open_path, f"{stores[0][0]},{tmp_path}/missing:2")
    assert message.startswith(f"config.data.path: {tmp_path}/missing.idx: no such file;")
    write(tmp_path / "single", [[7]], 10)
    message = one_line(open_path, f"{stores[0][0]},{tmp_path}/single", split="validation")
    assert f"leaves no document of {tmp_path}/single.bin for validation" in message


def test_samples_are_bytes_only_where_all_stores_may_be(tmp_path):
    write(tmp_path / "bytes", [[*b"def f", 256], [*b"x = 1", 256]], 257)
    write(tmp_path / "more", [[*b"abc", 256], [*b"defg", 256]], 257)
    write(tmp_path / "ids", [[1, 2, 300], [4, 5]], 400)
    both = open_path(f"{tmp_path}/bytes,{tmp_path}/more")
    assert both.tokenizer.decode([*b"abc"]) == "abc" and "samples as bytes" in both.description
    assert open_path(f"{tmp_path}/bytes,{tmp_path}/ids").tokenizer.decode([97, 300]) == "97 300"

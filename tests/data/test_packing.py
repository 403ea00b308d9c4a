import sys
import threading

import numpy as np
import pytest

from hybrid_jax import data
from hybrid_jax.config import DataConfig
from hybrid_jax.data.packing import PackedDataset
from hybrid_jax.data.shuffle import permutation
from hybrid_jax.data.tokenizer import ByteTokenizer, TokenStore

EOD = 256
KEYS = ("tokens", "targets", "segment_ids", "positions")


def make(lengths, *, length=8, seed=1, training=True, isolate=True):
    """Documents whose tokens are all different where they fit, so that a token tells where it came from."""
    starts = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    tokens = np.arange(starts[-1]).astype(np.uint32) + 1000
    tokens[starts[1:] - 1] = EOD
    return PackedDataset(
        TokenStore(tokens, starts),
        ByteTokenizer(),
        sequence_length=length,
        seed=seed,
        training=training,
        isolate_documents=isolate,
        description="",
        source={},
    )


def all_windows(dataset, first=0, count=0):
    count = count or dataset.num_windows
    return dataset.batch(0, range(first, first + count), first + count)


def equal(a, b):
    return all(np.array_equal(a[k], b[k]) and a[k].dtype == b[k].dtype == np.int32 for k in KEYS)


@pytest.fixture(scope="module")
def python():
    return data.open(DataConfig(), sequence_length=64, vocab_size=257, seed=3)


LENGTHS = [5, 1, 2, 30, 9, 8, 3, 17, 4, 4, 4, 16, 7]


@pytest.mark.parametrize("isolate", [True, False])
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("length", [1, 7, 8, 40])
def test_rows_equal_a_plain_loop(length, training, isolate):
    dataset = make(LENGTHS, length=length, training=training, isolate=isolate)
    store = dataset.store
    documents = [store.tokens[a:b].tolist() for a, b in zip(store.starts, store.starts[1:], strict=False)]
    count = dataset.num_windows
    order = permutation(len(documents), 1, 1, 0) if training else range(len(documents))
    windows = permutation(count, 2, 1, 0) if training else permutation(count, 3)
    stream = [(token, n) for n, d in enumerate(order) for token in documents[d]]
    assert count == (len(stream) - 1) // length if training else 0 <= count * length - len(stream) + 1 < length
    batch = all_windows(dataset)
    for row, window in enumerate(windows.tolist()):
        begin, tokens = window * length, batch["tokens"][row].tolist()
        segment, position, previous = 0, -1, None
        for t in range(length):
            place = begin + t
            if place >= len(stream):
                assert batch["segment_ids"][row, t] == 0 and batch["targets"][row, t] == -1
                assert tokens[t] == EOD
                continue
            token, document = stream[place]
            if previous is None or (isolate and document != previous):
                segment, position = segment + 1, -1
            previous, position = document, position + 1
            following = stream[place + 1] if place + 1 < len(stream) else (-1, document)
            target = following[0] if not isolate or following[1] == document else -1
            got = [int(batch[k][row, t]) for k in KEYS]
            assert got == [token, target, segment, position], (row, t)


def test_an_epoch_predicts_every_token_once():
    dataset = make(LENGTHS, length=6)
    store = dataset.store
    first_tokens = set(store.tokens[store.starts[:-1]].tolist())
    for epoch in range(4):
        batch = all_windows(dataset, first=epoch * dataset.num_windows, count=dataset.num_windows)
        targets = batch["targets"][batch["targets"] >= 0]
        ordinary = targets[targets != EOD]
        assert len(set(ordinary.tolist())) == len(ordinary)
        assert not set(ordinary.tolist()) & first_tokens  # never predicted from another document
        assert (batch["segment_ids"] > 0).all()
        left_out = (dataset.num_tokens - 1) % 6
        assert batch["targets"].size + left_out == dataset.num_tokens - 1


def test_validation_predicts_every_token_once_then_only_padding():
    dataset = make(LENGTHS, length=6, training=False)
    batch = all_windows(dataset)
    targets = np.sort(batch["targets"][batch["targets"] >= 0])
    assert np.array_equal(targets, np.sort(dataset.store.tokens[dataset.predicted()].astype(np.int32)))
    assert len(targets) == dataset.num_tokens - len(LENGTHS)
    beyond = dataset.batch(1, range(dataset.num_windows), dataset.num_windows)
    assert (beyond["targets"] == -1).all() and (beyond["segment_ids"] == 0).all()


def test_predicted_marks_the_targets_of_the_first_windows():
    dataset = make(LENGTHS, length=6, training=False)
    for count in (1, 3, dataset.num_windows):
        targets = all_windows(dataset, count=count)["targets"]
        expected = np.sort(targets[targets >= 0])
        assert np.array_equal(np.sort(dataset.store.tokens[dataset.predicted(count)]), expected)
    with pytest.raises(ValueError):
        make(LENGTHS).predicted()


def test_validation_windows_are_spread_and_the_same_for_every_seed():
    one, two = (make([40] * 30, training=False, seed=s) for s in (1, 2))
    assert equal(all_windows(one), all_windows(two)) and one.fingerprint == two.fingerprint
    quarter = all_windows(one, count=one.num_windows // 4)["tokens"]
    documents = {int(t - 1000) // 40 for t in quarter.ravel() if t != EOD}
    assert len(documents) > 15


def test_targets_positions_segments_of_real_text(python):
    batch = python.batch(17, range(32), 32)
    tokens, targets, segments, positions = (batch[k] for k in KEYS)
    assert segments.min() == 1 and segments[:, 0].max() == 1
    steps = np.diff(segments, axis=1)
    assert set(np.unique(steps)) <= {0, 1}
    assert np.array_equal(steps == 1, tokens[:, :-1] == EOD)
    assert np.array_equal(positions[:, 1:], np.where(steps == 1, 0, positions[:, :-1] + 1))
    assert (positions[:, 0] == 0).all()
    assert np.array_equal(targets[:, :-1], np.where(steps == 1, -1, tokens[:, 1:]))
    assert np.array_equal(targets[:, -1] == -1, tokens[:, -1] == EOD)


@pytest.mark.parametrize("processes", [1, 2, 4])
def test_global_batch_is_the_same_for_any_number_of_processes(python, processes):
    whole = python.batch(5, range(8), 8)
    share = 8 // processes
    parts = [python.batch(5, range(p * share, (p + 1) * share), 8) for p in range(processes)]
    assert equal(whole, {k: np.concatenate([p[k] for p in parts]) for k in KEYS})
    strided = python.batch(5, [7, 0, 3], 8)
    assert equal(strided, {k: whole[k][[7, 0, 3]] for k in KEYS})


def test_any_step_alone_equals_the_sequence_also_over_epochs():
    dataset = make(LENGTHS, length=6)
    steps = [dataset.batch(s, range(4), 4) for s in range(40)]
    assert 40 * 4 > 8 * dataset.num_windows  # more epochs than are kept in memory
    fresh = make(LENGTHS, length=6)
    for s in (39, 0, 20, 7, 38):
        assert equal(fresh.batch(s, range(4), 4), steps[s])


def test_batch_size_regroups_the_same_windows():
    dataset = make(LENGTHS, length=6)
    large = [dataset.batch(s, range(6), 6)["tokens"] for s in range(4)]
    small = [dataset.batch(s, range(3), 3)["tokens"] for s in range(8)]
    assert np.array_equal(np.concatenate(large), np.concatenate(small))


def test_epochs_and_seeds_shuffle_documents_and_windows():
    dataset = make([12] * 40, length=12)
    n = dataset.num_windows
    first, second = (all_windows(dataset, e * n, n)["tokens"] for e in (0, 1))
    other = all_windows(make([12] * 40, length=12, seed=2))["tokens"]
    assert not np.array_equal(first, second) and not np.array_equal(first, other)
    one_document = make([400], length=12)
    first, second = (all_windows(one_document, e * 33, 33)["tokens"] for e in (0, 1))
    assert not np.array_equal(first, second)
    # Windows that follow each other in a batch are not neighbours in the stream.
    start = np.array([r[0] for r in make([400], length=12).batch(0, range(33), 33)["tokens"]])
    assert (np.diff(start) == 12).mean() < 0.3


@pytest.mark.parametrize("training", [True, False])
def test_text_shorter_than_a_window_is_padded(training):
    dataset = make([3, 2], length=16, training=training)
    assert dataset.num_windows == 1
    batch = all_windows(dataset)
    assert (batch["segment_ids"][0] > 0).sum() == 5 and (batch["targets"] >= 0).sum() == 3
    plain = all_windows(make([3, 2], length=16, training=training, isolate=False))
    assert plain["segment_ids"][0].tolist() == [1] * 5 + [0] * 11
    assert plain["positions"][0, :5].tolist() == [0, 1, 2, 3, 4]
    assert (plain["targets"] >= 0).sum() == 4


def test_threads_may_share_a_dataset():
    dataset = make(LENGTHS, length=6)
    expected = [dataset.batch(s, range(4), 4) for s in range(30)]
    shared, wrong = make(LENGTHS, length=6), []

    def read(offset):
        try:
            for s in range(300):
                s = (s * 7 + offset) % 30
                if not equal(shared.batch(s, range(4), 4), expected[s]):
                    wrong.append(s)
        except Exception as error:
            wrong.append(error)

    threads = [threading.Thread(target=read, args=(k,)) for k in range(4)]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for t in threads:
            t.start()
        for t in threads:
            t.join()
    finally:
        sys.setswitchinterval(interval)
    assert not wrong


@pytest.mark.parametrize("step, rows", [(0, [8]), (0, [-1]), (-1, [0])])
def test_rows_outside_the_batch_raise(python, step, rows):
    with pytest.raises(ValueError, match="outside a global batch of 8"):
        python.batch(step, rows, 8)

import gc
import subprocess
import sys
import threading
import time

import numpy as np
import pytest

from hybrid_jax.data import prefetch


class Counting:
    """A dataset whose batch tells its step; fails at one of them."""

    def __init__(self, fail_at=-1, error=None):
        self.fail_at, self.error, self.made = fail_at, error, []

    def batch(self, step, rows, global_batch_size):
        if step == self.fail_at:
            raise self.error
        self.made.append(step)
        return {"tokens": np.array([[step, r, global_batch_size] for r in rows], np.int32)}


def threads():
    return [t for t in threading.enumerate() if t.name == "hybrid_jax-prefetch"]


def wait_until(condition):
    deadline = time.monotonic() + 5
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.01)
    return condition()


@pytest.fixture(autouse=True)
def no_thread_is_left():
    yield
    assert not threads()


def test_yields_the_batches_in_order_from_any_step():
    with prefetch(Counting(), 7, [2, 3], 4) as batches:
        for step in range(7, 27):
            assert next(batches)["tokens"].tolist() == [[step, 2, 4], [step, 3, 4]]


@pytest.mark.parametrize("depth", [1, 2, 5])
def test_works_ahead_by_depth_and_no_more(depth):
    dataset = Counting()
    with prefetch(dataset, 0, [0], 1, depth=depth) as batches:
        assert wait_until(lambda: len(dataset.made) == depth + 1)  # one more is held by the thread
        time.sleep(0.3)
        assert dataset.made == list(range(depth + 1))
        next(batches)
        assert wait_until(lambda: len(dataset.made) == depth + 2)


@pytest.mark.parametrize("error", [OSError("disk gone"), KeyboardInterrupt(), SystemExit(3)])
def test_an_error_is_raised_where_its_batch_was_due(error):
    batches = prefetch(Counting(2, error), 0, [0], 1)
    assert [int(next(batches)["tokens"][0, 0]) for _ in range(2)] == [0, 1]
    with pytest.raises(type(error)) as caught:
        next(batches)
    assert caught.value is error
    assert not threads()
    with pytest.raises(StopIteration):
        next(batches)


def test_close_stops_the_thread_even_while_it_waits_for_room():
    dataset = Counting()
    batches = prefetch(dataset, 0, [0], 1)
    assert wait_until(lambda: len(dataset.made) == 3)
    begin = time.monotonic()
    batches.close()
    assert time.monotonic() - begin < 2 and not threads()
    batches.close()
    assert list(batches) == []


def test_leaving_the_block_by_an_exception_stops_the_thread():
    with pytest.raises(ZeroDivisionError), prefetch(Counting(), 0, [0], 1) as batches:
        next(batches)
        raise ZeroDivisionError


def test_dropping_the_iterator_stops_the_thread():
    batches = prefetch(Counting(), 0, [0], 1)
    next(batches)
    assert threads()
    del batches
    gc.collect()
    assert not threads()


def test_a_program_that_forgets_to_close_still_ends():
    code = (
        "from hybrid_jax.config import DataConfig\n"
        "from hybrid_jax import data\n"
        "d = data.open(DataConfig(source='synthetic'), sequence_length=64, vocab_size=64, seed=1)\n"
        "batches = data.prefetch(d, 0, range(64), 64)\n"
        "next(batches)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], timeout=60, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_depth_is_at_least_one():
    with pytest.raises(ValueError, match="depth"):
        prefetch(Counting(), 0, [0], 1, depth=0)

"""Runs that go back: to which checkpoint, on to which data, and equal to an undisturbed run whenever they are killed."""

import dataclasses
import json

import jax
import numpy as np
import pytest

from hybrid_jax import checkpoint, metrics, rollback, step, train
from hybrid_jax.errors import UserError
from hybrid_jax.rollback import Rollback, batch_of, pushes_out, target
from tests.poison import Poison
from tests.test_train import final_state, lines_of
from tests.tiny import tiny_config

# ---- which checkpoint, which batch ----


def test_the_target_is_the_newest_checkpoint_after_which_a_step_was_good():
    assert target([4, 8, 12], 14, 4) == 12
    assert target([4, 8, 12], 13, 4) == 8  # 12 may hold what made step 13 bad
    assert target([12], 13, 4) == 12  # there is no other
    assert target([12], 12, 4) == 0 and target([], 5, 4) == 0
    assert target([4, 8, 10], 14, 4) == 8  # 10 was saved for a signal: an undisturbed run has none
    assert target([10, 12], 13, 4) == 10


def test_a_checkpoint_does_not_push_out_the_last_good_one():
    assert pushes_out([4, 8], keep=2, first=6)  # 8 and the new one would be left
    assert not pushes_out([4, 8], keep=3, first=6)
    assert pushes_out([4], keep=1, first=6) and not pushes_out([4, 8], keep=2, first=10)
    assert not pushes_out([8], keep=1, first=6)  # there is none to lose
    assert not pushes_out([], keep=3, first=6)


def test_the_batch_of_a_step_is_a_function_of_the_roll_backs():
    """Against a list that is cut and grown as the run goes."""
    rng, read, reader, records = np.random.default_rng(0), [], 0, ()
    for _ in range(200):
        for _ in range(rng.integers(1, 20)):
            read.append(reader)
            reader += 1
        at, to = len(read), int(rng.integers(max(len(read) - 15, 0), len(read)))
        records += (Rollback(at, to, read[to], reader, ""),)
        assert batch_of(records[:-1], to + 1) == read[to] and batch_of(records[:-1], at + 1) == reader
        del read[to:]
        assert [batch_of(records, k + 1) for k in range(len(read) + 3)] == [*read, reader, reader + 1, reader + 2]


# ---- whole runs ----

STEPS = 20
KEYS = {
    "model__pattern": "A-",
    "train__steps": STEPS,
    "train__max_bad_steps": 3,
    "checkpoint__every_steps": 4,
    "divergence__window": 6,
    "divergence__spike_steps": 3,
}


@pytest.fixture(scope="module")
def compiled():
    """One program for all runs of this file, for the sake of time."""
    programs = {}
    real = step.Programs.compile_step

    def compile_once(self):
        if "step" not in programs:
            programs["step"] = real(self)
        return programs["step"]

    patch = pytest.MonkeyPatch()
    patch.setattr(step.Programs, "compile_step", compile_once)
    yield
    patch.undo()


def run(cfg, factors, patch=None):
    """Trains with these batches spoilt; the (step, batch) pairs that were read."""
    poison = Poison(factors)
    with pytest.MonkeyPatch.context() as patches:
        poison.install(patches.setattr)
        if patch:
            patch(patches)
        train.run(cfg)
    return poison.read


def timeless(workdir):
    timing = ("tokens_per_second", "tflops_per_second")
    return [{k: v for k, v in line.items() if k not in timing} for line in lines_of(workdir)]


def assert_equal(cfg, other):
    (a, last_a), (b, last_b) = final_state(cfg), final_state(other)
    assert last_a == last_b == STEPS
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_array_equal(x, y)


SPIKE, NAN = {12: 30.0}, {12: float("nan")}


@pytest.mark.parametrize("factors", [SPIKE, NAN])
def test_a_roll_back_equals_a_run_that_never_saw_the_skipped_batches(tmp_path, compiled, factors, capsys):
    read = run(tiny_config(tmp_path / "a", **KEYS), factors)
    # Steps 13 to 15 were not good, and 16 was on its way; 12 may have been spoilt already, so back to 8.
    assert read == [(k, k - 1) for k in range(1, 17)] + [(k, k + 6) for k in range(9, STEPS + 1)]
    said = capsys.readouterr().out
    assert "back to checkpoint 8; batches 8 to 14 of the data are skipped (roll-back 1 of 3)" in said

    def skip(patches):
        patches.setattr(rollback, "batch_of", lambda _, k: k - 1 if k <= 8 else k + 6)

    keys = {**KEYS, "divergence__max_rollbacks": 0}
    clean = tiny_config(tmp_path / "clean", **keys)
    assert run(clean, {}, skip) == [(k, k - 1 if k <= 8 else k + 6) for k in range(1, STEPS + 1)]
    assert_equal(tiny_config(tmp_path / "a", **KEYS), clean)

    lines, undone = metrics.course(lines_of(tmp_path / "a"))
    assert [line["step"] for line in lines] == list(range(1, STEPS + 1))
    assert [[line["step"] for line in part] for part in undone] == [list(range(9, 16))]
    assert [line["loss"] for line in lines] == [line["loss"] for line in lines_of(tmp_path / "clean")]
    (event,) = [line for line in lines_of(tmp_path / "a") if line.get("event") == "rollback"]
    assert event.pop("reason").startswith("3 steps in a row")
    assert event == {"step": 15, "event": "rollback", "to_step": 8, "first_batch": 8, "next_batch": 15}
    off = [line.get("off_band", 0) for line in lines_of(tmp_path / "a") if line["step"] in (13, 14, 15)]
    assert off[:3] == [1, 2, 3] and off[3:] == [0, 0, 0, 0][: len(off) - 3]


class Killed(BaseException):
    pass


def kill(owner, name, when, after=False):
    """A patch that dies in the call number `when` of a function, before or after it does its work."""

    def patch(patches):
        real, calls = getattr(owner, name), []

        def dies(*arguments, **named):
            calls.append(None)
            if len(calls) == when and not after:
                raise Killed
            result = real(*arguments, **named)
            if len(calls) == when:
                raise Killed
            return result

        patches.setattr(owner, name, dies)

    return patch


MOMENTS = {
    "in the bad stretch": kill(metrics.JsonlWriter, "write", 14),
    "before it is decided": kill(rollback.History, "add", 1),
    "while it is written down": kill(rollback.os, "replace", 3),  # the first two are config.json and metrics.jsonl
    "as it is written down": kill(rollback, "_write_durably", 1, after=True),
    "with the newer checkpoints gone": kill(checkpoint.Checkpoints, "delete_after", 1, after=True),
    "when it is done": kill(rollback, "_write_durably", 2, after=True),
    "before the state is restored": kill(train.Training, "restore", 2),
    "after the state is restored": kill(train.Training, "restore", 2, after=True),
    "before the next checkpoint": kill(metrics.JsonlWriter, "write", 18),
    "after the next checkpoint": kill(metrics.JsonlWriter, "write", 23),
}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory, compiled):
    cfg = tiny_config(tmp_path_factory.mktemp("undisturbed"), **KEYS)
    run(cfg, SPIKE)
    return cfg


@pytest.mark.parametrize("moment", MOMENTS)
def test_killed_at_any_moment_it_ends_as_if_it_had_not_been(tmp_path, undisturbed, moment):
    cfg = dataclasses.replace(undisturbed, workdir=str(tmp_path))
    with pytest.raises(Killed):
        run(cfg, SPIKE, MOMENTS[moment])
    read = run(cfg, SPIKE)
    assert dict(read)[STEPS] == STEPS + 6
    assert_equal(cfg, undisturbed)
    assert timeless(tmp_path) == timeless(undisturbed.workdir)
    assert not list(tmp_path.rglob("*.tmp"))

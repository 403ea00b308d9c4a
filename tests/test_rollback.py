"""Runs that go back: to which checkpoint, on to which data; equal to an undisturbed run whenever they are killed."""

import dataclasses
import json
import os
import signal

import jax
import numpy as np
import pytest

from hybrid_jax import checkpoint, metrics, rollback, step, train
from hybrid_jax.errors import UserError
from hybrid_jax.rollback import Rollback, batch_of, loses_all, target
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
    assert loses_all([4, 8], [4], first=6)  # 8 and the new one would be left
    assert not loses_all([4, 8], [], first=6)
    assert loses_all([4], [4], first=6) and not loses_all([4, 8], [4], first=10)
    assert not loses_all([8], [8], first=6)  # there is none to lose
    assert not loses_all([], [], first=6)


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

STEPS = 16
KEYS = {
    "model__pattern": "A-",
    "train__steps": STEPS,
    "train__max_bad_steps": 3,
    "checkpoint__every_steps": 4,
    "checkpoint__keep": 3,
    "divergence__window": 6,
    "divergence__spike_steps": 3,
}
SPIKE, NAN = {12: 30.0}, {12: float("nan")}


@pytest.fixture(scope="module", autouse=True)
def one_program_for_all_runs():
    """For the sake of time."""
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


def run(cfg, factors, patch=lambda patches: None):
    """Trains with these batches spoilt; the (step, batch) pairs that were read."""
    poison = Poison(factors)
    with pytest.MonkeyPatch.context() as patches:
        poison.install(patches.setattr)
        patch(patches)
        train.run(cfg)
    return poison.read


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """(config of a run that rolled back, what it read)."""
    cfg = tiny_config(tmp_path_factory.mktemp("undisturbed"), **KEYS)
    return cfg, run(cfg, SPIKE)


@pytest.fixture(scope="module")
def clean(tmp_path_factory):
    """The run that goes past those batches of itself."""

    def skip(patches):
        patches.setattr(rollback, "batch_of", lambda _, k: k - 1 if k <= 8 else k + 6)

    cfg = tiny_config(tmp_path_factory.mktemp("clean"), **KEYS, divergence__max_rollbacks=0)
    assert run(cfg, {}, skip) == [(k, k - 1 if k <= 8 else k + 6) for k in range(1, STEPS + 1)]
    return cfg


def timeless(workdir):
    timing = ("tokens_per_second", "tflops_per_second", "checkpoint_seconds")
    return [{k: v for k, v in line.items() if k not in timing} for line in lines_of(workdir)]


def events_of(workdir):
    return [(line["step"], line["event"]) for line in lines_of(workdir) if "event" in line]


def saved(workdir):
    return sorted(int(path.name) for path in (workdir / "checkpoints").iterdir() if path.name.isdigit())


def assert_equal(cfg, other):
    (a, last_a), (b, last_b) = final_state(cfg), final_state(other)
    assert last_a == last_b == STEPS
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_array_equal(x, y)


@pytest.mark.parametrize("factors", [SPIKE, NAN])
def test_a_roll_back_equals_a_run_that_never_saw_the_skipped_batches(tmp_path, undisturbed, clean, factors, capsys):
    cfg, read = undisturbed
    if factors is NAN:
        cfg = tiny_config(tmp_path, **KEYS)
        read = run(cfg, factors)
        said = capsys.readouterr().out
        assert "back to checkpoint 8; batches 8 to 14 of the data are skipped (roll-back 1 of 3)" in said
    # Steps 13 to 15 were not good, and 16 was on its way; 12 may have been spoilt already, so back to 8.
    assert read == [(k, k - 1) for k in range(1, 17)] + [(k, k + 6) for k in range(9, STEPS + 1)]
    assert_equal(cfg, clean)
    written = lines_of(cfg.workdir)
    lines, undone = metrics.course(written)
    assert [(x["step"], x["loss"]) for x in lines] == [(x["step"], x["loss"]) for x in lines_of(clean.workdir)]
    assert [[line["step"] for line in part] for part in undone] == [list(range(9, 16))]
    (event,) = [line for line in written if line.get("event") == "rollback"]
    assert event.pop("reason").startswith("3 steps in a row")
    assert event == {"step": 15, "event": "rollback", "to_step": 8, "first_batch": 8, "next_batch": 15}
    assert [line["off_band"] for line in written if "off_band" in line] == [1, 2, 3]


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


def sigterm(patches):
    """A signal while step 14 runs: it is saved, with a stretch of steps that were not good behind it."""
    real = metrics.JsonlWriter.write

    def write(self, number, values):
        real(self, number, values)
        if number == 13:
            os.kill(os.getpid(), signal.SIGTERM)

    patches.setattr(metrics.JsonlWriter, "write", write)


MOMENTS = {
    "in the bad stretch": kill(metrics.JsonlWriter, "write", 14),
    "stopped in the bad stretch": sigterm,
    "as it is written down": kill(rollback, "_write_durably", 1, after=True),
    "when it is done": kill(rollback, "_write_durably", 2, after=True),
    "after the next checkpoint": kill(metrics.JsonlWriter, "write", 21),
}


@pytest.mark.parametrize("moment", MOMENTS)
def test_killed_at_any_moment_it_ends_as_if_it_had_not_been(tmp_path, undisturbed, moment):
    cfg = dataclasses.replace(undisturbed[0], workdir=str(tmp_path))
    with pytest.raises(SystemExit if MOMENTS[moment] is sigterm else Killed):
        run(cfg, SPIKE, MOMENTS[moment])
    if MOMENTS[moment] is sigterm:
        assert 14 in saved(tmp_path)
    run(cfg, SPIKE)
    assert_equal(cfg, undisturbed[0])
    assert timeless(tmp_path) == timeless(undisturbed[0].workdir)
    assert not list(tmp_path.rglob("*.tmp"))


def test_after_the_last_roll_back_the_run_stops_and_keeps_what_is_from_before(tmp_path):
    factors = {5: 30.0, 12: 30.0}
    keys = {**KEYS, "checkpoint__every_steps": 2, "checkpoint__keep": 2, "divergence__window": 3}
    cfg = tiny_config(tmp_path, **keys, divergence__max_rollbacks=1)
    with pytest.raises(UserError) as caught:
        run(cfg, factors)
    # Step 6 is the first bad one of three, back to 4 and on with batch 8; batch 12 is read by step 9.
    text = str(caught.value)
    assert text.startswith("config.divergence.spike_steps: 3 steps in a row had a loss above ") and "\n" not in text
    assert "checkpoint 6 is kept; rolled back 1 times already (config.divergence.max_rollbacks); lower" in text
    # 10 would have pushed out 6, as 8 may have been spoilt.
    assert events_of(tmp_path) == [(8, "rollback"), (10, "not_saved"), (11, "stopped")]
    assert saved(tmp_path) == [6]  # 8 was newer, and had pushed out 4
    with pytest.raises(UserError):  # the same again
        run(cfg, factors)
    assert events_of(tmp_path) == [(8, "rollback"), (10, "not_saved"), (11, "stopped")]
    more = dataclasses.replace(cfg, divergence=dataclasses.replace(cfg.divergence, max_rollbacks=2))
    assert run(more, factors)[-1] == (STEPS, 24)
    assert [event for event in events_of(tmp_path) if event[1] == "rollback"] == [(8, "rollback"), (11, "rollback")]


def test_before_the_first_checkpoint_it_goes_back_to_the_initial_state(tmp_path):
    cfg = tiny_config(tmp_path, **{**KEYS, "train__steps": 3})
    with pytest.raises(Killed):
        run(cfg, {0: float("nan")}, kill(train.Training, "restore", 2))
    assert run(cfg, {0: float("nan")}) == [(1, 3), (2, 4), (3, 5)]
    assert not (tmp_path / "metrics.jsonl.old").exists()
    assert [line["step"] for line in lines_of(tmp_path)] == [1, 2, 3, 3, 1, 2, 3]


def test_a_target_that_cannot_be_read_is_passed_over_and_the_same_batches_are_read_again(tmp_path):
    def damage(patches):
        real = checkpoint.Checkpoints.delete_after

        def delete(self, number):
            real(self, number)
            for file in (self.folder / "8").rglob("*"):
                if file.is_file() and file.stat().st_size:
                    os.truncate(file, 1)

        patches.setattr(checkpoint.Checkpoints, "delete_after", delete)

    read = run(tiny_config(tmp_path, **KEYS), SPIKE, damage)
    assert read[16:] == [(k, k - 1 if k <= 8 else k + 6) for k in range(5, STEPS + 1)]


# ---- the file ----


class _NoCheckpoints:
    def __init__(self, folder):
        self.folder = folder

    def delete_after(self, number):
        raise AssertionError


RECORD = {"at": 15, "to": 8, "first_batch": 8, "next_batch": 15, "reason": "x"}


@pytest.mark.parametrize("text", ["", "[]", '{"rollbacks": [], ', '{"rollbacks": [{"at": 3}], "unfinished": false}'])
def test_a_damaged_file_is_one_line_with_the_remedy(tmp_path, text):
    (tmp_path / rollback.FILE).write_text(text)
    with pytest.raises(UserError, match=r"rollbacks\.json: damaged: .* delete it to go on with what the newest"):
        rollback.read(_NoCheckpoints(tmp_path))


def test_a_checkpoint_brings_its_roll_backs_along_and_a_run_that_is_gone_none(tmp_path):
    history = rollback.read(_NoCheckpoints(tmp_path))
    assert history.rollbacks == () and history.resume(None)
    assert history.resume({"rollbacks": [RECORD]})  # the file was lost
    again = rollback.read(_NoCheckpoints(tmp_path))
    assert again.rollbacks == history.rollbacks == (Rollback(**RECORD),)
    assert again.resume({"rollbacks": []}) and again.resume({})  # the one that was gone back to; one whose meta is lost
    assert again.rollbacks == history.rollbacks
    assert not again.resume(None) and again.rollbacks == ()  # its checkpoints were deleted by hand
    assert json.loads((tmp_path / rollback.FILE).read_text()) == {"rollbacks": [], "unfinished": False}

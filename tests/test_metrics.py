"""What a run writes and shows."""

import io
import json
import logging
import math
import os
import sys
import types
from pathlib import Path

import pytest

from hybrid_jax import metrics
from hybrid_jax.config import Config, LogConfig
from hybrid_jax.errors import UserError

VALUES = {"loss": 2.5, "grad_norm": 0.7, "learning_rate": 1e-3, "tokens_per_second": 12345.0}


def _strict(text):
    def refuse(word):
        raise AssertionError(f"{word} is not JSON")

    return [json.loads(line, parse_constant=refuse) for line in text.splitlines()]


def test_jsonl_is_valid_json_also_when_a_value_is_not_finite(tmp_path):
    writer = metrics.JsonlWriter(tmp_path / "metrics.jsonl")
    writer.write(1, VALUES)
    writer.write(2, {**VALUES, "loss": math.nan, "grad_norm": -math.inf})
    writer.close()
    first, second = _strict((tmp_path / "metrics.jsonl").read_text())
    assert first == {"step": 1, **VALUES}
    assert second["loss"] is None and second["grad_norm"] is None
    assert second["nonfinite"] == ["loss", "grad_norm"]
    assert second["learning_rate"] == 1e-3


def test_resuming_drops_what_was_written_beyond_the_checkpoint(tmp_path):
    path = tmp_path / "metrics.jsonl"
    writer = metrics.JsonlWriter(path)
    for step in range(1, 8):
        writer.write(step, VALUES)
    writer.close()
    with path.open("a") as file:
        file.write('{"step": 8, "lo')  # killed while writing
    resumed = metrics.JsonlWriter(path, keep_to=5)
    resumed.write(6, {"loss": 9.0})
    resumed.close()
    assert [line["step"] for line in _strict(path.read_text())] == [1, 2, 3, 4, 5, 6]
    assert _strict(path.read_text())[-1]["loss"] == 9.0
    metrics.JsonlWriter(path).close()  # a fresh run in an old folder
    assert path.read_text() == ""


def test_tensorboard_events_can_be_read_back(tmp_path):
    pytest.importorskip("tensorboardX")
    from tensorboardX.proto import event_pb2

    writer = metrics.TensorBoardWriter(tmp_path)
    writer.write(3, {**VALUES, "nonfinite": ["x"]})
    writer.close()
    (file,) = tmp_path.iterdir()
    data, found = file.read_bytes(), {}
    while data:  # TFRecord: length u64, crc u32, payload, crc u32
        length = int.from_bytes(data[:8], "little")
        event = event_pb2.Event.FromString(data[12 : 12 + length])
        found |= {value.tag: (event.step, value.simple_value) for value in event.summary.value}
        data = data[16 + length :]
    assert found["loss"] == (3, 2.5)
    assert set(found) == set(VALUES)


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="this system has no /dev/full")
def test_lines_wait_while_the_disk_is_full(tmp_path, monkeypatch, caplog):
    writer = metrics.JsonlWriter(tmp_path / "metrics.jsonl")
    writer.write(1, VALUES)
    with monkeypatch.context() as patch, open("/dev/full", "wb", buffering=0) as full:
        patch.setattr(writer, "_file", full)
        writer.write(2, VALUES)
        writer.write(3, VALUES)
    assert [line["step"] for line in metrics.read_jsonl(tmp_path / "metrics.jsonl")] == [1]
    assert len(caplog.records) == 1 and "No space left on device; its lines wait" in caplog.text
    writer.write(4, VALUES)
    writer.close()
    assert [line["step"] for line in metrics.read_jsonl(tmp_path / "metrics.jsonl")] == [1, 2, 3, 4]
    writer = metrics.JsonlWriter(tmp_path / "metrics.jsonl", 4)
    writer.close()
    with pytest.raises(ValueError):  # another fault is not swallowed
        writer.write(5, VALUES)


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="this system has no /dev/full")
def test_a_console_goes_on_while_the_disk_is_full():
    stream = io.StringIO()
    console = metrics.Console(Path("/dev/full"), stream)
    console.text("one")
    console.progress(1, 2, VALUES, math.nan)
    console.close()
    assert "one" in stream.getvalue() and "loss 2.5" in stream.getvalue()


@pytest.mark.parametrize(("module", "key"), [("tensorboardX", "tensorboard"), ("wandb", "wandb")])
def test_a_missing_tracker_is_one_line_with_the_remedy(tmp_path, monkeypatch, module, key):
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(
        UserError, match=rf"config\.log\.{key}: {module} is not installed.*pip install -e '\.\[track\]'"
    ):
        metrics.open_writers(Config(log=LogConfig(**{key: True})), tmp_path, 0)
    assert not (tmp_path / "metrics.jsonl").exists()


class _Wandb(types.ModuleType):
    """As much of wandb as a run uses; a server's side of it: steps that do not go up are dropped."""

    def __init__(self):
        super().__init__("wandb")
        self.starts, self.metrics, self.rows, self.finished = [], [], [], 0

    def init(self, **arguments):
        self.starts.append(arguments)
        return self

    def define_metric(self, name, step_metric=None):
        self.metrics.append((name, step_metric))

    def log(self, values, step=None):
        last = self.rows[-1][0] if self.rows else 0
        if step is None or step > last:
            self.rows.append((last + 1 if step is None else step, dict(values)))

    def finish(self):
        self.finished += 1


def test_wandb_goes_on_in_the_same_curve_and_shows_the_steps_done_again(tmp_path, monkeypatch):
    fake = _Wandb()
    monkeypatch.setitem(sys.modules, "wandb", fake)
    cfg = Config(log=LogConfig(wandb=True, wandb_project="p"))
    folder = tmp_path / "a_run"
    folder.mkdir()
    for restored, steps in ((0, (1, 2, 3)), (1, (2, 3, 4))):  # stopped after 3, the checkpoint is of 1
        writers = metrics.open_writers(cfg, folder, restored)
        for step in steps:
            for writer in writers:
                writer.write(step, {**VALUES, "loss": step + restored / 10, "nonfinite": ["x"]})
        for writer in writers:
            writer.close()
    assert fake.finished == 2
    first, second = fake.starts
    assert first == second
    assert (first["mode"], first["project"], first["name"], first["dir"]) == ("offline", "p", "a_run", str(folder))
    assert first["resume"] == "allow" and first["config"]["log"]["wandb"] is True
    assert first["id"] == (folder / "wandb_id").read_text() and len(first["id"]) >= 8
    assert fake.metrics == [("*", "step")] * 2
    assert [(row["step"], row["loss"]) for _, row in fake.rows] == [
        *((1, 1.0), (2, 2.0), (3, 3.0)),
        *((2, 2.1), (3, 3.1), (4, 4.1)),
    ]
    assert set(fake.rows[0][1]) == {"step", *VALUES}

    other = tmp_path / "another_run"
    other.mkdir()
    online = Config(log=LogConfig(wandb=True, wandb_mode="online"))
    metrics.open_writers(online, other, 0)
    assert fake.starts[-1]["mode"] == "online" and fake.starts[-1]["id"] != first["id"]


def test_trackers_are_off_and_offline_unless_asked(tmp_path):
    (writer,) = metrics.open_writers(Config(), tmp_path, 0)
    assert isinstance(writer, metrics.JsonlWriter)
    assert LogConfig().wandb_mode == "offline"


class _Terminal(io.StringIO):
    def isatty(self):
        return True


def test_plain_lines_are_few_and_the_last_one_is_there(tmp_path):
    stream = io.StringIO()
    console = metrics.Console(tmp_path / "train.log", stream, every_seconds=1000)
    for step in range(1, 101):
        console.progress(step, 100, VALUES, 30.0)
    console.text("a note")
    console.close()
    lines = stream.getvalue().splitlines()
    assert [line.split()[1] for line in lines[:-1]] == ["1/100", "2/100", "3/100", "100/100"]
    assert lines[-1] == "a note"
    assert "\r" not in stream.getvalue()
    assert (tmp_path / "train.log").read_text() == stream.getvalue()
    for part in ("loss 2.5000", "lr 1.00e-03", "|g| 0.7", "12.3k tok/s", "left 0:30"):
        assert part in lines[0]


def test_terminal_gets_one_bar_and_notes_stand_on_lines_of_their_own(tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    stream = _Terminal()
    console = metrics.Console(tmp_path / "train.log", stream)
    values = {**VALUES, "tflops_per_second": 1.5, "mfu": 0.123}
    for step in (1, 2, 50):
        console.progress(step, 100, values, 3725.0)
    console.text("a note")
    console.progress(51, 100, values, math.nan)
    console.close()
    drawn = stream.getvalue().split("\r\x1b[2K")[1:]
    assert len(drawn) == 4
    assert all(len(bar.split("\n")[0]) < 120 for bar in drawn)
    assert drawn[2].endswith("\na note\n")
    assert "MFU 12.3%" in drawn[2] and "1.5 TFLOP/s" in drawn[2] and "left 1:02:05" in drawn[2]
    filled = drawn[2].count("█")
    assert filled > 0 and abs(filled - drawn[2].count("░")) <= 1  # half-way
    assert "left" not in drawn[3]
    assert "\r" not in (tmp_path / "train.log").read_text()


def test_what_is_logged_for_debugging_stands_in_train_log_alone(tmp_path):
    stream = io.StringIO()
    console, logger = metrics.Console(tmp_path / "train.log", stream), logging.Logger("of this test", logging.DEBUG)
    logger.addHandler(console.handler())
    logger.info("a phase")
    try:
        raise ValueError("of Orbax")
    except ValueError:
        logger.debug("a detail", exc_info=True)
    console.close()
    (line,) = stream.getvalue().splitlines()
    kept = (tmp_path / "train.log").read_text()
    assert line.endswith("s] a phase") and kept.startswith(line)
    assert "a detail\nTraceback" in kept and kept.endswith("ValueError: of Orbax\n")


def test_quiet_console_of_the_other_processes(tmp_path):
    stream = io.StringIO()
    console = metrics.Console(tmp_path / "train.log", stream, quiet=True)
    console.text("x")
    console.progress(1, 2, VALUES, 1.0)
    console.close()
    assert stream.getvalue() == "" and not (tmp_path / "train.log").exists()


def test_clock_times_steps_only(monkeypatch):
    """Not compiling, not validation, and not the step by which the pipeline fills or drains."""
    now = [100.0]
    monkeypatch.setattr(metrics.time, "perf_counter", lambda: now[0])
    clock = metrics.Clock(tokens_per_step=1000)

    def after(seconds, **how):
        now[0] += seconds
        clock.mark(**how)

    now[0] += 50  # compiling
    clock.start()
    after(4.0)
    assert clock.take() == pytest.approx(250)  # the filling step, while there is nothing better
    after(2.0)
    after(3.0)
    assert clock.take() == pytest.approx(2000 / 5)
    after(0.5, drained=True)
    assert clock.take() == pytest.approx(1000 / clock.seconds_per_step)
    assert 2.0 < clock.seconds_per_step < 3.0
    now[0] += 77  # validation
    clock.start()
    after(9.0)
    after(2.0)
    assert clock.take() == pytest.approx(500)
    assert 2.0 < clock.seconds_per_step < 3.0


def test_clock_of_one_step(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(metrics.time, "perf_counter", lambda: now[0])
    clock = metrics.Clock(tokens_per_step=1000)
    clock.start()
    now[0] += 5.0
    clock.mark(drained=True)
    assert clock.take() == clock.take() == pytest.approx(200)


def test_clock_of_a_pipeline_that_only_fills_and_drains(monkeypatch):
    """A device that computes both steps before the first one's numbers can be read, as between two checkpoints."""
    now = [0.0]
    monkeypatch.setattr(metrics.time, "perf_counter", lambda: now[0])
    clock = metrics.Clock(tokens_per_step=1000)
    clock.start()
    now[0] += 8.0
    clock.mark()
    assert clock.take() == pytest.approx(125)
    now[0] += 0.001
    clock.mark(drained=True)
    assert clock.take() == pytest.approx(250, rel=1e-3)


def test_short_numbers_and_durations():
    assert [metrics.short(x) for x in (950, 12_345, 4_560_000, 2.5e9)] == ["950", "12.3k", "4.56M", "2.5G"]
    assert [metrics.duration(s) for s in (9, 605, 3725, 90061)] == ["0:09", "10:05", "1:02:05", "1d 01:01:01"]

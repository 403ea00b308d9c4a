"""The fault harness: a few kills of it, and that it finds what it is for."""

import re
import subprocess
import sys
from pathlib import Path

from tests.chaos import outcome
from tests.chaos.outcome import Trial

ROOT = Path(__file__).parents[1]


def test_five_kills_leave_no_trace():
    arguments = ["-m", "tests.chaos", "--kills", "5", "--rounds", "0", "--seed", "5", "--lanes", "1"]
    done = subprocess.run([sys.executable, *arguments], cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    tries, survived, lost = map(int, re.search(r"\| all \| (\d+) \| (\d+) \| (\d+) \|", done.stdout).groups())
    assert tries >= 5 and survived == tries and lost == 0
    assert "| SIGKILL of prepare |" in done.stdout, done.stdout  # the rest are kills of a run


def _run(folder, loss=1.5, digest="a", extra=""):
    folder.mkdir()
    (folder / "digests.json").write_text(f'{{"4": {{"params.w": "{digest}"}}}}')
    (folder / "metrics.jsonl").write_text('{"step": 1, "loss": 2.0}\n' + f'{{"step": 2, "loss": {loss}}}\n' + extra)
    return folder


def test_what_differs_is_seen(tmp_path):
    want = _run(tmp_path / "want")
    assert outcome.differences(_run(tmp_path / "same", extra='{"step": 2, "event": "checkpoint_failed"}\n'), want) == []
    other = {"array": {"digest": "b"}, "loss": {"loss": 1.5000001}, "twice": {"extra": '{"step": 1, "loss": 2.0}\n'}}
    for name, named in other.items():
        assert len(outcome.differences(_run(tmp_path / name, **named), want)) == 1, name
    (tmp_path / "want" / "metrics.jsonl").write_text('{"step": 1, "loss": 2.0}\n')
    assert any("lines of steps" in line for line in outcome.differences(_run(tmp_path / "more"), want))
    left = _run(tmp_path / "left", loss=1.5)
    (left / "config.json.tmp").touch()
    assert outcome.differences(left, _run(tmp_path / "whole")) == ["left behind: ['config.json.tmp']"]


def test_lost_and_repeated_documents_are_counted(tmp_path):
    import numpy as np

    from hybrid_jax.data.store import StoreWriter

    with StoreWriter(tmp_path / "store", vocab_size=257) as writer:
        for number in (0, 1, 3, 3):
            writer.append(np.frombuffer(f"document {number} text\0".encode(), np.uint8))
    assert outcome.document_changes(tmp_path / "store", 4) == (1, 1)


def test_a_refusal_is_one_line_that_names_the_fault(tmp_path):
    trial = Trial(tmp_path)
    trial.out.write_text("error: of before\nsome\nerror: config.data.path: gone\n")
    trial.expect_error_line(2, 17, "config.data.path")
    assert not trial.problems
    trial.expect_error_line(0, 17, "config.data.path")
    trial.expect_error_line(2, 17, "another file")
    trial.expect_error_line(2, 0, "config.data.path")
    assert len(trial.problems) == 3

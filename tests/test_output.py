"""Files that a command writes at its end."""

import os
import subprocess
import sys

import pytest

from hybrid_jax import output


def test_checking_leaves_a_file_as_it_is(tmp_path):
    (tmp_path / "old.json").write_text("old")
    (tmp_path / "link.json").symlink_to("target.json")
    for name in (tmp_path / "old.json", tmp_path / "link.json", "/dev/null"):
        output.check("--json", str(name))
    assert (tmp_path / "old.json").read_text() == "old"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link.json", "old.json"]


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path, monkeypatch):
    (tmp_path / "old.json").write_text("old")
    (tmp_path / "link.json").symlink_to("old.json")
    output.write(tmp_path / "link.json", "new")
    output.write(tmp_path / "bytes", b"\x00\x01")
    output.write("/dev/null", "gone")
    assert (tmp_path / "link.json").is_symlink() and (tmp_path / "old.json").read_text() == "new"
    assert (tmp_path / "bytes").read_bytes() == b"\x00\x01"

    def full(source, target):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(OSError, match="No space left"):
        output.write(tmp_path / "old.json", "newer")
    assert (tmp_path / "old.json").read_text() == "new"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bytes", "link.json", "old.json"]


def test_what_a_killed_process_left_goes_with_the_next_write(tmp_path):
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    left, others = tmp_path / f".a.json.{ended.pid}.tmp", tmp_path / f".a.json.{os.getppid()}.tmp"
    for path in (left, others, tmp_path / ".b.json.1.tmp"):
        path.touch()
    output.write(tmp_path / "a.json", "{}")
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([".b.json.1.tmp", others.name, "a.json"])

"""What ends prepare from outside: a full disk, and Ctrl-C before there is anything to keep."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hybrid_jax.data import locks, prepare
from tests.data.test_prepare import ROOT, bpe_file, large, many, run, start, until_parts, write  # noqa: F401

LIMITED = """
import resource, signal, sys
from hybrid_jax.data import prepare
prepare.PART_BYTES = 2**15
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[1]), resource.RLIM_INFINITY))
sys.exit(prepare.main(sys.argv[2:]))
"""
FULL = """
import os, sys
from pathlib import Path
from tests.chaos import disk
from hybrid_jax.data import prepare
prepare.PART_BYTES = 2**15
if problem := disk.mount(Path(sys.argv[2]), int(sys.argv[1])):
    print(problem)
    sys.exit(77)
code = prepare.main(sys.argv[3:])
print(*sorted(os.listdir(sys.argv[2])))
sys.exit(code)
"""


def script(code, *arguments, **settings):
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", code, *map(str, arguments)]
    return subprocess.run(command, env=environment, text=True, capture_output=True, **settings)


def the_line(done, place, why):
    """Of a command that could not write."""
    assert done.returncode == 2 and not done.stdout, done
    (line,) = [line for line in done.stderr.splitlines() if not line.startswith("prepare: ")]
    assert line.startswith(f"error: {place}") and line.endswith(why), line


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize(("limit", "name"), [(100, "plan.json"), (20_000, "000000.bin")])
def test_no_room_for_a_part(tmp_path, workers, limit, name):
    write(tmp_path, {f"in/{i}.txt": "x" * 50_000 for i in range(2)})
    more = ("--input", tmp_path / "in", "--output", tmp_path / "store", "--workers", workers)
    done = script(LIMITED, limit, *more)
    if workers == 2:
        done.stderr = done.stderr.replace("000001.bin", "000000.bin")
    the_line(done, tmp_path / "store.parts" / name, ": cannot be written: File too large")
    assert [path.name for path in tmp_path.iterdir()] == ["in"]


@pytest.mark.parametrize("fraction", [0, 0.4])
def test_no_room_to_join_them(tmp_path, bpe_file, large, fraction):  # noqa: F811
    """More than a part, and less than all of them: the parts are kept, and the next command goes on from there."""
    more = ("--input", large[0], "--tokenizer", bpe_file, "--output", tmp_path / "store", "--workers", 1)
    more = (*more, "--validation_fraction", fraction)
    done = script(LIMITED, 200_000, *more)
    the_line(done, f"{tmp_path / 'store.parts'}/joined", "bin: cannot be written: File too large")
    assert [path.name for path in tmp_path.iterdir()] == ["store.parts"]
    names = {path.name for path in (tmp_path / "store.parts").iterdir()}
    assert "plan.json" in names and not [name for name in names if name.startswith((".", "joined"))]
    again = start(*more)
    _, error = again.communicate()
    assert again.returncode == 0 and "parts are whole already" in error and not (tmp_path / "store.parts").exists()
    if not fraction:
        assert (tmp_path / "store.bin").read_bytes() == Path(f"{large[1]}.bin").read_bytes()


def test_no_room_for_the_tokenizer(tmp_path, bpe_file):  # noqa: F811
    write(tmp_path, {"in/a.txt": "alpha"})
    size = bpe_file.stat().st_size
    done = script(LIMITED, size - 1, "--input", tmp_path / "in", "--tokenizer", bpe_file, "--output", tmp_path / "s")
    the_line(done, tmp_path / "s.parts" / "joined.tokenizer.json", ": cannot be written: File too large")
    assert not list(tmp_path.glob("s.[a-oq-z]*"))


def test_an_older_store_stays_where_there_is_no_room(tmp_path, bpe_file):  # noqa: F811
    write(tmp_path, {"in/a.txt": "alpha"})
    arguments = ("--input", tmp_path / "in", "--output", tmp_path / "s")
    assert run(*arguments) == 0
    before = {path.name: path.read_bytes() for path in tmp_path.glob("s.*")}
    size = bpe_file.stat().st_size
    assert script(LIMITED, size - 1, *arguments, "--tokenizer", bpe_file, "--overwrite").returncode == 2
    assert {path.name: path.read_bytes() for path in tmp_path.glob("s.[a-oq-z]*")} == before


@pytest.mark.parametrize("share", [0.2, 1.7])
def test_a_disk_that_is_full(tmp_path, bpe_file, large, share):  # noqa: F811
    """For not all of the parts, and for not all of what they are joined to."""
    (tmp_path / "disk").mkdir()
    size = round(share * Path(f"{large[1]}.bin").stat().st_size)
    more = ("--input", large[0], "--tokenizer", bpe_file, "--output", tmp_path / "disk" / "store", "--workers", 2)
    done = script(FULL, size, tmp_path / "disk", *more, cwd=ROOT)
    if done.returncode == 77:
        pytest.skip(f"this process may mount nothing: {done.stdout.strip()}")
    assert done.returncode == 2 and done.stdout.strip() in ("", "store.parts"), done
    (line,) = [line for line in done.stderr.splitlines() if not line.startswith("prepare: ")]
    assert line.startswith(f"error: {tmp_path / 'disk' / 'store.parts'}/"), line
    assert line.endswith(": cannot be written: No space left on device")


# Ctrl-C.


def until(path, process):
    end = time.monotonic() + 60
    while not path.exists():
        assert process.poll() is None and time.monotonic() < end, process.communicate()
        time.sleep(0.005)


def test_ctrl_c_while_it_imports(tmp_path):
    """With a numpy that takes long, and says when it begins."""
    write(tmp_path, {"numpy/__init__.py": "import pathlib, time; pathlib.Path('begun').touch(); time.sleep(60)"})
    command = [sys.executable, "-m", "hybrid_jax.data.prepare", "--input", "x", "--output", "y"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(
        command, cwd=tmp_path, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    until(tmp_path / "begun", process)
    process.send_signal(signal.SIGINT)
    out, error = process.communicate(timeout=60)
    assert (process.returncode, out) == (130, "")
    assert error == "Ctrl-C: stopped; nothing is lost, and the same command starts again\n"


def test_ctrl_c_before_a_part_is_whole(tmp_path):
    write(tmp_path, {"in/a.txt": "x" * 50_000_000})
    process = start("--input", tmp_path / "in", "--output", tmp_path / "store", "--workers", 1)
    until(tmp_path / "store.parts" / "plan.json", process)
    for _ in range(3):  # more than one changes nothing
        process.send_signal(signal.SIGINT)
    out, error = process.communicate(timeout=60)
    assert (process.returncode, out) == (130, "")
    assert error.strip().splitlines()[-1] == "stopped: no part was whole yet, nothing is kept"
    assert "Traceback" not in error and sorted(path.name for path in tmp_path.iterdir()) == ["in"]


def test_workers_that_outlive_their_command_are_waited_for(tmp_path, monkeypatch, capsys):
    """They may still write parts, and would leave what the next command has cleared away."""
    write(tmp_path, {"in/a.txt": "a text"})
    command = ["--input", str(tmp_path / "in"), "--output", str(tmp_path / "store"), "--workers", "1"]
    folder = tmp_path / "store.parts"
    folder.mkdir()
    assert locks.hold_as_worker(folder) is None  # no command made it
    (folder / locks.WORKERS).touch()
    monkeypatch.setattr(locks, "_WAIT_SECONDS", 0.2)
    with locks.hold_as_worker(folder), locks.hold_as_worker(folder):
        assert prepare.main(command) == 2
        assert "workers of a command that has ended still write" in capsys.readouterr().err
    assert prepare.main(command) == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in", "store.bin", "store.idx", "store.json"]

"""What commands share: what becomes of output that cannot be written."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PRINTS = """
import sys
from hybrid_jax import command

def run(arguments):
    print("x" * 100_000, flush=True)
    return 3

sys.exit(command.main(run, [], "nothing was written"))
"""
LAUNCH = [str(ROOT / "launch.py"), "--help"]
COMMANDS = {"of a module": ["-c", PRINTS], "launch": LAUNCH, "bench": ["-m", "hybrid_jax.bench", "--list"]}
COMMANDS |= {"prepare": ["-m", "hybrid_jax.data.prepare", "--verify"]}


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    from hybrid_jax.data import prepare

    folder = tmp_path_factory.mktemp("store")
    (folder / "a.txt").write_text("a text")
    assert prepare.main(["--input", str(folder / "a.txt"), "--output", str(folder / "s"), "--workers", "1"]) == 0
    return folder / "s"


@pytest.mark.parametrize("name", COMMANDS)
def test_output_that_cannot_be_written(store, name):
    command = [sys.executable, *COMMANDS[name], *([str(store)] if name == "prepare" else [])]
    buffered = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    settings = {"cwd": ROOT, "stderr": subprocess.PIPE, "text": True, "timeout": 120, "env": buffered}
    with open("/dev/full", "w") as full:
        done = subprocess.run(command, stdout=full, **settings)
    assert (done.returncode, done.stderr) == (2, "error: standard output: No space left on device\n")
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    process = subprocess.Popen(command, cwd=ROOT, text=True, env=buffered, **pipes)
    process.stdout.close()  # as `| head -0` does
    assert process.stderr.read() == "" and process.wait(120) == 0

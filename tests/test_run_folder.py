"""A run's folder: a start that is refused leaves nothing behind, and nothing of what was there is lost."""

import subprocess
import sys
from pathlib import Path

import pytest

from hybrid_jax import train
from hybrid_jax.errors import UserError
from hybrid_jax.run_folder import RunFolder
from tests.processes import free_port
from tests.tiny import tiny_config

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"mesh__fsdp": 2}, "config.mesh.fsdp"),
        ({"data__source": "files", "data__path": "/nowhere/*.txt"}, "/nowhere"),
        ({"eval__sample_tokens": 3, "eval__sample_prompt": "def"}, "config.eval.sample_prompt"),
        ({"checkpoint__init_from": "/nowhere"}, "/nowhere"),
    ],
)
def test_a_refused_start_leaves_nothing(changed, said, tmp_path):
    with pytest.raises(UserError, match=said):
        train.run(tiny_config(tmp_path / "runs" / "one", **changed))
    assert not list(tmp_path.iterdir())
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "other").touch()
    with pytest.raises(UserError, match=said):
        train.run(tiny_config(tmp_path / "runs" / "one", **changed))
    assert [path.name for path in tmp_path.rglob("*")] == ["runs", "other"]


def test_what_was_there_stays(tmp_path):
    (tmp_path / "note").write_text("mine")
    with pytest.raises(UserError):
        train.run(tiny_config(tmp_path, mesh__fsdp=2))
    assert (tmp_path / "note").read_text() == "mine"
    assert "error: config.mesh.fsdp" in (tmp_path / "train.log").read_text()
    folder = RunFolder(tmp_path / "new", 0)
    assert folder.claim() == ""
    (tmp_path / "new" / "config.json").touch()  # it has begun
    folder.unmake()
    assert {path.name for path in (tmp_path / "new").iterdir()} == {".lock", "config.json"}
    assert RunFolder(tmp_path / "note", 0).claim() == f"config.workdir: {tmp_path / 'note'} is a file, not a folder"
    other = RunFolder(tmp_path / "new", 0).claim()
    assert other.startswith("config.workdir: another run (process ")
    folder.release()


def test_two_processes_leave_nothing(tmp_path):
    command = [
        sys.executable, "launch.py", "--config=configs/tiny_hybrid.py", f"--config.workdir={tmp_path}/run",
        "--config.mesh.fsdp=3", "--platform=cpu", f"--coordinator_address=127.0.0.1:{free_port()}", "--num_processes=2",
    ]  # fmt: skip
    processes = [
        subprocess.Popen([*command, f"--process_id={i}"], cwd=ROOT, stderr=subprocess.PIPE, text=True) for i in range(2)
    ]
    said = [process.communicate(timeout=120)[1] for process in processes]
    assert [process.returncode for process in processes] == [2, 2], said
    assert all(
        line.startswith("error: config.mesh.fsdp: 3 does not divide 2") and line.count("\n") == 1 for line in said
    )
    assert not list(tmp_path.iterdir())

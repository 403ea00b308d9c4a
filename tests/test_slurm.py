"""Batch scripts that hybrid_jax.slurm writes: what they say, what is refused, what they do under a fake Slurm."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hybrid_jax import slurm

ROOT = Path(__file__).parents[1]
TINY = f"--config={ROOT}/configs/tiny_hybrid.py"
BIG = [f"--config={ROOT}/configs/gdn_1b.py", "--config.data.path=/data/corpus", "--nodes=4"]


def written(*arguments):
    return slurm.script(slurm.plan(arguments))


def lines_of(text, start):
    return [line for line in text.splitlines() if line.startswith(start)]


VARIANTS = {
    "bare": [],
    "one process a GPU": ["--tasks_per_node=8"],
    "two GPUs a process": ["--tasks_per_node=4"],
    "docker": ["--container=rocm/jax-training:maxtext-v26.5"],
    "podman": ["--container=x", "--container_runtime=podman", "--platform=cuda", "--mount=/scratch"],
    "apptainer": ["--container=/images/x.sif", "--container_runtime=apptainer"],
    "one process": ["--nodes=1"],
    "without checkpoints": ["--config.checkpoint.every_steps=0"],
    "CPUs": ["--platform=cpu", '--env=A=it\'s "$HOME"', "--sbatch=--qos=high"],
}


@pytest.mark.parametrize("name", VARIANTS)
def test_scripts_are_sound_bash(name, tmp_path):
    text = written(*BIG, *VARIANTS[name])
    path = tmp_path / "job.sbatch"
    path.write_text(text)
    task = text.split("<<'TASK'\n")[1].split("\nTASK\n")[0]
    (tmp_path / "task.sh").write_text(f"#!/bin/bash\n{task}\n")
    checker = shutil.which("shellcheck") or shutil.which("shellcheck", path=Path(sys.executable).parent)
    for file in (path, tmp_path / "task.sh"):
        subprocess.run(["bash", "-n", file], check=True)
        if checker:
            done = subprocess.run([checker, file], capture_output=True, text=True)
            assert done.returncode == 0, done.stdout
    assert "  \n" not in text and "\n\n\n" not in text
    if not checker:
        pytest.skip("shellcheck is not installed")


def test_a_script_says_what_the_job_needs():
    text = written(*BIG, "--time=2-00:00:00", "--partition=mi300", "--account=hybrid", "--env=NCCL_SOCKET_IFNAME=eth0")
    assert lines_of(text, "#SBATCH") == [
        f"#SBATCH {option}"
        for option in (
            "--job-name=gdn_1b", "--nodes=4", "--ntasks-per-node=1", "--gpus-per-node=8", "--time=2-00:00:00",
            "--exclusive", "--output=%x-%j.log", "--open-mode=append", "--partition=mi300", "--account=hybrid",
            "--requeue", "--signal=B:USR1@300",
        )
    ]  # fmt: skip
    assert "mesh data 32 x fsdp 1 x tensor 1" in text
    assert "--expected_devices=32" in text and "export JAX_NUM_PROCESSES=4" in text
    assert 'export NCCL_IB_GID_INDEX="${NCCL_IB_GID_INDEX:-3}"' in text
    assert "export NCCL_SOCKET_IFNAME=eth0" in text
    assert "--xla_gpu_enable_command_buffer= " in text
    assert "JAX_LOCAL_DEVICE_IDS" not in text
    assert 'squeue -h -j "$SLURM_JOB_ID"' in text and 'scontrol requeue "$SLURM_JOB_ID"' in text


def test_options_of_sbatch_stay_one_word_each():
    text = written(*BIG, "--sbatch=--comment=a b; touch #x", "--sbatch=--partition=p", "--sbatch=--exclude=n[1-3],m")
    assert lines_of(text, "#SBATCH --comment") == ['#SBATCH --comment="a b; touch #x"']
    assert "#SBATCH --partition=p\n" in text and '#SBATCH --exclude="n[1-3],m"\n' in text


def test_gpus_of_each_process():
    for tasks, ids in ((8, "$SLURM_LOCALID"), (4, "$(seq -s , $((SLURM_LOCALID * 2)) $((SLURM_LOCALID * 2 + 1)))")):
        text = written(*BIG, f"--tasks_per_node={tasks}")
        assert f"\nJAX_LOCAL_DEVICE_IDS={ids}\n" in text and f"JAX_NUM_PROCESSES={4 * tasks}" in text
        assert "--expected_devices=32" in text
    found = subprocess.run(
        ["bash", "-c", f"SLURM_LOCALID=3; echo {ids}"], capture_output=True, text=True, check=True
    ).stdout  # fmt: skip
    assert found == "6,7\n"


def test_containers():
    text = written(*BIG, "--container=rocm/jax-training:maxtext-v26.5", "--env=A=b")
    for words in (
        "docker run --rm", "--device=/dev/kfd --device=/dev/dri --group-add=video", "--ipc=host", "--shm-size=64g",
        "--security-opt=seccomp=unconfined", f"--volume={ROOT}:{ROOT}", "--volume=/data:/data", "--env=JAX_PROCESS_ID",
        "--env=XLA_FLAGS", "--env=A", "python3 \\\n  launch.py", "docker ps -q --filter",
    ):  # fmt: skip
        assert words in text, words
    text = written(*BIG, *VARIANTS["podman"])
    assert "--device=nvidia.com/gpu=all" in text and "--volume=/scratch:/scratch" in text and "/dev/kfd" not in text
    text = written(*BIG, *VARIANTS["apptainer"])
    assert "apptainer exec \\\n  --rocm" in text and "xargs" not in text


def test_a_job_without_checkpoints_is_not_queued_again():
    text = written(*BIG, "--config.checkpoint.every_steps=0")
    assert "requeue" not in text.split("# Written by")[1].split("\n", 1)[1] and "--signal" not in text


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([TINY], "the following arguments are required: --nodes"),
        ([TINY, "--nodes=0"], "--nodes: must be at least 1, not 0"),
        ([TINY, "--nodes=two"], "--nodes: invalid int value: 'two'"),
        ([TINY, "--nodes=2", "--config.train.step=3"], "config.train.step: unknown key, did you mean 'steps'?"),
        (["--config=configs/gdn_2b.py", "--nodes=2"], "--config: configs/gdn_2b.py does not exist"),
        ([*BIG, "--config.mesh.data=8"], "4 nodes x 8 GPUs: config.mesh.data: 8 x fsdp 1 x tensor 1 does not make 32"),
        ([TINY, "--nodes=3"], "3 nodes x 8 GPUs: config.train.global_batch_size: 8 rows do not divide over 24 devices"),
        ([*BIG, "--tasks_per_node=3"], "--tasks_per_node: 3 processes cannot share 8 GPUs evenly; use 1, or 8"),
        ([BIG[0], "--nodes=4"], "error: config.data.path: empty; make this recipe's data"),
        ([*BIG, "--time=tomorrow"], "--time: 'tomorrow' is no limit as sbatch takes it"),
        ([*BIG, "--time=5"], "--grace_seconds: 300 s is not less than --time=5"),
        ([*BIG, "--env=A B"], "--env: 'A B' is not NAME=VALUE"),
        ([*BIG, "--sbatch=qos"], "--sbatch: 'qos' is no option"),
        ([*BIG, "--sbatch=--nodes=9"], "--sbatch: --nodes is set by the script itself (--nodes=4); use"),
        ([*BIG, "--sbatch=--qos=a", "--sbatch=--no-requeue"], "--sbatch: --no-requeue is set by the script itself;"),
        ([*BIG, "--partition=p", "--sbatch=--partition=q"], "--sbatch: --partition is set by the script itself (--p"),
        ([*BIG, "--sbatch=--comment=it's"], "has a quote or backslash in it"),
        ([*BIG, "--sbatch=--comment a"], "--sbatch: '--comment a' is no option"),
        ([*BIG, "--config.workdir=runs/a b"], "--job_name: 'a b', which is the folder's of config.workdir, is no name"),
        ([*BIG, "--container_runtime=podman"], "are for a --container, which is not given"),
        ([*BIG, "--container=x", "--container_runtime=lxc"], "--container_runtime: invalid choice: 'lxc'"),
        ([*BIG, "--container=x", "--mount=data"], "--mount: 'data' is no absolute path"),
        ([*BIG, "--job_name=a b"], "--job_name: 'a b' is no name for a job"),
        ([*BIG, "--out=/nonexistent/x"], "--out: cannot write /nonexistent/x"),
    ],
)  # fmt: skip
def test_mistakes_are_refused_when_writing(arguments, said, capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    assert slurm.command.main(slurm.run, arguments, "") == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and err.startswith("error: ") and said in err


def test_a_file_is_written_and_how_to_submit_it_is_said(tmp_path, capsys):
    assert slurm.run([*BIG, f"--out={tmp_path}/job"]) == 0
    assert capsys.readouterr().out == (
        f"{tmp_path}/job: 4 processes on 4 nodes, 32 devices; submit it with: sbatch {tmp_path}/job\n"
    )
    assert (tmp_path / "job").read_text().startswith("#!/bin/bash\n#SBATCH")


# ---- under a fake Slurm ----

_SRUN = """\
import os, signal, subprocess, sys
assert sys.argv[1] == "--kill-on-bad-exit=1"
count = int(os.environ["FAKE_TASKS"])
tasks = []
for index in range(count):
    env = {**os.environ, "SLURM_PROCID": str(index), "SLURM_LOCALID": "0", "SLURM_STEP_NUM_TASKS": str(count),
           "SLURM_STEP_NODELIST": "fake[1-2]", "SLURM_NODEID": str(index)}
    log = open(os.environ["FAKE_LOG"] + f".{index}", "a")
    tasks.append(subprocess.Popen(sys.argv[2:], env=env, stdout=log, stderr=log))
def forward(number, frame):
    for task in tasks:
        task.send_signal(number)
signal.signal(signal.SIGUSR1, forward)
signal.signal(signal.SIGTERM, forward)
left, codes = list(tasks), []
while left:
    pid, status = os.wait()
    task = next(t for t in left if t.pid == pid)
    left.remove(task)
    code = os.waitstatus_to_exitcode(status)
    codes.append(code if code >= 0 else 128 - code)
    if code:  # as --kill-on-bad-exit does
        for other in left:
            os.kill(other.pid, signal.SIGKILL)
sys.exit(max(codes))
"""
_SCONTROL = """\
#!/bin/bash
case $1 in
  show) echo 127.0.0.1 ;;
  requeue) echo "$2" >>"$FAKE_LOG.requeued" ;;
esac
"""


class FakeSlurm:
    """sbatch, srun, scontrol and squeue of a cluster of this machine, with two tasks."""

    def __init__(self, folder, environment=None):
        self.folder, self.log, self.environment = folder, folder / "log", environment or {}
        (folder / "bin").mkdir()
        for name, text in (
            ("srun", f"#!{sys.executable}\n{_SRUN}"),
            ("scontrol", _SCONTROL),
            ("squeue", "#!/bin/bash\necho ${FAKE_STATE:-RUNNING}\n"),
        ):
            (folder / "bin" / name).write_text(text)
            (folder / "bin" / name).chmod(0o755)

    def sbatch(self, script, **environment):
        names = ("JAX_", "SLURM_", "TRITON_")
        env = {name: value for name, value in os.environ.items() if not name.startswith(names)}
        env |= {"PATH": f"{self.folder / 'bin'}:{os.environ['PATH']}", "SLURM_JOB_NODELIST": "fake[1-2]"}
        env |= {"SLURM_JOB_ID": str(os.getpid()), "FAKE_TASKS": "2", "FAKE_LOG": str(self.log)}
        env |= {**self.environment, **environment}
        return subprocess.Popen(["bash", script], env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)

    def said(self, index):
        path = Path(f"{self.log}.{index}")
        return path.read_text() if path.exists() else ""

    @property
    def requeued(self):
        path = Path(f"{self.log}.requeued")
        return path.read_text().split() if path.exists() else []


def small_job(folder, steps):
    arguments = [
        f"--config={ROOT}/tests/chaos/config.py", "--config.data.source=synthetic", "--config.data.validation_path=",
        f"--config.workdir={folder}/run", f"--config.train.steps={steps}", "--config.eval.batches=0",
        "--config.eval.every_steps=0", "--config.checkpoint.every_steps=1000", "--nodes=2", "--platform=cpu",
        f"--out={folder}/job.sbatch",
    ]  # fmt: skip
    assert slurm.run(arguments) == 0
    return folder / "job.sbatch"


def test_two_processes_of_a_fake_slurm_train_to_the_end(tmp_path, compile_once):
    fake, job = FakeSlurm(tmp_path, compile_once), small_job(tmp_path, 4)
    process = fake.sbatch(job)
    out, _ = process.communicate(timeout=200)
    assert process.returncode == 0, out + fake.said(0) + fake.said(1)
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert lines[-1]["step"] == 4 and not fake.requeued
    assert "2 x cpu (cpu), 2 processes" in fake.said(0) and "expected" not in fake.said(0)
    assert re.search(r"^host +processes +devices a process", fake.said(0), re.M)
    assert "step" not in fake.said(1)  # process 0 alone prints
    assert "training: steps 1 to 4" in (tmp_path / "run" / "logs" / "rank-1" / "info.log").read_text()


def test_a_job_that_is_signalled_is_queued_again_and_goes_on(tmp_path, compile_once):
    fake, job = FakeSlurm(tmp_path, compile_once), small_job(tmp_path, 100_000)
    metrics = tmp_path / "run" / "metrics.jsonl"
    process = fake.sbatch(job)
    _wait_for(process, lambda: metrics.exists() and metrics.read_text().count("\n") > 3)
    process.send_signal(signal.SIGUSR1)  # as --signal=B:USR1@300 does
    out, _ = process.communicate(timeout=100)
    assert fake.requeued == [str(os.getpid())], out + fake.said(0) + fake.said(1)
    assert process.returncode in (75, 137), out
    done = json.loads(metrics.read_text().splitlines()[-1])["step"]
    assert f"stopped after step {done} of 100000; checkpoint {done} is whole" in fake.said(0)
    assert not list((tmp_path / "run").glob("requeue.*"))
    process = fake.sbatch(small_job(tmp_path, done + 2), SLURM_RESTART_COUNT="1")
    process.communicate(timeout=200)
    assert process.returncode == 0, fake.said(0) + fake.said(1)
    steps = [json.loads(line)["step"] for line in metrics.read_text().splitlines()]
    assert steps == list(range(1, done + 3)) and len(fake.requeued) == 1


def test_a_cancelled_job_stays_away(tmp_path):
    """Its processes are told to end too, and end as those of a job that is to be queued again."""
    fake = FakeSlurm(tmp_path)
    job = tmp_path / "job"
    text = slurm.script(slurm.plan([TINY, "--nodes=2", "--platform=cpu", f"--config.workdir={tmp_path}/run"]))
    job.write_text(re.sub(r"(?s)^exec .*?(?=^TASK)", 'touch "$REQUEUE_FILE"; exit 75\n', text, flags=re.M))
    for state, requeued in (("COMPLETING", 0), ("RUNNING", 1)):
        process = fake.sbatch(job, FAKE_STATE=state)
        process.communicate(timeout=30)
        assert process.returncode in (75, 137) and len(fake.requeued) == requeued, state


def _wait_for(process, holds, seconds=150):
    end = time.monotonic() + seconds
    while not holds():
        assert process.poll() is None and time.monotonic() < end, process.communicate(timeout=5)
        time.sleep(0.05)

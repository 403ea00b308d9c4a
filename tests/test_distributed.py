"""Several processes as one run: how they meet, and what is said of those that do not come."""

import concurrent.futures
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from hybrid_jax import cluster, distributed, signals
from hybrid_jax.cluster import Member
from hybrid_jax.errors import UserError
from tests.processes import free_port
from tests.test_supervisor import ends


def test_one_process_does_not_start_a_service():
    assert distributed.initialize(None) is False
    assert distributed.is_main()
    assert distributed.table() == ""
    distributed.leave(3)  # returns: there is nobody who would wait
    distributed.check_expected(0)
    distributed.check_expected(1)
    with pytest.raises(UserError, match=r"^--expected_devices: 8 expected, but there are 1: process 0: 1 x cpu$"):
        distributed.check_expected(8)


class _Device:
    def __init__(self, process, kind="AMD Instinct MI300X"):
        self.process_index, self.device_kind = process, kind


@pytest.fixture
def cluster_of(monkeypatch):
    """Makes this process believe that it is one of many: [(host, GPUs that jax sees there), ...]."""
    import jax

    def made(processes):
        monkeypatch.setattr(
            distributed, "members", [Member(host, "", 1, "rocm", "", "", gpus) for host, gpus in processes]
        )
        devices = [_Device(i) for i, (_, gpus) in enumerate(processes) for _ in range(gpus)]
        monkeypatch.setattr(jax, "devices", lambda: devices)
        monkeypatch.setattr(jax, "device_count", lambda: len(devices))
        monkeypatch.setattr(jax, "process_count", lambda: len(processes))

    return made


def test_the_table_of_hosts(cluster_of):
    cluster_of([("node1", 8), ("node2", 8)])
    assert distributed.table().splitlines() == [
        "host   processes  devices a process  devices                 kind",
        "-----------------------------------------------------------------",
        "node1          0                  8        8  AMD Instinct MI300X",
        "node2          1                  8        8  AMD Instinct MI300X",
    ]
    cluster_of([(f"n{i // 8:03}", 1) for i in range(64 * 8 - 1)])
    assert [line.split() for line in distributed.table().splitlines()[2:]] == [
        ["n000", "to", "n062", "(63", "hosts)", "0-503", "1", "504", "AMD", "Instinct", "MI300X"],
        ["n063", "504-510", "1", "7", "AMD", "Instinct", "MI300X"],
    ]


def test_devices_that_are_missing_are_told_by_process(cluster_of):
    cluster_of([("node1", 8), ("node2", 1)])
    with pytest.raises(UserError) as caught:
        distributed.check_expected(16)
    assert str(caught.value) == (
        "--expected_devices: 16 expected, but there are 9: process 0 (node1): 8 x AMD Instinct MI300X; "
        "process 1 (node2): 1 x AMD Instinct MI300X"
    )
    cluster_of([("node1", 8), ("node2", 8)])
    distributed.check_expected(16)


class _Client:
    """The part of jax's client that is used; what other processes would do is in `others`."""

    def __init__(self, others):
        self.values, self.others = {}, others

    def key_value_set(self, key, value):
        self.values[key] = value

    def wait_at_barrier(self, name, milliseconds):
        for index, said in self.others.items():
            self.values[f"{name}/{index}"] = "+" + said
        if len(self.key_value_dir_get(name + "/")) < 4:
            raise RuntimeError("DEADLINE_EXCEEDED: Barrier timed out.\nmore lines")

    def key_value_dir_get(self, folder):
        return [(key, value) for key, value in self.values.items() if key.startswith(folder)]

    def key_value_delete(self, folder):
        for key, _ in self.key_value_dir_get(folder):
            del self.values[key]


def _agree(client, said=""):
    return distributed._agree(client, 0, 4, said, "checkpoint 7", 2.5, "config.checkpoint.timeout_seconds")


def test_what_processes_say_is_known_to_all():
    client = _Client({1: "", 2: "disk full", 3: ""})
    assert _agree(client) == {2: "disk full"}
    assert _agree(client, "mine") == {0: "mine", 2: "disk full"}
    assert len(client.values) == 4  # of the last call alone
    assert distributed.agree("alone", "x") == {0: "alone"} and distributed.agree("", "x") == {}
    assert distributed.everywhere(True) and not distributed.everywhere(False)


@pytest.mark.parametrize(("others", "missing"), [({1: "", 3: ""}, "process 2 of 4"), ({2: "a"}, "processes 1,3 of 4")])
def test_processes_that_do_not_come_are_named(others, missing):
    with pytest.raises(cluster.MissingProcesses) as caught:
        _agree(_Client(others))
    said = f"checkpoint 7: {missing} did not arrive within 2.5 s (config.checkpoint.timeout_seconds); look at what"
    assert str(caught.value).startswith(said)
    assert caught.value.exit_code == signals.PEER_LOST_EXIT_CODE


def test_a_service_that_fails_is_one_line():
    class Broken(_Client):
        def wait_at_barrier(self, name, milliseconds):
            super().wait_at_barrier(name, milliseconds)
            raise RuntimeError("UNAVAILABLE: gone\nmore lines")

    with pytest.raises(UserError, match=r"the 4 processes did not meet: UNAVAILABLE: gone$"):
        _agree(Broken({1: "", 2: "", 3: ""}))


def _compared(values, monkeypatch):
    """What `check_alike` says in each process, a thread of this one."""
    import jax

    own, all_here, said = threading.local(), threading.Barrier(len(values), timeout=20), {}
    monkeypatch.setattr(jax, "process_index", lambda: own.index)
    monkeypatch.setattr(distributed, "members", [Member(f"n{i}", "", 1, "cpu", "", "", 0) for i in range(len(values))])

    def agree(text, doing):
        said[own.index] = text
        all_here.wait()
        found = {process: said[process] for process in sorted(said) if said[process]}
        all_here.wait()
        return found

    monkeypatch.setattr(distributed, "agree", agree)

    def process(index):
        own.index = index
        try:
            distributed.check_alike(values[index], "comparing", "start all with the same")
        except UserError as error:
            return str(error)
        return ""

    with concurrent.futures.ThreadPoolExecutor(len(values)) as pool:
        return list(pool.map(process, range(len(values))))


def test_what_differs_between_processes_is_named_to_all(monkeypatch):
    alike = {"config.model.remat": "none", "config.train.seed": 42, "config.train.steps": 8}
    assert _compared([alike] * 4, monkeypatch) == [""] * 4
    lines = _compared(
        [alike, {**alike, "config.train.seed": 7}, alike, {**alike, "config.train.steps": 9}], monkeypatch
    )
    said = "config.train.seed: 42 in processes 0,2-3 (n0, n2, n3); 7 in process 1 (n1); start all with the same"
    assert lines == [said] * 4
    lines = _compared([{"a": "x" * 5000}, {"a": "x" * 5000, "b": 1}], monkeypatch)
    assert lines == ["b: None in process 0 (n0); 1 in process 1 (n1); start all with the same"] * 2
    lines = _compared([{"a": i} for i in range(12)], monkeypatch)
    assert lines[11].startswith("a: 0 in process 0 (n0); 1 in process 1 (n1); ") and len(set(lines)) == 1


# ---- two processes, as `python launch.py` starts them ----

ROOT = Path(__file__).parents[1]


class Pair:
    """Two processes of one run on this machine, each a program of its own."""

    def __init__(self, folder, environment, *more, of_second=()):
        port = free_port()
        self.folder = folder
        arguments = [
            "--config=tests/chaos/config.py", "--platform=cpu", "--config.data.source=synthetic", "--num_processes=2",
            f"--coordinator_address=127.0.0.1:{port}", f"--config.workdir={folder}/run", "--heartbeat_seconds=10",
            "--config.train.steps=100000", "--config.eval.batches=0", "--config.eval.every_steps=0",
            "--config.checkpoint.every_steps=1000", *more,
        ]  # fmt: skip
        names = ("JAX_", "SLURM_", "OMPI_", "PMI_")
        kept = {name: value for name, value in os.environ.items() if not name.startswith(names)}
        environment = {**kept, **environment, "http_proxy": "http://127.0.0.1:9"}  # where nothing listens
        self.out = [folder / f"out.{index}" for index in range(2)]
        self.processes = []
        for index in range(2):
            with self.out[index].open("w") as out:
                command = [
                    sys.executable,
                    "launch.py",
                    *arguments,
                    f"--process_id={index}",
                    *(of_second if index else ()),
                ]
                self.processes.append(subprocess.Popen(command, cwd=ROOT, env=environment, stdout=out, stderr=out))

    def __enter__(self):
        return self

    def __exit__(self, *unused):
        for process in self.processes:
            process.kill()  # its trainer ends with it
            process.wait()

    def said(self, index):
        return self.out[index].read_text()

    def trainer(self, index):
        pid = self.processes[index].pid
        return int(Path(f"/proc/{pid}/task/{pid}/children").read_text().split()[0])

    def wait_for_steps(self, count):
        path = self.folder / "run" / "metrics.jsonl"
        end = time.monotonic() + 240
        while not (path.exists() and path.read_text().count("\n") >= count):
            assert time.monotonic() < end and None in [p.poll() for p in self.processes], self.said(0) + self.said(1)
            time.sleep(0.05)


@pytest.mark.parametrize("victim", [0, 1])
def test_one_that_dies_ends_the_other_with_a_line_that_names_it(victim, tmp_path, compile_once):
    with Pair(tmp_path, compile_once) as pair:
        pair.wait_for_steps(3)
        other, host = 1 - victim, socket.gethostname()
        trainers = [pair.trainer(index) for index in range(2)]
        pair.processes[victim].kill()
        began = time.monotonic()
        assert pair.processes[other].wait(60) == signals.PEER_LOST_EXIT_CODE, pair.said(other)
        assert time.monotonic() - began < 40  # 10 s of silence, and what a busy machine adds
        said = pair.said(other).splitlines()
        assert said[-1].startswith(
            f"error: process {victim} of 2 ({host}) is gone, so process {other} of 2 ended too; "
        )
        assert not [line for line in said if "Traceback" in line or "coordination" in line]
        assert "stack trace" in (tmp_path / "run" / "logs" / f"rank-{other}" / "error.log").read_text()
        assert all(map(ends, trainers))


@pytest.mark.slow
def test_one_that_compiles_for_much_longer_is_waited_for(tmp_path, compile_once):
    """CPUs' collectives give up after 30 s."""
    more = ("--heartbeat_seconds=120", "--config.train.steps=3", "--config.checkpoint.every_steps=0")
    with Pair(tmp_path, compile_once, *more) as pair:
        info, end = tmp_path / "run" / "logs" / "rank-1" / "info.log", time.monotonic() + 120
        while not (info.exists() and "compiling the training step" in info.read_text()):
            assert time.monotonic() < end and pair.processes[0].poll() is None, pair.said(0)
            time.sleep(0.01)
        trainer = pair.trainer(1)
        os.kill(trainer, signal.SIGSTOP)
        time.sleep(45)
        os.kill(trainer, signal.SIGCONT)
        assert [process.wait(60) for process in pair.processes] == [0, 0], pair.said(0) + pair.said(1)


_LEAVING = """
import sys, time
from hybrid_jax import cluster, distributed, platform, supervisor
platform.prepare("cpu")
index, port = int(sys.argv[1]), sys.argv[2]
distributed.initialize(cluster.find(coordinator_address=f"127.0.0.1:{port}", num_processes=2, process_id=index))
if index == 1:
    supervisor.flush = lambda: time.sleep(1)  # a busy machine
distributed.leave(2)
"""


def test_the_last_to_leave_is_not_ended_by_the_first():
    """Process 0 takes jax's service with it, which ends those that are still there."""
    port = str(free_port())
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""}
    processes = [
        subprocess.Popen([sys.executable, "-c", _LEAVING, str(index), port], cwd=ROOT, env=environment)
        for index in range(2)
    ]
    try:
        assert [process.wait(60) for process in processes] == [2, 2]
    finally:
        for process in processes:
            process.kill()


def test_an_error_in_one_process_is_not_waited_out_by_it(tmp_path, compile_once):
    with Pair(tmp_path, compile_once, "--expected_devices=3") as pair:
        assert [process.wait(60) for process in pair.processes] == [2, 2], pair.said(0) + pair.said(1)
        host = socket.gethostname()
        line = f"error: --expected_devices: 3 expected, but there are 2: processes 0-1 ({host}): 1 x cpu\n"
        assert pair.said(0) == line == pair.said(1)


def test_processes_with_other_configs_do_not_train_together(tmp_path, compile_once):
    host = socket.gethostname()
    with Pair(tmp_path, compile_once, of_second=("--config.train.seed=7",)) as pair:
        assert [process.wait(60) for process in pair.processes] == [2, 2], pair.said(0) + pair.said(1)
        line = f"error: config.train.seed: 3 in process 0 ({host}); 7 in process 1 ({host}); start all processes with "
        assert pair.said(0) == line + "the same config\n" == pair.said(1)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out.0", "out.1"]


@pytest.mark.slow
def test_processes_with_other_folders_do_not_train_together(tmp_path, compile_once):
    host = socket.gethostname()
    with Pair(tmp_path, compile_once, of_second=(f"--config.workdir={tmp_path}/local",)) as pair:
        assert [process.wait(60) for process in pair.processes] == [2, 2], pair.said(0) + pair.said(1)
        line = (
            f"error: config.workdir: {tmp_path}/run of process 0 ({host}) is not what process 1 ({host}) sees there; "
        )
        assert pair.said(0).startswith(line) and pair.said(0) == pair.said(1) and pair.said(0).count("\n") == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out.0", "out.1"]


def test_a_signal_to_one_parent_stops_both(tmp_path, compile_once):
    with Pair(tmp_path, compile_once, f"--requeue_file={tmp_path}/again") as pair:
        pair.wait_for_steps(3)
        pair.processes[1].send_signal(signal.SIGTERM)
        assert [process.wait(60) for process in pair.processes] == [75, 75], pair.said(0) + pair.said(1)
        assert "is whole; run the same command to go on from there" in pair.said(0)
        assert "SIGTERM: stopping after this step" in pair.said(1) and "step 1" not in pair.said(1)
        assert (tmp_path / "again").exists()
        logs = tmp_path / "run" / "logs"
        assert re.search(
            r"^\d{4}-\d\d-\d\d \d\d:\d\d:\d\d INFO    step +1/", (logs / "rank-1/info.log").read_text(), re.M
        )
        assert not (logs / "rank-0" / "error.log").exists()

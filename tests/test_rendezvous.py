"""How processes meet, on this machine's loopback: all of them, some of them, and others that have no business there."""

import concurrent.futures
import contextlib
import json
import os
import re
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from hybrid_jax import rendezvous, signals
from hybrid_jax.cluster import Group, MissingProcesses
from hybrid_jax.errors import UserError
from tests.processes import free_port

ROOT = Path(__file__).parents[1]


class Run:
    """A run's processes, each a thread; the pid that they tell is their number's."""

    def __init__(self, count, hosts=()):
        self.address, self.count, self.hosts = f"127.0.0.1:{free_port()}", count, hosts
        self.told = []
        self.pool = concurrent.futures.ThreadPoolExecutor(64)

    def start(self, index, seconds=30.0, host="", count=0):
        group = Group(self.address, count or self.count, index, hosts=tuple(self.hosts))
        host = host or f"n{index}.cluster"
        return self.pool.submit(rendezvous.meet, group, host, f"{index}!", seconds, self.told.append)

    def connect(self):
        end = time.monotonic() + 10
        while True:
            with contextlib.suppress(ConnectionRefusedError):
                return socket.create_connection(("127.0.0.1", int(self.address.rpartition(":")[2])), 10)
            assert time.monotonic() < end
            time.sleep(0.01)


def test_all_learn_what_all_say_whoever_comes_first():
    run = Run(40)
    others = [run.start(i) for i in range(39, 20, -1)]
    time.sleep(0.3)
    everyone = others + [run.start(i) for i in range(21)]
    said = tuple(f"{i}!" for i in range(40))
    assert [each.result(30) for each in everyone] == [said] * 40 and not run.told
    with socket.create_server(("127.0.0.1", int(run.address.rpartition(":")[2]))):
        pass  # the port is free for jax's service


@pytest.mark.parametrize(
    ("hosts", "named"),
    [
        ([], "processes 1,4 of 5"),
        (["n0", "n1", "n2", "n3", "n4"], "processes 1,4 of 5 (n1, n4)"),
        (["n0", "n2", "n3", "n1", "n4"], "processes 1,4 of 5"),  # the launcher's order is another
    ],
)
def test_those_that_do_not_come_are_named_to_all(hosts, named, monkeypatch):
    monkeypatch.setattr(rendezvous, "_FIRST_WORD", 0.5)
    run = Run(5, hosts)
    found = [run.start(0, 30), run.start(2, 1.5), run.start(3, 30)]
    for each in found:  # when the first one gives up
        with pytest.raises(MissingProcesses) as caught:
            each.result(20)
        assert str(caught.value).startswith(f"{named} did not come within ") and caught.value.exit_code == 69
        assert str(caught.value).endswith(f"see that all 5 are started, each with a number of its own, and reach "
                                          f"{run.address}")  # fmt: skip
    assert re.fullmatch(rf"waiting for {re.escape(named)}: \d s more \(--join_seconds\)", run.told[0]), run.told


def test_process_0_that_does_not_come_is_named():
    run = Run(2, ["n0", "n1"])
    with pytest.raises(MissingProcesses, match=r"^process 0 of 2 \(n0\) did not answer at .* Connection refused; see"):
        run.start(1, 0.5).result(20)
    with socket.create_server(("127.0.0.1", int(run.address.rpartition(":")[2]))) as server:

        def serve():
            for reply in (b"SSH-2.0-OpenSSH_9\r\n", b"[]\n", b"") * 20:
                connection, _ = server.accept()
                with connection:
                    connection.recv(1000)
                    connection.sendall(reply)

        threading.Thread(target=serve, daemon=True).start()
        with pytest.raises(
            MissingProcesses, match=r"did not answer at .*: (something else listens|what listens there ha)"
        ):
            run.start(1, 1).result(20)


def test_an_address_that_no_host_has_is_told_early_with_what_to_do(monkeypatch):
    def unknown(*unused):
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(rendezvous, "_FIRST_WORD", 0.3)
    monkeypatch.setattr(socket, "create_connection", unknown)
    run = Run(2)
    why = "Name or service not known; give a name that every host resolves, or process 0's IP address"
    with pytest.raises(MissingProcesses) as caught:
        run.start(1, 1.0).result(20)
    assert f"did not answer at {run.address} within 1 s (--join_seconds): {why}" in str(caught.value)
    assert len(run.told) == 1 and run.told[0].startswith(f"waiting for process 0 at {run.address} ({why} ")


def test_a_number_given_twice_and_another_count_are_turned_away():
    run = Run(3)
    first, one = run.start(0), run.start(1, host="a")
    with pytest.raises(UserError, match=r"^process 1 is there already, on a; give each process a number of its own"):
        time.sleep(0.3)
        twin = {"index": 1, "count": 3, "host": "b", "pid": 7, "seconds": 9, "said": "x"}
        with run.connect() as connection:
            rendezvous._send(connection, twin)
            raise UserError(json.loads(connection.makefile().readline())["refused"])
    with pytest.raises(UserError, match="process 2 takes the run for one of 4 processes, and process 0 for one of 3;"):
        run.start(2, count=4).result(20)
    assert [line[:44] for line in run.told] == [
        "warning: process 1 on b was turned away: it ", "warning: process 2 on n2.cluster was turned "
    ]  # fmt: skip
    last = run.start(2)
    assert first.result(20) == one.result(20) == last.result(20) == ("0!", "1!", "2!")


def test_one_that_left_may_come_again_and_strangers_are_nobody():
    run = Run(3)
    first = run.start(0)
    hello = {"index": 1, "count": 3, "host": "a", "pid": 7, "seconds": 99, "said": "before"}
    strangers = [run.connect() for _ in range(6)]  # the last says nothing
    for stranger, said in zip(strangers, (b"GET / HTTP/1.1\r\n", b"[1]\n", b"{}\n", b"x" * 99_999), strict=False):
        stranger.sendall(said)
    strangers[4].sendall(json.dumps({**hello, "index": 3}).encode() + b"\n")
    with run.connect() as connection:
        rendezvous._send(connection, hello)
        time.sleep(0.2)
    time.sleep(0.2)
    others = [run.start(1), run.start(2)]
    assert all(each.result(20) == ("0!", "1!", "2!") for each in (first, *others))
    for stranger in strangers:
        stranger.close()


def test_a_port_that_is_taken_is_one_line(monkeypatch):
    monkeypatch.setattr(rendezvous, "_LISTEN_SECONDS", 0.3)
    run = Run(2)
    with (
        socket.create_server(("", int(run.address.rpartition(":")[2]))),
        pytest.raises(UserError, match=r"^process 0 cannot listen at 127.*: Address already in use; is another run"),
    ):
        run.start(0).result(20)


def test_a_launch_that_misses_one_names_it(tmp_path):
    """Three of four real processes, of which Slurm says where they run."""
    port = free_port()
    names = ("JAX_", "SLURM_", "OMPI_", "PMI_")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(names)}
    host = socket.gethostname()
    slurm = {
        "SLURM_STEP_NODELIST": f"{host},far007", "SLURM_STEP_TASKS_PER_NODE": "3,1",
        "SLURM_STEP_NUM_TASKS": "4",
    }  # fmt: skip
    command = [
        sys.executable, "launch.py", "--config=tests/chaos/config.py", "--config.data.source=synthetic",
        "--platform=cpu", f"--coordinator_address=127.0.0.1:{port}", f"--config.workdir={tmp_path}/run",
        "--join_seconds=12",
    ]  # fmt: skip
    processes = [
        subprocess.Popen(command, cwd=ROOT, env={**kept, **slurm, "SLURM_PROCID": str(i)}, text=True,
                         stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        for i in range(3)
    ]  # fmt: skip
    ended = [(*process.communicate(timeout=120), process.returncode) for process in processes]
    line = "error: process 3 of 4 (far007) did not come within 12 s (--join_seconds); see that all 4 are started"
    for out, err, code in ended:
        assert not out and err.startswith(line) and err.count("\n") == 1, ended
        assert code == signals.PEER_LOST_EXIT_CODE

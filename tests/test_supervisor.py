"""The parent of a trainer: exit codes, signals, no orphan, and the runtime's abort as one line."""

import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hybrid_jax import signals, supervisor

ROOT = Path(__file__).parents[1]
_PARENT = """
import sys
from pathlib import Path
from hybrid_jax import supervisor
from hybrid_jax.cluster import Group
from hybrid_jax.rank_logs import RankLogs
index, folder, code = int(sys.argv[1]), sys.argv[2], sys.argv[3]
command = [sys.executable, "-c", "from hybrid_jax import supervisor; assert supervisor.attach()\\n" + code]
sys.exit(supervisor.run(command, Group("127.0.0.1:1", 4, index), RankLogs(Path(folder), index)))
"""


def start(index, folder, code):
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.Popen(
        [sys.executable, "-c", _PARENT, str(index), str(folder), code],
        env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT,
    )  # fmt: skip


def ends(pid, seconds=20):
    """Whether a process ends in time; one that nobody waited for has."""
    end = time.monotonic() + seconds
    while Path(f"/proc/{pid}/stat").exists() and time.monotonic() < end:
        if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX":
            return True
        time.sleep(0.01)
    return time.monotonic() < end


def ended(process):
    out, err = process.communicate(timeout=60)
    return process.returncode, out, err


@pytest.mark.parametrize("code", [0, 2, 75])
def test_the_exit_code_and_the_output_are_the_trainers(code, tmp_path):
    what = f"import sys; print('hello'); print('told', file=sys.stderr); sys.exit({code})"
    assert ended(start(0, tmp_path, what)) == (code, "hello\n", "told\n")
    assert not list(tmp_path.iterdir())


def test_processes_but_the_first_print_into_the_log(tmp_path):
    what = (
        "import sys; print('hello'); print('I1130 11:00:00.123456 7 a.cc:3] noise', file=sys.stderr); sys.exit('bad')"
    )
    assert ended(start(3, tmp_path, what)) == (1, "", "bad\n")
    info = (tmp_path / "rank-3" / "info.log").read_text()
    assert re.search(r"^\d{4}-\d\d-\d\d \d\d:\d\d:\d\d INFO    hello$", info, re.M)
    assert re.search(r" INFO    I1130 11:00:00.123456 7 a.cc:3\] noise$", info, re.M)


def test_a_trainer_that_was_killed_is_told(tmp_path):
    code, _, err = ended(start(2, tmp_path, "import os; os.kill(os.getpid(), 9)"))
    assert code == 137
    assert err.startswith(f"error: process 2 of 4, on {socket.gethostname()}, was ended by SIGKILL; the machine may")
    assert err.count("\n") == 1
    assert "was ended by SIGKILL" in (tmp_path / "rank-2" / "error.log").read_text()


_WAITS = """
import os, signal, sys, time
def heard(number, frame):
    os.write(1, f"{signal.Signals(number).name}\\n".encode())  # print may be what the signal interrupts
    if number == signal.SIGTERM:
        sys.exit(75)
for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
    signal.signal(number, heard)
print(os.getpid(), flush=True)
while True:
    time.sleep(60)
"""


def test_signals_reach_the_trainer(tmp_path):
    with start(0, tmp_path, _WAITS) as process:
        assert int(process.stdout.readline()) != process.pid
        for number in (signal.SIGUSR1, signal.SIGINT, signal.SIGUSR1, signal.SIGTERM):
            process.send_signal(number)
            assert process.stdout.readline() == f"{number.name}\n"
        assert process.wait(20) == 75


def test_a_trainer_does_not_outlive_its_parent(tmp_path):
    with start(0, tmp_path, _WAITS) as process:
        trainer = int(process.stdout.readline())
        os.kill(trainer, 0)
        process.kill()
        assert ends(trainer)


def test_without_a_parent_there_is_nothing_to_attach_to(monkeypatch):
    monkeypatch.delenv(supervisor.VARIABLE, raising=False)
    assert supervisor.attach() is False
    supervisor.tell(["host"])  # to nobody


# ---- the runtime's abort (jaxlib 0.10.2 and 0.11.2), stack traces cut short ----

_STACK = """\
*** Check failure stack trace: ***
    @     0x7f1d5e440634  absl::lts_20260107::log_internal::LogMessage::SendToLog()
Fatal Python error: Aborted
"""
_FATAL = """\
F1130 12:01:20.485906   18121 client.h:80] Terminating process because the JAX distributed service detected fatal \
errors. This most likely indicates that another task died; see the other task logs for more details. absl::Status: """
_POLLED = """\
E1130 12:01:20.485772   18121 coordination_service_agent.cc:289] Polled an error from coordination service (this can \
be an error from this or another task).
"""
_SILENT = """\
UNAVAILABLE: The following tasks are unhealthy (stopped sending heartbeats):
{}
The tasks have crashed. Check the task logs for an earlier error, or scheduler events (e.g. preemption, eviction) to \
debug further."""
_PROPAGATED = """\
E1130 12:01:20.485312   18110 coordination_service.cc:1549] Use error polling to propagate the following \
error to all tasks: """
_PREEMPTION = """\
W1130 12:01:20.485312   18110 preemption_sync_manager.cc:120] Failed to retrieve preemption notice: UNAVAILABLE: Failed
Additional GRPC error information from remote target coordination_service while calling GetKeyValue:
:UNKNOWN:Error received from peer  {grpc_status:14, grpc_message:"Socket closed"}. This is only expected if one of
"""
_TRACE = """\
=== Source Location Trace: ===
external/xla+/xla/pjrt/distributed/coordination/coordination_service.cc:232

"""
_NO_ANSWER = """\
UNAVAILABLE: Failed to send RPC to coordination service. Either the leader task was preempted/died/restarted \
unexpectedly or this task is experiencing network issues.
Additional GRPC error information from remote target coordination_service while calling \
/xla.coordination.CoordinationService/PollForError:
:UNKNOWN:Error received from peer  {grpc_message:"Socket closed", grpc_status:14}
"""


def _died(*tasks):
    silent = _SILENT.format("\n".join(tasks))
    rpc = "\n\nRPC: /xla.coordination.CoordinationService/PollForError [type.googleapis.com/x='']\n"
    return f"{_PROPAGATED}{silent} [type.googleapis.com/x='']\n{_TRACE}{_POLLED}{_FATAL}{silent}{rpc}{_TRACE}{_STACK}"


def _late(call):
    rpc = f"DEADLINE_EXCEEDED: Deadline Exceeded\n\nRPC: /xla.coordination.CoordinationService/{call}\n"
    return _FATAL + rpc + _STACK


_CLOSED = _PREEMPTION + _POLLED + _FATAL + _NO_ANSWER + _STACK
_ABORTS = """
import os, sys
from hybrid_jax import supervisor
supervisor.tell(["node1", "node1", "node2", "node3"] if {told} else [])
print("before", file=sys.stderr)
sys.stderr.write({text!r})
sys.stderr.flush()
os.abort()
"""


@pytest.mark.parametrize(
    ("index", "text", "told", "said"),
    [
        (0, _died("2"), True, "process 2 of 4 (node2) is gone, so process 0 of 4 ended too; look at what"),
        (1, _died("2", "3"), True, "processes 2-3 of 4 (node2, node3) are gone, so process 1 of 4 ended"),
        (0, _died("/job:jax_worker/replica:0/task:3"), True, "process 3 of 4 (node3) is gone"),
        (3, _CLOSED, True, "process 0 of 4 (node1) is gone, so process 3 of 4 ended too"),
        (3, _late("Heartbeat"), True, "process 0 of 4 (node1) is gone"),
        (3, _died("3"), True, "process 3 of 4 was silent for too long, as when it is suspended"),
        (3, _CLOSED, False, "process 0 of 4 is gone"),
        (0, _late("RegisterTask"), False, "process 0 of 4 waited for the others in vain (--join_seconds)"),
        (2, _late("RegisterTask"), False, "process 2 of 4 waited for process 0 at 127.0.0.1:1 and the"),
    ],
)  # fmt: skip
def test_an_abort_of_the_runtime_is_one_line(index, text, told, said, tmp_path):
    code, _, err = ended(start(index, tmp_path, _ABORTS.format(text=text, told=told)))
    assert code == signals.PEER_LOST_EXIT_CODE
    before, line = err.splitlines()
    assert before == "before" and line.startswith(f"error: {said}")
    kept = (tmp_path / f"rank-{index}" / "error.log").read_text()
    assert "LogMessage::SendToLog" in kept and said in kept


def test_other_aborts_keep_their_text(tmp_path):
    text = "F1130 12:00:00.000000 7 buffer.cc:3] Check failed: a == b\n" + _STACK
    code, _, err = ended(start(0, tmp_path, _ABORTS.format(text=_POLLED + text, told=False)))
    assert code == 134
    lines = err.splitlines()
    assert all(line in lines for line in (*text.splitlines(), _POLLED.strip()))
    assert lines[-1].endswith("was ended by SIGABRT")
    # What the service says is no news where the trainer then ends as it should.
    quiet = _ABORTS.replace("os.abort()", "sys.exit(0)").format(text=_POLLED + "after\n", told=False)
    assert ended(start(0, tmp_path, quiet)) == (0, "", "before\nafter\n")

"""A parent beside each trainer of a run of several processes. No jax here.

jax's coordination service ends a process whose peer died by aborting it, from C++, with pages of text. The parent keeps
that text for the log and says in one line which process is gone and on which host. It passes signals on to the trainer
and hands its exit code through; the trainer ends when the parent does, however that ended.
"""

from __future__ import annotations

import collections
import ctypes
import dataclasses
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from typing import IO

from hybrid_jax import signals
from hybrid_jax.cluster import Group, on_hosts
from hybrid_jax.rank_logs import RankLogs

VARIABLE = "HYBRID_JAX_SUPERVISOR"  # of the trainer: its parent's number, and the pipe for `tell`
_PR_SET_PDEATHSIG = 1
_OUTPUT_SECONDS = 5.0  # for the last lines of a trainer that has ended


# ---- in the trainer ----------------------------------------------------------------------------------------------

_pipe = -1


def attach() -> bool:
    """Ties this process to its supervisor, if it has one: it is killed when that ends. Whether it has one."""
    global _pipe
    parent, _, pipe = os.environ.pop(VARIABLE, "").partition(":")
    if not parent:
        return False
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != int(parent):  # it ended before that
        os._exit(128 + signal.SIGKILL)
    _pipe = int(pipe)
    os.set_inheritable(_pipe, False)
    return True


def tell(hosts: Sequence[str]) -> None:
    """Tells the supervisor, if there is one, on which host each process runs."""
    global _pipe
    if _pipe >= 0:
        with open(_pipe, "w", encoding="utf-8") as file:
            json.dump(list(hosts), file)
        _pipe = -1


def flush() -> None:
    """Of what is printed, before an end that skips it."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            pass


# ---- what the runtime prints -------------------------------------------------------------------------------------

# A line of absl's log in C++: level, month and day, time, thread, file, line.
_RUNTIME_LINE = re.compile(r"^([IWEF])\d{4} \d\d:\d\d:\d\d\.\d+ +\d+ \S+:\d+\] ")
_OF_THE_SERVICE = re.compile(r"coordination_service|coordination service|preemption_sync|JAX distributed service", re.I)
_LEVELS = {"I": "INFO", "W": "WARNING", "E": "ERROR", "F": "ERROR"}
# The numbers of silent processes stand on lines of their own, or in what older versions call tasks.
_SILENT = re.compile(r"tasks are unhealthy \(stopped sending heartbeats\):\n((?:(?:\d+|/job:\S+)\n)+)")
_NUMBER = re.compile(r"(?:^|/task:)(\d+)$", re.MULTILINE)
_NO_ANSWER = re.compile(r"Failed to send RPC to coordination service|RPC: \S+/(?:Heartbeat|PollForError)\b")
_NOT_MET = re.compile(r"RPC: \S+/RegisterTask\b|cluster registration failed")


class RuntimeText:
    """Takes a trainer's stderr line by line and holds back what the coordination service says, until it is known
    whether that is what ended the trainer."""

    def __init__(self) -> None:
        self.held: collections.deque[str] = collections.deque(maxlen=20_000)  # a line a process
        self._fatal = self._holding = False

    def passes(self, line: str) -> bool:
        """Whether `line` is to be shown now."""
        found = _RUNTIME_LINE.match(line)
        if self._fatal and not found:  # the rest of the message, and Python's account of the abort
            self.held.append(line)
            return False
        if found:
            self._fatal = self._fatal or (found[1] == "F" and bool(_OF_THE_SERVICE.search(line)))
            self._holding = self._fatal or bool(_OF_THE_SERVICE.search(line))
        elif self._holding and not _continues(line):
            self._holding = False
        if self._holding:
            self.held.append(line)
        return not self._holding

    @property
    def aborted(self) -> bool:
        """Whether the service ended the process."""
        return self._fatal

    def gone(self, own: int) -> list[int]:
        """Numbers of the processes that it says are gone, for the process `own`; [] if it names none. Where it could
        not ask the service that is process 0, which runs it."""
        text = "\n".join(self.held) + "\n"
        if listed := _SILENT.search(text):
            return sorted({int(number) for number in _NUMBER.findall(listed[1])})
        return [0] if own and _NO_ANSWER.search(text) else []

    @property
    def not_met(self) -> bool:
        """Whether the processes did not all come to the start."""
        return bool(_NOT_MET.search("\n".join(self.held)))


def _continues(line: str) -> bool:
    """Whether a line without a head belongs to a message of the service before it."""
    return (
        bool(re.match(r"\d+$|/job:|The tasks have crashed|RPC: |Additional GRPC|===|external/|:|\s", line)) or not line
    )


# ---- in the parent -----------------------------------------------------------------------------------------------


@dataclasses.dataclass
class _Told:
    hosts: Sequence[str] = ()


def run(arguments: Sequence[str], group: Group, logs: RankLogs) -> int:
    """Runs the trainer, a program with its arguments, as process `group.index` of the run; returns the exit code.

    The trainer's own where it ended by itself, signals.PEER_LOST_EXIT_CODE where the others' end ended it, 128 + N
    after signal N. What process 0 prints goes where this process prints; of the others only stderr does, and what they
    print goes into the log.
    """
    signals.AT_ONCE.end()
    with signals.Forward().listen() as forward:
        reading, writing = os.pipe()
        environment = {**os.environ, VARIABLE: f"{os.getpid()}:{writing}"}
        trainer = subprocess.Popen(
            arguments,
            env=environment,
            pass_fds=[writing],
            stdout=None if group.index == 0 else subprocess.PIPE,
            stderr=subprocess.PIPE,
            process_group=0,  # Ctrl-C of a terminal comes from here alone
        )
        os.close(writing)
        forward.to(trainer.pid)
        text, told = RuntimeText(), _Told()
        assert trainer.stderr
        threads = [_thread(_read_told, reading, told), _thread(_read_stderr, trainer.stderr, text, logs, group.index)]
        if trainer.stdout:
            threads.append(_thread(_read_stdout, trainer.stdout, logs))
        code = trainer.wait()
        for thread in threads:
            thread.join(_OUTPUT_SECONDS)
    return _verdict(code, text, told, group, logs)


def _thread(target: Callable[..., None], *arguments: object) -> threading.Thread:
    made = threading.Thread(target=target, args=arguments, daemon=True)
    made.start()
    return made


def _read_told(pipe: int, told: _Told) -> None:
    with open(pipe, encoding="utf-8", errors="replace") as file:
        said = file.read()
    if said:
        told.hosts = json.loads(said)


def _read_stderr(stream: IO[bytes], text: RuntimeText, logs: RankLogs, index: int) -> None:
    for raw in stream:
        line = raw.decode(errors="replace").rstrip("\n")
        shown, found = text.passes(line), _RUNTIME_LINE.match(line)
        if found or not shown:
            logs.write(_LEVELS[found[1]] if found else "ERROR", line)
        if shown and (index == 0 or not found or found[1] in "EF"):
            _print(line)


def _read_stdout(stream: IO[bytes], logs: RankLogs) -> None:
    for raw in stream:
        logs.write("INFO", raw.decode(errors="replace").rstrip("\n"))


def _verdict(code: int, text: RuntimeText, told: _Told, group: Group, logs: RankLogs) -> int:
    """The exit code, after a line that says why, where the trainer could not say it."""
    here = f"process {group.index} of {group.count}"
    gone = text.gone(group.index)
    if text.aborted and group.index in gone:
        _tell(f"{here} was silent for too long, as when it is suspended, and the others ended without it", logs)
    elif text.aborted and gone:
        them = "it" if len(gone) == 1 else "they"
        _tell(
            f"{on_hosts(gone, told.hosts, group.count)} {'is' if len(gone) == 1 else 'are'} gone, so {here} ended too; "
            f"look at what {them} printed last, and start all again: they go on from the newest checkpoint",
            logs,
        )
    elif text.aborted and text.not_met:
        others = "the others" if group.index == 0 else f"process 0 at {group.address} and the others"
        _tell(
            f"{here} waited for {others} in vain (--join_seconds); see that all {group.count} are started, each with "
            f"a number of its own, and reach {group.address}",
            logs,
        )
    elif code:
        for line in text.held:
            _print(line)
    if text.aborted and (gone or text.not_met):
        return signals.PEER_LOST_EXIT_CODE
    if code >= 0:
        return code
    name = signal.Signals(-code).name
    hint = "; the machine may have run out of memory" if -code == signal.SIGKILL else ""
    _tell(f"{here}, on {socket.gethostname()}, was ended by {name}{hint}", logs)
    return 128 - code


def _tell(line: str, logs: RankLogs) -> None:
    logs.write("ERROR", line)
    _print(f"error: {line}")


def _print(line: str) -> None:
    try:
        os.write(2, f"{line}\n".encode())
    except OSError:
        pass

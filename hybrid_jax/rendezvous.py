"""How the processes of a run meet, before jax's coordination service starts: that one does not say who did not come.

Process 0 listens where the service will; every other process connects, says in a line of JSON who it is and waits for
an answer, also in one line: what all of them said, or which of them are missing. Then the port is free again. No jax
here.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import json
import os
import selectors
import socket
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from hybrid_jax.cluster import Group, MissingProcesses, on_hosts
from hybrid_jax.errors import UserError

_BIND_VARIABLE = "JAX_COORDINATOR_BIND_ADDRESS"  # jax's, for where its service listens
_LISTEN_SECONDS = 10.0  # for the process 0 of a run that is ending to let go of the port
_CONNECT_SECONDS = 10.0
_ANSWER_SECONDS = 10.0  # for an answer to get through, once it is given
_AGAIN_SECONDS = 0.2
_FIRST_WORD, _NEXT_WORDS = 15.0, 60.0  # seconds after which process 0 says for whom it waits
_LONGEST = 1 << 16  # bytes that a process may say
_BACKLOG = 4096


def meet(
    group: Group, host: str, said: str, seconds: float, tell: Callable[[str], None] | None = None
) -> tuple[str, ...]:
    """What each process of `group` says, by number, once all are there; `said` is this one's, on `host`.

    tell: takes lines for the user while a process waits (default: to stderr). Raises MissingProcesses, the same line in
    every process, where not all are there within `seconds` of the first one's start; UserError where process 0 cannot
    listen, or has another of this number already.
    """
    if group.index == 0:
        return _Host(group, host, said, seconds, tell or _to_stderr).run()
    return _join(group, host, said, seconds, tell or _to_stderr)


def _to_stderr(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _split(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)


# ---- process 0 ---------------------------------------------------------------------------------------------------


@dataclasses.dataclass
class _Arrival:
    """A process that is there and waits for an answer; process 0 itself has no connection."""

    said: str
    host: str
    pid: int
    gives_up: float  # time.monotonic()
    connection: socket.socket | None = None


class _Host:
    def __init__(self, group: Group, host: str, said: str, seconds: float, tell: Callable[[str], None]):
        self.group, self.seconds, self.tell = group, seconds, tell
        self.began = time.monotonic()
        self.here = {0: _Arrival(said, host, os.getpid(), self.began + seconds)}
        self.selector = selectors.DefaultSelector()

    def run(self) -> tuple[str, ...]:
        next_word = self.began + _FIRST_WORD
        with _listening(self.group.address) as server, contextlib.ExitStack() as stack:
            stack.callback(self._close)
            self.selector.register(server, selectors.EVENT_READ, self._accept)
            while len(self.here) < self.group.count:
                now, end = time.monotonic(), min(arrival.gives_up for arrival in self.here.values())
                if now >= end:
                    line = self._missing_line()
                    self._answer({"missing": line})
                    raise MissingProcesses(line)
                if now >= next_word:
                    self.tell(f"waiting for {self._missing()}: {end - now:.0f} s more (--join_seconds)")
                    next_word = now + _NEXT_WORDS
                for key, _ in self.selector.select(min(end, next_word) - now):
                    key.data(key.fileobj)
            said = tuple(self.here[i].said for i in range(self.group.count))
            self._answer({"said": said})
        return said

    def _missing(self) -> str:
        missing = [i for i in range(self.group.count) if i not in self.here]
        hosts = self.group.hosts
        # A launcher's list may have the processes in another order, or other names.
        if any(_short(hosts[i]) != _short(arrival.host) for i, arrival in self.here.items() if i < len(hosts)):
            hosts = ()
        return on_hosts(missing, hosts, self.group.count)

    def _missing_line(self) -> str:
        return (
            f"{self._missing()} did not come within {self.seconds:g} s (--join_seconds); see that all "
            f"{self.group.count} are started, each with a number of its own, and reach {self.group.address}"
        )

    def _accept(self, server: socket.socket) -> None:
        with contextlib.suppress(OSError):  # gone again
            connection, _ = server.accept()
            connection.setblocking(False)
            buffer = bytearray()
            self.selector.register(connection, selectors.EVENT_READ, lambda found: self._read(found, buffer))

    def _read(self, connection: socket.socket, buffer: bytearray) -> None:
        try:
            received = connection.recv(_LONGEST)
        except BlockingIOError:
            return
        except OSError:
            received = b""
        buffer += received
        if not received or len(buffer) > _LONGEST:
            self._drop(connection)
        elif buffer.endswith(b"\n"):
            self._hear(connection, bytes(buffer))

    def _hear(self, connection: socket.socket, line: bytes) -> None:
        hello = _parsed(line)
        try:
            index, count, host = int(hello["index"]), int(hello["count"]), str(hello["host"])
            gives_up = time.monotonic() + float(hello["seconds"])
            arrival = _Arrival(str(hello["said"]), host, int(hello["pid"]), gives_up, connection)
            if index not in range(count):
                raise ValueError(index)
        except (KeyError, TypeError, ValueError):  # no process of a run
            self._drop(connection)
            return
        other = self.here.get(index)
        if count != self.group.count:
            problem = f"takes the run for one of {count} processes, and process 0 for one of {self.group.count}"
        elif other and (other.host, other.pid) != (host, arrival.pid):
            problem = f"is there already, on {other.host}"
        else:
            if other and other.connection:
                self._drop(other.connection)
            self.here[index] = arrival
            return
        self.tell(f"warning: process {index} on {host} was turned away: it {problem}")
        _send(connection, {"refused": f"process {index} {problem}; give each process a number of its own, and all the "
                           "same number of processes"})  # fmt: skip
        self._drop(connection)

    def _drop(self, connection: socket.socket) -> None:
        self.selector.unregister(connection)
        connection.close()
        gone = [index for index, arrival in self.here.items() if arrival.connection is connection]
        for index in gone:  # it may come again
            del self.here[index]

    def _answer(self, answer: dict[str, Any]) -> None:
        for arrival in self.here.values():
            if arrival.connection:
                _send(arrival.connection, answer)

    def _close(self) -> None:
        for key in list(self.selector.get_map().values()):
            if isinstance(key.fileobj, socket.socket):
                key.fileobj.close()
        self.selector.close()


def _short(host: str) -> str:
    return host.partition(".")[0]


@contextlib.contextmanager
def _listening(address: str) -> Iterator[socket.socket]:
    """A socket that listens where jax's service will: on every interface, unless jax's variable names one."""
    host, port = _split(os.environ.get(_BIND_VARIABLE, "").strip() or f"[::]:{_split(address)[1]}")
    end = time.monotonic() + _LISTEN_SECONDS
    while True:
        try:
            server = _listen(host, port)
            break
        except OSError as error:
            if error.errno != errno.EADDRINUSE or time.monotonic() >= end:
                why = str(error.strerror or error).partition(" (while")[0]  # Python adds where
                raise UserError(
                    f"process 0 cannot listen at {address}: {why}; is another run using "
                    "that port? give all processes another one (--coordinator_address, JAX_COORDINATOR_PORT under "
                    "Slurm)"
                ) from None
        time.sleep(_AGAIN_SECONDS)
    with server:
        server.setblocking(False)
        yield server


def _listen(host: str, port: int) -> socket.socket:
    if host == "::" and socket.has_dualstack_ipv6():
        try:
            return socket.create_server(
                (host, port), family=socket.AF_INET6, backlog=_BACKLOG, dualstack_ipv6=True, reuse_port=False
            )
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise
    host = "" if host == "::" else host
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((host, port), family=family, backlog=_BACKLOG)


# ---- the others --------------------------------------------------------------------------------------------------


def _join(group: Group, host: str, said: str, seconds: float, tell: Callable[[str], None]) -> tuple[str, ...]:
    began, why, remedy, told = time.monotonic(), "", "", False
    end = began + seconds
    wrong = False  # where that it starts late cannot be why
    while (left := end - time.monotonic()) > 0:
        hello = {"index": group.index, "count": group.count, "host": host, "pid": os.getpid(), "seconds": left}
        try:
            with socket.create_connection(_split(group.address), min(left, _CONNECT_SECONDS)) as connection:
                _send(connection, {**hello, "said": said})
                connection.settimeout(left + _ANSWER_SECONDS)
                with connection.makefile("rb") as file:
                    line = file.readline()
        except OSError as error:
            why, remedy = error.strerror or str(error), "see that it is started, and that this host reaches it"
            if wrong := isinstance(error, socket.gaierror):
                remedy = "give a name that every host resolves, or process 0's IP address (--coordinator_address)"
        else:
            answer = _parsed(line)
            if "refused" in answer:
                raise UserError(answer["refused"])
            if "missing" in answer:
                raise MissingProcesses(answer["missing"])
            if isinstance(answer.get("said"), Sequence) and len(answer["said"]) == group.count:
                return tuple(answer["said"])
            wrong = True
            why, remedy = "something else listens there", "give all processes another port (--coordinator_address)"
            if not line:
                why, remedy = "what listens there hangs up", "see that no other run, or another program, has that port"
        if wrong and not told and time.monotonic() >= began + _FIRST_WORD:
            left = end - time.monotonic()
            tell(f"waiting for process 0 at {group.address} ({why}; {remedy}): {left:.0f} s more (--join_seconds)")
            told = True
        time.sleep(_AGAIN_SECONDS)
    raise MissingProcesses(
        f"{on_hosts([0], group.hosts, group.count)} did not answer at {group.address} within {seconds:g} s "
        f"(--join_seconds): {why}; {remedy}"
    )


def _send(connection: socket.socket, message: dict[str, Any]) -> None:
    """Where the other end is gone, or does not take it in time, nothing happens: its side will say so."""
    with contextlib.suppress(OSError):
        connection.settimeout(_ANSWER_SECONDS)
        connection.sendall(json.dumps(message).encode() + b"\n")


def _parsed(line: bytes) -> dict[str, Any]:
    try:
        found = json.loads(line)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}

"""Processes for faults to hit: trainers forked from one process that has imported jax and started no device, so that
a start costs half a second instead of four, and commands.

What a trainer runs is `launch.main`, as the command line does.
"""

import atexit
import contextlib
import ctypes
import mmap
import os
import random
import signal
import struct
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).parents[2]
_PR_SET_PDEATHSIG = 1
# Of a command and of the processes that it starts: the file operation at which it kills itself, and in which of them.
KILL_AT, KILL_IN, KILL_UNDER = "CHAOS_KILL_AT", "CHAOS_KILL_IN", "CHAOS_KILL_UNDER"


def load(cache: Path) -> None:
    """Imports what a trainer needs. Compiled programs are kept in `cache`, so that only the first trainer compiles."""
    os.environ.update(
        JAX_PLATFORMS="cpu",
        JAX_COMPILATION_CACHE_DIR=str(cache),
        JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS="0",
        JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES="-1",
    )
    from hybrid_jax import platform

    platform.prepare("cpu")
    import matplotlib.pyplot  # noqa: F401
    from jax._src import xla_bridge

    import hybrid_jax.train  # noqa: F401
    import launch  # noqa: F401

    threads = len(os.listdir("/proc/self/task"))
    if threads > 1 or xla_bridge.backends_are_initialized():
        raise SystemExit(f"error: {threads} threads after the imports, or a device: forked trainers would hang")


class Process:
    """A process that this one started and is to wait for. `code` is None until it has ended, negative after a
    signal."""

    def __init__(self, pid: int):
        self.pid, self.code = pid, None

    def poll(self) -> int | None:
        if self.code is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.code = os.waitstatus_to_exitcode(status)
        return self.code

    def wait(self, seconds: float, until: Callable[[], bool] = lambda: False) -> bool:
        """Until it has ended, `until()` holds or the time is over; whether it has ended."""
        end = time.monotonic() + seconds
        while self.poll() is None and not until() and time.monotonic() < end:
            time.sleep(0.001)
        return self.code is not None

    def send(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        """SIGKILL, and waits for the end."""
        self.send(signal.SIGKILL)
        self.wait(60)


def trainer(
    arguments: Sequence[str],
    out: Path,
    *,
    before: Callable[[], None] | None = None,
    after: Callable[[], None] | None = None,
    environment: Mapping[str, str] | None = None,
) -> Process:
    """python launch.py ARGUMENTS, its output appended to `out`. `before` runs in it first, `after` if it succeeded."""

    def body() -> int:
        import launch
        from hybrid_jax import signals

        signals.AT_ONCE.listen()  # as launch.py does where it is the program
        os.environ.update(environment or {})
        if before:
            before()
        try:
            code = launch.main(list(arguments))
        except SystemExit as error:
            code = error.code if isinstance(error.code, int) else 1
        if after and code == 0:
            after()
        # What the interpreter does at its end; its stack has more below this function.
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        return code

    return _fork(body, out)


def command(
    arguments: Sequence[str],
    out: Path,
    *,
    before: Callable[[], None] | None = None,
    environment: Mapping[str, str] | None = None,
) -> Process:
    """A program with its arguments, in a session of its own, its output appended to `out`."""

    def body() -> int:
        if before:
            before()
        os.execve(arguments[0], list(arguments), {**os.environ, "PYTHONPATH": str(ROOT), **(environment or {})})

    return _fork(body, out)


def _fork(body: Callable[[], int], out: Path) -> Process:
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid:
        return Process(pid)
    code = 1
    try:
        os.setsid()
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # none outlives the harness
        log = os.open(out, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.chdir(ROOT)
        code = body()
    except KeyboardInterrupt:  # before or after what `launch.main` answers for
        code = 130
    except BaseException:
        traceback.print_exc()
    finally:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os._exit(code)


# A moment that can be met again: the process ends itself just before it changes the file system for the n-th time.

_CHANGES = ("os.rename", "os.remove", "os.rmdir", "os.mkdir", "os.truncate", "os.link", "os.symlink", "shutil.rmtree")


class FileOperations:
    """Counts a process's changes under a folder as Python sees them (audit events), across a fork; kills at one."""

    def __init__(self) -> None:
        self._count = mmap.mmap(-1, 8)

    @property
    def count(self) -> int:
        return struct.unpack("q", self._count)[0]

    def install(self, folder: Path, kill_at: int = 0) -> None:
        """In the process to be counted; there is no way back."""
        within, writing = os.fspath(folder), os.O_WRONLY | os.O_RDWR

        def hook(event: str, arguments: tuple) -> None:
            if event != "open" and event not in _CHANGES:
                return
            if event == "open" and not (isinstance(arguments[2], int) and arguments[2] & writing):
                return
            if not isinstance(arguments[0], (str, bytes, os.PathLike)):
                return
            if os.fsdecode(arguments[0]).startswith(within):
                count = self.count + 1
                self._count[:] = struct.pack("q", count)
                if count == kill_at:
                    os.kill(os.getpid(), signal.SIGKILL)
                    time.sleep(60)  # not one instruction more in this thread

        sys.addaudithook(hook)


def kill_as_asked(role: str) -> None:
    """In a command: installs what KILL_AT, KILL_IN and KILL_UNDER of its environment ask for."""
    if os.environ.get(KILL_IN) == role:
        FileOperations().install(Path(os.environ[KILL_UNDER]), int(os.environ[KILL_AT]))


def session(leader: int, command: str = "") -> list[int]:
    """The running processes of the session that `leader` began, without itself and what has ended; those whose command
    line holds `command`."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()  # state, parent, group, session, ...
            said = path.with_name("cmdline").read_text()
        except OSError:
            continue
        if int(fields[3]) == leader and fields[0] not in "ZX" and path.parent.name != str(leader) and command in said:
            found.append(int(path.parent.name))
    return found


def session_ends(leader: int, seconds: float) -> bool:
    """Whether every process of it ends in time."""
    end = time.monotonic() + seconds
    while session(leader):
        if time.monotonic() > end:
            return False
        time.sleep(0.01)
    return True


def kill_process(pid: int) -> None:
    """One that another process waits for; it may have ended."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def pause(rng: random.Random, longest: float) -> None:
    time.sleep(rng.uniform(0, longest))

"""Ctrl-C, SIGTERM and SIGUSR1: before training an end at once, in training a request to stop after the step.

Schedulers send SIGTERM before they kill, and SIGUSR1 where a job asked for an earlier word (Slurm's `--signal`).
No jax here: `launch.py` listens with `AT_ONCE` before it imports jax.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from types import FrameType
from typing import Any, Self

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
# "Temporary failure" in sysexits.h: what a scheduler may be told to start again, and nothing else here exits with.
REQUEUE_EXIT_CODE = 75
PEER_LOST_EXIT_CODE = 69  # "service unavailable" there: another process of the run is gone
_AGAIN_SECONDS = 0.05


def exit_code(number: int, requeue: int) -> int:
    """Of a process that ends for a signal: 130 for Ctrl-C, as shells have it, and `requeue` for the others."""
    return 130 if number == signal.SIGINT else requeue


class _Handlers:
    """Handlers of SIGNALS from `listen` on to the end of a `with` block, in the main thread; elsewhere (a notebook's
    worker, a test) Python allows none, and nothing is done.

    `_receive` runs in the main thread when that is next in Python; `_received` in a thread of its own, and so also
    while the main thread compiles, or waits for a device.
    """

    def __init__(self) -> None:
        self._old: dict[int, Any] = {}
        self._pipe: tuple[int, int] | None = None
        self._old_fd = -1

    def __enter__(self) -> Self:
        return self

    def listen(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            self._pipe = os.pipe()
            os.set_blocking(self._pipe[1], False)
            self._old_fd = signal.set_wakeup_fd(self._pipe[1], warn_on_full_buffer=False)
            threading.Thread(target=self._read, args=(self._pipe[0],), daemon=True, name="signals").start()
            self.install()
        return self

    def install(self) -> None:
        """Sets the handlers, once more where something else replaced them: jax.distributed does for SIGTERM."""
        if self._pipe:
            for number in SIGNALS:
                old = signal.signal(number, self._receive)
                self._old.setdefault(number, old)

    def __exit__(self, *unused: object) -> None:
        self.end()

    def end(self) -> None:
        """The handlers of before come back."""
        for number, handler in self._old.items():
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)
        if self._pipe:
            signal.set_wakeup_fd(self._old_fd, warn_on_full_buffer=False)
            os.close(self._pipe[1])  # ends the thread
        self._old, self._pipe = {}, None

    def _read(self, pipe: int) -> None:
        while number := os.read(pipe, 1):
            if number[0] in SIGNALS:
                self._received(number[0])
        os.close(pipe)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        pass

    def _received(self, number: int) -> None:
        pass


class ExitAtOnce(_Handlers):
    """Where nothing is held that is not on the disk: a signal ends the process, with one line and no traceback.

    A thread answers, as Python may be deep in a compiler, which would hear of it minutes later, or in an import, which
    would turn a KeyboardInterrupt into something else.
    """

    def __init__(self) -> None:
        super().__init__()
        self.requeue_exit_code = REQUEUE_EXIT_CODE

    def _received(self, number: int) -> None:
        name = "Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name
        _say(f"{name}: stopped; nothing is lost, and the same command starts again")
        os._exit(exit_code(number, self.requeue_exit_code))


AT_ONCE = ExitAtOnce()  # of this process: a command listens before its slow imports


class StopRequest(_Handlers):
    """From `listen` on, `signal` is the number of the signal that came, or 0. A Ctrl-C after that ends the process at
    once.

    After `no_more_steps` there is nothing to stop after, and a signal ends what is being done: KeyboardInterrupt for
    Ctrl-C, SystemExit(requeue_exit_code) for the others, for the caller to clean up after. One that is raised where
    Python has to drop it, as in a callback of the garbage collector, is raised again.
    """

    together_seconds = 0.0  # Ctrl-Cs so close to the first are it, sent twice

    def __init__(self, requeue_exit_code: int = REQUEUE_EXIT_CODE) -> None:
        super().__init__()
        self.requeue_exit_code = requeue_exit_code
        self.signal = 0
        self._stepping = True
        self._heard = 0.0  # when the first one came
        self._raised: BaseException | None = None
        self._again: threading.Timer | None = None  # sends the signal once more
        self._own = 0  # signals that it sent and `_received` has not heard yet
        self._hook: Any = None

    def listen(self) -> Self:
        self._hook, sys.unraisablehook = sys.unraisablehook, self._dropped
        return super().listen()

    def end(self) -> None:
        if self._again:
            self._again.cancel()
        if self._hook:
            sys.unraisablehook, self._hook = self._hook, None
        super().end()

    def _dropped(self, told: Any) -> None:
        if self._raised is None or told.exc_value is not self._raised:
            self._hook(told)
            return
        self._own += 1
        self._again = threading.Timer(_AGAIN_SECONDS, os.kill, (os.getpid(), self.signal))
        self._again.daemon = True
        self._again.start()

    def no_more_steps(self) -> None:
        self._stepping = False
        if self.signal:
            self._end()

    def _end(self) -> None:
        self._raised = KeyboardInterrupt() if self.signal == signal.SIGINT else SystemExit(self.requeue_exit_code)
        raise self._raised

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if self._again:
            self._again = None
            self._end()
        if self.signal:
            return
        self.signal = number
        name, more = ("Ctrl-C", "Ctrl-C again") if number == signal.SIGINT else (signal.Signals(number).name, "Ctrl-C")
        what = "after this step" if self._stepping else "when the last checkpoint is whole"
        _say(f"{name}: stopping {what} ({more} aborts at once)")
        if not self._stepping:
            self._end()

    def _received(self, number: int) -> None:
        if self._own:
            self._own -= 1
            return
        if self._heard and number == signal.SIGINT:
            if time.monotonic() - self._heard < self.together_seconds:
                return
            _say("error: aborted; the last whole checkpoint is kept")
            os._exit(130)  # threads may hold locks: nothing orderly is left to try
        self._heard = time.monotonic()


class Interrupts(_Handlers):
    """For what answers somebody: a Ctrl-C while `busy` sets `asked`, and another one then ends the process; when not
    busy it is a KeyboardInterrupt. SIGTERM and SIGUSR1 end the process.
    """

    def __init__(self) -> None:
        super().__init__()
        self.busy = self.asked = False

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT and not self.busy:
            raise KeyboardInterrupt

    def _received(self, number: int) -> None:
        if number != signal.SIGINT or (self.busy and self.asked):
            os._exit(128 + number)
        self.asked = self.busy


class Forward(_Handlers):
    """Passes signals on to another process, those from before it is known too.

    Of a scheduler that signals every process of a job that one may get each twice (see StopRequest.together_seconds).
    """

    def __init__(self) -> None:
        super().__init__()
        self._pid, self._before = 0, 0

    def to(self, pid: int) -> None:
        self._pid = pid
        if self._before:
            self._received(self._before)

    def _received(self, number: int) -> None:
        if not self._pid:
            self._before = number
            return
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._pid, number)


def _say(line: str) -> None:
    """Writes past Python's buffers and locks; on a terminal, below the ^C that stands there. Where a supervisor passes
    it on, the terminal is at the other output."""
    os.write(2, f"{chr(10) if os.isatty(2) or os.isatty(1) else ''}{line}\n".encode())

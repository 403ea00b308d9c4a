"""Ctrl-C and SIGTERM as a request to stop after the current step; a second Ctrl-C ends the process at
once."""

from __future__ import annotations

import os
import signal
import threading
from types import FrameType
from typing import Any


class StopRequest:
    """While used as a context manager, `signal` is the number of the signal that came, or 0."""

    def __init__(self) -> None:
        self.signal = 0
        self._old: dict[int, Any] = {}

    def __enter__(self) -> StopRequest:
        # Python allows handlers in the main thread only; elsewhere (a notebook's worker, a test) there is
        # none to set.
        # Set after jax.distributed.initialize, which installs its own for SIGTERM.
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._old[number] = signal.signal(number, self._receive)
        return self

    def __exit__(self, *unused: object) -> None:
        for number, handler in self._old.items():
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if self.signal and number == signal.SIGINT:
            os.write(2, b"\nerror: aborted; the last whole checkpoint is kept\n")
            os._exit(130)  # threads may hold locks: nothing orderly is left to try
        if not self.signal:
            self.signal = number
            name, more = ("Ctrl-C", "Ctrl-C again") if number == signal.SIGINT else ("SIGTERM", "Ctrl-C")
            os.write(2, f"\n{name}: stopping after this step ({more} aborts at once)\n".encode())

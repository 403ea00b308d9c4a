"""What Orbax, and the threads that it and tensorstore leave behind, print of a write that failed or of a damaged file.

checkpoint.py tells of each in one line. Theirs, a traceback for every thread and file, go to this module's logger at
DEBUG: a run keeps them in train.log.
"""

from __future__ import annotations

import logging
import sys
import threading
import traceback
from collections.abc import Callable
from types import TracebackType
from typing import Any

_log = logging.getLogger(__name__)
_PACKAGES = ("orbax", "tensorstore")


def divert() -> None:
    """Does so for all of this process, to its end: a thread may print long after the write that it belonged to."""
    for name in ("absl", "asyncio"):  # what is added twice is there once
        logging.getLogger(name).addFilter(_is_not_theirs)
    if not isinstance(sys.unraisablehook, _Hook):
        sys.unraisablehook = _Hook(sys.unraisablehook)
    if not isinstance(threading.excepthook, _Hook):
        threading.excepthook = _Hook(threading.excepthook)


class _Hook:
    """Passes on what is not theirs. Called for an exception that nothing could be told of, as in a thread of C++."""

    def __init__(self, previous: Callable[[Any], Any]):
        self.previous = previous

    def __call__(self, told: Any) -> None:
        error, where = told.exc_value, told.exc_traceback
        if not (_is_in_packages(where) or _is_of_a_closed_loop(error)):
            self.previous(told)
            return
        text = "".join(traceback.format_exception(told.exc_type, error, where)).rstrip()
        _log.debug("in the thread %s:\n%s", threading.current_thread().name, text)


def _is_not_theirs(record: logging.LogRecord) -> bool:
    """A filter of records."""
    where = record.exc_info[2] if record.exc_info else None
    theirs = "/orbax/" in record.pathname or _is_in_packages(where)
    if record.levelno < logging.WARNING or not theirs:
        return True
    text = logging.Formatter().format(record) if where else record.getMessage()
    _log.debug("%s", text)
    return False


def _is_in_packages(where: TracebackType | None) -> bool:
    names = (frame.f_code.co_filename for frame, _ in traceback.walk_tb(where))
    return any(f"/{package}/" in name for name in names for package in _PACKAGES)


def _is_of_a_closed_loop(error: BaseException | None) -> bool:
    """When one array cannot be written Orbax closes its event loop, which tensorstore still calls for the others."""
    return isinstance(error, RuntimeError) and str(error) == "Event loop is closed"

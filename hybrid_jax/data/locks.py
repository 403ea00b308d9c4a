"""Who works in a folder of parts: one command, and workers that may outlive it for a moment.

A file system without locks goes without them.
"""

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from hybrid_jax.errors import UserError

LOCK, WORKERS = "lock", "workers.lock"
_WAIT_SECONDS = 30.0  # for workers whose command was killed: they end when they have heard of it


@contextlib.contextmanager
def only_command(folder: Path) -> Iterator[None]:
    """Makes the folder. Raises UserError if it cannot be written or another process works in it."""
    try:
        folder.mkdir(exist_ok=True)
        with (folder / LOCK).open("a") as file:  # a lock ends with its process, however that ends
            if not _taken(file, alone=True):
                raise UserError(f"--output: another process is preparing {folder}; wait for it")
            with (folder / WORKERS).open("a") as workers:
                until = time.monotonic() + _WAIT_SECONDS
                while not _taken(workers, alone=True):
                    if time.monotonic() > until:
                        raise UserError(f"--output: workers of a command that has ended still write {folder}; end them")
                    time.sleep(0.05)
            yield
    except OSError as error:
        raise UserError(f"--output: {error.filename or folder}: {error.strerror or error}") from None


def hold_as_worker(folder: Path) -> IO[str] | None:
    """What a worker holds as long as it may write into the folder; None if that is gone, and its command with it."""
    try:
        file = (folder / WORKERS).open("r+")
    except OSError:
        return None
    _taken(file, alone=False)
    return file


def _taken(file: IO[str], alone: bool) -> bool:
    """Whether nobody else has it; others may, unless it is to be `alone`."""
    try:
        import fcntl

        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB if alone else fcntl.LOCK_SH)
    except BlockingIOError:
        return False
    except (ImportError, OSError):  # no locks here
        pass
    return True

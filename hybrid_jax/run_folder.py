"""A run's folder: one run at a time writes to it, and a start that is refused leaves it as it was."""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import shutil
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO

_OF_A_START = {".lock", "train.log", "logs", "checkpoints"}  # what is there before anything of the run itself


_MARK = ".seen_by_all-"  # and a number nobody else draws
_SEE_SECONDS = 10.0  # for what another host wrote to come through a network's file system
_AGAIN_SECONDS = 0.2


class RunFolder:
    """The folder of a run, in one of its processes."""

    def __init__(self, folder: Path, rank: int):
        self.folder, self.rank = folder, rank
        self._lock: IO[str] | None = None
        self._made = [path for path in (folder, *folder.parents) if not path.exists()]  # innermost first
        there = _names(folder)
        if rank and not (folder / "logs" / f"rank-{rank}").exists():  # process 0 may have been here already
            there -= _OF_A_START
        self._was_empty = not there

    def claim(self) -> str:
        """Makes the folder and takes its lock: "", or what is wrong."""
        folder = self.folder
        try:
            if folder.exists() and not folder.is_dir():
                return f"config.workdir: {folder} is a file, not a folder"
            folder.mkdir(parents=True, exist_ok=True)
            lock = (folder / ".lock").open("a+", encoding="utf-8")
        except OSError as error:
            return f"config.workdir: cannot write to {folder}: {error.strerror or error}"
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.seek(0)
            owner = lock.read().strip() or "another process"
            lock.close()
            return f"config.workdir: another run ({owner}) is writing to {folder}; set another one, or stop it"
        except OSError:  # a file system without locks
            pass
        else:
            lock.truncate(0)
            lock.write(f"process {os.getpid()} on {socket.gethostname()}")
            lock.flush()
        self._lock = lock
        return ""

    @contextlib.contextmanager
    def mark(self) -> Iterator[str]:
        """A file in the folder, by whose name the other processes tell that they see the same one."""
        name = _MARK + secrets.token_hex(8)
        (self.folder / name).touch()
        try:
            yield name
        finally:
            (self.folder / name).unlink(missing_ok=True)

    def sees(self, mark: str) -> bool:
        end = time.monotonic() + _SEE_SECONDS
        while not (self.folder / mark).exists():
            if time.monotonic() >= end:
                return False
            time.sleep(_AGAIN_SECONDS)
        return True

    def release(self) -> None:
        if self._lock:
            self._lock.close()

    def unmake(self) -> None:
        """After a refusal: takes away what this process has made, if nothing was there and the run has not begun.

        Of several processes each takes its own logs, and the last one the folder.
        """
        if not self._was_empty or not _names(self.folder) <= _OF_A_START:
            return
        shutil.rmtree(self.folder / "logs" / f"rank-{self.rank}", ignore_errors=True)
        if self._lock:
            for name in ("train.log", ".lock"):
                (self.folder / name).unlink(missing_ok=True)
        folders = [self.folder / "logs", self.folder / "checkpoints", *([self.folder] if self.rank else self._made)]
        for path in folders:
            with contextlib.suppress(OSError):  # it is not there, or not empty
                path.rmdir()


def _names(folder: Path) -> set[str]:
    try:
        return {path.name for path in folder.iterdir() if not path.name.startswith(_MARK)}
    except OSError:  # it is not there, or is a file: `claim` says so
        return set()

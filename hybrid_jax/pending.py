"""A checkpoint on its way to the disk, and in a few words why it did not get there."""

from __future__ import annotations

import dataclasses
import errno
import os
import threading
from collections.abc import Callable, Mapping
from typing import Any


@dataclasses.dataclass
class Write:
    """start: begins it and returns what waits for its end; `run` calls both in a thread, and `done` is set at the end.
    told: whether the error has been said."""

    step: int
    meta: dict[str, Any]
    deadline: float  # of time.monotonic()
    start: Callable[[], Callable[[], Any]]
    done: threading.Event = dataclasses.field(default_factory=threading.Event)
    error: BaseException | None = None
    told: bool = False

    def run(self) -> None:
        try:
            wait = self.start()
            self.start = _started  # it holds what is written
            wait()
        except BaseException as error:
            self.error = error
        self.done.set()


def _started() -> Any:
    raise RuntimeError("started already")


def joined(said: Mapping[int, str]) -> str:
    """What processes said, as one text; what all say alike stands there once."""
    if len(set(said.values())) <= 1 and 0 in said:
        return said[0]
    return "; ".join(f"process {process}: {text}" for process, text in said.items())


_FAULTS = ("ENOSPC", "EDQUOT", "EROFS", "EACCES", "EPERM", "ENOENT", "EIO", "ESTALE", "ENOTDIR", "EFBIG")


def reason(error: BaseException, otherwise: str = "") -> str:
    """An exception of a write as one short text: the file system's own words where they can be found in it, else
    `otherwise`, or where that is empty its own."""
    texts = []
    link: BaseException | None = error
    while link is not None:
        texts.append(f"{type(link).__name__} {link}")
        link = link.__cause__ or link.__context__
    for name in _FAULTS:
        if os.strerror(getattr(errno, name)) in " ".join(texts):
            return os.strerror(getattr(errno, name))
    text = otherwise or " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= 160 else text[:157] + "..."

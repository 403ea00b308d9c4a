"""A run's logs, by process and level: logs/rank-N/{debug,info,warning,error}.log in its folder.

Each file has the lines of its level and of those above, dated. They hold what is printed, what this package and, from
INFO on (kept as DEBUG), others give to Python's logging, and in processes that print nothing what they would have
printed.
"""

from __future__ import annotations

import contextlib
import logging
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

LEVELS = {name: getattr(logging, name) for name in ("DEBUG", "INFO", "WARNING", "ERROR")}


class RankLogs:
    """The files of one process. They are opened with the first line of their level and only added to, so the trainer
    and its supervisor may both write."""

    def __init__(self, folder: Path, rank: int):
        self.folder = folder / f"rank-{rank}"
        self._files: dict[str, TextIO] = {}
        self._failed = False

    def write(self, level: str, text: str) -> None:
        """Adds `text`, each of its lines dated, to the files of `level` and below. What cannot be written, as on a full
        disk, is left out, and said once: no reason to end a run."""
        stamp = time.strftime("%Y-%m-%d %H:%M:%S")
        lines = "".join(f"{stamp} {level:<7} {line}\n" for line in text.splitlines() or [""])
        for name, number in LEVELS.items():
            if number <= LEVELS[level]:
                try:
                    file = self._files.get(name) or self._open(name)
                    file.write(lines)
                    file.flush()
                except (OSError, ValueError) as error:  # ValueError: closed, by a line that comes late
                    self._fail(error)

    def _open(self, name: str) -> TextIO:
        self.folder.mkdir(parents=True, exist_ok=True)
        self._files[name] = (self.folder / f"{name.lower()}.log").open("a", encoding="utf-8", errors="replace")
        return self._files[name]

    def _fail(self, error: Exception) -> None:
        if not self._failed and isinstance(error, OSError):
            self._failed = True
            print(f"warning: {self.folder}: {error.strerror or error}; lines of its logs are left out", file=sys.stderr)

    def close(self) -> None:
        for file in self._files.values():
            with contextlib.suppress(OSError):
                file.close()

    @contextlib.contextmanager
    def listening(self, show: bool) -> Iterator[None]:
        """Takes what reaches the root of Python's logging, until the block ends.

        show: whether warnings are still printed where nobody else handles them, as Python does by itself.
        """
        root, handler = logging.getLogger(), _Records(self)
        old_level, old_levels = root.level, {other: other.level for other in root.handlers}
        added: list[logging.Handler] = [handler]
        if show and not root.handlers and logging.lastResort:
            added.append(logging.lastResort)
        for other in old_levels:  # what they did not get before is not for them
            other.setLevel(max(other.level, old_level))
        for each in added:
            root.addHandler(each)
        root.setLevel(min(old_level, logging.INFO))
        try:
            yield
        finally:
            root.setLevel(old_level)
            for each in added:
                root.removeHandler(each)
            for other, level in old_levels.items():
                other.setLevel(level)


class _Records(logging.Handler):
    def __init__(self, logs: RankLogs):
        super().__init__(logging.INFO)
        self.setFormatter(logging.Formatter("%(name)s: %(message)s"))
        self.logs = logs

    def emit(self, record: logging.LogRecord) -> None:
        if record.levelno < logging.WARNING:  # of others' doings there is much, and little of use
            self.logs.write("DEBUG", self.format(record))
        else:
            self.logs.write(level_name(record.levelno), self.format(record))


def level_name(number: int) -> str:
    """The highest of LEVELS that is not above `number`, such as ERROR for Python's CRITICAL."""
    return [name for name, least in LEVELS.items() if least <= max(number, logging.DEBUG)][-1]

"""The line that says how far long work is: a bar on a terminal, else a new line every ten seconds."""

import shutil
import sys
import time
from collections.abc import Callable
from typing import TextIO

from hybrid_jax.metrics import duration, short


class Line:
    """On stderr, beginning with `name`. A stream that is a terminal gets one line, drawn anew ten times a second."""

    def __init__(self, name: str, stream: TextIO | None = None):
        self._name, self._stream = name, stream or sys.stderr
        self._bar = self._stream.isatty()
        self.began = self._last = time.monotonic()
        self._drawn = False

    def due(self) -> bool:
        """Whether it is time to show something again; counts as shown."""
        now = time.monotonic()
        if now - self._last < (0.1 if self._bar else 10.0):
            return False
        self._last = now
        return True

    def show(self, share: float, text: str) -> None:
        """`share` of the work, in [0, 1], and more about it."""
        text = f"{share:4.0%}  {text}"
        if self._bar:
            room = min(shutil.get_terminal_size((100, 24)).columns - len(text) - len(self._name) - 5, 30)
            filled = round(room * share)
            bar = f"{'█' * filled}{'░' * (room - filled)} " if room >= 5 else ""
            print(f"\r\x1b[2K{self._name}: {bar}{text}", end="", file=self._stream, flush=True)
            self._drawn = True
        else:
            print(f"{self._name}: {text.strip()}", file=self._stream, flush=True)

    def say(self, text: str) -> None:
        """A line that stays."""
        self.close()
        print(f"{self._name}: {text}", file=self._stream, flush=True)

    def close(self) -> None:
        """Takes the bar away."""
        if self._drawn:
            print("\r\x1b[2K", end="", file=self._stream, flush=True)
            self._drawn = False


class Count:
    """Progress of a number of parts that take as long as their weights, such as characters, say.

    clock: seconds, which may stand still while something is compiled.
    """

    def __init__(self, line: Line, parts: int, weight: float, unit: str, clock: Callable[[], float] = time.monotonic):
        self._line, self._parts, self._weight, self._unit, self._clock = line, parts, weight, unit, clock
        self._done, self._done_weight = 0, 0.0
        self._began = clock()

    def add(self, weight: float, parts: int = 1) -> None:
        """So many more parts are done, which have this weight together."""
        self._done += parts
        self._done_weight += weight
        if not self._line.due():
            return
        share = min(self._done_weight / self._weight, 1.0) if self._weight else 1.0
        seconds = self._clock() - self._began
        text = f"{self._done:,} of {self._parts:,} {self._unit}  {short(self._done / max(seconds, 1e-9))}/s"
        self._line.show(share, text + left(share, seconds))


def left(share: float, seconds: float, first: float = 0.0) -> str:
    """What to add to a text: the time that is left when `share` of the work is done, `first` of it before these
    seconds; nothing while that cannot be known."""
    return f"  left {duration(seconds * (1 - share) / (share - first))}" if share > first else ""

"""How far a long command is: a bar on a terminal, else a plain line every ten seconds."""

from __future__ import annotations

import shutil
import sys
import time
from typing import TextIO

from hybrid_jax.metrics import duration, short

_EVERY = 0.1, 10.0  # seconds between two bars, two lines


class Progress:
    """`add` what was done; `close` takes the bar away. Written to stderr.

    name: of the command. total: of `unit`, such as "B".
    """

    def __init__(self, name: str, total: int, unit: str):
        self._name, self._total, self._unit = name, max(total, 1), unit
        self._stream: TextIO = sys.stderr
        self._bar = self._stream.isatty()
        self._began = self._last = time.monotonic()
        self._done = 0
        self._drawn = False

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *unused: object) -> None:
        self.close()

    def add(self, count: int) -> None:
        self._done += count
        now = time.monotonic()
        if now - self._last < _EVERY[not self._bar]:
            return
        self._last = now
        seconds, share = now - self._began, self._done / self._total
        text = f"{share:4.0%}  {short(self._done)}{self._unit}  {short(self._done / seconds)}{self._unit}/s"
        if 0 < share < 1:
            text += f"  left {duration(seconds * (1 - share) / share)}"
        if not self._bar:
            print(f"{self._name}: {text.strip()}", file=self._stream, flush=True)
            return
        room = min(shutil.get_terminal_size((100, 24)).columns - len(text) - len(self._name) - 5, 30)
        filled = round(room * min(share, 1.0))
        bar = f"{'█' * filled}{'░' * (room - filled)} " if room >= 5 else ""
        print(f"\r\x1b[2K{self._name}: {bar}{text}", end="", file=self._stream, flush=True)
        self._drawn = True

    def close(self) -> None:
        if self._drawn:
            print("\r\x1b[2K", end="", file=self._stream, flush=True)
            self._drawn = False

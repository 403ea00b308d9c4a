"""How far a long command is: a bar on a terminal, else a line every ten seconds; on stderr."""

import math
import shutil
import sys
import time
from typing import TextIO

from hybrid_jax.metrics import duration, short


class Progress:
    """share: of the work, done before this began."""

    def __init__(self, share: float = 0.0):
        self._stream: TextIO = sys.stderr
        self._first = share
        self._bar = self._stream.isatty()
        self._began = self._last = time.monotonic()
        self._drawn = False

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._began

    def due(self) -> bool:
        """Whether it is time to `show` again."""
        return time.monotonic() - self._last >= (0.1 if self._bar else 10.0)

    def show(self, share: float, text: str) -> None:
        self._last = time.monotonic()
        share = min(max(share, 0.0), 1.0)
        text = f"{share:4.0%}  {text}"
        if share > self._first:
            text += f"  left {duration(self.seconds * (1 - share) / (share - self._first))}"
        if self._bar:
            room = min(shutil.get_terminal_size((100, 24)).columns - len(text) - 12, 30)
            filled = round(room * share)
            bar = f"{'█' * filled}{'░' * (room - filled)} " if room >= 5 else ""
            print(f"\r\x1b[2Kprepare: {bar}{text}", end="", file=self._stream, flush=True)
            self._drawn = True
        else:
            print(f"prepare: {text.strip()}", file=self._stream, flush=True)

    def close(self) -> None:
        if self._drawn:
            print("\r\x1b[2K", end="", file=self._stream, flush=True)


class Counted(Progress):
    """Of a count that grows to `total`; what: is being done, unit: is counted."""

    def __init__(self, total: int, what: str, unit: str):
        super().__init__()
        self._total, self._what, self._unit, self._count = max(total, 1), what, unit, 0

    def add(self, count: int) -> None:
        self._count += count
        if self.due():
            self.show(self._count / self._total, f"{self._what} {short(self._count)} {self._unit}")


class Making(Progress):
    """Of parts: share of the input, tokens, rate. total_bytes: of the input, 0 if not known; whole_bytes and
    whole_tokens: of the parts that were whole before; limit: of tokens."""

    def __init__(self, total_bytes: int, whole_bytes: int, whole_tokens: int, limit: int | None):
        self._total, self._limit = total_bytes or math.inf, limit
        self._bytes, self._tokens = whole_bytes, whole_tokens
        self._read = self._made = 0
        super().__init__(self._share())

    def add(self, read: int, made: int) -> None:
        self.set(self._read + read, self._made + made)

    def set(self, read: int, made: int) -> None:
        """Bytes read and tokens made by this process so far."""
        self._read, self._made = read, made
        if self.due():
            self.show(
                self._share(), f"{short(self._tokens + made)} tokens  {short(made / max(self.seconds, 1e-9))} tok/s"
            )

    def _share(self) -> float:
        share = (self._bytes + self._read) / self._total
        return max(share, (self._tokens + self._made) / self._limit if self._limit else 0.0)

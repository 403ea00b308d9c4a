"""How far `prepare` is."""

import math
import time

from hybrid_jax.metrics import short
from hybrid_jax.progress import Line, left


class Counted:
    """Of a count that grows to `total`; what: is being done, unit: is counted."""

    def __init__(self, total: int, what: str, unit: str):
        self._line, self._total, self._what, self._unit, self._count = Line("prepare"), max(total, 1), what, unit, 0

    def add(self, count: int) -> None:
        self._count += count
        if self._line.due():
            share = min(self._count / self._total, 1.0)
            text = f"{self._what} {short(self._count)} {self._unit}"
            self._line.show(share, text + left(share, time.monotonic() - self._line.began))

    def close(self) -> None:
        self._line.close()


class Making:
    """Of parts: share of the input, tokens, rate. total_bytes: of the input, 0 if not known; whole_bytes and
    whole_tokens: of the parts that were whole before; limit: of tokens."""

    def __init__(self, total_bytes: int, whole_bytes: int, whole_tokens: int, limit: int | None):
        self._line = Line("prepare")
        self._total, self._limit = total_bytes or math.inf, limit
        self._bytes, self._tokens = whole_bytes, whole_tokens
        self._read = self._made = 0
        self._first = self._share()

    def add(self, read: int, made: int) -> None:
        self.set(self._read + read, self._made + made)

    def set(self, read: int, made: int) -> None:
        """Bytes read and tokens made by this process so far."""
        self._read, self._made = read, made
        if self._line.due():
            share, seconds = self._share(), time.monotonic() - self._line.began
            text = f"{short(self._tokens + made)} tokens  {short(made / max(seconds, 1e-9))} tok/s"
            self._line.show(share, text + left(share, seconds, self._first))

    def close(self) -> None:
        self._line.close()

    def _share(self) -> float:
        share = (self._bytes + self._read) / self._total
        return min(max(share, (self._tokens + self._made) / self._limit if self._limit else 0.0), 1.0)

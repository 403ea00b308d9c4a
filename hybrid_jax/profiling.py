"""The jax.profiler trace of train.profile_steps."""

from __future__ import annotations

from pathlib import Path

import jax


class Profile:
    """A jax.profiler trace of the steps "first:last", both included, or to the run's last step; used as a
    context manager around the loop."""

    def __init__(self, steps: str, last_of_run: int, folder: Path):
        self._first, last = (int(part) for part in steps.split(":")) if steps else (-1, -1)
        self._last = min(last, last_of_run)
        self.folder = folder
        self._running = False

    def __enter__(self) -> Profile:
        return self

    def __exit__(self, *unused: object) -> None:
        self.stop()

    def begins(self, step: int) -> bool:
        return step == self._first and not self._running  # after a roll-back it may still be

    def ends(self, step: int) -> bool:
        return self._running and step == self._last

    def start(self) -> None:
        jax.profiler.start_trace(str(self.folder))
        self._running = True

    def stop(self) -> None:
        if self._running:
            jax.profiler.stop_trace()
            self._running = False

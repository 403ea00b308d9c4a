"""When a run has diverged: too many steps in a row that were not finite, or with the loss above a band.

The band ends at median + width * sigma of the losses of the last `window` good steps, and moves down only: a loss that
climbs slowly leaves it, too. Sigma is 1.4826 times their median absolute deviation, which a few odd losses do not move,
and at least a hundredth of the median (of 1 nat where that is less), so that a loss that hardly varies has a band too.
Until there are `window` losses, the band is that around knowing nothing, log(vocabulary), or the first loss if that is
higher. A loss above the band does not enter it.

All of this is a function of the numbers of the steps alone, which every process holds. The detector's own state is
kept with each checkpoint, so that a run that was restarted decides as one that was not. No jax here.
"""

from __future__ import annotations

import collections
import math
import statistics
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hybrid_jax.config import Config

_MAD_TO_SIGMA = 1.4826  # of a normal distribution
_SMALLEST_SIGMA = 0.01  # of the median


class Diverged(Exception):
    """Training cannot go on from here: the steps `first` to `step`, the last one looked at, were not good."""

    def __init__(self, where: str, step: int, first: int, reason: str, advice: str):
        super().__init__(reason)
        self.where, self.step, self.first = where, step, first
        self.reason, self.about, self.advice = reason, "", advice  # one line for a person has all three


class Detector:
    """Watches the loss of each step, in order."""

    def __init__(self, cfg: Config):
        self.cfg = cfg.divergence
        self.max_bad_steps = cfg.train.max_bad_steps
        self._ignorance = math.log(cfg.model.vocab_size)  # nats per token
        can_go_back = self.cfg.max_rollbacks > 0 and cfg.checkpoint.every_steps > 0
        self._watches_loss = can_go_back and self.cfg.spike_steps > 0
        self.resume({})

    @property
    def limit(self) -> float:
        """The upper edge of the band; inf before the first loss, or where no loss is too high."""
        return self._edge(*self._band) if self._band and self._watches_loss else math.inf

    @property
    def record(self) -> dict[str, Any]:
        """The detector's state, as JSON."""
        return {"losses": list(self._losses), "band": list(self._band), "off": self.off}

    def resume(self, record: Mapping[str, Any]) -> None:
        """Goes on from a `record`; from an empty one, anew."""
        self._losses = collections.deque[float](record.get("losses", ()), self.cfg.window)
        self._band = tuple(record.get("band", ()))  # (median, sigma) of the lowest so far, or ()
        self.off = record.get("off", 0)  # steps in a row, up to the last one, that were not good

    def _edge(self, median: float, sigma: float) -> float:
        return median + self.cfg.width * sigma

    def observe(self, step: int, loss: float, bad_steps: int) -> Diverged | None:
        """The verdict after a step. `bad_steps`: those in a row, this one included, that were not finite."""
        if bad_steps == 0 and loss <= self.limit:
            self.off = 0
            self._losses.append(loss)
            if not self._band:
                self._band = band([max(loss, self._ignorance)])
            elif len(self._losses) == self.cfg.window:
                self._band = min(self._band, band(self._losses), key=lambda b: self._edge(*b))
            return None
        self.off += 1
        if bad_steps >= self.max_bad_steps:
            return Diverged(
                "config.train.max_bad_steps", step, step - max(self.off, bad_steps) + 1,
                f"{bad_steps} steps in a row were not finite",
                "lower config.optimizer.learning_rate or look at that sublayer",
            )  # fmt: skip
        if math.isfinite(self.limit) and self.off >= self.cfg.spike_steps:
            return Diverged(
                "config.divergence.spike_steps", step, step - self.off + 1,
                f"{self.off} steps in a row had a loss above {self.limit:.4f}",
                "lower config.optimizer.learning_rate, or set config.divergence.spike_steps=0 to train on all the same",
            )  # fmt: skip
        return None


def band(losses: Sequence[float]) -> tuple[float, float]:
    """(median, sigma) of these losses; see above."""
    median = statistics.median(losses)
    deviation = statistics.median(abs(loss - median) for loss in losses)
    return median, max(_MAD_TO_SIGMA * deviation, _SMALLEST_SIGMA * max(median, 1.0))

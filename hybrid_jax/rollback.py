"""Going back after a divergence: which checkpoint to, and which batch each step reads from then on.

A roll-back to checkpoint `to` after step `at` skips the batches that the steps `to` + 1 to `at` read: step `to` + 1
reads the one after them. So the batch of a step is a function of the list of roll-backs, and of nothing else.

The list is `checkpoints/rollbacks.json`, and every checkpoint holds the list of its time. A roll-back is decided when
it stands in the file; what comes after it (newer checkpoints are deleted, the state is restored) is done again by the
next start where a run is killed in between.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from hybrid_jax import distributed
from hybrid_jax.data.interface import Batches
from hybrid_jax.errors import UserError

if TYPE_CHECKING:
    from hybrid_jax.checkpoint import Checkpoints

FILE = "rollbacks.json"


@dataclasses.dataclass(frozen=True)
class Rollback:
    """Steps are counted from 1, batches from 0."""

    at: int  # the last step that was looked at
    to: int  # the checkpoint that was gone back to; 0 = the initial state
    first_batch: int  # skipped
    next_batch: int  # not skipped: step `to` + 1 reads it
    reason: str

    @property
    def event(self) -> dict[str, Any]:
        """Its line in metrics.jsonl, without the step."""
        values = dataclasses.asdict(self)
        return {"event": "rollback", "to_step": values.pop("to"), **{k: v for k, v in values.items() if k != "at"}}


def batch_of(rollbacks: Sequence[Rollback], step: int) -> int:
    """Which batch of the data the training step `step` reads."""
    for rollback in reversed(rollbacks):
        if rollback.to < step:
            return rollback.next_batch + step - 1 - rollback.to
    return step - 1


@dataclasses.dataclass(frozen=True)
class Stream:
    """The batches of a run with these roll-backs, by the steps done before (0 for step 1)."""

    dataset: Batches
    rollbacks: tuple[Rollback, ...]

    def batch(self, step: int, rows: Sequence[int], global_batch_size: int) -> dict[str, np.ndarray]:
        return self.dataset.batch(batch_of(self.rollbacks, step + 1), rows, global_batch_size)


def target(steps: Iterable[int], first: int, every: int) -> int:
    """The checkpoint to go back to when step `first` was the first that was not good; 0: the initial state.

    The loss of a step is that of the parameters after the step before: checkpoint `first` - 1 is taken only where
    there is no other. One that a signal asked for, at a step that is no multiple of `every`, comes after those that an
    undisturbed run has too.
    """
    before = (step for step in steps if step < first)
    return max(before, key=lambda step: (step < first - 1, step % every == 0, step), default=0)


def loses_all(steps: Iterable[int], lost: Iterable[int], first: int) -> bool:
    """Whether without those `lost` none is left of the checkpoints from before step `first`, the first not good."""
    good = {step for step in steps if step < first - 1}
    return bool(good) and good <= set(lost)


class History:
    """The roll-backs of a run, in order. Every process of the run calls every method, at the same time."""

    def __init__(self, path: Path | None = None, rollbacks: tuple[Rollback, ...] = (), unfinished: bool = False):
        """`path`: the file, None for a run that has no checkpoints to go back to."""
        self.path, self.rollbacks, self._unfinished = path, rollbacks, unfinished

    def add(self, at: int, to: int, reason: str, checkpoints: Checkpoints) -> Rollback:
        """Decides on a roll-back, and deletes the checkpoints newer than `to`. Nothing may be being written."""
        first, following = (batch_of(self.rollbacks, step) for step in (to + 1, at + 1))
        rollback = Rollback(at, to, first, following, reason)
        self._write((*self.rollbacks, rollback), unfinished=True)
        self.finish(checkpoints)
        return rollback

    def finish(self, checkpoints: Checkpoints) -> None:
        """Does what is left to do of a roll-back that was cut short."""
        if self._unfinished:
            checkpoints.delete_after(self.rollbacks[-1].to)
            self._write(self.rollbacks, unfinished=False)

    def resume(self, saved: Mapping[str, Any] | None) -> bool:
        """Goes on from a checkpoint's meta, None where there is none; False: the file was of a run that is gone.

        A checkpoint knows of more roll-backs than the file where the file is gone, and of fewer where it was gone back
        to.
        """
        known = _parse((saved or {}).get("rollbacks", ()))
        stale = saved is None and bool(self.rollbacks) and self.rollbacks[-1].to > 0  # to a checkpoint that is gone
        if stale or len(known) > len(self.rollbacks):
            self._write(known, unfinished=False)
        return not stale

    @property
    def record(self) -> list[dict[str, Any]]:
        """What a checkpoint keeps, as JSON."""
        return [dataclasses.asdict(rollback) for rollback in self.rollbacks]

    def _write(self, rollbacks: tuple[Rollback, ...], unfinished: bool) -> None:
        self.rollbacks, self._unfinished, problem = rollbacks, unfinished, ""
        assert self.path
        if distributed.is_main():
            try:
                _write_durably(self.path, json.dumps({"rollbacks": self.record, "unfinished": unfinished}, indent=1))
            except OSError as error:
                problem = f"{self.path}: a roll-back could not be written down: {error.strerror or error}"
        _agree(problem, self.path)


def read(checkpoints: Checkpoints) -> History:
    """The roll-backs of the run with these checkpoints; one that was cut short is finished.

    Raises UserError if the file is damaged.
    """
    path, problem, history = checkpoints.folder / FILE, "", History(checkpoints.folder / FILE)
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        history = History(path, _parse(found["rollbacks"]), bool(found["unfinished"]))
    except FileNotFoundError:
        pass
    except (OSError, ValueError, TypeError, KeyError) as error:
        reason = error.strerror if isinstance(error, OSError) else "damaged"
        problem = (
            f"{path}: {reason}: it says which batches the run skipped; put a copy of it back, or delete it to go on "
            "with what the newest checkpoint says of them"
        )
    _agree(problem, path)  # process 0 does not write before all have read
    history.finish(checkpoints)
    return history


def _parse(records: Iterable[Mapping[str, Any]]) -> tuple[Rollback, ...]:
    return tuple(Rollback(**record) for record in records)


def _agree(problem: str, path: Path) -> None:
    if not distributed.everywhere(not problem):
        raise UserError(problem or f"{path}: another process cannot use it; its own output says why")


def _write_durably(path: Path, text: str) -> None:
    scratch = path.with_name(path.name + ".tmp")
    with scratch.open("w", encoding="utf-8") as file:
        file.write(text + "\n")
        file.flush()
        os.fsync(file.fileno())
    os.replace(scratch, path)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)

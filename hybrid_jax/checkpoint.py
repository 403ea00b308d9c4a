"""Checkpoints of a run: written asynchronously by Orbax, found again by themselves.

`{folder}/{step}/` holds the state after `step` optimizer steps and, as JSON, what it belongs to. Orbax writes
into a folder with a temporary name and renames it at the end, so a half-written one is never taken for whole;
one that was damaged later (manifest.py) is passed over for the next older one. Every process of a run calls every
method, from its main thread.
"""

from __future__ import annotations

import collections
import dataclasses
import shutil
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import orbax.checkpoint.experimental.v1 as ocp
from absl import flags

from hybrid_jax import cluster, distributed, manifest, orbax_log, pending, schema
from hybrid_jax.errors import UserError
from hybrid_jax.optimizer import STACKED, path_str

PyTree = Any

STATE = "state"
TEMPORARY = "orbax-checkpoint-tmp"  # in the name of a checkpoint that is being written
_DAMAGED = ".damaged"  # after the name of one that was passed over
_USABLE = 0.95  # of a device's memory: what is free lies in pieces
_PIECE, _PIECE_OF_LAYERS = 2**23, 2**20  # bytes of an array that are compressed together, at most and at least
_STALE = "stale"  # said of a list of checkpoints that is not what lies in the folder


def kept(steps: Sequence[int], keep: int, every: int = 1, for_good: int = 0) -> list[bool]:
    """Which of these checkpoints, oldest first, stay: the newest, the `keep` newest of steps that `every` divides, and
    all of steps that `for_good` divides (0: none). What a signal asks for at another step costs none of the others."""
    scheduled = [step for step in steps if step % every == 0][-keep:]
    return [step == steps[-1] or step in scheduled or (for_good > 0 and step % for_good == 0) for step in steps]


@dataclasses.dataclass
class _Kept(ocp.training.preservation_policies.PreservationPolicy):
    keep: int
    every: int
    for_good: int

    def should_preserve(self, checkpoints: Sequence[Any], *, context: Any) -> Sequence[bool]:
        return kept([checkpoint.step for checkpoint in checkpoints], self.keep, self.every, self.for_good)


def _meet_through_the_coordinator() -> None:
    """Has Orbax's processes wait for each other there. Else their devices do, by a collective from a thread beside the
    training step, which meets those of the step in another order in each process."""
    flags.FLAGS["experimental_orbax_use_distributed_barrier"].value = True
    if not flags.FLAGS.is_parsed():  # Orbax reads no flag before
        flags.FLAGS.mark_as_parsed()


class Checkpoints:
    """The checkpoints in one folder. Use as a context manager, or call `close`: it waits for a write in
    progress.

    keep, every, keep_every: which stay, see `kept`.
    max_failures: writes in a row that may fail before that is an error; each is told to `warn` and kept for `failures`.
    timeout_seconds: the longest that a write, or another process of the run, is waited for.
    warn: takes the lines of what went wrong, in place of `log`.
    """

    def __init__(
        self,
        folder: str | Path,
        keep: int,
        meta: dict[str, Any],
        log: Callable[[str], None],
        *,
        every: int = 1,
        keep_every: int = 0,
        max_failures: int = 1,
        timeout_seconds: int = 600,
        warn: Callable[[str], None] | None = None,
    ):
        self.folder = Path(folder).absolute()
        self.meta, self.log, self.warn = meta, log, warn or log
        self._policy = _Kept(max(keep, 1), every, keep_every)
        self.max_failures, self.timeout_seconds = max_failures, timeout_seconds
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except FileExistsError:
            raise UserError(f"{self.folder}: is no folder; move it away, or set another config.workdir") from None
        self._told: list[tuple[int, str]] = []
        self._failed = 0  # writes in a row
        self._lost: tuple[int, str] | None = None  # the newest write asked for, if it failed, and why
        self._write: pending.Write | None = None
        self._copy: Callable[[PyTree], PyTree] | None = None
        self._abandoned = False
        self._opened = 0
        orbax_log.divert()
        _meet_through_the_coordinator()
        self._open()

    def __enter__(self) -> Checkpoints:
        return self

    def __exit__(self, *unused: object) -> None:
        self.close()

    def _open(self) -> None:
        """Makes Orbax read the folder anew, and clears away what a write left half done."""
        unfinished = _unfinished(self.folder)
        self._opened += 1
        context = ocp.Context()
        context.asynchronous.timeout_secs = self.timeout_seconds
        context.array.saving.scoped_storage_options_creator = _in_pieces
        opened = self._opened
        context.asynchronous.post_finalization_callback = lambda: self._seal(opened)  # no method: it is deep-copied
        # An abandoned write of before may still stand at a barrier: it must meet nobody there.
        context.multiprocessing.barrier_sync_key_prefix = f"hybrid_jax_{self._opened}"
        training = ocp.training
        self._orbax = training.Checkpointer(
            self.folder,
            context=context,
            save_decision_policy=training.save_decision_policies.FixedIntervalPolicy(1),  # the caller decides when
            preservation_policy=self._policy,
            cleanup_tmp_directories=True,
        )
        self._whole = set(self._listed())
        for name in unfinished:
            self.log(f"{self.folder / name} was not written to its end and is deleted")

    def _try_open(self) -> str:
        """`_open`, or why the folder cannot be read."""
        try:
            self._open()
        except Exception as error:  # orbax raises many kinds
            return pending.reason(error)
        return ""

    def _listed(self) -> list[int]:
        return [checkpoint.step for checkpoint in self._orbax.checkpoints]

    def steps(self) -> list[int]:
        """Steps of the whole checkpoints, oldest first."""
        return sorted(step for step in self._whole if (self.folder / str(step)).is_dir())

    def pushes_out(self, step: int) -> list[int]:
        """The checkpoints that one more, of `step`, would cost. Waits for the write in progress."""
        self.settle()
        policy, steps = self._policy, [*self.steps(), step]
        stay = kept(steps, policy.keep, policy.every, policy.for_good)
        return [old for old, stays in zip(steps, stay, strict=True) if not stays]

    # ---- writing -----------------------------------------------------------------

    def save(self, step: int, state: PyTree, record: Mapping[str, Any] | None = None) -> None:
        """Starts writing; returns when `state` may be donated. Replaces nothing.

        Where the devices have room for it, the state is copied there, and from there in the background; otherwise this
        waits for the copy to the host. At most one copy of a state is held: a save waits until the one before it has
        been written. A write that fails is told by `failures`, and raises UserError only when it is one too many.
        `record`, JSON, is found again in the meta that `restore` returns.
        """
        self.settle()
        self._lost = None
        said = self._agree(self._probe() or (_STALE if self._listed() != self.steps() else ""), f"checkpoint {step}")
        reason = pending.joined({process: text for process, text in said.items() if text != _STALE})
        if said and not reason:
            reason = self._try_open()
        if reason:
            self._count_failure(step, reason)
        if reason or step in self.steps():
            return
        meta = {**self.meta, **(record or {})}
        room = _fits_twice(state)
        held = self.prepare(state)(state) if room else state
        copied = threading.Event()

        def start() -> Callable[[], Any]:
            nonlocal held
            try:
                response = self._orbax.save_async(
                    step, held, force=True, checkpointable_name=STATE, custom_metadata=meta
                )
            finally:
                held = None  # the host has it
                copied.set()
            assert response is not None  # it is None for what the policy leaves out
            return response.result

        self._write = pending.Write(step, meta, time.monotonic() + self.timeout_seconds, start)
        threading.Thread(target=self._write.run, daemon=True, name="checkpoint").start()
        if not room:
            copied.wait()
        self.poll()

    def prepare(self, state: PyTree) -> Callable[[PyTree], PyTree]:
        """Compiles, once, the copy that `save` makes of such a state: the first one would wait for it."""
        if self._copy is None:
            same = jax.tree.map(lambda x: x.sharding, state)
            copy = jax.jit(lambda tree: jax.tree.map(jnp.copy, tree), out_shardings=same)
            self._copy = copy.lower(state).compile()
        return self._copy

    def _probe(self) -> str:
        """Why this process cannot write to the folder; "" if it can."""
        probe = self.folder / f".writable.{jax.process_index()}"
        try:
            if not self.folder.is_dir():
                self.folder.mkdir(exist_ok=True)  # but not its parents: a file system may be gone
                self.warn(f"{self.folder} was gone, with what was in it, and is made anew")
            probe.touch()
            probe.unlink()
        except OSError as error:
            return f"{error.strerror or error}: {error.filename}"
        return ""

    def _seal(self, opened: int) -> None:
        """Called by Orbax, in process 0, in a thread, when all files are there and before the final name is given."""
        write = self._write
        if write is None or opened != self._opened:
            raise TimeoutError("this write was given up")
        (folder,) = self._temporary(write.step)
        manifest.write(folder, write.meta)

    def _temporary(self, step: int) -> list[Path]:
        """The folder in which this checkpoint is being written, if it is there."""
        return [path for path in self.folder.glob(f"{step}.*{TEMPORARY}*") if path.is_dir()]

    def poll(self) -> None:
        """Looks whether a write in progress has failed, and says so at once. Raises UserError if it was one too many.

        Of several processes each sees its own failure here; all learn of it in the next `save`, `wait` or `restore`.
        """
        write = self._write
        if write is None or not write.done.is_set() or write.error is None:
            return
        if jax.process_count() == 1:
            self.settle()
        elif not write.told:
            write.told = True
            who, why = f"process {jax.process_index()}", pending.reason(write.error)
            print(f"{who}: checkpoint {write.step} could not be written: {why}", file=sys.stderr, flush=True)

    def failures(self) -> list[tuple[int, str]]:
        """(step, reason) of the writes that failed since this was last asked."""
        told, self._told = self._told, []
        return told

    def settle(self) -> None:
        """Waits for the write in progress, and agrees with the other processes on how it ended."""
        write = self._write
        if write is None:
            return
        write.done.wait(max(0.0, write.deadline - time.monotonic()))
        if not write.done.is_set():
            reason = f"not written within {self.timeout_seconds} s (config.checkpoint.timeout_seconds)"
        elif write.error:
            gone = distributed.is_main() and not list(self.folder.glob(f"{write.step}*"))
            reason = pending.reason(write.error, "its folder vanished while it was written" if gone else "")
        else:
            reason = ""
        said = self._agree(reason, f"the end of checkpoint {write.step}")
        self._write = None
        if said:
            self._clear_away(write.step)
            self._count_failure(write.step, pending.joined(said))
            return
        self._failed = 0
        self._whole.add(write.step)
        if distributed.is_main():
            for path in self.folder.glob(f"*{_DAMAGED}"):  # the run has come past it
                if path.stem.isdigit() and int(path.stem) <= write.step:
                    shutil.rmtree(path, ignore_errors=True)

    def _clear_away(self, step: int) -> None:
        """So that a full disk does not stay full."""
        if distributed.is_main():
            for path in self._temporary(step):
                shutil.rmtree(path, ignore_errors=True)
        # Orbax has forgotten what this write would have replaced, and may remember what it did not write.
        if self.folder.is_dir():
            self._try_open()  # if it cannot, `save` sees that its list is stale, and tries again

    def _count_failure(self, step: int, reason: str) -> None:
        self._failed += 1
        self._lost = (step, reason)
        self._told.append(self._lost)
        self.warn(
            f"checkpoint {step} could not be written: {reason}; {self._kept()} (failure {self._failed} in a row; "
            f"config.checkpoint.max_failures is {self.max_failures})"
        )
        if self._failed >= self.max_failures:
            raise self._error(step, reason)

    def _agree(self, said: str, doing: str) -> dict[int, str]:
        try:
            return distributed.agree(said, doing, self.timeout_seconds, "config.checkpoint.timeout_seconds")
        except cluster.MissingProcesses:
            self._abandoned = True
            raise

    def wait(self) -> None:
        """Until what was started has been written. Raises UserError if the newest write failed."""
        self.settle()
        if self._lost:
            raise self._error(*self._lost)

    def _error(self, step: int, reason: str) -> UserError:
        return UserError(
            f"{self.folder}: checkpoint {step} could not be written: {reason}; {self._kept()}; mend that, or set "
            "another config.workdir, and run the same command to go on from there"
        )

    def _kept(self) -> str:
        newest = self.steps()
        return f"checkpoint {newest[-1]} is kept" if newest else "there is none yet"

    def close(self) -> None:
        """Waits for a write in progress; what fails is said, and raises nothing."""
        if self._abandoned:  # others are gone: there is nobody to end it with
            return
        try:
            self.settle()
            self._orbax.close()
        except UserError:
            return  # said already
        except Exception as error:
            self.warn(f"{self.folder}: {pending.reason(error)}")

    def delete_after(self, step: int) -> None:
        """Deletes the checkpoints that are newer than `step`, newest first."""
        self.settle()
        for newer in reversed(self.steps()):
            if newer > step:
                self._orbax.delete(newer)

    # ---- reading -----------------------------------------------------------------

    def restore(self, wanted: PyTree) -> tuple[PyTree, int, dict[str, Any]] | None:
        """(state, step, meta) of the newest checkpoint that can be read, or None when there is none.

        `wanted` is a tree of ShapeDtypeStructs with shardings, of any mesh. A checkpoint that is damaged is passed
        over, with a line that says why, and set aside under another name. Raises UserError when the checkpoint is of
        another model (naming the first paths that differ), of another schema, or when there are some and none can be
        read.
        """
        self.settle()
        passed: dict[int, str] = {}
        files = {int(path.name) for path in self.folder.iterdir() if path.name.isdigit() and not path.is_dir()}
        for step in sorted({*self.steps(), *files}, reverse=True):
            began = time.perf_counter()
            found = self._try_restore(step, wanted)
            if isinstance(found, str):
                passed[step] = found
                self.warn(f"checkpoint {step} cannot be read and is passed over ({found})")
                continue
            self.log(f"restored checkpoint {step} in {time.perf_counter() - began:.1f} s")
            self._set_aside(list(passed))
            self._finish_deleting()
            return found[0], step, found[1]
        if passed:
            raise UserError(
                f"{self.folder}: none of the {len(passed)} checkpoints can be read "
                f"({'; '.join(f'{step}: {reason}' for step, reason in list(passed.items())[:3])}); move the folder "
                "away to start anew"
            )
        return None

    def _finish_deleting(self) -> None:
        """Deletes what a run that was killed had begun to delete: it has no part in the order of those kept, and may
        lack some of its files."""
        policy, steps = self._policy, self.steps()
        stay = kept(steps, policy.keep, policy.every, policy.for_good)
        for step, stays in zip(steps, stay, strict=True):
            if not stays:
                self._orbax.delete(step)

    def _set_aside(self, steps: list[int]) -> None:
        """Renames damaged checkpoints: the run could never save at those steps again, nor count what it keeps."""
        if not steps:
            return
        if distributed.is_main():
            for step in steps:
                path = self.folder / str(step)
                aside = path.with_name(path.name + _DAMAGED)
                try:
                    shutil.rmtree(aside, ignore_errors=True)
                    path.rename(aside)
                    self.log(f"checkpoint {step} is set aside as {aside.name}, until the run has come past it")
                except OSError as error:
                    self.warn(f"checkpoint {step} cannot be set aside: {error.strerror or error}")
        self._agree("", "setting damaged checkpoints aside")
        self._open()

    def _try_restore(self, step: int, wanted: PyTree) -> tuple[PyTree, dict[str, Any]] | str:
        """(state, meta), or why the checkpoint cannot be read, as all processes agreed."""
        folder = self.folder / str(step)
        reason = manifest.damage(folder, jax.process_index(), jax.process_count())
        if said := self._agree(reason, f"reading checkpoint {step}"):
            return pending.joined(said)
        meta, saved, reason = self._index(step)
        if said := self._agree(reason, f"reading checkpoint {step}"):
            return pending.joined(said)
        template = schema.template(folder, meta, saved, wanted, self.meta["pattern"], self.log)
        state, reason = self._load(step, template)
        if said := self._agree(reason, f"reading checkpoint {step}"):
            return pending.joined(said)
        state = schema.migrate(folder, meta, state, wanted, self.meta["pattern"], self.log)
        if not bool(_all_finite(state)):
            return "it holds values that are not finite"
        return state, meta

    def _index(self, step: int) -> tuple[dict[str, Any], PyTree, str]:
        """(meta, the saved arrays' shapes and dtypes, why they cannot be had)."""
        try:
            found = self._orbax.metadata(step)
        except Exception:  # orbax raises many kinds, by which file is damaged
            whole = (self.folder / str(step) / "_CHECKPOINT_METADATA").exists()
            return {}, None, "its index is damaged" if whole else "_CHECKPOINT_METADATA is missing"
        meta, saved = dict(found.custom_metadata or {}), found.metadata
        if isinstance(saved, dict) and set(saved) == {STATE}:
            saved = saved[STATE]
        if saved is None:
            return meta, None, "its index is damaged"
        known = manifest.is_recorded(self.folder / str(step), meta)
        return meta, saved, "" if known else "its record of the run, in _CHECKPOINT_METADATA, was changed"

    def _load(self, step: int, wanted: PyTree) -> tuple[PyTree, str]:
        try:
            return jax.block_until_ready(self._orbax.load(step, wanted, checkpointable_name=STATE)), ""
        except Exception:
            return None, "its files are incomplete or damaged"


def _in_pieces(path: tuple[Any, ...], leaf: Any) -> ocp.options.ArrayOptions.Saving.StorageOptions:
    """How an array lies in its files: a layer of a stacked one by itself, unless that is tiny, so that reading one
    does not decompress all, and a large one in parts."""
    stacked = STACKED in path_str(path).split(".") and len(leaf.shape) > 1
    alone = stacked and leaf.nbytes >= leaf.shape[0] * _PIECE_OF_LAYERS
    return ocp.options.ArrayOptions.Saving.StorageOptions(chunk_byte_size=_PIECE, shard_axes=(0,) if alone else ())


def _unfinished(folder: Path) -> list[str]:
    """Names of what a write that did not end has left."""
    try:
        return sorted(path.name for path in folder.iterdir() if TEMPORARY in path.name)
    except OSError:
        return []


def _fits_twice(state: PyTree) -> bool:
    """Whether each of this process's devices has room for a second copy of its part of `state`, at the peak."""
    size: dict[jax.Device, int] = collections.defaultdict(int)
    for array in jax.tree.leaves(state):
        for shard in array.addressable_shards:
            size[shard.device] += shard.data.nbytes
    for device, needed in size.items():
        stats = device.memory_stats() or {}  # a CPU has none
        limit = stats.get("bytes_limit", 0)
        if limit and stats.get("peak_bytes_in_use", limit) + needed > _USABLE * limit:
            return False
    return True


@jax.jit
def _all_finite(state: PyTree) -> jax.Array:
    floats = [x for x in jax.tree.leaves(state) if jnp.issubdtype(x.dtype, jnp.floating)]
    return jnp.all(jnp.stack([jnp.isfinite(x).all() for x in floats]))

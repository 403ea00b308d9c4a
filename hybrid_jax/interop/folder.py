"""A folder that is there whole or not at all."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

from hybrid_jax.errors import UserError
from hybrid_jax.metrics import short


def check_free(out: Path, overwrite: bool, ours: Callable[[Path], bool], what: str) -> None:
    """Raises UserError unless `out` can become a new folder: it is not there, is empty, or may be overwritten.

    ours: whether a folder is `what` the command makes; nothing else is replaced, a run with its
    checkpoints least of all.
    """
    if not out.parent.is_dir():
        raise UserError(f"--out: there is no folder {out.parent}; make it first")
    if not os.access(out.parent, os.W_OK):
        raise UserError(f"--out: {out.parent} cannot be written to")
    if out.is_symlink() or (out.exists() and not out.is_dir()):
        raise UserError(f"--out: {out} is there and is no folder; name another")
    if not out.is_dir() or not any(out.iterdir()):
        return
    if not overwrite:
        raise UserError(f"--out: {out} is there already; name another, or --overwrite replaces it")
    if not ours(out):
        raise UserError(f"--out: {out} is not {what}, so it is not replaced; name another")


@contextlib.contextmanager
def appearing(out: Path, needed: int) -> Iterator[Path]:
    """A scratch folder beside `out`, which takes its place at the end of the block, or vanishes when that fails.

    needed: bytes that will be written. Raises UserError where the disk has not that much, becomes full, or another
    process is writing the same folder.
    """
    scratch = out.parent / f".{out.name}.partial"
    try:
        free = shutil.disk_usage(out.parent).free
        if free < needed:
            raise UserError(f"--out: needs {short(needed)}B and {out.parent} has {short(free)}B left; free some space")
        with _locked(scratch):
            try:
                yield scratch
                _replace(scratch, out)
            finally:
                shutil.rmtree(scratch, ignore_errors=True)
    except OSError as error:
        place = error.filename or out
        raise UserError(f"--out: {place}: {error.strerror or error}; nothing was written") from None


def _replace(scratch: Path, out: Path) -> None:
    for path in (*(p for p in scratch.rglob("*") if p.is_dir()), scratch):
        _sync(path)
    old = out.parent / f".{out.name}.old"
    shutil.rmtree(old, ignore_errors=True)
    if out.is_dir():
        out.rename(old)
    try:
        scratch.rename(out)
    except BaseException:
        if old.is_dir():
            old.rename(out)
        raise
    shutil.rmtree(old, ignore_errors=True)
    _sync(out.parent)


def _sync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def _locked(scratch: Path) -> Iterator[None]:
    """Makes the folder anew: what a killed process left is removed, one in which another process works is refused."""
    lock = scratch.with_name(f"{scratch.name}.lock")
    with lock.open("a") as handle:
        try:
            import fcntl

            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)  # released also when the process dies
        except BlockingIOError:
            raise UserError(f"--out: another process is writing {scratch}; wait for it") from None
        except (ImportError, OSError):  # no locks here
            pass
        try:
            shutil.rmtree(scratch, ignore_errors=True)
            scratch.mkdir()
            yield
        finally:
            lock.unlink(missing_ok=True)

"""Disks that are full: a tmpfs of this process's own, or a limit on the size of files where there can be none."""

import ctypes
import os
import random
import resource
import shutil
import signal
from pathlib import Path

from tests.chaos import preparing, training
from tests.chaos.outcome import Trial, last_step
from tests.chaos.training import LIMIT, workdir

_NEWNS, _NEWUSER, _PRIVATE, _DETACH, _REMOUNT = 0x20000, 0x10000000, (1 << 18) | (1 << 14), 2, 32
_libc = ctypes.CDLL(None, use_errno=True)
_own_namespace = False


def mount(folder: Path, size: int) -> str:
    """A tmpfs of `size` bytes that only this process and its children see, and that ends with them; what is wrong,
    or ""."""
    global _own_namespace
    if not _own_namespace:
        user, group = os.getuid(), os.getgid()
        if _libc.unshare(_NEWNS | (_NEWUSER if user else 0)):
            return f"no mount namespace: {os.strerror(ctypes.get_errno())}"
        if user:
            Path("/proc/self/setgroups").write_text("deny")
            Path("/proc/self/uid_map").write_text(f"{user} {user} 1")
            Path("/proc/self/gid_map").write_text(f"{group} {group} 1")
        _libc.mount(b"none", b"/", None, _PRIVATE, None)
        _own_namespace = True
    if _libc.mount(b"tmpfs", os.fsencode(folder), b"tmpfs", 0, b"size=%d" % size):
        return f"no tmpfs: {os.strerror(ctypes.get_errno())}"
    return ""


def _resize(folder: Path, size: int) -> None:
    if _libc.mount(b"tmpfs", os.fsencode(folder), b"tmpfs", _REMOUNT, b"size=%d" % size):
        raise OSError(ctypes.get_errno(), "remount")


def under_a_run(reference: training.Reference, rng: random.Random, trial: Trial) -> None:
    """The disk fills while the run trains. There is room again after its end, or, in a half of them, while it runs."""
    workdir(trial).mkdir()
    if problem := mount(workdir(trial), 2**22):
        trial.untried.append(problem)
        _limited_files(reference, rng, trial)
        return
    ballast, since = workdir(trial) / "ballast", len(trial.said())
    trainer = training.start(reference.store, trial)
    target, later = rng.randint(1, training.STEPS - 12), rng.choice((8, 1000))
    trainer.wait(LIMIT, until=lambda: last_step(workdir(trial)) >= target)
    _fill(ballast, room=rng.choice((0, rng.randint(0, 100_000))))
    trial.hit("disk full under a run", f"after step {last_step(workdir(trial))}")
    trainer.wait(LIMIT, until=lambda: last_step(workdir(trial)) >= target + later)
    ballast.unlink()
    if not trainer.wait(LIMIT):
        trainer.kill()
        trial.problems.append(f"on a full disk: still there after {LIMIT:.0f} s")
    if trainer.code != 0:
        trial.expect_error_line(trainer.code, since, str(workdir(trial)))
    training.finish_and_compare(reference, trial)
    _unmount(workdir(trial), trial)


def _limited_files(reference: training.Reference, rng: random.Random, trial: Trial) -> None:
    training.run_until_it_can_resume(reference, rng, trial)
    since, limit = len(trial.said()), rng.randint(10_000, 30_000)
    trainer = training.start(reference.store, trial, before=lambda: _limit_files(limit))
    trainer.wait(LIMIT)
    trial.hit("a limit on file sizes under a run", f"{limit} bytes")
    if trainer.code != 0:
        trial.expect_error_line(trainer.code, since, str(workdir(trial)))
    training.finish_and_compare(reference, trial)


def under_prepare(reference: preparing.Reference, rng: random.Random, trial: Trial) -> None:
    """Too little room for the parts or for joining them."""
    corpus = preparing.prefix(trial).parent
    size = sum(p.stat().st_size for p in reference.prefix.parent.glob(f"{reference.prefix.name}.*"))
    problem = mount(corpus, round(rng.uniform(0.05, 1.8) * size))
    before = None
    if problem:
        trial.untried.append(problem)
        limit = round(rng.uniform(0.01, 0.9) * size)
        before = lambda: _limit_files(limit)  # noqa: E731
    since = len(trial.said())
    run = preparing.start(reference, preparing.prefix(trial), trial.out, rng.randint(1, 2), before=before)
    if not run.wait(LIMIT):
        run.kill()
    trial.hit("a limit on file sizes under prepare" if problem else "disk full under prepare")
    trial.expect_error_line(run.code, since, str(corpus), "No space left" if not problem else "File too large")
    stores = [p.name for p in corpus.glob("store.*") if p.is_file()]
    trial.expect(not stores, f"prepare failed and left {stores}")
    if not problem:
        _resize(corpus, 8 * size)
    preparing.finish_and_compare(reference, rng, trial)
    if not problem:
        _unmount(corpus, trial)


def _fill(path: Path, room: int) -> None:
    """Writes a file until the disk is full, and leaves `room` bytes free."""
    block = bytes(2**14)
    with path.open("wb", buffering=0) as file:
        try:
            while file.write(block) == len(block):
                pass
        except OSError:
            pass
        file.truncate(max(0, file.tell() - room))


def _limit_files(size: int) -> None:
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))


def _unmount(folder: Path, trial: Trial) -> None:
    """What is in it is kept if there is something to look at."""
    if trial.problems:
        shutil.copytree(folder, folder.with_name(f"{folder.name} kept"))
    _libc.umount2(os.fsencode(folder), _DETACH)

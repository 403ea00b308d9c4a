"""Faults of a training run. After them the run is started again, and must end as the undisturbed one did."""

import dataclasses
import random
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hybrid_jax.signals import REQUEUE_EXIT_CODE, exit_code
from tests.chaos import outcome, process
from tests.chaos.config import SAVE_EVERY, STEPS
from tests.chaos.outcome import Trial, being_written, last_step, whole_checkpoints
from tests.chaos.process import FileOperations, Process

LIMIT = 120.0  # seconds; a run that takes longer hangs
MOST_KILLS = 5  # of a run


@dataclasses.dataclass(frozen=True)
class Reference:
    """The undisturbed run."""

    folder: Path
    store: Path  # prefix of what it learned
    seconds: float
    operations: int  # on files
    overrides: tuple[str, ...] = ()  # of its config
    before: Callable[[], None] = lambda: None  # called first in each of its processes


def start(store: Path, trial: Trial, *overrides: str, **named: Any) -> Process:
    arguments = [
        "--config=tests/chaos/config.py",
        f"--config.workdir={workdir(trial)}",
        f"--config.data.path={store}",
        *overrides,
    ]
    return process.trainer(arguments, trial.out, **named)


def workdir(trial: Trial) -> Path:
    return trial.folder / "run"


def finish(store: Path, trial: Trial, *overrides: str, **named: Any) -> Process:
    """Runs it to its end, and leaves the digests of its checkpoints."""
    trainer = start(store, trial, *overrides, after=outcome.digest_checkpoints(workdir(trial)), **named)
    if not trainer.wait(LIMIT):
        trainer.kill()
        trial.problems.append(f"hangs: not done after {LIMIT:.0f} s")
    elif trainer.code:
        trial.problems.append(f"started again, it ends with {trainer.code}: {_last_line(trial)}")
    return trainer


def finish_and_compare(reference: Reference, trial: Trial) -> None:
    trainer = finish(reference.store, trial, *reference.overrides, before=reference.before)
    if trainer.code == 0:
        trial.problems += outcome.differences(workdir(trial), reference.folder)
    trial.expect(outcome.TRACEBACK not in trial.said(), "a traceback")


def run_reference(folder: Path, store: Path) -> Reference:
    """Two runs: one that compiles, of which a half is a run that resumed, and one that is timed. They must agree."""
    import time

    first, second = Trial(folder / "stopped"), Trial(folder / "undisturbed")
    for trial in (first, second):
        trial.folder.mkdir()
    trainer = start(store, first)
    trainer.wait(LIMIT, until=lambda: last_step(workdir(first)) >= STEPS // 2)
    trainer.send(signal.SIGTERM)
    trainer.wait(LIMIT)
    operations, began = FileOperations(), time.monotonic()
    finish(store, second, before=lambda: operations.install(workdir(second)))
    reference = Reference(workdir(second), store, time.monotonic() - began, operations.count)
    if second.problems:
        raise SystemExit(f"error: the undisturbed run fails: {second.problems}; see {second.out}")
    if trainer.code != REQUEUE_EXIT_CODE:
        raise SystemExit(f"error: a run that was told to stop ends with {trainer.code}; see {first.out}")
    finish_and_compare(reference, first)
    if first.problems:
        raise SystemExit(f"error: a run that was stopped and resumed: {first.problems}; see {first.out}")
    return reference


# ---- SIGKILL ----


def kills(reference: Reference, rng: random.Random, trial: Trial, named: str = "") -> None:
    """SIGKILL, up to MOST_KILLS times, each time in the run that goes on from the last. The table names each fault
    `named` SIGKILL ..."""
    for _ in range(rng.randint(1, MOST_KILLS)):
        if not _killed(reference, rng, trial, named):
            break
    finish_and_compare(reference, trial)


def _killed(reference: Reference, rng: random.Random, trial: Trial, named: str) -> bool:
    folder, since, old = workdir(trial), len(trial.said()), set(being_written(workdir(trial)))
    moment = rng.choice(("clock", "step", "save", "file"))
    at, longest = rng.randint(1, reference.operations), rng.choice((0.0, 0.02, 0.1))
    share, target = rng.uniform(0, 1.2), rng.randint(1, STEPS)
    operations = FileOperations()

    def prepare() -> None:
        reference.before()
        if moment == "file":
            operations.install(folder, at)

    trainer = start(reference.store, trial, *reference.overrides, before=prepare)

    def training() -> bool:
        return "training: steps" in trial.said(since)

    if moment == "file":
        trainer.wait(LIMIT)
    elif moment == "clock":
        trainer.wait(share * reference.seconds)
    elif moment == "step":
        trainer.wait(LIMIT, until=lambda: training() and last_step(folder) >= target
                     and not set(being_written(folder)) - old)  # fmt: skip
    else:
        trainer.wait(LIMIT, until=lambda: training() and last_step(folder) >= target - SAVE_EVERY
                     and bool(set(being_written(folder)) - old))  # fmt: skip
    if moment != "file":
        process.pause(rng, longest)
        trainer.kill()
    if trainer.code == 0:
        return False
    trial.expect(trainer.code == -signal.SIGKILL, f"ended with {trainer.code} before it was killed")
    if moment == "file":
        fault = "SIGKILL before a file operation"
    elif set(being_written(folder)) - old:
        fault = "SIGKILL while a checkpoint is written"
    elif not training():
        fault = "SIGKILL while the run starts"
    elif last_step(folder) >= STEPS - 1:
        fault = "SIGKILL after the last step"
    else:
        fault = "SIGKILL in a step"
    trial.hit(named + fault, f"{f'operation {at} ' if moment == 'file' else ''}after step {last_step(folder)}")
    return trainer.code == -signal.SIGKILL


def run_until_it_can_resume(reference: Reference, rng: random.Random, trial: Trial, store: Path | None = None) -> None:
    """Leaves a run that was killed once two checkpoints or more were whole."""
    target = rng.randint(3 * SAVE_EVERY, STEPS - SAVE_EVERY)
    trainer = start(store or reference.store, trial)
    trainer.wait(
        LIMIT, until=lambda: last_step(workdir(trial)) >= target and len(whole_checkpoints(workdir(trial))) >= 2
    )
    trainer.kill()
    trial.expect(trainer.code == -signal.SIGKILL, f"ended with {trainer.code}: {_last_line(trial)}")


# ---- signals that a run can answer ----

SEQUENCES = (
    (signal.SIGTERM,),
    (signal.SIGINT,),
    (signal.SIGUSR1,),
    (signal.SIGTERM, signal.SIGTERM),
    (signal.SIGINT, signal.SIGINT),
    (signal.SIGTERM, signal.SIGINT),
    (signal.SIGUSR1, signal.SIGTERM),
)


def signals(sequence: tuple[signal.Signals, ...], reference: Reference, rng: random.Random, trial: Trial) -> None:
    """One signal, or two of them, at random moments; then the end, or another round of them."""
    for _ in range(rng.randint(1, 2)):
        trainer = start(reference.store, trial)
        trainer.wait(rng.uniform(0.1, 1.0) * reference.seconds)
        for number in sequence:
            trainer.send(number)
            process.pause(rng, rng.choice((0.001, 0.1)))
        if not trainer.wait(LIMIT):
            trainer.kill()
            trial.problems.append(f"{_names(sequence)}: still there after {LIMIT:.0f} s")
        if trainer.code == 0:
            break
        trial.hit(_names(sequence), f"exit code {trainer.code}")
        allowed = {exit_code(number, REQUEUE_EXIT_CODE) for number in sequence}
        trial.expect(trainer.code in allowed, f"{_names(sequence)}: exit code {trainer.code}: {_last_line(trial)}")
    finish_and_compare(reference, trial)


def _names(sequence: tuple[signal.Signals, ...]) -> str:
    return " then ".join(number.name for number in sequence)


def _last_line(trial: Trial) -> str:
    lines = trial.said().strip().splitlines()
    return lines[-1] if lines else ""


# ---- damaged files ----

DAMAGES: dict[str, Callable[[Path, random.Random], None]] = {}


def _damage(function: Callable[[Path, random.Random], None]) -> Callable[[Path, random.Random], None]:
    DAMAGES[function.__name__] = function
    return function


@_damage
def truncated(path: Path, rng: random.Random) -> None:
    with path.open("r+b") as file:
        file.truncate(rng.randrange(path.stat().st_size))


@_damage
def changed(path: Path, rng: random.Random) -> None:
    """One byte of it."""
    with path.open("r+b") as file:
        place = rng.randrange(path.stat().st_size)
        file.seek(place)
        old = file.read(1)[0]
        file.seek(place)
        file.write(bytes([old ^ rng.randint(1, 255)]))


@_damage
def removed(path: Path, rng: random.Random) -> None:
    path.unlink()


def damaged_checkpoint(how: str, reference: Reference, rng: random.Random, trial: Trial) -> None:
    """A file of the newest checkpoint: the older one is taken."""
    run_until_it_can_resume(reference, rng, trial)
    _damage_one(how, whole_checkpoints(workdir(trial))[-1], rng, trial)
    trial.faults.append(f"a file of a checkpoint {how}")
    finish_and_compare(reference, trial)


def damaged_checkpoints(reference: Reference, rng: random.Random, trial: Trial) -> None:
    """A file of every checkpoint: the run must not begin anew in silence."""
    run_until_it_can_resume(reference, rng, trial)
    for step in whole_checkpoints(workdir(trial)):
        _damage_one(rng.choice(list(DAMAGES)), step, rng, trial)
    trial.faults.append("a file of every checkpoint damaged")
    since = len(trial.said())
    trainer = start(reference.store, trial)
    trainer.wait(LIMIT)
    if trainer.code != 0:  # 0 where what was damaged is never read
        trial.expect_error_line(trainer.code, since, "none of the", str(workdir(trial) / "checkpoints"))
        (workdir(trial) / "checkpoints").rename(trial.folder / "moved away")  # as it says
    finish_and_compare(reference, trial)


def _damage_one(how: str, step: int, rng: random.Random, trial: Trial) -> None:
    files = [p for p in sorted((workdir(trial) / "checkpoints" / str(step)).rglob("*")) if p.is_file()]
    path = rng.choice([p for p in files if p.stat().st_size])
    DAMAGES[how](path, rng)
    trial.story.append(f"{path.relative_to(trial.folder)} {how}")


def damaged_store(how: str, suffix: str, reference: Reference, rng: random.Random, trial: Trial) -> None:
    """A file of the store that a stopped run goes on with: it must refuse, and go on when the file is whole again."""
    store = _copied_store(reference, trial)
    run_until_it_can_resume(reference, rng, trial, store)
    path = Path(f"{store}{suffix}")
    DAMAGES[how](path, rng)
    trial.hit(f"a file of the store {how}", suffix)
    since = len(trial.said())
    trainer = start(store, trial)
    trainer.wait(LIMIT)
    trial.expect_error_line(trainer.code, since, f"config.data|{store}")
    path.write_bytes(Path(f"{reference.store}{suffix}").read_bytes())
    finish_and_compare(dataclasses.replace(reference, store=store), trial)


def store_cut_short_under_the_run(reference: Reference, rng: random.Random, trial: Trial) -> None:
    """Its ids truncated while they are mapped: the run may die, but not end with other numbers."""
    store = _copied_store(reference, trial)
    trainer = start(store, trial)
    target = rng.randint(1, STEPS // 2)
    trainer.wait(LIMIT, until=lambda: last_step(workdir(trial)) >= target)
    truncated(Path(f"{store}.bin"), rng)
    trial.hit("the store truncated under a run", f"after step {last_step(workdir(trial))}")
    if not trainer.wait(LIMIT):
        trainer.kill()
    Path(f"{store}.bin").write_bytes(Path(f"{reference.store}.bin").read_bytes())
    finish_and_compare(dataclasses.replace(reference, store=store), trial)


def _copied_store(reference: Reference, trial: Trial) -> Path:
    store = trial.folder / "store"
    for suffix in (".bin", ".idx", ".json"):
        Path(f"{store}{suffix}").write_bytes(Path(f"{reference.store}{suffix}").read_bytes())
    return store

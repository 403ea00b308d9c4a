"""Two processes of one run (jax.distributed on loopback), of which one is killed or stopped."""

import random
import signal
import time
from pathlib import Path

from tests.chaos import outcome, training
from tests.chaos.outcome import Trial, last_step
from tests.chaos.process import Process
from tests.chaos.training import LIMIT, workdir
from tests.processes import free_port

HEARTBEAT_SECONDS = 10


def run_reference(folder: Path, one: training.Reference) -> training.Reference:
    """Two processes undisturbed: their sums are in another order than one's, so they have a reference of their own."""
    trial = Trial(folder / "two")
    trial.folder.mkdir()
    _finish(one.store, trial)
    if trial.problems:
        raise SystemExit(f"error: two undisturbed processes fail: {trial.problems}; see {trial.out}")
    return training.Reference(workdir(trial), one.store, one.seconds, one.operations)


def one_goes(number: signal.Signals, reference: training.Reference, rng: random.Random, trial: Trial) -> None:
    """SIGKILL or SIGSTOP of one: the other must end by itself, and both go on when they are started again."""
    victim, target = rng.randint(0, 1), rng.randint(1, training.STEPS - 8)
    processes = _start(reference.store, trial)
    processes[0].wait(LIMIT, until=lambda: last_step(workdir(trial)) >= target)
    processes[victim].send(number)
    began = time.monotonic()
    other = processes[1 - victim]
    ended = other.wait(LIMIT)
    trial.hit(
        f"{number.name} of one of two processes",
        f"process {victim} after step {last_step(workdir(trial))}; the other ended with {other.code} after "
        f"{time.monotonic() - began:.1f} s",
    )
    trial.expect(ended, f"{number.name} of process {victim}: the other still waits for it after {LIMIT:.0f} s")
    for each in processes:
        each.kill()
    _finish(reference.store, trial)
    if not trial.problems:
        trial.problems += outcome.differences(workdir(trial), reference.folder)


def _finish(store: Path, trial: Trial) -> None:
    processes = _start(store, trial, last=True)
    if not all(each.wait(LIMIT) for each in processes):
        trial.problems.append(f"two processes hang: not done after {LIMIT:.0f} s")
        for each in processes:
            each.kill()
    codes = [each.code for each in processes]
    trial.expect(codes == [0, 0], f"started again, they end with {codes}")


def _start(store: Path, trial: Trial, last: bool = False) -> list[Process]:
    port = free_port()

    def named(index: int) -> dict[str, str]:
        names = ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID")
        return dict(zip(names, (f"127.0.0.1:{port}", "2", str(index)), strict=True))

    after = outcome.digest_checkpoints(workdir(trial)) if last else None
    return [
        training.start(store, trial, f"--heartbeat_seconds={HEARTBEAT_SECONDS}", after=after, environment=named(index))
        for index in range(2)
    ]

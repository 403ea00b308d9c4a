"""Faults of making a store. After them the command is given again, and the store must be the undisturbed one."""

import dataclasses
import gzip
import json
import random
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.chaos import outcome, process
from tests.chaos.outcome import Trial
from tests.chaos.process import KILL_AT, KILL_IN, KILL_UNDER, Process, command
from tests.chaos.training import DAMAGES, LIMIT

DOCUMENTS = 6000
MOST_KILLS = 4  # of a store


RECORDS = ("--records", "--validation_fraction", "0.2")


@dataclasses.dataclass(frozen=True)
class Reference:
    """The undisturbed store, and with which options it is made."""

    inputs: Path
    prefix: Path
    options: tuple[str, ...]
    seconds: float


def write_records(folder: Path, rng: random.Random) -> None:
    """DOCUMENTS numbered prompts with responses, in two kinds of file."""
    folder.mkdir()
    for file in range(6):
        lines = "".join(
            json.dumps({"prompt": f"document {n} ", "response": "x" * rng.randint(1, 500)}) + "\n"
            for n in range(file, DOCUMENTS, 6)
        ).encode()
        (folder / f"{file}.jsonl{'.gz' * (file % 2)}").write_bytes(gzip.compress(lines) if file % 2 else lines)


def write_inputs(folder: Path, rng: random.Random) -> None:
    """DOCUMENTS numbered documents of many lengths, in files of four kinds."""
    words = ["".join(rng.choices("aeioubdfgklmnprst", k=rng.randint(2, 9))) for _ in range(300)]
    texts = [f"document {n} {' '.join(rng.choices(words, k=rng.randint(1, 80)))}" for n in range(DOCUMENTS - 30)]
    folder.mkdir()
    for file in range(6):
        lines = "".join(json.dumps({"text": text}) + "\n" for text in texts[file::6]).encode()
        if file < 3:
            (folder / f"{file}.jsonl").write_bytes(lines)
        else:
            (folder / f"{file}.jsonl.gz").write_bytes(gzip.compress(lines, mtime=0))
    for n in range(DOCUMENTS - 30, DOCUMENTS):
        (folder / f"file{n}.txt").write_text(f"document {n} {' '.join(rng.choices(words, k=rng.randint(1, 3000)))}")


def start(
    reference: Reference, prefix: Path, out: Path, workers: int, more: Sequence[str] = (), **named: Any
) -> Process:
    arguments = ["-m", "tests.chaos.small_parts", "--input", str(reference.inputs), "--output", str(prefix)]
    return command([sys.executable, *arguments, *reference.options, "--workers", str(workers), *more], out, **named)


def run_reference(folder: Path, inputs: Path, options: tuple[str, ...] = ()) -> Reference:
    reference = Reference(inputs, folder / "store", options, 0.0)
    began = time.monotonic()
    run = start(reference, reference.prefix, folder / "out.txt", 1)
    run.wait(LIMIT)
    if run.code != 0 or outcome.document_changes(reference.prefix, DOCUMENTS) != (0, 0):
        raise SystemExit(f"error: the undisturbed store fails with {run.code}; see {folder / 'out.txt'}")
    return dataclasses.replace(reference, seconds=time.monotonic() - began)


def kills(reference: Reference, rng: random.Random, trial: Trial) -> None:
    """SIGKILL of the command or of one of its workers, up to MOST_KILLS times."""
    for _ in range(rng.randint(1, MOST_KILLS)):
        if not _killed(reference, rng, trial):
            break
    finish_and_compare(reference, rng, trial)


def _killed(reference: Reference, rng: random.Random, trial: Trial) -> bool:
    """Whether there was something to kill. What remains of a command may still run when it is given again."""
    workers, victim = rng.randint(1, 3), rng.choice(("command", "worker"))
    if workers == 1:
        victim = "command"
    by_file = rng.random() < 0.5
    since = len(trial.said())
    asked = {KILL_IN: victim, KILL_AT: str(rng.randint(1, 60)), KILL_UNDER: str(trial.folder)} if by_file else {}
    run = start(reference, prefix(trial), trial.out, workers, environment=asked)
    if by_file:
        run.wait(LIMIT)
    else:
        run.wait(rng.uniform(0, 1.3 if workers == 1 else 2.5) * reference.seconds)
        if victim == "worker" and (there := process.session(run.pid, "spawn_main")):
            process.kill_process(rng.choice(there))
            run.wait(LIMIT)
        else:
            victim = "command"
            run.kill()
    if run.code == 0:
        return False
    if victim == "command":
        trial.expect(run.code == -signal.SIGKILL, f"prepare ended with {run.code} before it was killed")
    else:
        trial.expect_error_line(run.code, since, "a worker process was ended from outside")
    trial.hit(
        f"SIGKILL of {'prepare' if victim == 'command' else 'a worker of prepare'}",
        f"{workers} workers, {f'at file operation {asked[KILL_AT]}' if by_file else 'by the clock'}",
    )
    if rng.random() < 0.5:
        trial.expect(process.session_ends(run.pid, 20), "workers go on 20 s after their command was killed")
    return True


def finish_and_compare(reference: Reference, rng: random.Random, trial: Trial) -> None:
    run = start(reference, prefix(trial), trial.out, rng.randint(1, 2))
    if not run.wait(LIMIT):
        run.kill()
    if run.code != 0:
        trial.problems.append(f"given again, prepare ends with {run.code}: {trial.said().splitlines()[-1:]}")
        return
    trial.expect(process.session_ends(run.pid, 20), "workers go on 20 s after the store was whole")
    trial.problems += outcome.store_differences(prefix(trial), reference.prefix)
    lost, twice = outcome.document_changes(prefix(trial), DOCUMENTS)
    trial.documents = (DOCUMENTS, lost, twice)
    trial.expect(not lost and not twice, f"{lost} documents lost, {twice} duplicated")
    trial.expect(outcome.TRACEBACK not in trial.said(), "a traceback")


def prefix(trial: Trial) -> Path:
    return trial.folder / "corpus" / "store"


# ---- other faults ----


def signals(number: signal.Signals, reference: Reference, rng: random.Random, trial: Trial) -> None:
    """While it works: before that it imports, and Python answers."""
    run = start(reference, prefix(trial), trial.out, rng.randint(1, 2))
    run.wait(LIMIT, until=Path(f"{prefix(trial)}.parts").exists)
    run.wait(rng.uniform(0, 0.5) * reference.seconds)
    run.send(number)
    if not run.wait(LIMIT):
        run.kill()
        trial.problems.append(f"{number.name}: still there after {LIMIT:.0f} s")
    trial.hit(f"{number.name} to prepare", f"exit code {run.code}")
    allowed = {0, 128 + number, -number}  # the last where Python itself ends after the work
    trial.expect(run.code in allowed, f"{number.name} to prepare: exit code {run.code}")
    finish_and_compare(reference, rng, trial)


def damaged_parts(how: str, reference: Reference, rng: random.Random, trial: Trial) -> None:
    """A file of the parts that a killed command left."""
    folder, target = Path(f"{prefix(trial)}.parts"), rng.randint(2, 10)
    while True:
        run = start(reference, prefix(trial), trial.out, 1)
        run.wait(LIMIT, until=lambda: len([*folder.glob("[0-9]*.json")]) >= target)
        run.kill()
        files = [p for p in sorted(folder.glob("[0-9p]*")) if p.stat().st_size] if folder.is_dir() else []
        if files:
            break
        for path in prefix(trial).parent.iterdir():  # it was faster than the kill
            path.unlink()
    path = rng.choice(files)
    DAMAGES[how](path, rng)
    trial.hit(f"a file of prepare's parts {how}", path.name)
    if path.name == "plan.json":  # the record of what was asked for: it may refuse, and begin anew when told to
        since = len(trial.said())
        run = start(reference, prefix(trial), trial.out, 1)
        run.wait(LIMIT)
        if run.code != 0:
            trial.expect_error_line(run.code, since, "--overwrite")
            run = start(reference, prefix(trial), trial.out, 1, more=["--overwrite"])
            run.wait(LIMIT)
        trial.expect(run.code == 0, f"after a damaged plan.json: exit code {run.code}")
    finish_and_compare(reference, rng, trial)

"""Faults at random moments: python -m tests.chaos --kills 200 --rounds 5, or `make chaos`.

Runs and stores are killed, their files damaged, their disks filled, their numbers spoilt; then they are started again,
and must end bit for bit as the undisturbed ones. Prints a table of faults, and for each trial that failed the command
that repeats it; the exit code is 1 then. What a seed decides are the faults and their moments, not the machine's speed.
"""

import argparse
import collections
import dataclasses
import multiprocessing
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from multiprocessing import connection
from pathlib import Path

from tests.chaos import disk, nonfinite, preparing, process, several, training
from tests.chaos.outcome import Trial

PREPARE_SHARE = 0.25  # of the kills
MOST_FAILURES = 20  # trials that failed, after which no more kills are tried


@dataclasses.dataclass
class References:
    """What undisturbed runs end with."""

    run: training.Reference
    store: preparing.Reference
    records: preparing.Reference
    skipped: training.Reference | None = None
    rolled_back: training.Reference | None = None
    two: training.Reference | None = None

    def a_store(self, rng: random.Random) -> preparing.Reference:
        return rng.choice((self.store, self.records))


Fault = Callable[[References, random.Random, Trial], None]


def kills(kind: str) -> Fault:
    if kind == "kill-run":
        return lambda r, rng, trial: training.kills(r.run, rng, trial)
    return lambda r, rng, trial: preparing.kills(r.a_store(rng), rng, trial)


def others() -> dict[str, Fault]:
    """Every other fault, by a name that --only takes."""
    found: dict[str, Fault] = {}
    for sequence in training.SEQUENCES:
        name = "+".join(number.name for number in sequence)
        found[name] = lambda r, rng, trial, s=sequence: training.signals(s, r.run, rng, trial)
    for how in training.DAMAGES:
        found[f"checkpoint-{how}"] = lambda r, rng, trial, h=how: training.damaged_checkpoint(h, r.run, rng, trial)
        for suffix in (".bin", ".idx"):
            found[f"store{suffix}-{how}"] = lambda r, rng, trial, h=how, s=suffix: training.damaged_store(
                h, s, r.run, rng, trial
            )
        found[f"parts-{how}"] = lambda r, rng, trial, h=how: preparing.damaged_parts(h, r.a_store(rng), rng, trial)
    found["checkpoints-damaged"] = lambda r, rng, trial: training.damaged_checkpoints(r.run, rng, trial)
    found["store-cut"] = lambda r, rng, trial: training.store_cut_short_under_the_run(r.run, rng, trial)
    for number in (signal.SIGINT, signal.SIGTERM):
        found[f"prepare-{number.name}"] = lambda r, rng, trial, n=number: preparing.signals(
            n, r.a_store(rng), rng, trial
        )
    found["disk-run"] = lambda r, rng, trial: disk.under_a_run(r.run, rng, trial)
    found["disk-prepare"] = lambda r, rng, trial: disk.under_prepare(r.a_store(rng), rng, trial)
    found["nan-memory"] = lambda r, rng, trial: nonfinite.in_memory(r.run, rng, trial)
    found["nan-skipped"] = lambda r, rng, trial: nonfinite.in_data(_there(r.skipped), rng, trial)
    found["nan-rolled-back"] = lambda r, rng, trial: nonfinite.in_data(_there(r.rolled_back), rng, trial)
    for number in (signal.SIGKILL, signal.SIGSTOP):
        found[f"two-{number.name}"] = lambda r, rng, trial, n=number: several.one_goes(n, _there(r.two), rng, trial)
    return found


def _there(reference: training.Reference | None) -> training.Reference:
    assert reference
    return reference


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser("python -m tests.chaos", description=__doc__.split("\n", 1)[0])  # type: ignore[union-attr]
    add = parser.add_argument
    add("--kills", type=int, default=200, help="SIGKILLs that must have hit a run or prepare (default: 200)")
    add("--rounds", type=int, default=5, help="trials of each other fault (default: 5)")
    add("--seed", type=int, help="of all faults and moments (default: another each time)")
    add("--only", metavar="NAME:NUMBER", help="one trial of a seed, as a failure names it; NAME: a round of it")
    add("--lanes", type=int, default=max(1, min(len(os.sched_getaffinity(0)), 8)), help="trials at once")
    add("--folder", type=Path, help="where to work (default: a new temporary folder); kept if a trial fails")
    options = parser.parse_args(arguments)
    names = ["kill-run", "kill-prepare", *others()]
    if options.only and options.only.partition(":")[0] not in names:
        parser.error(f"--only {options.only}: one of {', '.join(names)}")
    return options


def main(arguments: list[str]) -> int:
    options = parse(arguments)
    seed = random.SystemRandom().randrange(10**6) if options.seed is None else options.seed
    folder = options.folder or Path(tempfile.mkdtemp(prefix="chaos-"))
    folder = folder.absolute()
    folder.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    print(f"chaos: seed {seed}, in {folder}", flush=True)
    process.load(folder / "compiled")
    references = make_references(folder, options)
    print(
        f"chaos: an undisturbed run takes {references.run.seconds:.1f} s and {references.run.operations} file "
        f"operations, a store {references.store.seconds:.1f} s ({time.monotonic() - began:.0f} s so far)",
        flush=True,
    )
    trials = run_trials(options, seed, folder, references)
    failed = [(name, trial) for name, trial in trials if trial.problems]
    print(table([trial for _, trial in trials]))
    print(f"\nseed {seed}, {options.lanes} at once, {time.monotonic() - began:.0f} s")
    for name, trial in failed:
        print(f"\n{name} failed: {'; '.join(trial.problems)}")
        print(f"  what hit it: {'; '.join(trial.story)}; what it printed: {trial.out}")
        print(f"  again: {sys.executable} -m tests.chaos --seed {seed} --only {name}")
    if not failed and options.folder is None:
        shutil.rmtree(folder, ignore_errors=True)
    return 1 if failed else 0


def make_references(folder: Path, options: argparse.Namespace) -> References:
    base = folder / "undisturbed"
    shutil.rmtree(base, ignore_errors=True)
    base.mkdir()
    preparing.write_inputs(base / "text", random.Random(0))
    store = preparing.run_reference(base, base / "text")
    (base / "masked").mkdir()
    preparing.write_records(base / "records", random.Random(0))
    records = preparing.run_reference(base / "masked", base / "records", preparing.RECORDS)
    found = References(training.run_reference(base, store.prefix), store, records)
    wanted = (options.only or "").partition(":")[0]
    every = not wanted and options.rounds > 0
    if every or wanted == "nan-skipped":
        found.skipped = nonfinite.run_reference(base, found.run, nonfinite.SKIPPED)
    if every or wanted == "nan-rolled-back":
        found.rolled_back = nonfinite.run_reference(base, found.run, nonfinite.ROLLED_BACK)
    if every or wanted.startswith("two-"):
        found.two = several.run_reference(base, found.run)
    return found


# ---- trials, several at once ----


def run_trials(options: argparse.Namespace, seed: int, folder: Path, references: References) -> list[tuple[str, Trial]]:
    """(name, trial) of all of them. A lane is a process that forks trainers; it has no threads, and so has this one."""
    context = multiprocessing.get_context("fork")
    done: list[tuple[str, Trial]] = []
    next_name = names_to_do(options, done)
    busy: dict[connection.Connection, str] = {}
    lanes = []
    for _ in range(options.lanes):
        ours, theirs = context.Pipe()
        lane = context.Process(target=_lane, args=(theirs, seed, folder, references))
        lane.start()
        theirs.close()
        lanes.append((lane, ours))
        if (name := next(next_name, None)) is not None:
            ours.send(name)
            busy[ours] = name
    while busy:
        for ready in connection.wait(list(busy)):
            assert isinstance(ready, connection.Connection)
            name = busy.pop(ready)
            trial = ready.recv()
            done.append((name, trial))
            marks = "" if not trial.problems else f" FAILED: {'; '.join(trial.problems)}"
            print(f"chaos: {name}: {'; '.join(trial.story) or 'nothing hit it'}{marks}", flush=True)
            if (name := next(next_name, None)) is not None:
                ready.send(name)
                busy[ready] = name
    for lane, pipe in lanes:
        pipe.send(None)
        lane.join()
    return done


def names_to_do(options: argparse.Namespace, done: list[tuple[str, Trial]]) -> Iterator[str]:
    """NAME:NUMBER of each trial: the other faults, then kills until as many as asked for have hit something."""
    if options.only:
        yield options.only if ":" in options.only else f"{options.only}:0"
        return
    for number in range(options.rounds):
        for name in others():
            yield f"{name}:{number}"
    counts = collections.Counter[str]()

    def hits(kind: str) -> int:
        return sum(len(trial.faults) for name, trial in done if name.startswith(kind))

    wanted = {"kill-prepare": round(options.kills * PREPARE_SHARE)}
    wanted["kill-run"] = options.kills - wanted["kill-prepare"]
    failures = 0
    while failures <= MOST_FAILURES and (short := [kind for kind in wanted if hits(kind) < wanted[kind]]):
        kind = min(short, key=lambda kind: counts[kind] / wanted[kind])
        yield f"{kind}:{counts[kind]}"
        counts[kind] += 1
        failures = sum(bool(trial.problems) for _, trial in done)


def _lane(pipe: connection.Connection, seed: int, folder: Path, references: References) -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    while (name := pipe.recv()) is not None:
        pipe.send(one_trial(name, seed, folder, references))


def one_trial(name: str, seed: int, folder: Path, references: References) -> Trial:
    kind = name.partition(":")[0]
    trial = Trial(folder / name.replace(":", "-"))
    shutil.rmtree(trial.folder, ignore_errors=True)
    trial.folder.mkdir()
    preparing.prefix(trial).parent.mkdir()
    fault = kills(kind) if kind.startswith("kill-") else others()[kind]
    try:
        fault(references, random.Random(f"{seed} {name}"), trial)
    except Exception as error:  # of the harness, or of a file that a fault left unreadable
        trial.problems.append(f"{type(error).__name__}: {error}")
    if not trial.problems:
        shutil.rmtree(trial.folder, ignore_errors=True)
    return trial


# ---- the table ----


def table(trials: list[Trial]) -> str:
    """A Markdown table. A fault is survived if what it hit ended bit for bit as if undisturbed, and said what it should
    on the way; else it is lost."""
    tries, lost = collections.Counter[str](), collections.Counter[str]()
    for trial in trials:
        tries.update(trial.faults)
        if trial.problems:
            lost.update(trial.faults or ["(before a fault)"])
    lines = ["", "| fault | tries | survived | lost |", "|---|---|---|---|"]
    for fault in sorted(tries | lost):
        lines.append(f"| {fault} | {tries[fault]} | {tries[fault] - lost[fault]} | {lost[fault]} |")
    total, gone = tries.total(), lost.total()
    lines.append(f"| all | {total} | {total - gone} | {gone} |")
    stores = [trial.documents for trial in trials if trial.documents[0]]
    documents, missing, twice = (sum(counts) for counts in zip(*stores, strict=True)) if stores else (0, 0, 0)
    lines += ["", f"documents: {documents:,} in {len(stores)} stores; {missing} lost, {twice} duplicated"]
    for reason, count in collections.Counter(reason for trial in trials for reason in trial.untried).items():
        lines.append(f"not tried: a full disk, {count} times ({reason}); files had a limit of size instead")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""What a run ended with, and whether it is what the undisturbed run ended with."""

import dataclasses
import hashlib
import json
import os
import re
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

TRACEBACK = "Traceback (most recent call last)"
_METRICS = ("loss", "grad_norm", "learning_rate", "tokens", "skipped", "validation_loss", "validation_loss_per_byte")
_TIMES = ("created", "seconds", "started", "finished")  # of a manifest


@dataclasses.dataclass
class Trial:
    """One folder, the faults that hit it, and what is wrong with it in the end."""

    folder: Path
    faults: list[str] = dataclasses.field(default_factory=list)  # rows of the table
    problems: list[str] = dataclasses.field(default_factory=list)
    untried: list[str] = dataclasses.field(default_factory=list)  # what this machine does not allow
    story: list[str] = dataclasses.field(default_factory=list)
    documents: tuple[int, int, int] = (0, 0, 0)  # of the store that was made: all, lost, duplicated

    def hit(self, fault: str, detail: str = "") -> None:
        self.faults.append(fault)
        self.story.append(f"{fault} {detail}".rstrip())

    def expect(self, holds: bool, otherwise: str) -> None:
        if not holds:
            self.problems.append(otherwise)

    @property
    def out(self) -> Path:
        """What all its processes print."""
        return self.folder / "out.txt"

    def said(self, since: int = 0) -> str:
        return self.out.read_bytes()[since:].decode(errors="replace") if self.out.exists() else ""

    def expect_error_line(self, code: int | None, since: int, *words: str) -> None:
        """A refusal: exit code 2 and one line that names what is wrong."""
        lines = [line for line in self.said(since).splitlines() if line.startswith("error: ")]
        named = len(lines) == 1 and all(re.search(word, lines[0]) for word in words)
        self.expect(code == 2 and named, f"exit code {code} and {lines or 'no error line'} instead of 2 and {words}")


# A run.


def digest_checkpoints(workdir: Path) -> Callable[[], None]:
    """To run in a trainer at its end: reads all checkpoints from disk, without the project's code, and leaves the
    digest of each array in digests.json."""

    def leave() -> None:
        import warnings

        import jax
        import orbax.checkpoint.experimental.v1 as ocp

        warnings.simplefilter("ignore")  # orbax takes the shardings from the checkpoint, and says so
        found: dict[str, dict[str, str]] = {}
        for step in whole_checkpoints(workdir):
            state = ocp.load(workdir / "checkpoints" / str(step), checkpointable_name="state")
            found[str(step)] = {
                jax.tree_util.keystr(keys): _array_digest(np.asarray(leaf.addressable_data(0)))
                for keys, leaf in jax.tree_util.tree_leaves_with_path(state)
            }
        if jax.process_index() == 0:
            (workdir / "digests.json").write_text(json.dumps(found))

    return leave


def _array_digest(array: np.ndarray) -> str:
    digest = hashlib.sha256(f"{array.dtype} {array.shape}".encode())
    digest.update(np.ascontiguousarray(array).tobytes())
    return digest.hexdigest()


def metrics(workdir: Path) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl that are whole."""
    path = workdir / "metrics.jsonl"
    lines = []
    for text in path.read_text().splitlines() if path.exists() else ():
        try:
            lines.append(json.loads(text))
        except ValueError:
            continue  # cut off by a kill
    return lines


def course(workdir: Path) -> tuple[dict[int, list[dict[str, Any]]], list[dict[str, Any]]]:
    """(lines of the steps that were not undone, by step; roll-backs)."""
    by_step: dict[int, list[dict[str, Any]]] = {}
    rollbacks = []
    for line in metrics(workdir):
        if line.get("event") == "rollback":
            rollbacks.append(line)
            by_step = {step: lines for step, lines in by_step.items() if step <= line["to_step"]}
        elif "event" not in line:
            by_step.setdefault(line["step"], []).append(line)
    return by_step, rollbacks


def last_step(workdir: Path) -> int:
    return max((line["step"] for line in metrics(workdir)), default=0)


def being_written(workdir: Path) -> list[str]:
    """Checkpoints that are there under their temporary names."""
    try:
        return [name for name in os.listdir(workdir / "checkpoints") if "tmp" in name]
    except OSError:
        return []


def whole_checkpoints(workdir: Path) -> list[int]:
    try:
        return sorted(int(name) for name in os.listdir(workdir / "checkpoints") if name.isdigit())
    except OSError:
        return []


def differences(workdir: Path, reference: Path) -> list[str]:
    """Where a run's checkpoints, losses and leftovers are not those of the reference; bit for bit."""
    return list(_differences(workdir, reference))


def _differences(workdir: Path, reference: Path) -> Iterator[str]:
    want, got = (json.loads((folder / "digests.json").read_text()) for folder in (reference, workdir))
    if want.keys() != got.keys():
        yield f"checkpoints {sorted(got)} instead of {sorted(want)}"
    for step in want.keys() & got.keys():
        paths = want[step].keys() | got[step].keys()
        wrong = sorted(path for path in paths if want[step].get(path) != got[step].get(path))
        if wrong:
            yield f"checkpoint {step}: {len(wrong)} of {len(paths)} arrays differ, {wrong[0]} among them"
    (ours, our_rollbacks), (theirs, their_rollbacks) = (course(folder) for folder in (workdir, reference))
    if our_rollbacks != their_rollbacks:
        yield f"roll-backs {our_rollbacks} instead of {their_rollbacks}"
    if lost := sorted(theirs.keys() - ours.keys()):
        yield f"metrics.jsonl: the lines of steps {lost} are missing"
    if more := sorted(step for step, lines in ours.items() if step not in theirs or len(lines) > 1):
        yield f"metrics.jsonl: the lines of steps {more} are there and should not be, or more than once"
    for step in sorted(ours.keys() & theirs.keys()):
        line, want = ours[step][0], theirs[step][0]
        wrong = [
            f"{name} {line.get(name)} not {want.get(name)}" for name in _METRICS if line.get(name) != want.get(name)
        ]
        if wrong:
            yield f"metrics.jsonl: step {step}: {', '.join(wrong)}"
            break
    if left := [os.fspath(p.relative_to(workdir)) for p in workdir.rglob("*") if "tmp" in p.name]:
        yield f"left behind: {left}"


# A store.


def documents(prefix: Path) -> list[bytes]:
    """The documents of a Megatron store of uint16 ids, read from its format's description; their last id is cut off."""
    index = Path(f"{prefix}.idx").read_bytes()
    magic, version, code, sequences, entries = struct.unpack_from("<9sQBQQ", index)
    if (magic, version, code, entries) != (b"MMIDIDX\0\0", 1, 8, sequences + 1):
        raise ValueError(f"{prefix}.idx: {magic!r}, version {version}, dtype {code}, {entries} of {sequences}")
    at = struct.calcsize("<9sQBQQ")
    sizes = np.frombuffer(index, "<i4", sequences, at)
    pointers = np.frombuffer(index, "<i8", sequences, at + 4 * sequences)
    ids = np.fromfile(f"{prefix}.bin", "<u2")
    return [
        ids[at : at + size - 1].astype(np.uint8).tobytes()
        for at, size in zip((pointers // 2).tolist(), sizes.tolist(), strict=True)
    ]


def store_differences(prefix: Path, reference: Path) -> list[str]:
    """Where a store's files are not those of the reference: byte for byte, but for the times in the manifest."""
    got, want = ({p.name.removeprefix(store.name): p for p in store.parent.glob(f"{store.name}.*")} for store in
                 (prefix, reference))  # fmt: skip
    found = [f"files {sorted(got)} instead of {sorted(want)}"] * (got.keys() != want.keys())
    for suffix in sorted(got.keys() & want.keys()):
        if suffix != ".json":
            if got[suffix].read_bytes() != want[suffix].read_bytes():
                found.append(f"{suffix} differs")
            continue
        ours, theirs = (json.loads(files[suffix].read_bytes()) for files in (got, want))
        names = (ours.keys() | theirs.keys()) - {*_TIMES}
        if wrong := sorted(name for name in names if ours.get(name) != theirs.get(name)):
            found.append(f"the manifest's {wrong} differ")
    return found


def document_changes(prefix: Path, number_of_documents: int) -> tuple[int, int]:
    """(lost, duplicated), of a store with its validation store: documents are numbered, "document 17 ..."."""
    stores = [prefix, *(path.with_suffix("") for path in prefix.parent.glob(f"{prefix.name}.validation.idx"))]
    numbers = [int(text.split()[1]) for store in stores for text in documents(store)]
    return number_of_documents - len({*numbers}), len(numbers) - len({*numbers})

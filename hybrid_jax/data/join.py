"""Parts of hybrid_jax.data.parts to one token store, or to two, of training and of validation."""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from hybrid_jax.data.parts import SIZES, Job
from hybrid_jax.data.store import StoreWriter
from hybrid_jax.errors import UserError

_TOKENS, _DOCUMENTS = 2**21, 2**16  # copied at once
_HASHES = 2**64


class NoStore(UserError):
    """The parts are whole, but make no store."""


@dataclasses.dataclass
class Joined:
    """A store's counts, and bytes and crc32 of its files, by their ending."""

    documents: int = 0
    tokens: int = 0
    text_bytes: int = 0
    learnt_tokens: int = 0
    files: dict[str, dict[str, int]] = dataclasses.field(default_factory=dict)


def join(job: Job, parts: Sequence[dict[str, Any]], fraction: float, report: Callable[[int], None]) -> list[Joined]:
    """Writes joined.* in the job's folder from parts in order, and joined.validation.* if fraction is above 0.

    Held out for validation are the documents whose text has a hash in the lowest `fraction` of all hashes, so every
    copy of a text is on one side; but of two texts or more, one is on each side. report(tokens) is called as it goes
    on. Raises NoStore where there is no document, if not even the first has at most max_tokens, or no second text.
    """
    folder = Path(job.folder)
    for path in folder.glob("joined.*"):
        path.unlink()
    if not any(part["documents"] for part in parts):
        raise NoStore("--input: no document with a token in it")
    limit = _limit(job, parts, fraction) if fraction else 0
    prefixes = [folder / "joined", folder / "joined.validation"][: 2 if fraction else 1]
    made = [Joined() for _ in prefixes]
    with contextlib.ExitStack() as stack:
        writers = [
            stack.enter_context(StoreWriter(prefix, vocab_size=job.vocabulary.size, masked=job.records))
            for prefix in prefixes
        ]
        for stem, first, sizes in _blocks(job, parts):
            held_out = _rank(sizes[:, 2]) < limit if limit else np.zeros(len(sizes), bool)
            for ids, learnt in _ids(job, stem, first, int(sizes[:, 0].sum())):
                for side, (writer, joined) in enumerate(zip(writers, made, strict=True)):
                    mine = held_out == side
                    if not mine.any():
                        continue
                    chosen = slice(None) if mine.all() else np.repeat(mine, sizes[:, 0])
                    writer.write(ids[chosen], None if learnt is None else learnt[chosen])
                    joined.learnt_tokens += 0 if learnt is None else int(np.count_nonzero(learnt[chosen]))
                report(len(ids))
            for side, (writer, joined) in enumerate(zip(writers, made, strict=True)):
                mine = sizes[held_out == side]
                writer.cut(mine[:, 0])
                joined.documents += len(mine)
                joined.tokens += int(mine[:, 0].sum())
                joined.text_bytes += int(mine[:, 1].sum())
    for writer, joined in zip(writers, made, strict=True):
        joined.files = writer.files
    return made


def _blocks(job: Job, parts: Sequence[dict[str, Any]]) -> Iterator[tuple[Path, int, np.ndarray]]:
    """(path of a part without its ending, its first token, sizes) of documents that follow each other, up to the one
    that would pass max_tokens: _TOKENS and _DOCUMENTS at most, or one of any length."""
    left = job.max_tokens
    for number, part in enumerate(parts):
        stem = Path(job.folder, f"{number:06d}")
        first = 0
        with stem.with_suffix(".sizes").open("rb") as file:
            for _ in range(0, part["documents"], _DOCUMENTS):
                sizes = np.fromfile(file, SIZES, 3 * _DOCUMENTS).reshape(-1, 3)
                while len(sizes):
                    ends = np.cumsum(sizes[:, 0])
                    count = max(int(np.searchsorted(ends, _TOKENS, side="right")), 1)
                    if left is not None and ends[count - 1] > left:
                        if count := int(np.searchsorted(ends, left, side="right")):
                            yield stem, first, sizes[:count]
                        elif left == job.max_tokens:
                            raise NoStore(f"--max_tokens: {left} is less than the first document, of {ends[0]} tokens")
                        return
                    yield stem, first, sizes[:count]
                    first += int(ends[count - 1])
                    left = None if left is None else left - int(ends[count - 1])
                    sizes = sizes[count:]


def _ids(job: Job, stem: Path, first: int, count: int) -> Iterator[tuple[np.ndarray, np.ndarray | None]]:
    """Ids of a part and, of records, which are learnt: `count` of them, _TOKENS at most at once."""
    with contextlib.ExitStack() as stack:

        def opened(suffix: str, dtype: np.dtype) -> BinaryIO:
            file = stack.enter_context(stem.with_suffix(suffix).open("rb"))
            file.seek(first * dtype.itemsize)
            return file

        dtype = job.vocabulary.dtype
        ids = opened(".bin", dtype)
        learnt = opened(".mask", np.dtype(bool)) if job.records else None
        while count:
            now = min(count, _TOKENS)
            found = np.fromfile(ids, dtype, now), None if learnt is None else np.fromfile(learnt, bool, now)
            if any(len(values) < now for values in found if values is not None):
                raise UserError(f"{stem}: became shorter while it was read; give the command again")
            yield found
            count -= now


def _limit(job: Job, parts: Sequence[dict[str, Any]], fraction: float) -> int:
    """Documents are held out whose `_rank` is below it."""
    lowest, highest = _HASHES, -1
    for _, _, sizes in _blocks(job, parts):
        rank = _rank(sizes[:, 2])
        lowest, highest = min(lowest, int(rank.min())), max(highest, int(rank.max()))
    if lowest == highest:
        raise NoStore("--validation_fraction: there is only one text, so none can be held out; leave it out")
    return min(max(round(fraction * _HASHES), lowest + 1), highest)


def _rank(hashes: np.ndarray) -> np.ndarray:
    """Uniform over uint64."""
    return hashes.view(np.uint64)

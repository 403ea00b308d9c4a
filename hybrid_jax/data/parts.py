"""Text to parts of a token store, by several processes, and parts to a store; see hybrid_jax.data.prepare.

A part is three files of a folder:

    NNNNNN.bin      ids of the part's documents, end to end
    NNNNNN.sizes    int64 [documents, 2]: tokens and UTF-8 bytes of each
    NNNNNN.json     counts, and a digest of them and of the other files; the last one written, so the part is whole
                    when it is there
"""

import contextlib
import dataclasses
import hashlib
import json
import multiprocessing
import os
import signal
import threading
from array import array
from collections.abc import Callable, Iterator, Sequence
from concurrent import futures
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from hybrid_jax.data.documents import Reader, Span
from hybrid_jax.data.hub import Rows
from hybrid_jax.data.store import StoreWriter
from hybrid_jax.data.vocabulary import Vocabulary
from hybrid_jax.errors import UserError

CALL_CHARACTERS = 2**20  # encoded at once
_LONGEST = 2**31 - 1  # tokens of a document of a store
_JOIN_TOKENS = 2**22  # copied at once
_DIGEST_BYTES = 2**20  # read at once
COUNTS = ("documents", "tokens", "text_bytes", "empty", "replaced")


# A part.


@dataclasses.dataclass(frozen=True)
class Job:
    """What is asked of every part."""

    folder: str
    vocabulary: Vocabulary
    text_field: str
    append_eod: bool
    max_tokens: int | None


def make_part(
    job: Job, number: int, spans: Sequence[Span | Rows], encode: Callable, report: Callable
) -> dict[str, Any]:
    """Writes the part and returns its counts. report(bytes read, tokens made) is called as it goes on.

    A part is left at a document once it alone holds more than max_tokens. Raises UserError for what cannot be read
    or written; the part does not count as whole then.
    """
    reader = Reader(job.text_field)
    stem = Path(job.folder, f"{number:06d}")
    with whole_file(stem.with_suffix(".bin")) as out:
        ids = _Ids(job, out, encode)
        read = made = 0

        def flush() -> None:
            nonlocal read, made
            ids.flush(span.path)
            report(reader.bytes_read - read, ids.tokens + ids.length - made)
            read, made = reader.bytes_read, ids.tokens + ids.length

        for span in spans:
            documents = reader.rows(span) if isinstance(span, Rows) else reader.documents(span)
            for document in documents:
                for piece in document:
                    ids.add(piece)
                    if ids.weight >= CALL_CHARACTERS:
                        flush()
                ids.end()
                if job.max_tokens is not None and ids.tokens > job.max_tokens:
                    break
            if job.max_tokens is not None and ids.tokens > job.max_tokens:
                break
        flush()
    with whole_file(stem.with_suffix(".sizes")) as file:
        file.write(np.asarray(ids.sizes, "<i8").tobytes())
    counts = (len(ids.sizes) // 2, ids.tokens, sum(ids.sizes[1::2]), ids.empty, reader.replaced)
    stats: dict[str, Any] = dict(zip(COUNTS, counts, strict=True))
    if isinstance(spans[-1], Rows):
        stats["after"] = spans[-1].after
    with whole_file(stem.with_suffix(".json")) as file:
        file.write(json.dumps({**stats, "digest": _digest(stem, stats)}).encode())
    return stats


class _Ids:
    """The ids of documents that come in pieces, encoded many at a time; those without any are left out.

    tokens: of the documents that are whole; length, size: tokens and bytes so far of the one that is not; weight:
    of what waits to be encoded.
    """

    def __init__(self, job: Job, out: BinaryIO, encode: Callable[[list[str]], list[np.ndarray]]):
        self._out, self._encode, self._dtype = out, encode, job.vocabulary.dtype
        self._end = np.asarray([job.vocabulary.end_of_document] * job.append_eod, self._dtype)
        self._texts: list[str] = []
        self._ends: list[int] = []  # how many of them there were when a document ended
        self.sizes = array("q")  # tokens and bytes of each document
        self.tokens = self.empty = self.length = self.size = self.weight = 0

    def add(self, piece: str) -> None:
        self._texts.append(piece)
        self.weight += len(piece)

    def end(self) -> None:
        self._ends.append(len(self._texts))
        self.weight += 64  # so that empty ones do not wait without end

    def flush(self, path: str) -> None:
        encoded = self._encode(self._texts)
        at = 0
        for stop in self._ends:
            self._write(encoded[at:stop], self._texts[at:stop], path)
            at = stop
            if self.length:
                self._out.write(self._end.data)
                self.sizes.extend((self.length + len(self._end), self.size))
                self.tokens += self.length + len(self._end)
            else:
                self.empty += 1
            self.length = self.size = 0
        self._write(encoded[at:], self._texts[at:], path)
        self._texts, self._ends, self.weight = [], [], 0

    def _write(self, encoded: list[np.ndarray], texts: list[str], path: str) -> None:
        for ids, text in zip(encoded, texts, strict=True):
            self._out.write(ids.astype(self._dtype, copy=False).data)
            self.length += len(ids)
            self.size += len(text.encode())
        if self.length + len(self._end) > _LONGEST:
            raise UserError(f"{path}: has a document of over {_LONGEST} tokens; cut it in parts")


def whole_part(folder: Path, number: int) -> dict[str, Any] | None:
    """Its counts, and of a stream where that stood after it; None if the part is not there, or not as it was written.
    Reads all of it."""
    stem = folder / f"{number:06d}"
    try:
        written = json.loads(stem.with_suffix(".json").read_bytes())
        stats = {name: written[name] for name in (*COUNTS, "after") if name in written}
        return stats if stats.keys() >= set(COUNTS) and written["digest"] == _digest(stem, stats) else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _digest(stem: Path, stats: dict[str, Any]) -> str:
    digest = hashlib.blake2b(json.dumps(stats).encode(), digest_size=16)
    for suffix in (".bin", ".sizes"):
        with stem.with_suffix(suffix).open("rb") as file:
            while piece := file.read(_DIGEST_BYTES):
                digest.update(piece)
    return digest.hexdigest()


@contextlib.contextmanager
def whole_file(path: Path) -> Iterator[BinaryIO]:
    """A file that gets its name when the block ends without an exception. Raises UserError if it cannot be written."""
    scratch = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with scratch.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(scratch, path)
    except OSError as error:
        raise UserError(f"{path}: cannot be written: {error.strerror or error}") from None
    finally:
        with contextlib.suppress(OSError):
            scratch.unlink(missing_ok=True)


# All parts.


class NoStore(UserError):
    """The parts are whole, but make no store."""


def join(folder: Path, parts: Sequence[dict[str, int]], vocab: Vocabulary, max_tokens: int | None) -> dict[str, int]:
    """Writes joined.bin and joined.idx from parts in order; returns the counts of what is in them.

    Raises NoStore if not even the first document has at most max_tokens, and where there is no document.
    """
    total = dict.fromkeys(COUNTS, 0)
    for suffix in (".bin", ".idx"):
        (folder / f"joined{suffix}").unlink(missing_ok=True)
    if not any(part["documents"] for part in parts):
        raise NoStore("--input: no document with a token in it")
    with StoreWriter(folder / "joined", vocab_size=vocab.size) as writer:
        for number, part in enumerate(parts):
            for name in ("empty", "replaced"):
                total[name] += part[name]
            if not part["documents"]:
                continue
            stem = folder / f"{number:06d}"
            sizes, text_bytes = np.fromfile(stem.with_suffix(".sizes"), "<i8").reshape(-1, 2).T
            tokens = np.asarray(np.memmap(stem.with_suffix(".bin"), vocab.dtype, "r"))
            ends = np.cumsum(sizes)
            kept = len(ends)
            if max_tokens is not None:
                kept = int(np.searchsorted(ends, max_tokens - total["tokens"], side="right"))
            if not kept and not total["documents"]:
                raise NoStore(f"--max_tokens: {max_tokens} is less than the first document, of {sizes[0]} tokens")
            first = 0
            while first < kept:
                begin = int(ends[first] - sizes[first])
                last = max(int(np.searchsorted(ends[:kept], begin + _JOIN_TOKENS, side="right")), first + 1)
                writer.extend(tokens[begin : int(ends[last - 1])], sizes[first:last])
                first = last
            total["documents"] += kept
            total["tokens"] += int(sizes[:kept].sum())
            total["text_bytes"] += int(text_bytes[:kept].sum())
            if kept < len(ends):
                break
    return total


def make_parts(
    job: Job,
    missing: Iterator[tuple[int, Sequence[Span | Rows]]],
    stats: dict[int, dict[str, Any]],
    workers: int,
    progress: Any,
) -> list[dict[str, Any]]:
    """The counts of all parts in order, or of the first ones that hold max_tokens.

    missing: number and spans of each part to make. stats: of those that are whole already, by number; it is filled.
    """

    def enough() -> bool:
        return job.max_tokens is not None and sum(s["tokens"] for s in _leading(stats)) >= job.max_tokens

    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # here and in the workers: a core each
    if workers == 1:
        encode = job.vocabulary.encoder()
        while not enough() and (part := next(missing, None)) is not None:
            stats[part[0]] = make_part(job, *part, encode, progress.add)
        return _leading(stats)
    context = multiprocessing.get_context("spawn")  # a fork of a process with threads may hang
    counts = context.Array("q", 2)
    ended, end = context.Pipe(duplex=False)
    pool = futures.ProcessPoolExecutor(workers, context, _start_worker, (job, counts, ended))
    running: dict[futures.Future, int] = {}
    try:
        while not enough():
            while len(running) < 2 * workers and (part := next(missing, None)) is not None:
                with _interrupts_held():
                    running[pool.submit(_work, *part)] = part[0]
            if not running:
                break
            done, _ = futures.wait(running, timeout=0.2, return_when=futures.FIRST_COMPLETED)
            for future in done:
                stats[running.pop(future)] = future.result()
            progress.set(*counts[:])
    except BrokenProcessPool:
        raise UserError(
            "a worker process was ended from outside, perhaps for want of memory; give the command again, "
            "with fewer --workers"
        ) from None
    finally:
        end.close()  # ends the workers, as the end of this process would
        pool.shutdown(cancel_futures=True)
    return _leading(stats)


def _leading(stats: dict[int, dict[str, int]]) -> list[dict[str, int]]:
    found: list[dict[str, int]] = []
    while len(found) in stats:
        found.append(stats[len(found)])
    return found


_worker: dict[str, Any] = {}


def _start_worker(job: Job, counts: Any, ended: Any) -> None:
    def end_with_parent() -> None:
        ended.poll(None)
        os._exit(1)

    threading.Thread(target=end_with_parent, daemon=True).start()

    def report(read: int, made: int) -> None:
        with counts.get_lock():
            counts[0] += read
            counts[1] += made

    _worker.update(job=job, encode=job.vocabulary.encoder(), report=report)


def _work(number: int, spans: Sequence[Span | Rows]) -> dict[str, Any]:
    return make_part(_worker["job"], number, spans, _worker["encode"], _worker["report"])


@contextlib.contextmanager
def _interrupts_held() -> Iterator[None]:
    """A process started in it never sees Ctrl-C; one that comes meanwhile is raised afterwards."""
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    old = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, old)

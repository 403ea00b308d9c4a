"""Text to parts of a token store, by several processes; see hybrid_jax.data.prepare.

A part is a few files of a folder:

    NNNNNN.bin      ids of the part's documents, end to end
    NNNNNN.mask     of records: a byte for each id, 1 where it is learnt
    NNNNNN.sizes    int64 [documents, 3]: tokens and UTF-8 bytes of each, and a hash of its text
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
from collections.abc import Callable, Iterator, Sequence
from concurrent import futures
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from hybrid_jax.data import locks
from hybrid_jax.data.documents import Field, Place, Reader, Records, Take
from hybrid_jax.data.inputs import Span
from hybrid_jax.data.records import NOTHING_LEARNT
from hybrid_jax.data.store_index import LONGEST
from hybrid_jax.data.streams import Rows
from hybrid_jax.data.vocabulary import Encoder, Vocabulary
from hybrid_jax.errors import UserError

CALL_CHARACTERS = 2**16  # encoded at once: what comes of them stays in a core's cache
SIZES = np.dtype("<i8")
COUNTS = ("documents", "tokens", "text_bytes", "empty", "replaced")
_DIGEST_BYTES = 2**20  # read at once


# A part.


@dataclasses.dataclass(frozen=True)
class Job:
    """What is asked of every part. records: their documents are prompts and responses. hashes: of texts are needed."""

    folder: str
    vocabulary: Vocabulary
    text_field: str
    records: bool
    append_eod: bool
    max_tokens: int | None
    hashes: bool

    @property
    def take(self) -> Take:
        return Records() if self.records else Field(self.text_field)

    @property
    def suffixes(self) -> tuple[str, ...]:
        """Of the files of a part without its last, .json."""
        return (".bin", ".sizes", *((".mask",) if self.records else ()))


def make_part(
    job: Job, number: int, spans: Sequence[Span | Rows], encode: Encoder, report: Callable[[int, int], None]
) -> dict[str, Any]:
    """Writes the part and returns its counts. report(bytes read, tokens made) is called as it goes on.

    A part is left at a document once it alone holds more than max_tokens. Raises UserError for what cannot be read
    or written; the part does not count as whole then.
    """
    reader = Reader(job.take)
    stem = Path(job.folder, f"{number:06d}")
    with contextlib.ExitStack() as stack:
        paths = {suffix: stem.with_suffix(suffix) for suffix in job.suffixes}
        files = {suffix: _Hashed(path, stack.enter_context(whole_file(path))) for suffix, path in paths.items()}
        ids = _Ids(job, files, encode)
        read = made = 0

        def flush() -> None:
            nonlocal read, made
            ids.flush()
            report(reader.bytes_read - read, ids.tokens + ids.open_tokens - made)
            read, made = reader.bytes_read, ids.tokens + ids.open_tokens

        def enough() -> bool:
            return job.max_tokens is not None and ids.tokens > job.max_tokens

        for span in spans:
            for document in reader.rows(span) if isinstance(span, Rows) else reader.documents(span):
                ids.begin(document.place)
                for text, learn in document.pieces:
                    ids.add(text, learn)
                    if ids.weight >= CALL_CHARACTERS:
                        flush()
                ids.end()
                if enough():
                    break
            if enough():
                break
        flush()
    counts = (ids.documents, ids.tokens, ids.text_bytes, ids.empty, reader.replaced)
    stats: dict[str, Any] = dict(zip(COUNTS, counts, strict=True))
    if isinstance(spans[-1], Rows):
        stats["after"] = spans[-1].after
    digest = _digest(stats, [files[suffix].digest.hexdigest() for suffix in job.suffixes])
    with whole_file(stem.with_suffix(".json")) as file:
        file.write(json.dumps({**stats, "digest": digest}).encode())
    return stats


class _Hashed:
    """A file that is written, with the digest of what was."""

    def __init__(self, path: Path, file: BinaryIO):
        self._path, self._file, self.digest = path, file, hashlib.blake2b(digest_size=16)

    def write(self, values: np.ndarray) -> None:
        raw = np.ascontiguousarray(values).view(np.uint8).data
        try:
            self._file.write(raw)
        except OSError as error:
            raise _unwritten(self._path, error) from None
        self.digest.update(raw)


class _Ids:
    """Writes the ids of documents that come in pieces, encoded many at a time; those without any are left out.

    documents, tokens, text_bytes: of those that are whole and written; open_tokens: written of one that is not whole;
    weight: of what waits to be encoded.
    """

    def __init__(self, job: Job, files: dict[str, _Hashed], encode: Encoder):
        self._files, self._encode, self._dtype = files, encode, job.vocabulary.dtype
        self._end, self._records, self._hashes = job.vocabulary.end_of_document, job.records, job.hashes
        self._appends = job.append_eod and not job.records  # records hold their end-of-document ids
        self.documents = self.tokens = self.text_bytes = self.empty = self.open_tokens = 0
        self._open = np.zeros((1, 3), np.int64)  # of a document that is not whole: tokens, bytes, learnt tokens
        self._forget()

    def _forget(self) -> None:
        self.weight = 0
        self._pieces: list[str | None] = []
        self._sizes: list[int] = []  # of each piece: bytes
        self._learnt: list[bool] = []
        self._stops: list[int] = []  # of each document: pieces up to its end
        self._places: list[Place] = []
        self._hashed: list[int] = []

    def begin(self, place: Place) -> None:
        self._place = place
        if self._hashes:
            self._hash = hashlib.blake2b(digest_size=8)

    def add(self, piece: str | None, learn: bool) -> None:
        """None is the end-of-document id."""
        self._pieces.append(piece)
        self._learnt.append(learn)
        size = 0
        if piece is not None:
            size = len(piece) if piece.isascii() else len(piece.encode())
            self.weight += len(piece)
            if self._hashes:
                self._hash.update(piece.encode())
        self._sizes.append(size)

    def end(self) -> None:
        if self._appends:
            self.add(None, True)
        self._stops.append(len(self._pieces))
        self._places.append(self._place)
        self._hashed.append(int.from_bytes(self._hash.digest(), "little", signed=True) if self._hashes else 0)
        self.weight += 64  # so that empty ones do not wait without end

    def flush(self) -> None:
        """Encodes and writes what came. Raises UserError for a document that is too long, or with nothing to learn."""
        is_text = np.asarray([piece is not None for piece in self._pieces], bool)
        encoded, lengths_of_texts = self._encode([piece for piece in self._pieces if piece is not None])
        lengths = np.ones(len(is_text), np.int64)
        lengths[is_text] = lengths_of_texts
        learnt = np.asarray(self._learnt, bool)
        counts = self._by_document(np.stack([lengths, np.asarray(self._sizes, np.int64), lengths * learnt], axis=1))
        whole, last = counts[:-1], np.asarray(self._stops, np.int64) - 1
        self._refuse(counts[:, 0] > LONGEST, f"has over {LONGEST} tokens; cut it in parts")
        if self._records:  # of which the last id ends the document
            self._refuse(whole[:, 2] <= learnt[last], f"{NOTHING_LEARNT}; mend or remove it")
        empty = whole[:, 0] == self._appends
        if self._appends:
            lengths[last[empty]] = 0
        ids = np.full(lengths.sum(), self._end or 0, self._dtype)
        ids[np.repeat(is_text, lengths)] = encoded
        self._files[".bin"].write(ids)
        if self._records:
            self._files[".mask"].write(np.repeat(learnt, lengths))
        kept = np.stack([whole[:, 0], whole[:, 1], np.asarray(self._hashed, np.int64)], axis=1)[~empty]
        self._files[".sizes"].write(kept.astype(SIZES, copy=False))
        self.documents += len(kept)
        self.empty += int(empty.sum())
        self.tokens += int(kept[:, 0].sum())
        self.text_bytes += int(kept[:, 1].sum())
        self._open = counts[-1:]
        self.open_tokens = int(self._open[0, 0])
        self._forget()

    def _by_document(self, values: np.ndarray) -> np.ndarray:
        """Sums [documents + 1, 3] of values [pieces, 3]; the last of the document that is not whole."""
        before = np.concatenate([np.zeros((1, 3), np.int64), np.cumsum(values, axis=0)])
        sums = np.diff(before[[*self._stops, -1]], axis=0, prepend=np.zeros((1, 3), np.int64))
        sums[:1] += self._open
        return sums

    def _refuse(self, documents: np.ndarray, why: str) -> None:
        if documents.any():
            raise UserError(f"{[*self._places, self._place][int(np.argmax(documents))]}: {why}")


def whole_part(job: Job, number: int) -> dict[str, Any] | None:
    """Its counts, and of a stream where that stood after it; None if the part is not there, or not as it was written.
    Reads all of it."""
    stem = Path(job.folder, f"{number:06d}")
    try:
        written = json.loads(stem.with_suffix(".json").read_bytes())
        stats = {name: written[name] for name in (*COUNTS, "after") if name in written}
        digest = _digest(stats, [_digest_of(stem.with_suffix(suffix)) for suffix in job.suffixes])
        return stats if stats.keys() >= set(COUNTS) and written["digest"] == digest else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _digest(stats: dict[str, Any], digests: Sequence[str]) -> str:
    return hashlib.blake2b(json.dumps([stats, *digests]).encode(), digest_size=16).hexdigest()


def _digest_of(path: Path) -> str:
    digest = hashlib.blake2b(digest_size=16)
    with path.open("rb") as file:
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
        raise _unwritten(path, error) from None
    finally:
        with contextlib.suppress(OSError):
            scratch.unlink(missing_ok=True)


def _unwritten(path: Path, error: OSError) -> UserError:
    return UserError(f"{path}: cannot be written: {error.strerror or error}")


# All parts.


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

    held = locks.hold_as_worker(Path(job.folder))
    if held is None or ended.poll(0):  # else another command may be in the folder already
        os._exit(1)
    threading.Thread(target=end_with_parent, daemon=True).start()

    def report(read: int, made: int) -> None:
        with counts.get_lock():
            counts[0] += read
            counts[1] += made

    _worker.update(job=job, held=held, encode=job.vocabulary.encoder(), report=report)


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

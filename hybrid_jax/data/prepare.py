"""Text files to a token store: python -m hybrid_jax.data.prepare --input texts/ --output corpus --tokenizer bytes

Writes PREFIX.bin and PREFIX.idx (see hybrid_jax.data.store) and PREFIX.json, which says what they were made from.
The input is cut into parts; whole ones lie in PREFIX.parts/ until all are there and joined, so that a command that was
ended can be given again and goes on; --dataset streams a data set of the Hugging Face hub in their place (see
hybrid_jax.data.hub):

    plan.json       what was asked for, and the input files
    NNNNNN.*        parts, see hybrid_jax.data.parts
"""

import argparse
import contextlib
import dataclasses
import json
import math
import os
import re
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, TextIO

from hybrid_jax.data.documents import ACCEPTED, Source, cut, find, sources
from hybrid_jax.data.hub import Stream, missing_parts
from hybrid_jax.data.manifest import FORMAT, VERSION, tokenizer_path
from hybrid_jax.data.parts import Job, NoStore, join, make_parts, whole_file, whole_part
from hybrid_jax.data.vocabulary import Vocabulary, vocabulary
from hybrid_jax.errors import UserError
from hybrid_jax.metrics import duration, short

PART_BYTES, PARTS = 2**22, 2**12  # of input in a part, more where that would make more parts


class Progress:
    """Share of the input, tokens, rate and time left: a bar on a terminal, else a line every ten seconds."""

    def __init__(self, total_bytes: int, whole: dict[int, dict[str, int]], whole_bytes: int, limit: int | None):
        self._stream: TextIO = sys.stderr
        self._total, self._limit = total_bytes or math.inf, limit  # 0: not known
        self._bytes, self._tokens = whole_bytes, sum(stats["tokens"] for stats in whole.values())
        self._read = self._made = 0
        self._first = self._share()
        self._bar = self._stream.isatty()
        self._began = self._last = time.monotonic()
        self._drawn = False

    def add(self, read: int, made: int) -> None:
        self.set(self._read + read, self._made + made)

    def set(self, read: int, made: int) -> None:
        """Bytes read and tokens made by this process so far."""
        self._read, self._made = read, made
        now = time.monotonic()
        if now - self._last < (0.1 if self._bar else 10.0):
            return
        self._last = now
        seconds, share = now - self._began, self._share()
        text = f"{share:4.0%}  {short(self._tokens + made)} tokens  {short(made / seconds)} tok/s"
        if share > self._first:
            text += f"  left {duration(seconds * (1 - share) / (share - self._first))}"
        if self._bar:
            room = min(shutil.get_terminal_size((100, 24)).columns - len(text) - 12, 30)
            filled = round(room * share)
            bar = f"{'█' * filled}{'░' * (room - filled)} " if room >= 5 else ""
            print(f"\r\x1b[2Kprepare: {bar}{text}", end="", file=self._stream, flush=True)
            self._drawn = True
        else:
            print(f"prepare: {text.strip()}", file=self._stream, flush=True)

    def close(self) -> None:
        if self._drawn:
            print("\r\x1b[2K", end="", file=self._stream, flush=True)

    def _share(self) -> float:
        share = (self._bytes + self._read) / self._total
        return min(max(share, (self._tokens + self._made) / self._limit if self._limit else 0.0), 1.0)


def make_plan(options: argparse.Namespace, vocab: Vocabulary, files: Sequence[Source]) -> dict[str, Any]:
    """What decides every byte of the store, as plan.json and the manifest hold it."""
    return {
        "version": VERSION,
        "tokenizer": {
            "name": vocab.name,
            "sha256": vocab.sha256,
            "vocab_size": vocab.size,
            "end_of_document": vocab.end_of_document,
        },
        "options": {name: getattr(options, name) for name in ("text_field", "append_eod", "max_tokens")},
        "part_bytes": max(PART_BYTES, sum(file.size for file in files) // PARTS),
        "sources": [dataclasses.asdict(file) for file in files],
    }


def changed(old: dict[str, Any], new: dict[str, Any]) -> str:
    """What of a plan is not what it was, in words; "" if nothing is."""
    if old.get("version") != new["version"]:
        return "another version wrote it"
    if old["tokenizer"]["sha256"] != new["tokenizer"]["sha256"]:
        return f"--tokenizer was {old['tokenizer']['name']}, is {new['tokenizer']['name']} with other content"
    if old["tokenizer"]["end_of_document"] != new["tokenizer"]["end_of_document"]:
        ids = (plan["tokenizer"]["end_of_document"] for plan in (old, new))
        return "--eod_token named the id {}, names {}".format(*ids)
    for name, value in new["options"].items():
        if old["options"][name] != value:
            return f"--{name} was {old['options'][name]}, is {value}"
    before, now = ({file["path"]: file for file in plan["sources"]} for plan in (old, new))
    for path in before | now:
        if path not in now or path not in before:
            return f"the input file {path} is {'new' if path in now else 'gone'}"
        if before[path] != now[path]:
            return f"the input file {path} has changed"
    if list(before) != list(now):
        return "the input files have another order"
    return "another version wrote it" if old.get("part_bytes", new["part_bytes"]) != new["part_bytes"] else ""


def run(options: argparse.Namespace) -> int:
    """Everything between the options and the exit code. Raises UserError."""
    for name in ("workers", "max_tokens"):
        if (value := getattr(options, name)) is not None and value < 1:
            raise UserError(f"--{name}: {value} is not positive")
    prefix = os.path.expanduser(options.output).removesuffix(".idx").removesuffix(".bin")
    if os.path.basename(prefix) in ("", ".", "..") or os.path.isdir(prefix):
        raise UserError(f"--output: {options.output!r} is a folder; name the store in it, as {prefix or '.'}/corpus")
    if not os.path.isdir(os.path.dirname(prefix) or "."):
        raise UserError(f"--output: there is no folder {os.path.dirname(prefix)}; make it first")
    outputs = [Path(f"{prefix}{suffix}") for suffix in (".bin", ".idx", ".json")]
    folder = Path(f"{prefix}.parts")
    vocab = vocabulary(options.tokenizer, options.eod_token, options.append_eod)
    if (options.input is None) == (options.dataset is None):
        raise UserError("--input: give it or --dataset, one of the two")
    stream = Stream(options.dataset, options.split) if options.dataset else None
    files = [stream.source] if stream else sources(find(options.input))
    plan = make_plan(options, vocab, files)
    if not options.overwrite and not (folder / "plan.json").exists():
        there = [path for path in outputs if path.exists()]
        old = _read_json(outputs[2])
        if len(there) == 3 and old.get("format") == FORMAT and not changed(old, plan):
            _clear(folder)
            print(f"{prefix}: is whole already, made from these files with these options")
            return 0
        if there:
            raise UserError(f"--output: {there[0]} is there already; name another, or --overwrite replaces it")
    with _locked(folder):
        try:
            return _run(options, prefix, folder, outputs, vocab, plan, files, stream)
        except (UserError, KeyboardInterrupt, OSError) as error:
            kept = 0 if isinstance(error, NoStore) else _parts_there(folder)
            _clear_scratch(folder)  # of workers that were ended
            if not kept:
                _clear(folder)
            if isinstance(error, OSError):
                raise UserError(f"{error.filename or folder}: {error.strerror or error}") from None
            if isinstance(error, UserError):
                raise
            what = "no part was whole yet, nothing is kept"
            if kept:
                command = "the same command" + ", without --overwrite," * options.overwrite
                what = f"{kept} whole parts are kept in {folder}; {command} goes on from there"
            print(f"\nstopped: {what}", file=sys.stderr)
            return 130


def _run(
    options: argparse.Namespace,
    prefix: str,
    folder: Path,
    outputs: list[Path],
    vocab: Vocabulary,
    plan: dict[str, Any],
    files: Sequence[Source],
    stream: Stream | None,
) -> int:
    if options.overwrite:
        _clear(folder, keep_lock=True)
    old = _read_json(folder / "plan.json")
    if (why := changed(old, plan) if old else "") and _parts_there(folder):
        raise UserError(f"--output: {folder} holds parts of another run: {why}; undo that, or --overwrite starts anew")
    if why or not old:
        _clear(folder, keep_lock=True)
        with whole_file(folder / "plan.json") as file:
            file.write(json.dumps(plan).encode())
    _clear_scratch(folder)
    parts = [] if stream else cut(files, plan["part_bytes"])
    there = sorted(int(path.stem) for path in folder.glob("*.json") if path.stem.isdigit())
    found = {number: whole_part(folder, number) for number in there}
    whole = {number: stats for number, stats in found.items() if stats}
    if whole:
        print(f"prepare: {len(whole)}{f' of {len(parts)}' * bool(parts)} parts are whole already", file=sys.stderr)
    if stream:
        whole_bytes = sum(stats["text_bytes"] for stats in whole.values())
        missing: Iterator[tuple[int, Sequence[Any]]] = missing_parts(
            stream, options.text_field, plan["part_bytes"], whole
        )
    else:
        whole_bytes = sum(span.end - span.start for number in whole for span in parts[number])
        missing = iter([(number, spans) for number, spans in enumerate(parts) if number not in whole])
    progress = Progress(sum(file.size for file in files), whole, whole_bytes, options.max_tokens)
    job = Job(str(folder), vocab, options.text_field, options.append_eod, options.max_tokens)
    workers = options.workers or _cores()
    workers = workers if stream else min(workers, max(len(parts) - len(whole), 1))
    try:
        made = make_parts(job, missing, whole, workers, progress)
    finally:
        progress.close()
    if len(made) > 1:
        print(f"prepare: joining {len(made)} parts", file=sys.stderr, flush=True)
    counts = join(folder, made, vocab, options.max_tokens)
    del plan["part_bytes"]
    plan["tokenizer"]["bytes_per_token"] = counts["text_bytes"] / counts["tokens"]
    manifest = {"format": FORMAT, **counts, "dtype": vocab.dtype.name, **plan}
    for path in (*outputs[1:], Path(f"{prefix}.mask.bin")):  # of an older store: what does not fit must not stand there
        path.unlink(missing_ok=True)
    os.replace(folder / "joined.bin", outputs[0])
    os.replace(folder / "joined.idx", outputs[1])
    if vocab.definition:
        with whole_file(tokenizer_path(prefix)) as file:
            file.write(vocab.definition.encode())
    with whole_file(outputs[2]) as file:
        file.write(json.dumps(manifest, indent=1).encode() + b"\n")
    _clear(folder)
    print(
        f"{prefix}: {_documents(counts['documents'])}, {counts['tokens']:,} tokens ({vocab.name}, {vocab.size:,} ids, "
        f"{counts['text_bytes'] / counts['tokens']:.2f} bytes a token)"
    )
    for name, what in (("empty", "left out, without a token"), ("replaced", "with bytes that are no UTF-8, replaced")):
        if counts[name]:
            print(f"{_documents(counts[name])} {what}")
    return 0


class _Parser(argparse.ArgumentParser):
    def error(self, message: str):
        raise UserError(" ".join(message.removeprefix("argument ").split()))


def main(arguments: Sequence[str]) -> int:
    """The command; returns the exit code: 2 for a mistake of the user, 130 for Ctrl-C."""
    parser = _Parser("python -m hybrid_jax.data.prepare", description=__doc__.split("\n", 1)[0])  # type: ignore[union-attr]
    add = parser.add_argument
    add("--input", nargs="+", metavar="PATH", help=f"files, folders or globs ({ACCEPTED})")
    add("--dataset", metavar="NAME[:CONFIG]", help="of the Hugging Face hub, streamed (pip install datasets)")
    add("--split", default="train", metavar="NAME", help="of --dataset (default: train)")
    add("--output", required=True, metavar="PREFIX", help="writes PREFIX.bin, PREFIX.idx and PREFIX.json")
    add("--tokenizer", default="bytes", help="bytes, a tokenizer.json or a folder with one (default: bytes)")
    add("--text_field", default="text", metavar="NAME", help="of .jsonl and .parquet (default: text)")
    add("--workers", type=int, metavar="N", help="processes (default: a core each)")
    add("--max_tokens", type=int, metavar="N", help="leave out the first document that would pass it, and all after")
    append = argparse.BooleanOptionalAction
    add("--append_eod", action=append, default=True, help="end each document with the end-of-document id (default)")
    add("--eod_token", default="", metavar="NAME", help="of a tokenizer.json (default: a usual name that it has)")
    add("--overwrite", action="store_true", help="start anew and replace an older store")
    try:
        return run(parser.parse_args(arguments))
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("\nstopped: nothing was begun", file=sys.stderr)
        return 130


def _documents(count: int) -> str:
    return f"{count:,} document{'s' * (count != 1)}"


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _read_json(path: Path) -> dict[str, Any]:
    """{} for a file that is missing or no JSON object."""
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _parts_there(folder: Path) -> int:
    return sum(path.stem.isdigit() for path in folder.glob("*.json"))


def _clear_scratch(folder: Path) -> None:
    for path in folder.glob(".*.tmp"):
        path.unlink(missing_ok=True)


def _clear(folder: Path, *, keep_lock: bool = False) -> None:
    """Removes what this module put into the folder, plan.json first, and the folder if nothing else is in it."""
    ours = re.compile(r"plan\.json|joined\.(bin|idx)|\d{6,}\.(bin|sizes|json)|\..*\.tmp" + r"|lock" * (not keep_lock))
    names = sorted(os.listdir(folder), key="plan.json".__ne__) if folder.is_dir() else []
    for name in names:
        if ours.fullmatch(name):
            (folder / name).unlink(missing_ok=True)
    if not keep_lock:
        with contextlib.suppress(OSError):
            folder.rmdir()


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Makes the folder. Raises UserError if it cannot be written or another process works in it."""
    try:
        folder.mkdir(exist_ok=True)
        with (folder / "lock").open("a") as handle:
            try:
                import fcntl

                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)  # released also when the process dies
            except BlockingIOError:
                raise UserError(f"--output: another process is preparing {folder}; wait for it") from None
            except (ImportError, OSError):  # no locks here
                pass
            yield
    except OSError as error:
        raise UserError(f"--output: {error.filename or folder}: {error.strerror or error}") from None


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""Text files to a token store: python -m hybrid_jax.data.prepare --input texts/ --output corpus --tokenizer bytes

Writes PREFIX.bin and PREFIX.idx (see hybrid_jax.data.store) and PREFIX.json, which says what they were made from
(hybrid_jax.data.manifest); with --records also PREFIX.mask.bin, with --validation_fraction also PREFIX.validation.*.
The input is cut into parts; whole ones lie in PREFIX.parts/ until all are there and joined, so that a command that was
ended can be given again and goes on; --dataset and --tfds read a data set in their place (hybrid_jax.data.streams):

    plan.json       what was asked for, and the input files
    tokenizer.json  of the hub, or trained on the input
    NNNNNN.*        parts, see hybrid_jax.data.parts
    joined.*        the store, while the parts are joined
"""

import argparse
import contextlib
import dataclasses
import json
import os
import re
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from hybrid_jax import command, signals
from hybrid_jax.data import locks, train_tokenizer
from hybrid_jax.data.inputs import ACCEPTED, Source, cut, find, sources
from hybrid_jax.data.join import Joined, NoStore, join
from hybrid_jax.data.locks import LOCK, WORKERS
from hybrid_jax.data.manifest import ENDINGS, FORMAT, VERSION, check_sizes, stem, tokenizer_path
from hybrid_jax.data.parts import Job, make_parts, whole_file, whole_part
from hybrid_jax.data.plan import Earlier, changed, read_json
from hybrid_jax.data.progress import Counted, Making
from hybrid_jax.data.streams import Stream, missing_parts, open_stream
from hybrid_jax.data.verify import verify
from hybrid_jax.data.vocabulary import Vocabulary, vocabulary
from hybrid_jax.errors import UserError

PART_BYTES, PARTS = 2**22, 2**12  # of input in a part, more where that would make more parts
_PARTS_VERSION = 3
_OPTIONS = ("records", "text_field", "append_eod", "max_tokens", "validation_fraction")


def make_plan(options: argparse.Namespace, vocab: Vocabulary, inputs: Sequence[Source]) -> dict[str, Any]:
    """What decides every byte of the store, as plan.json and, without "parts", the manifest hold it."""
    return {
        "version": VERSION,
        "parts": {"version": _PARTS_VERSION, "bytes": max(PART_BYTES, sum(x.size for x in inputs) // PARTS)},
        "tokenizer": {
            "name": vocab.name,
            "sha256": vocab.sha256,
            "vocab_size": vocab.size,
            "end_of_document": vocab.end_of_document,
            **vocab.origin,
        },
        "options": {name: getattr(options, name) for name in _OPTIONS},
        "sources": [{"path": x.path, "size": x.size, "digest": x.digest, "kind": x.kind} for x in inputs],
    }


def check(options: argparse.Namespace) -> str:
    """PREFIX of --output. Fills in what depends on other options. Raises UserError for what cannot be."""
    for name in ("workers", "max_tokens"):
        if (value := getattr(options, name)) is not None and value < 1:
            raise UserError(f"--{name}: {value} is not positive")
    if not 0 <= options.validation_fraction < 1:
        raise UserError(f"--validation_fraction: {options.validation_fraction} is not in [0, 1)")
    if options.output is None:
        raise UserError("the following arguments are required: --output")
    if [options.input, options.dataset, options.tfds].count(None) != 2:
        raise UserError("--input: give it, --dataset or --tfds, one of the three")
    if options.split is not None and options.input is not None:
        raise UserError("--split: is one of a --dataset or --tfds, and --input has none; leave it out")
    options.split = options.split or "train"
    if options.data_dir is not None and options.tfds is None:
        raise UserError("--data_dir: is where --tfds finds its data sets; leave it out")
    if options.train_tokenizer is not None and (options.tokenizer is not None or options.eod_token):
        raise UserError("--train_tokenizer: makes a tokenizer; leave --tokenizer and --eod_token out")
    if options.records and options.text_field is not None:
        raise UserError("--text_field: --records has fields of its own; leave one of the two out")
    if options.records and not options.append_eod:
        raise UserError("--no-append_eod: the end of a response is learnt, so --records needs it; leave it out")
    options.text_field = None if options.records else options.text_field or "text"
    prefix = stem(options.output)
    if os.path.basename(prefix) in ("", ".", "..") or os.path.isdir(prefix):
        raise UserError(f"--output: {options.output!r} is a folder; name the store in it, as {prefix or '.'}/corpus")
    if not os.path.isdir(os.path.dirname(prefix) or "."):
        raise UserError(f"--output: there is no folder {os.path.dirname(prefix)}; make it first")
    return prefix


def run(options: argparse.Namespace) -> int:
    """Everything between the options and the exit code. Raises UserError."""
    if options.verify:
        if options.output or options.input or options.dataset or options.tfds:
            raise UserError("--verify: makes no store; leave --input, --dataset, --tfds and --output out")
        return verify(options.verify)
    prefix = check(options)
    prefixes = [prefix, f"{prefix}.validation"][: 2 if options.validation_fraction else 1]
    outputs = [Path(p + ending) for p in prefixes for ending in ENDINGS]
    folder = Path(f"{prefix}.parts")
    earlier = Earlier() if options.overwrite else Earlier.find(folder, prefix)
    stream = open_stream(options, earlier.sources)
    inputs = [stream.source] if stream else sources(find(options.input))
    if options.train_tokenizer is None:
        vocab = vocabulary(options.tokenizer or "bytes", options.eod_token, options.append_eod, earlier)
    else:
        same = earlier.same_text(inputs, records=options.records, text_field=options.text_field)
        vocab = train_tokenizer.planned(options.train_tokenizer, earlier if same else Earlier())
    read = set() if stream else {os.path.realpath(source.path) for source in inputs}
    for path in outputs:
        if path.is_dir():
            raise UserError(f"--output: {path} is a folder; name another, or move it")
        if os.path.realpath(path) in read:
            raise UserError(f"--input: {path} is a file of the store that --output names; name another")
    plan = make_plan(options, vocab, inputs)
    if not options.overwrite and not (folder / "plan.json").exists():
        if vocab.definition is not None and all(_is_whole(p, plan) for p in prefixes):
            _clear(folder)
            print(f"{_printable(prefix)}: is whole already, made from this input with these options")
            return 0
        there = [path for path in outputs if path.exists() and not _holds(path, vocab.definition)]
        if there:
            raise UserError(f"--output: {there[0]} is there already; name another, or --overwrite replaces it")
    job = Job(
        str(folder),
        vocab,
        options.text_field,
        options.records,
        options.append_eod,
        options.max_tokens,
        options.validation_fraction > 0,
    )
    with locks.only_command(folder):
        try:
            return _run(options, prefixes, job, plan, inputs, stream)
        except (UserError, KeyboardInterrupt, OSError) as error:
            with _uninterrupted():
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
                same = "the same command" + ", without --overwrite," * options.overwrite
                parts = "1 whole part is" if kept == 1 else f"{kept} whole parts are"
                what = f"{parts} kept in {folder}; {same} goes on from there"
            print(f"\nstopped: {what}", file=sys.stderr)
            return 130


def _is_whole(prefix: str, plan: dict[str, Any]) -> bool:
    """Whether a store is there that this plan would make."""
    about = read_json(Path(f"{prefix}.json"))
    try:
        check_sizes(prefix, about)
    except UserError:
        return False
    there = all(Path(prefix + ending).exists() for ending in (".bin", ".idx"))
    return there and about.get("format") == FORMAT and not changed(about, plan)


def _run(
    options: argparse.Namespace,
    prefixes: Sequence[str],
    job: Job,
    plan: dict[str, Any],
    inputs: Sequence[Source],
    stream: Stream | None,
) -> int:
    folder = Path(job.folder)
    if options.overwrite:
        _clear(folder, keep_lock=True)
    old = read_json(folder / "plan.json")
    why = _other(folder, old, plan)
    if job.vocabulary.definition is None:
        texts = train_tokenizer.sample(inputs, stream, plan["parts"]["bytes"], job.take)
        job = dataclasses.replace(job, vocabulary=train_tokenizer.train(job.vocabulary.size, texts))
        plan = make_plan(options, job.vocabulary, inputs)
        why = _other(folder, old, plan)
    if why or not old:
        _clear(folder, keep_lock=True)
    if job.vocabulary.origin and job.vocabulary.definition:
        with whole_file(folder / "tokenizer.json") as file:
            file.write(job.vocabulary.definition.encode())
    if why or not old:
        with whole_file(folder / "plan.json") as file:
            file.write(json.dumps(plan).encode())
    _clear_scratch(folder)
    made = _make_parts(options, job, plan, inputs, stream)
    progress = Counted(sum(part["tokens"] for part in made), "joined", "tokens")
    try:
        joined = join(job, made, options.validation_fraction, progress.add)
    finally:
        progress.close()
    names = ["joined", "joined.validation"][: len(joined)]
    splits = ["train", "validation"] if len(joined) > 1 else ["all"]
    for name, split, store in zip(names, splits, joined, strict=True):
        _write_manifest(folder / name, job, split, store, made, plan)
    with _uninterrupted():
        _place(folder, prefixes, names)
        _clear(folder)
    _report(prefixes, job.vocabulary, joined, made)
    return 0


def _other(folder: Path, old: dict[str, Any], plan: dict[str, Any]) -> str:
    """What has changed since the old plan. Raises UserError if there are parts made by it."""
    why = changed(old, plan) if old else ""
    if why and _parts_there(folder):
        raise UserError(f"--output: {folder} holds parts of another run: {why}; undo that, or --overwrite starts anew")
    return why


def _make_parts(
    options: argparse.Namespace, job: Job, plan: dict[str, Any], inputs: Sequence[Source], stream: Stream | None
) -> list[dict[str, Any]]:
    """The counts of all parts, in order."""
    part_bytes = plan["parts"]["bytes"]
    parts = [] if stream else cut(inputs, part_bytes)
    there = sorted(int(path.stem) for path in Path(job.folder).glob("*.json") if path.stem.isdigit())
    found = {number: whole_part(job, number) for number in there}
    whole = {number: stats for number, stats in found.items() if stats}
    if whole:
        print(f"prepare: {len(whole)}{f' of {len(parts)}' * bool(parts)} parts are whole already", file=sys.stderr)
    if stream:
        whole_bytes = sum(stats["text_bytes"] for stats in whole.values())
        missing: Iterator[tuple[int, Sequence[Any]]] = missing_parts(stream, job.take, part_bytes, whole)
    else:
        whole_bytes = sum(span.end - span.start for number in whole for span in parts[number])
        missing = iter([(number, spans) for number, spans in enumerate(parts) if number not in whole])
    tokens = sum(stats["tokens"] for stats in whole.values())
    progress = Making(sum(x.size for x in inputs), whole_bytes, tokens, options.max_tokens)
    workers = options.workers or _cores()
    workers = workers if stream else min(workers, max(len(parts) - len(whole), 1))
    try:
        return make_parts(job, missing, whole, workers, progress)
    finally:
        progress.close()


def _write_manifest(
    joined: Path, job: Job, split: str, store: Joined, made: Sequence[dict[str, Any]], plan: dict[str, Any]
) -> None:
    vocab = job.vocabulary
    manifest = {
        "format": FORMAT,
        "documents": store.documents,
        "tokens": store.tokens,
        "text_bytes": store.text_bytes,
        "loss_mask": job.records,
        **({"learnt_tokens": store.learnt_tokens} if job.records else {}),
        "split": split,
        "files": store.files,
        **{name: sum(part[name] for part in made) for name in ("empty", "replaced")},
        "dtype": vocab.dtype.name,
        **{name: value for name, value in plan.items() if name != "parts"},
    }
    manifest["tokenizer"] = {**plan["tokenizer"], "bytes_per_token": store.text_bytes / store.tokens}
    if vocab.definition:
        with whole_file(tokenizer_path(joined)) as file:
            file.write(vocab.definition.encode())
    with whole_file(Path(f"{joined}.json")) as file:
        file.write(json.dumps(manifest, indent=1).encode() + b"\n")


def _place(folder: Path, prefixes: Sequence[str], names: Sequence[str]) -> None:
    """Gives the stores in `folder` their names, in place of older ones, of which nothing stays."""
    older = list(prefixes)
    if read_json(Path(f"{prefixes[0]}.json")).get("split") == "train" and len(prefixes) == 1:
        older.append(f"{prefixes[0]}.validation")  # made with it
    for prefix in reversed(older):
        for ending in reversed(ENDINGS):
            Path(prefix + ending).unlink(missing_ok=True)
    for prefix, name in reversed([*zip(prefixes, names, strict=True)]):
        for ending in ENDINGS:
            with contextlib.suppress(FileNotFoundError):
                os.replace(folder / f"{name}{ending}", prefix + ending)
    with contextlib.suppress(OSError):  # not everywhere can a folder be opened
        handle = os.open(folder.parent, os.O_RDONLY)
        os.fsync(handle)
        os.close(handle)


def _report(prefixes: Sequence[str], vocab: Vocabulary, joined: Sequence[Joined], made: Sequence[dict]) -> None:
    for prefix, store in zip(prefixes, joined, strict=True):
        learnt = f", {store.learnt_tokens:,} of them learnt" * bool(store.learnt_tokens)
        print(
            f"{_printable(prefix)}: {_documents(store.documents)}, {store.tokens:,} tokens{learnt} ({vocab.name}, "
            f"{vocab.size:,} ids, {store.text_bytes / store.tokens:.2f} bytes a token)"
        )
    for name, what in (("empty", "left out, without a token"), ("replaced", "with bytes that are no UTF-8, replaced")):
        if count := sum(part[name] for part in made):
            print(f"{_documents(count)} {what}")


def _parser() -> argparse.ArgumentParser:
    parser = command.Parser("data.prepare", __doc__)
    add, append = parser.add_argument, argparse.BooleanOptionalAction
    add("--input", nargs="+", metavar="PATH", help=f"files, folders or globs ({ACCEPTED})")
    add("--dataset", metavar="NAME[:CONFIG]", help="of the Hugging Face hub, streamed, or a local folder of that kind")
    add("--tfds", metavar="NAME[/CONFIG][:VERSION]", help="of tensorflow-datasets, prepared as array_record")
    add("--data_dir", metavar="FOLDER", help="of --tfds (default: $TFDS_DATA_DIR or ~/tensorflow_datasets)")
    add("--split", metavar="NAME", help="of --dataset or --tfds (default: train)")
    add("--output", metavar="PREFIX", help="writes PREFIX.bin, PREFIX.idx and PREFIX.json")
    add("--tokenizer", help="bytes, a tokenizer.json, a folder with one, or a model of the hub (default: bytes)")
    add("--train_tokenizer", type=int, metavar="VOCAB", help="train a byte-level BPE of VOCAB ids on the input instead")
    add("--text_field", metavar="NAME", help="of .jsonl and .parquet (default: text)")
    add("--records", action="store_true", help="prompts and responses, or messages: learn the responses alone")
    add("--validation_fraction", type=float, default=0.0, metavar="F", help="of documents for PREFIX.validation.*")
    add("--workers", type=int, metavar="N", help="processes (default: a core each)")
    add("--max_tokens", type=int, metavar="N", help="leave out the first document that would pass it, and all after")
    add("--append_eod", action=append, default=True, help="end each document with the end-of-document id (default)")
    add("--eod_token", default="", metavar="NAME", help="of a tokenizer.json (default: a usual name that it has)")
    add("--overwrite", action="store_true", help="start anew and replace an older store")
    add("--verify", metavar="PREFIX", help="reads a store and compares it with what was written; writes nothing")
    return parser


def main(arguments: Sequence[str]) -> int:
    """The command; returns the exit code: 2 for a mistake of the user, 130 for Ctrl-C."""
    try:
        code = run(_parser().parse_args(arguments))
        sys.stdout.flush()  # here, where what it cannot write is told in one line
        return code
    except UserError as error:
        print(f"error: {_printable(' '.join(str(error).splitlines()))}", file=sys.stderr)
        return 2
    except OSError as error:  # before anything was begun
        if error.filename is None:
            return command.unprinted(error)
        print(f"error: {_printable(str(error.filename))}: {error.strerror or error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("\nstopped: nothing was begun", file=sys.stderr)
        return 130


def _printable(text: str) -> str:
    """With names that are no text, as a file's may be, written as bytes."""
    return text.encode(errors="backslashreplace").decode()


def _documents(count: int) -> str:
    return f"{count:,} document{'s' * (count != 1)}"


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _holds(path: Path, definition: str | None) -> bool:
    """Whether a tokenizer lies there already that is the right one."""
    return bool(definition) and path.suffix == ".json" and path.read_bytes() == (definition or "").encode()


def _parts_there(folder: Path) -> int:
    return sum(path.stem.isdigit() for path in folder.glob("*.json"))


def _clear_scratch(folder: Path) -> None:
    for path in folder.glob(".*.tmp"):
        path.unlink(missing_ok=True)


def _clear(folder: Path, *, keep_lock: bool = False) -> None:
    """Removes what this module put into the folder, plan.json first, and the folder if nothing else is in it."""
    ours = re.compile(
        r"(plan|tokenizer)\.json|joined(\.validation)?\.(bin|idx|json|mask\.bin|tokenizer\.json)|\d{6,}\.(bin|mask|sizes|json)|"
        r"\..*\.tmp" + rf"|{re.escape(LOCK)}|{re.escape(WORKERS)}" * (not keep_lock)
    )
    names = sorted(os.listdir(folder), key="plan.json".__ne__) if folder.is_dir() else []
    for name in names:
        if ours.fullmatch(name):
            (folder / name).unlink(missing_ok=True)
    if not keep_lock:
        with contextlib.suppress(OSError):
            folder.rmdir()


@contextlib.contextmanager
def _uninterrupted() -> Iterator[None]:
    """Ctrl-C is not heard in it, as it takes no time."""
    main_thread = threading.current_thread() is threading.main_thread()
    old = signal.signal(signal.SIGINT, signal.SIG_IGN) if main_thread else None
    try:
        yield
    finally:
        if main_thread:
            signal.signal(signal.SIGINT, old)


if __name__ == "__main__":
    signals.AT_ONCE.__exit__()  # `main` answers from here on
    sys.exit(main(sys.argv[1:]))

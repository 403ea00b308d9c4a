"""Documents and their split into training and validation: the standard library, files or a token store of the
user."""

import dataclasses
import glob
import hashlib
import itertools
import json
import os
import platform
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from hybrid_jax.data.interface import Documents
from hybrid_jax.errors import UserError

if TYPE_CHECKING:
    from hybrid_jax.config import DataConfig

PIECE = 2**16  # documents of a store looked at in one go
ACCEPTED = (".txt", ".md", ".py", ".jsonl")

# Installed packages are not the standard library; its own tests are missing from many Linux distributions;
# `encodings` is character tables, not text.
_NOT_LIBRARY = {"site-packages", "dist-packages", "test", "tests", "idle_test", "encodings"}


@dataclasses.dataclass(frozen=True)
class Document:
    """One text: `name` is stable across machines, `text` is valid UTF-8."""

    name: str
    text: bytes

    @property
    def digest(self) -> bytes:
        return hashlib.blake2b(self.text, digest_size=16).digest()


@dataclasses.dataclass(frozen=True)
class Corpus:
    """Documents of both splits in a fixed order. No text is in both."""

    train: list[Document]
    validation: list[Document]
    description: str


def python_library(validation_fraction: float) -> Corpus:
    """The .py files of the running Python's own standard library, split by file.

    Raises UserError where this Python ships without sources.
    """
    root = sysconfig.get_path("stdlib")
    names = [n for n in _walk(root, _NOT_LIBRARY) if n.endswith(".py") and not n.startswith("_sysconfigdata")]
    if len(names) < 20:
        raise UserError(
            f"config.data.source: 'python' finds no standard library sources in {root}; "
            "set config.data.source=files and config.data.path to a folder of text"
        )
    label = f"Python {platform.python_version()} standard library"
    return _corpus([_read_file(root, n) for n in names], validation_fraction, label)


def files(path: str, validation_fraction: float, key: str = "path") -> Corpus:
    """Text files of a folder (recursive), a glob, or one file; a .jsonl line is a document, its `text` field
    the text.

    Raises UserError, naming config.data.`key`, when there is nothing to read, or for a .jsonl line without text.
    """
    kinds = ", ".join(ACCEPTED)
    if not path:
        raise UserError(f"config.data.{key}: empty; name a folder, a glob or a file ({kinds}) for source 'files'")
    full = os.path.expanduser(path)
    if os.path.isdir(full):
        root, names = full, list(_walk(full, set()))
    elif os.path.isfile(full):
        root, names = os.path.split(full)[0], [os.path.basename(full)]
    else:
        found = sorted(f for f in glob.glob(full, recursive=True) if os.path.isfile(f))
        if not found:
            raise UserError(f"config.data.{key}: {path}: no such file or folder ({kinds} are read)")
        # Names relative to the fixed part of the glob: a file added later renames no other one.
        fixed = itertools.takewhile(lambda part: not glob.has_magic(part), Path(full).parts)
        root = str(Path(*fixed))
        names = sorted(_posix(os.path.relpath(f, root)) for f in found)
    names = [n for n in names if n.lower().endswith(ACCEPTED)]
    if not names:
        raise UserError(f"config.data.{key}: {path}: holds no file that can be read ({kinds})")
    label = f"{path} ({len(names)} {'file' if len(names) == 1 else 'files'})"
    corpus = _corpus([_read_file(root, n, key) for n in names], validation_fraction, label)
    if not corpus.train:
        raise UserError(f"config.data.{key}: {path}: its files hold no text to train on")
    return corpus


def with_validation(train: Corpus, validation: Corpus) -> Corpus:
    """Both splits of two corpora that hold nothing out. A text of training is left out of validation."""
    seen = {d.digest for d in train.train}
    held_out = [d for d in validation.train if d.digest not in seen]
    if not held_out:
        raise UserError(
            f"config.data.validation_path: every text of {validation.description} is in config.data.path too; give "
            "other text"
        )
    return Corpus(train.train, held_out, f"{train.description}, validated on {validation.description}")


def held_out(data: "DataConfig") -> str:
    """How config.data parts validation off, as a part of `Dataset.identity`."""
    return "0, as data.validation_path is set" if data.validation_path else str(data.validation_fraction)


def size(documents: int, tokens: int) -> str:
    """What there is of a split, as a part of `Dataset.identity`."""
    return f"{documents:,} documents, {tokens:,} tokens"


@dataclasses.dataclass(frozen=True)
class Split:
    """Which documents of a store are held out: by a hash of the document's number alone, so that documents added at the
    end move no old one, and that nothing has to be kept of any. Copies of a text are not looked for.

    documents, tokens: of training and of validation, empty documents left out.
    """

    limit: int  # of the hashes of those held out
    other: int  # number of a document that is not where its hash says; -1: none
    documents: tuple[int, int]
    tokens: tuple[int, int]

    def held_out(self, numbers: np.ndarray) -> np.ndarray:
        """Of each of these documents, bool."""
        return (_rank(numbers) < np.uint64(self.limit)) ^ (numbers == self.other)

    def trained_on(self, numbers: np.ndarray) -> np.ndarray:
        return ~self.held_out(numbers)


def split_store(store: Documents, fraction: float) -> Split:
    """Holds out this fraction of the documents; but of two documents or more with tokens, one is on each side if the
    fraction is above 0."""
    limit = min(int(fraction * 2.0**64), 2**64 - 1)
    counts = np.zeros((2, 2), np.int64)  # documents and tokens of each, of training and of validation
    ends: list[tuple[int, int]] = []  # (hash, number) of the documents with the lowest and the highest of each piece
    for at in range(0, store.num_documents, PIECE):
        lengths = store.scan(at, min(at + PIECE, store.num_documents))
        numbers = np.flatnonzero(lengths) + at
        if not len(numbers):
            continue
        rank = _rank(numbers)
        held = rank < np.uint64(limit)
        in_validation = np.asarray([np.count_nonzero(held), lengths[numbers[held] - at].sum()])
        counts += np.asarray([[len(numbers), lengths.sum()] - in_validation, in_validation])
        ends += [(int(rank[i]), int(numbers[i])) for i in (rank.argmin(), rank.argmax())]
    other = -1
    if fraction > 0 and counts[:, 0].sum() > 1 and not counts[:, 0].all():
        giver = int(counts[1, 0] > 0)
        other = (max if giver else min)(ends)[1]
        moved = np.asarray([1, store.lengths(np.asarray([other]))[0]])
        counts[giver] -= moved
        counts[1 - giver] += moved
    (trained_on, tokens), (held_out, held_out_tokens) = counts.tolist()
    return Split(limit, other, (trained_on, held_out), (tokens, held_out_tokens))


def _rank(numbers: np.ndarray) -> np.ndarray:
    """Hash of each, uniform over uint64."""
    rank = numbers.astype(np.uint64)
    rank += np.uint64(0x9E3779B97F4A7C15)  # splitmix64 (Steele, Lea and Flood 2014)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB), (31, 1)):
        rank ^= rank >> np.uint64(shift)
        rank *= np.uint64(factor)
    return rank


@dataclasses.dataclass(frozen=True)
class _File:
    name: str
    documents: list[Document]
    undecodable: bool


def _walk(root: str, skip: set[str]) -> Iterator[str]:
    """Relative paths of files under root, with forward slashes, sorted; hidden and cache folders left out."""
    names = []
    for folder, subfolders, inside in os.walk(root):
        subfolders[:] = [d for d in subfolders if d not in skip and d != "__pycache__" and not d.startswith(".")]
        names += [_posix(os.path.relpath(os.path.join(folder, n), root)) for n in inside if not n.startswith(".")]
    return iter(sorted(names))


def _posix(path: str) -> str:
    return path.replace(os.sep, "/")


def _read_file(root: str, name: str, key: str = "path") -> _File:
    file = Path(root, name)
    try:
        raw = file.read_bytes()
    except OSError as error:
        raise UserError(f"config.data.{key}: {file}: {error.strerror or error}") from None
    raw = raw.removeprefix(b"\xef\xbb\xbf")
    undecodable = False
    try:
        raw.decode()
    except UnicodeDecodeError:
        raw, undecodable = raw.decode(errors="replace").encode(), True
    if not name.lower().endswith(".jsonl"):
        return _File(name, [Document(name, raw)] if raw.strip() else [], undecodable)
    documents = []
    for number, line in enumerate(raw.split(b"\n"), 1):
        if not line.strip():
            continue
        try:
            text = json.loads(line)["text"].encode(errors="replace")
        except (ValueError, TypeError, KeyError, AttributeError):
            raise UserError(
                f'config.data.path: {file}: line {number} is not a JSON object with a string field "text"'
            ) from None
        if text.strip():
            documents.append(Document(f"{name}:{number}", text))
    return _File(name, documents, undecodable)


def _corpus(read: list[_File], fraction: float, label: str) -> Corpus:
    read_any = [f for f in read if f.documents]
    if len(read_any) == 1:
        train, held_out = _split_one(read_any[0].documents, fraction)
    else:
        by_name = {f.name: f.documents for f in read_any}
        ours, theirs = _split_names(list(by_name), fraction)
        train = [d for name in ours for d in by_name[name]]
        held_out = [d for name in theirs for d in by_name[name]]
    seen = {d.digest for d in train}
    held_out = [d for d in held_out if d.digest not in seen]
    replaced = sum(f.undecodable for f in read)
    if replaced:
        label += f", undecodable bytes replaced in {replaced}"
    return Corpus(train, held_out, label)


def _split_names(names: list[str], fraction: float) -> tuple[list[str], list[str]]:
    """By a hash of the name alone, so that a new file never moves an old one to the other side."""
    rank = {n: int.from_bytes(hashlib.blake2b(n.encode(), digest_size=8).digest(), "big") for n in names}
    held_out = {n for n in names if rank[n] < fraction * 2.0**64}
    if fraction > 0 and len(names) > 1:
        if not held_out:
            held_out = {min(names, key=rank.__getitem__)}
        elif len(held_out) == len(names):
            held_out.remove(max(names, key=rank.__getitem__))
    return [n for n in names if n not in held_out], [n for n in names if n in held_out]


def _split_one(documents: list[Document], fraction: float) -> tuple[list[Document], list[Document]]:
    """One file: its documents by content, or the end of its only document."""
    if len(documents) > 1:
        by_content: dict[str, list[Document]] = {}
        for d in documents:
            by_content.setdefault(d.digest.hex(), []).append(d)
        if len(by_content) > 1:
            ours, theirs = _split_names(list(by_content), fraction)
            return [d for n in ours for d in by_content[n]], [d for n in theirs for d in by_content[n]]
    only = documents[0]
    cut = round(len(only.text) * (1 - fraction))
    line_end = only.text.find(b"\n", cut, cut + 4096)
    if fraction > 0 and line_end >= 0 and only.text[line_end + 1 :].strip():
        cut = line_end + 1
    while cut < len(only.text) and only.text[cut] & 0xC0 == 0x80:  # inside a UTF-8 character
        cut += 1
    parts = [
        Document(f"{only.name}[:{cut}]", only.text[:cut]),
        Document(f"{only.name}[{cut}:]", only.text[cut:]),
    ]
    return [d for d in parts[:1] if d.text], [d for d in parts[1:] if d.text]

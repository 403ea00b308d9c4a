"""The files that an input names, for hybrid_jax.data.prepare, and their cut into parts of like size."""

import dataclasses
import glob
import hashlib
import importlib.util
import os
import stat
from collections.abc import Iterable, Sequence

from hybrid_jax.data.unpack import PACKED, reading
from hybrid_jax.errors import UserError

TEXT, LINES, TABLE = (".txt", ".md", ".py"), ".jsonl", ".parquet"
ACCEPTED = ".txt, .md, .py, .jsonl, these with .gz or .zst, .parquet"

_FILE_COST = 4096  # a part of many small files is kept small too
_SAMPLES, _SAMPLE_BYTES = 16, 4096


@dataclasses.dataclass(frozen=True, slots=True)
class Source:
    """A file: its path as the user gave it, its bytes, and a digest of up to 16 evenly spaced blocks of 4 KiB.

    kind: what messages call it. modified: of a file its time of change in ns, to notice one during the work.
    """

    path: str
    size: int
    digest: str
    kind: str = "input file"
    modified: int = 0


@dataclasses.dataclass(frozen=True, slots=True)
class Span:
    """Bytes [start, end) of a file of `size` bytes: of .jsonl the lines and of .parquet the row groups that begin
    there, else the whole file."""

    path: str
    size: int
    modified: int
    start: int
    end: int


def find(inputs: Sequence[str]) -> list[str]:
    """The files that the inputs name, in their order, each once: folders and globs sorted, hidden ones left out.

    Raises UserError for an input without a file that can be read, a folder that cannot be listed, and for a file
    whose package is not installed.
    """
    found: dict[str, str] = {}
    for name in inputs:
        full = os.path.expanduser(name)
        if os.path.isdir(full):
            files = [f for f in _walk(full) if kind(f)]
        elif os.path.isfile(full):
            files = [full]
            if not kind(full):
                raise UserError(f"--input: {name}: this kind of file cannot be read ({ACCEPTED} can)")
        else:
            everything = sorted(f for f in glob.glob(full, recursive=True) if os.path.isfile(f))
            if not everything:
                there = "no such file or folder, and no file matches it"
                raise UserError(f"--input: {name}: {_not_a_file(full) if os.path.exists(full) else there}")
            files = [f for f in everything if kind(f)]
        if not files:
            raise UserError(f"--input: {name}: holds no file that can be read ({ACCEPTED} can)")
        for file in files:
            found.setdefault(os.path.realpath(file), file)
    for file in found.values():
        package = "pyarrow" if kind(file) == TABLE else PACKED.get(os.path.splitext(file)[1].lower(), "")
        if package and importlib.util.find_spec(package) is None:
            raise UserError(f"{file}: needs a package that is not installed: pip install {package}")
    return list(found.values())


def sources(paths: Iterable[str]) -> list[Source]:
    """Sizes and digests of files. Raises UserError for one that cannot be read."""
    found = []
    for path in paths:
        with reading(path):
            if not stat.S_ISREG(os.stat(path).st_mode):  # opening a pipe would wait for its other end
                raise UserError(f"{path}: {_not_a_file(path)}")
            with open(path, "rb") as file:
                about = os.fstat(file.fileno())
                digest = hashlib.blake2b(digest_size=16)
                last = max(about.st_size - _SAMPLE_BYTES, 0)
                for place in sorted({last * i // (_SAMPLES - 1) for i in range(_SAMPLES)}):
                    file.seek(place)
                    digest.update(file.read(_SAMPLE_BYTES))
        found.append(Source(path, about.st_size, digest.hexdigest(), modified=about.st_mtime_ns))
    return found


def cut(files: Sequence[Source], part_bytes: int) -> list[tuple[Span, ...]]:
    """Parts of about part_bytes, in order; one is larger where a file cannot be entered in its middle."""
    parts: list[tuple[Span, ...]] = []
    spans: list[Span] = []
    weight = 0
    for file in files:
        step = part_bytes if file.path.lower().endswith((LINES, TABLE)) else max(file.size, 1)
        for start in range(0, max(file.size, 1), step):
            spans.append(Span(file.path, file.size, file.modified, start, min(start + step, file.size)))
            weight += spans[-1].end - start + _FILE_COST
            if weight >= part_bytes:
                parts.append(tuple(spans))
                spans, weight = [], 0
    return [*parts, tuple(spans)] if spans else parts


def kind(path: str) -> str:
    """ ".txt" of any text file, ".jsonl", ".parquet", or "" of a file that cannot be read."""
    stem, suffix = os.path.splitext(path.lower())
    if suffix == TABLE:
        return TABLE
    if suffix in PACKED:
        suffix = os.path.splitext(stem)[1]
    return TEXT[0] if suffix in TEXT else LINES if suffix == LINES else ""


def _walk(root: str) -> list[str]:
    def failed(error: OSError) -> None:
        raise UserError(f"--input: {error.filename}: {error.strerror or error}") from None

    names = []
    for folder, subfolders, inside in os.walk(root, onerror=failed):
        subfolders[:] = [d for d in subfolders if d != "__pycache__" and not d.startswith(".")]
        names += [os.path.join(folder, n) for n in inside if not n.startswith(".")]
    return sorted(names)


def _not_a_file(path: str) -> str:
    what = "a folder" if os.path.isdir(path) else "a pipe or device"
    return f"is {what} and not a file; write what it gives into a file first"

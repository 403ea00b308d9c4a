"""A list of a checkpoint's files with their sizes and checksums: what tells a damaged one from a whole one.

Orbax's format has checksums of its indices only; a bit that changes in an array would be read as another number.
The list is written before the checkpoint gets its final name, so one without a list is of an older version.
"""

from __future__ import annotations

import concurrent.futures
import json
import os
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

NAME = "files.json"
# Written or changed by Orbax after the list is made; what is ours in the second is the record.
_LATER = {"commit_success.txt", "_CHECKPOINT_METADATA", NAME}
_BLOCK = 1 << 22  # bytes read at once
_THREADS = 4  # crc32 and reading release the interpreter's lock


def write(folder: Path, record: dict[str, Any]) -> None:
    """Lists the files below `folder`, and the checksum of `record` (JSON). Raises OSError."""
    names = sorted(_files(folder))
    with concurrent.futures.ThreadPoolExecutor(_THREADS) as pool:
        sums = list(pool.map(lambda name: checksum(folder / name), names))
    files = {name: [(folder / name).stat().st_size, crc] for name, crc in zip(names, sums, strict=True)}
    text = json.dumps({"record": _crc_of(record), "files": files})
    with (folder / NAME).open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def damage(folder: Path, part: int = 0, parts: int = 1) -> str:
    """What differs from the list, in a few words; "" if nothing does, or there is no list.

    All sizes are compared, and the checksums of every `parts`-th file from `part` on, so that the processes of a run
    may share the reading.
    """
    if not (folder / NAME).exists():
        return ""
    try:
        files, _ = _read(folder)
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return f"its list of files, {NAME}, cannot be read"
    for name, (size, _) in files.items():
        try:
            found = (folder / name).stat().st_size
        except OSError:
            return f"{name} is missing"
        if found != size:
            return f"{name} has {found:,} bytes and not {size:,}"
    mine = sorted(files, key=lambda name: -files[name][0])[part::parts]
    with concurrent.futures.ThreadPoolExecutor(_THREADS) as pool:
        for name, error in zip(mine, pool.map(lambda name: _wrong(folder / name, files[name][1]), mine), strict=True):
            if error:
                return f"{name} {error}"
    return ""


def is_recorded(folder: Path, record: dict[str, Any]) -> bool:
    """Whether `record` is the one given to `write`, as far as is known. Call where there is no `damage`."""
    return not (folder / NAME).exists() or _read(folder)[1] == _crc_of(record)


def _read(folder: Path) -> tuple[dict[str, tuple[int, int]], int]:
    """(size and checksum of each file, checksum of the record)."""
    listed = json.loads((folder / NAME).read_text(encoding="utf-8"))
    return {str(name): (int(size), int(crc)) for name, (size, crc) in listed["files"].items()}, int(listed["record"])


def checksum(path: Path, report: Callable[[int], None] = lambda count: None) -> int:
    """The crc32 of a file's bytes. report(bytes) is called as it goes on."""
    crc = 0
    with path.open("rb") as file:
        while block := file.read(_BLOCK):
            crc = zlib.crc32(block, crc)
            report(len(block))
    return crc


def _wrong(path: Path, crc: int) -> str:
    try:
        return "" if checksum(path) == crc else "was changed: its checksum is another one"
    except OSError as error:
        return f"cannot be read: {error.strerror or error}"


def _crc_of(record: dict[str, Any]) -> int:
    as_read = json.loads(json.dumps(record))  # keys are text now, and sort as it does
    return zlib.crc32(json.dumps(as_read, sort_keys=True).encode())


def _files(folder: Path) -> list[str]:
    found = [path.relative_to(folder) for path in folder.rglob("*") if path.is_file()]
    return [name.as_posix() for name in found if name.name not in _LATER]

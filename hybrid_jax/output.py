"""Files that a command writes at its end: looked at before the work begins, there whole or not at all."""

import contextlib
import glob
import os
from pathlib import Path

from hybrid_jax.errors import UserError


def check(option: str, name: str) -> None:
    """Raises UserError if the file cannot be written; leaves it as it is."""
    try:
        if not name or name.endswith("/") or os.path.isdir(name):
            raise UserError(f"{option}: {name!r} is a folder, not a file" if name else f"{option}: '' is no file name")
        path = Path(os.path.realpath(name))
        if path.exists() and not path.is_file():  # a pipe or a device: opening it may wait, or end its reader
            if not os.access(path, os.W_OK):
                raise PermissionError(None, "Permission denied")
            return
        new = not path.exists()
        path.open("ab").close()
        if new:
            path.unlink()
    except (OSError, ValueError) as error:
        raise UserError(f"{option}: cannot write {name}: {getattr(error, 'strerror', '') or error}") from None


def write(name: str | Path, content: str | bytes) -> None:
    """Replaces a file, or what a link leads to. A pipe or a device is written to as it is. Raises OSError."""
    path = Path(os.path.realpath(name))
    content = content.encode() if isinstance(content, str) else content
    if path.exists() and not path.is_file():
        path.write_bytes(content)
        return
    scratch = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    for other in path.parent.glob(f".{glob.escape(path.name)}.*.tmp"):
        if not _runs(other.name.split(".")[-2]):  # what a process that was killed has left
            with contextlib.suppress(OSError):
                other.unlink()
    try:
        scratch.write_bytes(content)
        os.replace(scratch, path)
    except BaseException:
        with contextlib.suppress(OSError):
            scratch.unlink()
        raise


def _runs(pid: str) -> bool:
    """Whether there is such a process on this machine."""
    try:
        os.kill(int(pid), 0)
    except PermissionError:  # another user's
        return True
    except (ValueError, OverflowError, ProcessLookupError):
        return False
    return True

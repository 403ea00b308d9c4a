"""XLA's choices of algorithms for matrix products, kept between starts: config.tune.gemm_cache.

When it compiles for a GPU, XLA times what cuBLASLt, hipBLASLt or its own code offer for each product. That makes starts
slow, and another start, or another node, may choose otherwise, which changes results in their last bits. With a folder
to keep them in, process 0 puts the choices of a run there, and all processes of later runs read them and time only what
is new.

A folder holds a file for each kind of GPU and version of jaxlib. Its first line, a comment to XLA, says what it is good
for: a file that is of anything else is not read.
"""

from __future__ import annotations

import atexit
import dataclasses
import importlib.metadata
import json
import os
import re
import tempfile
import zlib
from collections.abc import Callable, Mapping, MutableMapping
from pathlib import Path

from hybrid_jax import output, platform
from hybrid_jax.errors import UserError

LOAD, DUMP = "--xla_gpu_load_autotune_results_from", "--xla_gpu_dump_autotune_results_to"

_KEY = "config.tune.gemm_cache"
_HEADER = "# hybrid_jax "  # XLA reads text by protobuf's rules, to which this is a comment
_CHOOSING = re.compile(r"--xla_gpu_\w*(gemm|cublas|autotun)\w*=")  # flags that decide what there is to choose from


@dataclasses.dataclass(frozen=True)
class Prepared:
    """What `prepare` arranged. note: for the log; file: of the folder, None where nothing is kept; written: by XLA, of
    this process; identity: what choices are good for; loaded: those that are read, b"" if none are."""

    note: str
    file: Path | None = None
    written: Path | None = None
    identity: Mapping[str, str] = dataclasses.field(default_factory=dict)
    loaded: bytes = b""


_prepared: Prepared | None = None  # of this process, which can read flags once


def prepare(
    folder: str,
    platform_name: str,
    environment: MutableMapping[str, str] | None = None,
    found: Mapping[str, str] | None = None,
    knows: Callable[[str], bool] = platform.knows,
) -> Prepared:
    """Adds XLA's flags for `folder` ("" = none) to the environment, where there is anything to keep. To be called
    before jax is imported; `publish` then keeps what was chosen.

    found: `identity` of this machine, if not that. Raises UserError if the folder is a file.
    """
    global _prepared
    environment = os.environ if environment is None else environment
    _prepared = _prepare(folder, platform_name, environment, found, knows)
    return _prepared


def _prepare(folder, platform_name, environment, found, knows) -> Prepared:
    if not folder:
        return Prepared("")
    where = Path(folder)
    if where.exists() and not where.is_dir():
        raise UserError(f"{_KEY}: {folder} is a file; give a folder, which is made if it does not exist")
    if platform_name == "cpu":
        return Prepared("only GPUs have algorithms to choose from; nothing is kept")
    flags = environment.get("XLA_FLAGS", "").strip()
    if flags and not flags.startswith("-"):
        return Prepared(f"XLA_FLAGS={flags} names a file of flags, to which none can be added; nothing is kept")
    if taken := [flag for flag in (LOAD, DUMP) if f"{flag}=" in f"{flags} "]:
        return Prepared(f"XLA_FLAGS has {' and '.join(taken)} already; those count")
    if unknown := [flag for flag in (LOAD, DUMP) if not knows(flag)]:
        return Prepared(f"the installed XLA does not know {' and '.join(unknown)}; nothing is kept")
    found = identity(platform_name, flags) if found is None else found
    if not found["device"]:
        return Prepared("the driver does not say which GPU this is; nothing is kept")
    file = where / f"{found['device']}-jaxlib-{found['jaxlib']}.textproto".replace(" ", "-")
    written = Path(tempfile.gettempdir()) / f"hybrid_jax-gemm-{os.getuid()}-{os.getpid()}.textproto"
    new, body, note = f"{DUMP}={written}", b"", f"none of this GPU in {folder} yet; they are kept when all is compiled"
    if file.exists():
        reason, body = _read(file, found)
        if reason:
            note = f"{file} is not read: {reason}; all products are timed anew"
        else:
            note, new = f"read from {file}", f"{LOAD}={file} {new}"
    environment["XLA_FLAGS"] = f"{new} {flags}".strip()
    atexit.register(written.unlink, missing_ok=True)
    return Prepared(note, file, written, found, body)


def note() -> str:
    """A line about what `prepare` found, "" without a folder."""
    return "" if _prepared is None else _prepared.note


def publish() -> str:
    """Keeps what XLA has chosen by now; a line about it, "" if it is what was there. For process 0, when all is
    compiled. Choices that cannot be written are a line, and no error."""
    global _prepared
    ours = _prepared
    if ours is None or ours.file is None or ours.written is None:
        return ""
    try:
        body = ours.written.read_bytes()
    except FileNotFoundError:
        return "" if ours.loaded else "XLA told of no choice; nothing is kept"
    if body == ours.loaded:
        return ""
    header = _HEADER + json.dumps({**ours.identity, "crc32": zlib.crc32(body)}) + "\n"
    try:
        ours.file.parent.mkdir(parents=True, exist_ok=True)
        output.write(ours.file, header.encode() + body)
    except OSError as error:
        return f"cannot write {ours.file}: {error.strerror or error}; the next start chooses anew"
    _prepared = dataclasses.replace(ours, loaded=body)
    return f"kept in {ours.file}"


def _read(file: Path, identity: Mapping[str, str]) -> tuple[str, bytes]:
    """(why a file is of no use here, "" if it is, and XLA's part of it)."""
    try:
        first, _, body = file.read_bytes().partition(b"\n")
    except OSError as error:
        return f"cannot read it: {error.strerror or error}", b""
    try:
        header = json.loads(first.decode().removeprefix(_HEADER)) if first.startswith(_HEADER.encode()) else None
    except ValueError:
        header = None
    if not isinstance(header, dict):
        return "its first line does not say what it is of", b""
    for key, value in identity.items():
        if header.get(key) != value:
            return f"it is of {key} {header.get(key) or 'unknown'}, and this is {value or 'unknown'}", b""
    if header.get("crc32") != zlib.crc32(body):
        return "it was changed or cut short since it was written", b""
    return "", body


def identity(platform_name: str, flags: str) -> dict[str, str]:
    """What decides whether choices are good here: the GPU ("" if the driver does not say), the versions of jaxlib, its
    plugin and the library of products, and the flags that say which algorithms there are."""
    names = {str(one.metadata["Name"]): one.version for one in importlib.metadata.distributions()}

    def versions(pattern: str) -> str:
        return " ".join(sorted(f"{name} {version}" for name, version in names.items() if re.fullmatch(pattern, name)))

    return {
        "device": platform.amd_architecture() if platform_name == "rocm" else platform.nvidia_model(),
        "jaxlib": names.get("jaxlib", ""),
        "plugin": versions(rf"jax[-_]{platform_name}\d*[-_](plugin|pjrt)"),
        "library": platform.rocm_version() if platform_name == "rocm" else versions(r"nvidia[-_]cublas([-_]cu\d+)?"),
        "flags": " ".join(sorted(flag for flag in flags.split() if _CHOOSING.match(flag))),
    }

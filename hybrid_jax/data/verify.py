"""Whether a store of hybrid_jax.data.prepare is as it was written: --verify PREFIX reads all of it."""

from pathlib import Path
from typing import Any

from hybrid_jax.data import manifest
from hybrid_jax.data.progress import Counted
from hybrid_jax.data.store import StoreReader
from hybrid_jax.data.tokenizer import from_manifest
from hybrid_jax.errors import UserError
from hybrid_jax.manifest import checksum


def verify(prefix: str) -> int:
    """The exit code, 0: what is wrong is a UserError. Of a store that has a validation store, both are read."""
    stem = manifest.stem(prefix)
    about = _read(stem)
    stores = {stem: about}
    if about.get("split") == "train":
        stores[f"{stem}.validation"] = _read(f"{stem}.validation")
    for name, about in stores.items():
        manifest.check_sizes(name, about)
    sizes = {Path(name + ending): file for name, about in stores.items() for ending, file in about["files"].items()}
    progress = Counted(sum(file["bytes"] for file in sizes.values()), "read", "bytes")
    try:
        for path, file in sizes.items():
            if checksum(path, progress.add) != file["crc32"]:
                raise UserError(f"{path}: was changed: its checksum is another one; copy it again, or prepare it again")
    except OSError as error:
        raise UserError(f"{error.filename}: {error.strerror or error}") from None
    finally:
        progress.close()
    for name, about in stores.items():
        reader = StoreReader(name)
        from_manifest(name)
        counts = {"documents": reader.num_documents, "tokens": reader.num_tokens}
        for what, count in counts.items():
            if about[what] != count:
                raise UserError(f"{manifest.path_of(name)}: counts {about[what]} {what}, {reader.idx.name} has {count}")
        print(f"{name}: as it was written: {reader.num_documents:,} documents, {reader.num_tokens:,} tokens")
    return 0


def _read(prefix: str) -> dict[str, Any]:
    about = manifest.read(prefix)
    path = manifest.path_of(prefix)
    if about is None:
        raise UserError(f"--verify: {path}: no such file, or not the manifest of a store that prepare made")
    if "files" not in about:
        raise UserError(
            f"--verify: {path}: is of an older version, without checksums; there is nothing to compare with"
        )
    return about

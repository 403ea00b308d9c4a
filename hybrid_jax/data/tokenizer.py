"""Byte-level, trained and given tokenizers, and the ids of the synthetic source."""

import contextlib
import dataclasses
import hashlib
import math
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from hybrid_jax.data import manifest
from hybrid_jax.data.sources import Document
from hybrid_jax.errors import UserError

# `tokenizers` needs about 200 bytes of memory for a character of text without spaces: bound pieces and calls.
PIECE_CHARACTERS = 32_768
CALL_CHARACTERS = 1_000_000

# Of an end-of-document token, most telling first.
END_NAMES = ("<|endoftext|>", "<|end_of_text|>", "<|end▁of▁sentence|>", "<eod>", "<|eos|>", "</s>", "<eos>", "[EOS]")

# Part of the cache key: raise it when training or encoding changes.
_BPE_RECIPE = "byte-level bpe 1"


@dataclasses.dataclass(frozen=True)
class TokenStore:
    """Documents end to end. tokens [N] uint16 or uint32, each document ending in its end-of-document token;
    starts [documents + 1] int64, the last one being N."""

    tokens: np.ndarray
    starts: np.ndarray

    @property
    def num_documents(self) -> int:
        return len(self.starts) - 1

    def lengths(self, numbers: np.ndarray) -> np.ndarray:
        return self.starts[numbers + 1] - self.starts[numbers]

    def scan(self, first: int, end: int) -> np.ndarray:
        return np.diff(self.starts[first : end + 1])

    def first_tokens(self, numbers: np.ndarray) -> np.ndarray:
        return self.starts[numbers]


@dataclasses.dataclass(frozen=True)
class ByteTokenizer:
    """UTF-8 bytes are their own ids; 256 ends a document."""

    vocab_size: int = 257
    end_of_document: int = 256
    bytes_per_token: float = 1.0

    def encode(self, text: str) -> list[int]:
        return list(text.encode(errors="replace"))

    def decode(self, ids: Sequence[int]) -> str:
        """Ids that are no byte are dropped (a model's vocabulary may be larger), broken UTF-8 becomes
        U+FFFD."""
        return bytes(i for i in ids if 0 <= i < 256).decode(errors="replace")

    def store(self, documents: list[Document]) -> TokenStore:
        starts = np.cumsum([0] + [len(d.text) + 1 for d in documents], dtype=np.int64)
        tokens = np.full(starts[-1], self.end_of_document, np.uint16)
        for start, document in zip(starts, documents, strict=False):
            tokens[start : start + len(document.text)] = np.frombuffer(document.text, np.uint8)
        return TokenStore(tokens, starts)


@dataclasses.dataclass(frozen=True)
class BpeTokenizer:
    """A tokenizer of the `tokenizers` package. Of one trained here `end_of_document` is the id after the last one of
    the BPE, of a given one it is a special token: no text, not even one that spells a special token, can produce it.
    """

    bpe: Any  # tokenizers.Tokenizer, imported lazily
    vocab_size: int
    end_of_document: int
    bytes_per_token: float = 0.0

    @staticmethod
    def from_bpe(bpe: Any) -> "BpeTokenizer":
        return BpeTokenizer(bpe, vocab_size=bpe.get_vocab_size() + 1, end_of_document=bpe.get_vocab_size())

    def encode(self, text: str) -> list[int]:
        return [i for ids in self._encode_pieces(pieces(text)) for i in ids]

    def decode(self, ids: Sequence[int]) -> str:
        """Ids that are no token are dropped, broken UTF-8 becomes U+FFFD; special tokens are spelt out."""
        return self.bpe.decode([i for i in ids if 0 <= i < self.vocab_size], skip_special_tokens=False)

    def store(self, documents: list[Document]) -> TokenStore:
        dtype = np.uint16 if self.vocab_size <= 2**16 else np.uint32
        owner: list[int] = []

        def all_pieces() -> Iterator[str]:
            for number, document in enumerate(documents):
                for piece in pieces(document.text.decode()):
                    owner.append(number)
                    yield piece

        lengths = np.ones(len(documents), np.int64)
        parts: list[np.ndarray] = []
        last = -1
        for index, ids in enumerate(self._encode_pieces(all_pieces())):
            if owner[index] != last and parts:
                parts.append(np.asarray([self.end_of_document], dtype))
            last = owner[index]
            lengths[last] += len(ids)
            parts.append(np.asarray(ids, dtype))
        parts.append(np.asarray([self.end_of_document] * bool(documents), dtype))
        starts = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
        return TokenStore(np.concatenate(parts), starts)

    def _encode_pieces(self, texts: Iterable[str]) -> Iterator[list[int]]:
        call: list[str] = []
        size = 0
        for text in texts:
            if call and size + len(text) > CALL_CHARACTERS:
                yield from (e.ids for e in self.bpe.encode_batch_fast(call, add_special_tokens=False))
                call, size = [], 0
            call.append(text)
            size += len(text)
        if call:
            yield from (e.ids for e in self.bpe.encode_batch_fast(call, add_special_tokens=False))


@dataclasses.dataclass(frozen=True)
class IdTokenizer:
    """For sources without text: an id is written as its number, and how many bytes it stands for is not known."""

    vocab_size: int
    end_of_document: int
    bytes_per_token: float = math.nan

    def encode(self, text: str) -> list[int]:
        """Raises UserError for anything but numbers of ids, separated by spaces."""
        try:
            ids = [int(word) for word in text.split()]
        except ValueError:
            ids = [-1]
        if any(not 0 <= i < self.vocab_size for i in ids):
            raise UserError(
                f"{text!r}: this tokenizer's source has no text; give ids below {self.vocab_size}, separated by spaces"
            )
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        return " ".join(str(i) for i in ids)


def load(path: str | Path, end_of_document: int | None = None, bytes_per_token: float = math.nan) -> BpeTokenizer:
    """The tokenizer of a tokenizer.json or a folder with one.

    end_of_document: its id; None takes the first of END_NAMES that is in the vocabulary, else the last id. Raises
    UserError for a file that is not there or is none, and without the `tokenizers` package.
    """
    file, definition = read_definition(path)
    bpe = from_definition(definition, str(file))
    if end_of_document is None:
        end_of_document = next(iter(end_tokens(bpe)), vocab_size(bpe) - 1)
    return BpeTokenizer(bpe, vocab_size(bpe), end_of_document, bytes_per_token)


def from_manifest(prefix: str | Path) -> ByteTokenizer | BpeTokenizer | None:
    """The tokenizer that made a token store, with its bytes per token; None where no manifest says so.

    Raises UserError for a manifest that is damaged, and for a tokenizer file beside it that is missing or not the one
    that made the store.
    """
    found = manifest.read(prefix)
    if found is None:
        return None
    about = manifest.path_of(prefix)
    try:
        made_by = found["tokenizer"]
        name, sha256, end = made_by["name"], made_by["sha256"], made_by["end_of_document"]
        ratio = float(made_by["bytes_per_token"])
    except (KeyError, TypeError, ValueError):
        raise UserError(f"{about}: does not say which tokenizer made the store; prepare the store again") from None
    if name == "bytes":
        return ByteTokenizer(bytes_per_token=ratio)
    path = manifest.tokenizer_path(prefix)
    if not path.exists():
        raise UserError(f"{path}: no such file; it is the tokenizer of the store and has to be copied with it")
    if hashlib.sha256(read_definition(path)[1].encode()).hexdigest() != sha256:
        raise UserError(f"{path}: is not the tokenizer that made the store: {about.name} has another hash of it")
    return load(path, end, ratio)


def read_definition(path: str | Path) -> tuple[Path, str]:
    """(file, content) of a tokenizer.json or a folder with one. Raises UserError for a file that is not there."""
    file = Path(path).expanduser()
    file = file / "tokenizer.json" if file.is_dir() else file
    try:
        return file, file.read_bytes().decode()
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or "is not UTF-8"
        raise UserError(f"{file}: {why}; give a tokenizer.json or a folder with one") from None


def from_definition(definition: str, name: str) -> Any:
    """A tokenizers.Tokenizer that encodes all of a text and nothing else, whatever it spells. Raises UserError, naming
    `name`, for what is no tokenizer.json."""
    try:
        import tokenizers
    except ImportError:
        raise UserError(f"{name}: needs a package that is not installed: pip install tokenizers") from None
    try:
        bpe = tokenizers.Tokenizer.from_str(definition)
    except Exception as error:  # the package raises plain Exception
        raise UserError(f"{name}: is not a tokenizer.json: {' '.join(str(error).split())}") from None
    bpe.no_truncation()  # either would change what a document holds
    bpe.no_padding()
    bpe.encode_special_tokens = True  # as the characters that spell them
    return bpe


def vocab_size(bpe: Any) -> int:
    """The largest id and one: ids may have gaps."""
    return max(bpe.get_vocab(with_added_tokens=True).values(), default=-1) + 1


def end_tokens(bpe: Any) -> list[int]:
    """The ids of END_NAMES that are there."""
    return [i for name in END_NAMES if (i := bpe.token_to_id(name)) is not None]


def pieces(text: str) -> Iterator[str]:
    """Cuts text into at most PIECE_CHARACTERS each, after a line end where there is one."""
    start = 0
    while len(text) - start > PIECE_CHARACTERS:
        line_end = text.rfind("\n", start, start + PIECE_CHARACTERS)
        stop = line_end + 1 if line_end >= start else start + PIECE_CHARACTERS
        yield text[start:stop]
        start = stop
    if start < len(text):
        yield text[start:]


def train_bpe(texts: Iterable[str], vocab_size: int) -> Any:
    """A byte-level BPE (tokenizers.Tokenizer) of at most vocab_size ids, 256 of them bytes, without special tokens; the
    same for the same texts on any number of threads."""
    import tokenizers

    bpe = tokenizers.Tokenizer(tokenizers.models.BPE())
    bpe.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=vocab_size,
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
        max_token_length=64,
    )
    bpe.train_from_iterator(texts, trainer)
    return bpe


def cached_bpe(
    train: list[Document], documents: list[Document], vocab_size: int, cache_dir: str
) -> tuple[BpeTokenizer, TokenStore]:
    """The BPE of `vocab_size` ids trained on `train`, and `documents` encoded by it; both made once and kept
    on disk.

    vocab_size counts the end-of-document id. Of several processes on a machine one trains and the others
    wait. Raises UserError without the `tokenizers` package, for a vocabulary below 257, or for a folder not
    writable.
    """
    if vocab_size < 257:
        raise UserError(f"config.data.bpe_vocab_size: {vocab_size}: at least 257 (256 bytes and end of document)")
    tokenizers = _tokenizers()
    key = hashlib.blake2b(f"{_BPE_RECIPE} {vocab_size}".encode(), digest_size=16)
    for d in train:
        key.update(d.digest)
    folder = cache_folder(cache_dir) / f"bpe-{vocab_size}-{key.hexdigest()}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with _lock(folder / "lock"):
            model = folder / "tokenizer.json"
            # Read back from the file also when just trained: first and later runs use the same object.
            bpe = _read(model, lambda f: tokenizers.Tokenizer.from_file(str(f)))
            if bpe is None:
                _train(train, vocab_size, model)
                bpe = tokenizers.Tokenizer.from_file(str(model))
            tokenizer = BpeTokenizer.from_bpe(bpe)
            content = hashlib.blake2b(b"".join(d.digest for d in documents), digest_size=16).hexdigest()
            file = folder / f"tokens-{content}.npz"
            store = _read(file, _load_store)
            if store is None:
                store = tokenizer.store(documents)
                _write(file, lambda f: _save_store(f, store))
    except OSError as error:
        raise UserError(
            f"config.data.cache_dir: {folder}: {error.strerror or error}; set it to a writable folder"
        ) from None
    return tokenizer, store


def cache_folder(cache_dir: str) -> Path:
    """config.data.cache_dir, else $XDG_CACHE_HOME/hybrid_jax, else ~/.cache/hybrid_jax."""
    if cache_dir:
        return Path(cache_dir).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "hybrid_jax"


def _tokenizers() -> Any:
    try:
        import tokenizers
    except ImportError:
        raise UserError(
            "config.data.tokenizer: 'bpe' needs a package that is not installed: pip install tokenizers"
        ) from None
    return tokenizers


def _train(train: list[Document], vocab_size: int, file: Path) -> None:
    bpe = train_bpe((p for d in train for p in pieces(d.text.decode())), vocab_size - 1)
    _write(file, lambda f: bpe.save(str(f)))


def _load_store(file: Path) -> TokenStore:
    with np.load(file, allow_pickle=False) as arrays:
        return TokenStore(arrays["tokens"], arrays["starts"])


def _save_store(file: Path, store: TokenStore) -> None:
    with file.open("wb") as out:
        np.savez(out, tokens=store.tokens, starts=store.starts)


def _read(file: Path, load: Callable[[Path], Any]) -> Any:
    """None for a file that is missing or damaged: it is then made again."""
    if not file.exists():
        return None
    try:
        return load(file)
    except Exception:  # tokenizers raises plain Exception, numpy several kinds
        return None


def _write(file: Path, save: Callable[[Path], Any]) -> None:
    """Whole or not at all: a crash half-way leaves no file under the final name."""
    handle, temporary = tempfile.mkstemp(dir=file.parent, prefix=f".{file.name}.")
    os.close(handle)
    try:
        save(Path(temporary))
        os.replace(temporary, file)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise


@contextlib.contextmanager
def _lock(file: Path) -> Iterator[None]:
    """Waits for other processes. Where locks do not exist, two may do the same work; the result is the
    same."""
    with file.open("a") as handle:
        try:
            import fcntl

            fcntl.flock(handle, fcntl.LOCK_EX)  # released by the system also when the process dies
        except (ImportError, OSError):
            pass
        yield

"""A byte-level BPE of a bounded sample of the input, for hybrid_jax.data.prepare: the same for the same input, whatever
reads or trains it."""

import re
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

from hybrid_jax.data import tokenizer
from hybrid_jax.data.documents import Reader, Take
from hybrid_jax.data.inputs import Source, Span, cut
from hybrid_jax.data.plan import Earlier
from hybrid_jax.data.shuffle import permutation
from hybrid_jax.data.streams import Rows, Stream
from hybrid_jax.data.vocabulary import Vocabulary
from hybrid_jax.errors import UserError
from hybrid_jax.metrics import duration

END = "<|endoftext|>"  # the last id; no text gives it
SAMPLE_BYTES = 2**25  # of UTF-8: training takes 3 bytes of memory a byte of code, and 110 a byte of Chinese
_SHARE = 2**22  # of a part, at least
_NO_WORD = re.compile(r"\w{257,}", re.ASCII)  # encoded data: nothing to learn, at the price of all else
_LINE_SECONDS = 10.0


def planned(size: int, earlier: Earlier) -> Vocabulary:
    """The vocabulary of `size` ids that was trained earlier, on the same text, else one without a definition. Raises
    UserError for a size that is too small."""
    if size < 257:
        raise UserError(f"--train_tokenizer: {size}: at least 257 (256 bytes and the end of a document)")
    name = _name(size)
    if definition := earlier.definition(name):
        return _vocabulary(name, definition, earlier.origin)
    return Vocabulary(name, None, size, None)


def train(size: int, texts: Iterator[str]) -> Vocabulary:
    """Trains it: at most size - 1 ids and END. Says so on stderr. Raises UserError for what cannot be read."""
    _say(f"training a tokenizer of {size:,} ids on up to {SAMPLE_BYTES >> 20} MiB of the input")
    training = _Training(texts, size - 1)
    bpe = training.result()
    bpe.add_special_tokens([END])
    found = _vocabulary(_name(size), bpe.to_str(pretty=True), {"trained_on": training.size})
    if found.size < size:
        _say(f"that text gives only {found.size:,} ids, not {size:,}")
    return found


def sample(inputs: Sequence[Source], stream: Stream | None, part_bytes: int, take: Take) -> Iterator[str]:
    """Texts of SAMPLE_BYTES, or of all of a smaller input: of files parts from all over them, of each as much as of
    the others, from its beginning; of a stream what `Stream.sample` gives. Raises UserError for what has no text."""
    share = SAMPLE_BYTES
    if stream:
        return _texts(((rows,) for rows in stream.sample(take, _SHARE)), take, share)
    parts = cut(inputs, part_bytes)
    if sum(file.size for file in inputs) > SAMPLE_BYTES:
        share = max(SAMPLE_BYTES // len(parts), _SHARE)
    return _texts((parts[i] for i in permutation(len(parts), 0)), take, share)


def _texts(parts: Iterator[Sequence[Span | Rows]], take: Take, share: int) -> Iterator[str]:
    """share: of a part, at most."""
    reader = Reader(take)
    left = SAMPLE_BYTES
    for part in parts:
        limit = max(left - share, 0)
        for text in _pieces(reader, part):
            yield _NO_WORD.sub(" ", text)
            left -= len(text.encode())
            if left <= limit:
                break
        if left <= 0:
            return


def _pieces(reader: Reader, part: Sequence[Span | Rows]) -> Iterator[str]:
    for span in part:
        for document in reader.rows(span) if isinstance(span, Rows) else reader.documents(span):
            for text, _ in document.pieces:
                yield from tokenizer.pieces(text or "")


class _Training:
    """In a thread, as the package notices no Ctrl-C while it merges. size: bytes of text that it was given."""

    def __init__(self, texts: Iterator[str], size: int):
        self.size = 0
        self._texts = texts
        self._reading, self._stopped = True, False
        self._bpe: Any = None
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._work, args=(size,), daemon=True)

    def result(self) -> Any:
        began = time.monotonic()
        self._thread.start()
        try:
            while self._thread.is_alive():
                self._thread.join(_LINE_SECONDS)
                if self._thread.is_alive():
                    what = "read" if self._reading else "read, merging"
                    seconds = duration(time.monotonic() - began)
                    _say(f"{self.size / 2**20:.0f} MiB {what}, {seconds}")
        except KeyboardInterrupt:
            self._stopped = True
            if self._reading:
                self._thread.join()  # a thread that comes back into Python while it ends would crash
            raise
        if self._error is not None:
            raise self._error
        return self._bpe

    def _work(self, size: int) -> None:
        try:
            self._bpe = tokenizer.train_bpe(self._watched(), size)
        except BaseException as error:
            self._error = error

    def _watched(self) -> Iterator[str]:
        for text in self._texts:
            if self._stopped:
                raise KeyboardInterrupt
            self.size += len(text.encode())
            yield text
        self._reading = False


def _vocabulary(name: str, definition: str, origin: dict[str, Any]) -> Vocabulary:
    bpe = tokenizer.from_definition(definition, name)
    return Vocabulary(name, definition, tokenizer.vocab_size(bpe), bpe.token_to_id(END), origin)


def _name(size: int) -> str:
    return f"trained-{size}"


def _say(what: str) -> None:
    print(f"prepare: {what}", file=sys.stderr, flush=True)

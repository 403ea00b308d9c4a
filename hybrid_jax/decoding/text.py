"""Token ids to text as they come: only what later ids cannot change is given out, and nothing from a stop string on."""

from collections.abc import Sequence

from hybrid_jax.data.interface import Tokenizer

_UNFINISHED = "\N{REPLACEMENT CHARACTER}"  # what a tokenizer makes of a character's first bytes
_BYTES = 4  # of a character at most: while it lacks some, three of these may stand at the end
_CONTEXT = 8  # ids that are decoded anew with later ones: a character's bytes, and a word whose space depends on it
_BEFORE = 1024  # of the ids that a row continues, those that are looked at


class TextStream:
    """The text of one row.

    before: ids that the row continues; text that joins up with them, as a leading space, is right then. stop: strings,
    none of them empty, that end the text; it does not hold the one that did. What is found first is the one that ends
    first, wherever the borders of tokens lie.
    """

    def __init__(self, tokenizer: Tokenizer, before: Sequence[int] = (), stop: Sequence[str] = ()):
        self.tokenizer, self.stop = tokenizer, tuple(stop)
        self.text = ""  # all that was given out
        self.ids: list[int] = []  # all that were taken: up to the one that completed a stop string
        self.stopped = False
        self._window = self._spelt(before[-_BEFORE:])
        self._taken = self._finished(tokenizer.decode(self._window))  # what of the window's text has been taken
        self._waiting = 0  # ids since that
        self._held = ""  # text taken, but perhaps the beginning of a stop string
        self._shorten()

    def push(self, ids: Sequence[int]) -> str:
        """The text that is sure now that these follow."""
        return "".join(self._push(i) for i in ids if not self.stopped)

    def end(self) -> str:
        """The rest, as no more ids follow."""
        if self.stopped:
            return ""
        self._held += self.tokenizer.decode(self._window)[len(self._taken) :]
        return self._give(self._sure() if self._first_stop() else len(self._held))

    def _push(self, new: int) -> str:
        self.ids.append(new)
        spelt = self._spelt([new])
        self._window += spelt
        self._waiting += len(spelt)
        text = self._finished(self.tokenizer.decode(self._window))
        # Where bytes stand for rare characters, one that lacks some makes those before it unreadable too, until then.
        if text.startswith(self._taken) or self._waiting >= _BYTES:
            self._held += text[len(self._taken) :]
            self._taken, self._waiting = text, 0
            self._shorten()
        return self._give(self._sure())

    def _spelt(self, ids: Sequence[int]) -> list[int]:
        """Without those that stand for no text: they would push others out of the window."""
        end, size = self.tokenizer.end_of_document, self.tokenizer.vocab_size
        return [i for i in ids if 0 <= i < size and i != end]

    def _finished(self, text: str) -> str:
        cut = len(text)
        while cut and len(text) - cut < _BYTES - 1 and text[cut - 1] == _UNFINISHED:
            cut -= 1
        return text[:cut]

    def _shorten(self) -> None:
        """Cuts the window where what is left reads as it did."""
        if len(self._window) <= 2 * _CONTEXT:
            return
        whole = self.tokenizer.decode(self._window)
        for size in range(_CONTEXT, _CONTEXT + _BYTES):
            rest = self.tokenizer.decode(self._window[-size:])
            if whole.endswith(rest):
                self._window, self._taken = self._window[-size:], self._finished(rest)
                return

    def _first_stop(self) -> tuple[int, int] | None:
        """(end, start) in what is held of the stop string that ends first."""
        found = [(i + len(s), i) for s in self.stop if (i := self._held.find(s)) >= 0]
        return min(found, default=None)

    def _sure(self) -> int:
        """Characters held that may be given out. Sets `stopped`."""
        if found := self._first_stop():
            self.stopped = True
            return found[1]
        longest = max(map(len, self.stop), default=1)
        for start in range(max(0, len(self._held) - longest + 1), len(self._held)):
            if any(s.startswith(self._held[start:]) for s in self.stop):
                return start
        return len(self._held)

    def _give(self, count: int) -> str:
        text, self._held = self._held[:count], self._held[count:]
        self.text += text
        return text

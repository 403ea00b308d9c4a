"""A prompt after the other at a terminal: one row, whose states go on, so that nothing is read twice."""

import sys
from collections.abc import Callable

from hybrid_jax.data.interface import Tokenizer
from hybrid_jax.decoding.complete import follow
from hybrid_jax.decoding.decoder import Rows
from hybrid_jax.decoding.text import TextStream
from hybrid_jax.errors import UserError
from hybrid_jax.signals import Interrupts

HELP = """\
Each line continues the text so far. Ctrl-C stops an answer.
  /reset   forget the text so far
  /quit    leave, as Ctrl-D does
  /help    this"""


class Conversation:
    """prepare: makes ids of a line, in its template. Everything that was read or written is the text so far, with the
    stop string that ended an answer (which is not shown), but without an end of document.
    """

    def __init__(
        self,
        rows: Rows,
        tokenizer: Tokenizer,
        prepare: Callable[[str], list[int]],
        *,
        max_new_tokens: int,
        stop: tuple[str, ...],
        interrupts: Interrupts,
    ):
        self.rows, self.tokenizer, self.prepare = rows, tokenizer, prepare
        self.max_new_tokens, self.stop, self.interrupts = max_new_tokens, stop, interrupts

    def run(self, show: Callable[[str], None], say: Callable[[str], None]) -> None:
        """Until /quit or the end of the input. show: for what is written; say: for lines about it."""
        terminal = sys.stdin.isatty() and sys.stdout.isatty()
        if terminal:
            import readline  # noqa: F401  (editing and history in `input`)

            say(HELP)
        while True:
            try:
                line = input("> " if terminal else "")
            except EOFError:
                if terminal:
                    show("\n")
                return
            except KeyboardInterrupt:
                show("\n")
                say("/quit or Ctrl-D leaves")
                continue
            command = line.strip()
            if command == "/quit":
                return
            if command == "/reset":
                self.rows.reset()
            elif command == "/help":
                say(HELP)
            elif line:
                self._answer(line.encode("utf-8", "surrogateescape").decode("utf-8", "replace"), show, say)

    def _answer(self, line: str, show: Callable[[str], None], say: Callable[[str], None]) -> None:
        rows, interrupts = self.rows, self.interrupts
        interrupts.asked, interrupts.busy = False, True
        try:
            ids = self.prepare(line)
            if not rows.read([ids], self.max_new_tokens, stop=lambda: interrupts.asked):
                say("stopped while reading: the text so far ends in the middle of this line; /reset forgets it")
                return
            text = TextStream(self.tokenizer, ids, self.stop)
            for (new,) in rows.write([self.max_new_tokens]):
                piece, finished = follow(text, new, rows.decoder.end, self.max_new_tokens)
                show(piece)
                if finished or interrupts.asked:
                    rows.end_row(0)
                    show(text.end() if not finished else "")
            show("\n")
        except UserError as error:
            say(f"error: {error}")
        finally:
            interrupts.busy = False

"""Continues a list of prompts: batches of them, stop strings, text."""

import dataclasses
from collections.abc import Callable, Iterator, Sequence

from hybrid_jax.data.interface import Tokenizer
from hybrid_jax.decoding.decoder import Decoder, Rows
from hybrid_jax.decoding.sampling import Sampling
from hybrid_jax.decoding.text import TextStream
from hybrid_jax.errors import UserError
from hybrid_jax.model import Model, Params

BLOCK = 16  # tokens written between two looks at them


@dataclasses.dataclass(frozen=True)
class Completion:
    """What follows a prompt: its ids, without the end of document, and their text, which ends before a stop string.

    finish: "end" (of document), "stop" (a string), "length" (as many tokens as were asked for) or "interrupted".
    """

    ids: list[int]
    text: str
    finish: str


def complete(
    decoder: Decoder,
    tokenizer: Tokenizer,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    sampling: Sampling,
    seed: int = 0,
    stop: Sequence[str] = (),
    batch_size: int = 16,
    block: int = BLOCK,
    show: Callable[[int, str], None] = lambda number, text: None,
    done: Callable[[int, Completion], None] = lambda number, completion: None,
    progress: Callable[[int, int], None] = lambda read, total: None,
    interrupted: Callable[[], bool] = lambda: False,
) -> list[Completion]:
    """The completions of `prompts` (ids, at least one each), in their order; batch_size of them are written at a time.

    Each is what it would be alone: what is sampled in it follows from the seed, its number in `prompts` and its text.
    show: called with a prompt's number and text that follows it, as soon as it is sure. done: with each completion, in
    order. progress: see Rows.read. interrupted: asked now and then; once it is true what has been written is returned.
    Raises UserError for an empty prompt or stop string, and as Rows.read does, before anything of the batch is written.
    """
    for number, ids in enumerate(prompts):
        if not ids:
            raise UserError(f"prompt {number + 1} is empty: there is nothing to continue")
    if not all(stop):
        raise UserError("a stop string is empty, and would end every text before its first character")
    found: list[Completion] = []
    size = max(1, min(batch_size, len(prompts)))
    for start in range(0, len(prompts), size):
        rows = decoder.rows(range(start, start + size), sampling, seed)
        batch = prompts[start : start + size]
        looks = _looks(rows, batch, max_new_tokens, block, progress, interrupted)
        for completion in _written(rows, batch, tokenizer, stop, max_new_tokens, looks, show, start):
            found.append(completion)
            done(len(found) - 1, completion)
        if interrupted():
            break
    return found


def _looks(rows: Rows, batch, max_new_tokens, block, progress, interrupted) -> Iterator[list[list[int]]]:
    """What Rows.write gives after these prompts, until it is interrupted."""
    empty = rows.count - len(batch)  # rows of the last batch that have no prompt
    if rows.read([*batch, *[[]] * empty], max_new_tokens, progress, interrupted):
        for new in rows.write([max_new_tokens] * len(batch) + [0] * empty, block):
            yield new
            if interrupted():
                return


def _written(
    rows: Rows, batch, tokenizer, stop, max_new_tokens, looks: Iterator[list[list[int]]], show, first: int
) -> Iterator[Completion]:
    """The completions of a batch in order, each as soon as it and those before it are there."""
    texts = [TextStream(tokenizer, ids, stop) for ids in batch]
    finish = [""] * len(batch)
    given = 0
    for new in looks:
        for b, text in enumerate(texts):
            if new[b] and not finish[b]:
                piece, finish[b] = follow(text, new[b], rows.decoder.end, max_new_tokens)
                show(first + b, piece)
                if finish[b]:
                    rows.end_row(b)
        while given < len(batch) and finish[given]:
            yield Completion(texts[given].ids, texts[given].text, finish[given])
            given += 1
    for b in range(given, len(batch)):
        if not finish[b]:
            show(first + b, texts[b].end())
        yield Completion(texts[b].ids, texts[b].text, finish[b] or "interrupted")


def follow(text: TextStream, new: Sequence[int], end: int, limit: int) -> tuple[str, str]:
    """Takes ids that were written into `text`: (what can be shown now, how the text ended or ""), see Completion."""
    ended = new[-1] == end
    piece = text.push(new[:-1] if ended else new)
    ended_how = "end" if ended else "length" if len(text.ids) == limit else ""
    if ended_how:
        piece += text.end()
    return piece, "stop" if text.stopped else ended_how


def continuation(
    model: Model, params: Params, prompt: Sequence[int], count: int, sampling: Sampling, seed: int = 0
) -> list[int]:
    """`count` ids that follow those of a prompt (at least one), whatever they are."""
    rows = Decoder(model, params).rows([0], sampling, seed)
    rows.read([list(prompt)], count)
    return [i for new in rows.write([count], BLOCK) for i in new[0]]

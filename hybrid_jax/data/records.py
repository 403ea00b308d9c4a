"""Records of fine-tuning: text of which only a part is learnt.

    {"prompt": "...", "response": "..."}                      the response is learnt ("completion" is read too)
    {"messages": [{"role": "user", "content": "..."}, ...]}   what the role "assistant" says is learnt

A prompt and its response stand end to end as they are. A message is written as a line <|role|> and its content in
the lines below; an assistant's ends with the end-of-document id, which is learnt, so that a model learns to stop.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from hybrid_jax.errors import UserError

FIELDS = ("prompt", "response", "completion", "messages")
NOTHING_LEARNT = "its response is empty, so there is nothing to learn"
_RESPONSES = ("response", "completion")
_LEARNT_ROLE = "assistant"


def encode(
    record: Mapping[str, Any], encoder: Callable[[str], Sequence[int]], end_of_document: int
) -> tuple[np.ndarray, np.ndarray]:
    """A document of a masked store: (ids int64 [length], which are learnt bool [length]), as StoreWriter takes them.

    Each part of the record is encoded by itself, so that no token lies across the edge of a mask. Raises UserError,
    without the place, for what is no such record, and for one without a token to learn.
    """
    ids: list[np.ndarray] = []
    learnt: list[np.ndarray] = []
    for text, learn in parts(record):
        part = np.asarray(encoder(text) if text is not None else [end_of_document], np.int64)
        ids.append(part)
        learnt.append(np.full(len(part), learn))
    mask = np.concatenate(learnt)
    if sum(len(part) for part in ids) == 1 or not mask[:-1].any():
        raise UserError(NOTHING_LEARNT)
    return np.concatenate(ids), mask


def parts(record: Mapping[str, Any]) -> list[tuple[str | None, bool]]:
    """(text, whether it is learnt) of each part; None is the end-of-document id, which is the last part always. A
    field that is null counts as absent, as it has to be there in a table. Raises UserError as `encode` does."""
    if not isinstance(record, Mapping):
        raise UserError('is no JSON object with "prompt" and "response", or with "messages"')
    if record.get("messages") is not None:
        return _messages(record["messages"])
    response = next((name for name in _RESPONSES if record.get(name) is not None), _RESPONSES[0])
    for name in ("prompt", response):
        if not isinstance(record.get(name), str):
            raise UserError(f'has no text "{name}"; give "prompt" and "response", or "messages"')
    return [(record["prompt"], False), (record[response], True), (None, True)]


def _messages(messages: Any) -> list[tuple[str | None, bool]]:
    if not isinstance(messages, Sequence) or isinstance(messages, str) or not messages:
        raise UserError('its "messages" are no list of objects with "role" and "content"')
    found: list[tuple[str | None, bool]] = []
    for number, message in enumerate(messages, 1):
        role, content = (
            (message.get(name) for name in ("role", "content")) if isinstance(message, Mapping) else (None, None)
        )
        if not isinstance(role, str) or not isinstance(content, str):
            raise UserError(f'its message {number} is no object with the texts "role" and "content"')
        learn = role == _LEARNT_ROLE
        found.append((f"<|{role}|>\n", False))
        found.append((content, learn))
        found += [(None, True)] if learn else []
        found.append(("\n", False))
    if not any(learn for _, learn in found):
        raise UserError(f'none of its messages has the role "{_LEARNT_ROLE}", so there is nothing to learn')
    found.pop()
    return found if found[-1][0] is None else [*found, (None, False)]

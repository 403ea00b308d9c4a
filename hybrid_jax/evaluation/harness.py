"""A checkpoint as a model of lm-evaluation-harness, and the harness run on it.

Import after library.prepare.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import io
import json
import random
import time
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np
from lm_eval import evaluator
from lm_eval.api.instance import Instance
from lm_eval.api.model import CacheHook, TemplateLM
from lm_eval.models.utils import handle_stop_sequences, normalize_gen_kwargs
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from hybrid_jax import progress
from hybrid_jax.data.interface import Tokenizer
from hybrid_jax.decoding.complete import Completion, complete
from hybrid_jax.decoding.decoder import Decoder
from hybrid_jax.decoding.sampling import Sampling
from hybrid_jax.errors import UserError
from hybrid_jax.evaluation.scoring import Scorer
from hybrid_jax.evaluation.tasks import Loaded
from hybrid_jax.sample import on_one_device

BOOTSTRAPS = 1000  # resamples behind a standard error that has no formula: it is within some percent
SEED = 0  # of what a task draws
MAX_NEW_TOKENS = 256  # of an answer, where its task does not say, as in the harness
MOST_ROWS = 64  # of answers written at once, where no batch size is given; a quarter on a CPU


class Watched(TemplateLM):
    """Shows how far the requests are: the harness's hook is told of each that is answered, whatever the model."""

    line: progress.Line

    def loglikelihood(self, requests: list[Instance], disable_tqdm: bool = True) -> list[tuple[float, bool]]:
        with self._watch(requests, "requests"):
            return super().loglikelihood(requests, disable_tqdm=True)

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = True) -> list[float]:
        with self._watch(requests, "texts"):
            return super().loglikelihood_rolling(requests, disable_tqdm=True)  # type: ignore[safe-super]

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = True) -> list[str]:
        with self._watch(requests, "answers"):
            return super().generate_until(requests, disable_tqdm=True)  # type: ignore[safe-super]

    def clock(self) -> float:
        """Seconds, without those of compiling."""
        return time.monotonic()

    @contextlib.contextmanager
    def _watch(self, requests: Sequence[Instance], unit: str) -> Iterator[None]:
        weights = [_characters(request.args) for request in requests]
        self.line.say(f"{len(requests):,} {unit}")
        self.set_cache_hook(_Hook(progress.Count(self.line, len(requests), sum(weights), unit, self.clock)))
        try:
            yield
        finally:
            self.line.close()
            self.set_cache_hook(CacheHook(None))


class _Hook(CacheHook):
    def __init__(self, count: progress.Count):
        super().__init__(None)
        self._count = count

    def add_partial(self, attr: str, req: Any, res: Any) -> None:
        self._count.add(_characters(req))


def _characters(arguments: Sequence[Any]) -> int:
    return sum(len(part) for part in arguments if isinstance(part, str))


class _Checkpoint(TemplateLM):
    """Requests answered by a Scorer, on all devices, and a Decoder, on the first one.

    Every text begins as documents do in training, with no token of its own; an empty context is the end-of-document id.
    """

    def __init__(self, scorer: Scorer, tokenizer: Tokenizer):
        super().__init__()
        self._scorer, self._text = scorer, tokenizer

    @property
    def eot_token_id(self) -> int:
        return self._text.end_of_document

    @property
    def max_length(self) -> int:
        return self._scorer.window

    @property
    def max_gen_toks(self) -> int:
        return MAX_NEW_TOKENS

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **unused: Any) -> list[int]:
        return self._text.encode(string)

    def tok_decode(self, tokens: Sequence[int]) -> str:
        return self._text.decode([i for i in tokens if i != self.eot_token_id])

    def _encode_pair(self, context: str, continuation: str) -> tuple[list[int], list[int]]:
        before, after = super()._encode_pair(context, continuation)
        if after or not continuation:
            return before, after
        # The continuation joined the context's last token: what is asked begins where their tokens part.
        whole = self.tok_encode(context + continuation)
        same = next((i for i, (a, b) in enumerate(zip(before, whole, strict=False)) if a != b), len(whole) - 1)
        return whole[:same] or [self.prefix_token_id], whole[same:]

    def _loglikelihood_tokens(
        self, requests: list[tuple[Any, list[int], list[int]]], **unused: Any
    ) -> list[tuple[float, bool]]:
        def done(number: int, answer: tuple[float, bool]) -> None:
            self.cache_hook.add_partial("loglikelihood", requests[number][0], answer)

        return self._scorer.score([(context, continuation) for _, context, continuation in requests], done)

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        windows: list[tuple[list[int], list[int]]] = []
        owner: list[int] = []  # of each window
        for number, request in enumerate(requests):
            of_text = get_rolling_token_windows(
                self.tok_encode(request.args[0]), self.prefix_token_id, self.max_length, context_len=1
            )
            windows += [make_disjoint_window(window) for window in of_text]
            owner += [number] * (len(windows) - len(owner))
        left = np.bincount(owner, minlength=len(requests))
        totals = np.zeros(len(requests))

        def done(window: int, answer: tuple[float, bool]) -> None:
            number = owner[window]
            totals[number] += answer[0]
            left[number] -= 1
            if not left[number]:
                self.cache_hook.add_partial("loglikelihood_rolling", requests[number].args, float(totals[number]))

        self._scorer.score(windows, done)
        return totals.tolist()

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        answers = [""] * len(requests)
        alike: dict[str, list[int]] = {}
        for number, request in enumerate(requests):
            alike.setdefault(json.dumps(request.args[1], sort_keys=True, default=str), []).append(number)
        for numbers in alike.values():
            asked = _Asked.of(requests[numbers[0]].args[1], self.max_length)
            room = self.max_length - asked.tokens
            prompts = {n: self.tok_encode(requests[n].args[0]) or [self.prefix_token_id] for n in numbers}
            self._scorer.truncated += sum(len(ids) > room for ids in prompts.values())
            order = sorted(numbers, key=lambda n: len(prompts[n]), reverse=True)

            def done(place: int, completion: Completion, order: Sequence[int] = order) -> None:
                number = order[place]
                answers[number] = completion.text
                self.cache_hook.add_partial("generate_until", requests[number].args, completion.text)

            complete(
                self._decoder, self._text, [prompts[n][-room:] for n in order],
                max_new_tokens=asked.tokens, sampling=asked.sampling, seed=SEED, stop=asked.stop,
                batch_size=self._rows_at_once, done=done,
            )  # fmt: skip
        return answers

    @functools.cached_property
    def _decoder(self) -> Decoder:
        return Decoder(self._scorer.model, on_one_device(self._scorer.params), self.eot_token_id)

    @functools.cached_property
    def _rows_at_once(self) -> int:
        """Rows that are written together: as asked for, else as many as attention's cache has room for."""
        size = self._scorer.batch_size or (MOST_ROWS if jax.default_backend() != "cpu" else MOST_ROWS // 4)
        while not self._scorer.batch_size and size > 1:
            try:
                self._decoder.check_room(size, self.max_length)
                break
            except UserError:
                size //= 2
        return size


class CheckpointLM(Watched, _Checkpoint):
    """A model of lm-evaluation-harness out of a checkpoint."""

    def __init__(self, scorer: Scorer, tokenizer: Tokenizer, line: progress.Line):
        super().__init__(scorer, tokenizer)
        self.line = line

    def clock(self) -> float:
        decoding = self._decoder.timing.compile_seconds if "_decoder" in self.__dict__ else 0.0
        return time.monotonic() - self._scorer.compile_seconds - decoding


@dataclasses.dataclass(frozen=True)
class _Asked:
    """How a task wants its answers written."""

    tokens: int
    stop: tuple[str, ...]
    sampling: Sampling

    @classmethod
    def of(cls, arguments: dict[str, Any], window: int) -> _Asked:
        """Raises UserError for what this decoder does not do."""
        kwargs: dict[str, Any] = dict(normalize_gen_kwargs(arguments, MAX_NEW_TOKENS))
        tokens, sampled = kwargs.pop("max_gen_toks"), kwargs.pop("do_sample")
        stop = tuple(text for text in handle_stop_sequences(kwargs.pop("until"), None) if text)
        temperature = float(kwargs.pop("temperature", 1.0))
        if not 0 < tokens < window:
            raise UserError(
                f"--tasks: a task asks for answers of up to {tokens:,} tokens, which leaves nothing of the window of "
                f"{window:,} for its question; raise --max_length, or leave it out"
            )
        known = {name: kwargs.pop(name) for name in ("top_k", "top_p", "repetition_penalty") if name in kwargs}
        if kwargs:
            raise UserError(f"--tasks: a task's generation_kwargs name {', '.join(kwargs)}, which this decoder has not")
        return cls(tokens, stop, Sampling(temperature if sampled else 0.0, **known))


def check(loaded: Loaded, window: int) -> None:
    """Raises UserError, before any work, if a task asks for answers that the decoder of a checkpoint cannot write."""
    for task in loaded.tasks.values():
        if task.OUTPUT_TYPE == "generate_until":
            _Asked.of(task.get_config("generation_kwargs") or {}, window)


def run(model: TemplateLM, loaded: Loaded, limit: int | None, log_samples: bool = False) -> dict[str, Any]:
    """What lm_eval.evaluator.evaluate returns of these tasks, on the first `limit` documents of each (None: all)."""
    random.seed(SEED)
    np.random.seed(SEED)  # noqa: NPY002 (what tasks draw from)
    with contextlib.redirect_stdout(io.StringIO()):  # the harness prints as it goes
        return evaluator.evaluate(
            lm=model,
            task_dict={"tasks": loaded.tasks, "groups": loaded.groups},
            limit=limit,
            bootstrap_iters=BOOTSTRAPS,
            log_samples=log_samples,
        )

"""Numbers that are not finite, put into a run by replacing its compiled step."""

import dataclasses
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from tests.chaos import outcome, training
from tests.chaos.outcome import Trial, last_step
from tests.chaos.training import LIMIT, workdir

State = Any
BAD_BATCHES = range(21, 24)  # of the training data, from 0
SKIPPED, ROLLED_BACK = "--config.train.max_bad_steps=10", "--config.train.max_bad_steps=3"  # what they lead to
_Call = Callable[[State], tuple[State, Any]]  # the compiled step, given the rest of its arguments


def in_memory(reference: training.Reference, rng: random.Random, trial: Trial) -> None:
    """A parameter turns into NaN after a step: the run ends before it spoils a checkpoint."""
    at, since = rng.randint(1, training.STEPS - 1), len(trial.said())
    trainer = training.start(
        reference.store,
        trial,
        "--config.train.max_bad_steps=3",
        "--config.divergence.max_rollbacks=0",  # it would go past data that are good
        before=lambda: _replace_step(glitch(at)),
    )
    trainer.wait(LIMIT)
    trial.hit("NaN in a parameter", f"after step {at}, seen at {last_step(workdir(trial))}")
    trial.expect_error_line(trainer.code, since, "not finite")
    training.finish_and_compare(reference, trial)


def run_reference(folder: Path, one: training.Reference, leads_to: str) -> training.Reference:
    """The run whose data make NaN, without a kill."""
    trial = Trial(folder / f"nan-{leads_to[-1]}")
    trial.folder.mkdir()
    training.finish(one.store, trial, leads_to, before=spoil_data)
    _, rollbacks = outcome.course(workdir(trial))
    if trial.problems or len(rollbacks) != (leads_to == ROLLED_BACK):
        raise SystemExit(
            f"error: a run with bad batches: {trial.problems}, {len(rollbacks)} roll-backs; see {trial.out}"
        )
    return dataclasses.replace(one, folder=workdir(trial), overrides=(leads_to,), before=spoil_data)


def in_data(reference: training.Reference, rng: random.Random, trial: Trial) -> None:
    """Batches whose loss is NaN whoever computes it, and kills: what is decided about them is decided again."""
    what = "skipped" if SKIPPED in reference.overrides else "rolled back"
    training.kills(reference, rng, trial, f"NaN in the data, {what}, and ")


def glitch(at: int) -> Callable[[int, bytes, _Call, State], tuple[State, Any]]:
    def spoil(step: int, batch: bytes, call: _Call, state: State) -> tuple[State, Any]:
        state, numbers = call(state)
        return (_with_nan(state) if step == at else state), numbers

    return spoil


def spoil_data() -> None:
    """In a trainer: the loss of BAD_BATCHES is NaN, at whatever step they come."""
    bad: set[bytes] = set()

    def learn(cfg: Any) -> None:
        from hybrid_jax import data

        train = cfg.train
        opened = data.open(
            cfg.data,
            sequence_length=train.sequence_length,
            vocab_size=cfg.model.vocab_size,
            seed=train.seed,
            split="train",
        )
        for index in BAD_BATCHES:
            batch = opened.batch(index, range(train.global_batch_size), train.global_batch_size)
            bad.add(np.asarray(batch["tokens"], np.int32).tobytes())

    def spoil(step: int, batch: bytes, call: _Call, state: State) -> tuple[State, Any]:
        if batch not in bad:
            return call(state)
        params = state["params"]
        state, numbers = call(_with_nan(state))  # it takes the copy's memory, and changes nothing
        return {**state, "params": params}, numbers

    _replace_step(spoil, learn)


def _replace_step(spoil: Callable[..., tuple[State, Any]], learn: Callable[[Any], None] = lambda cfg: None) -> None:
    from hybrid_jax.step import Programs

    compile_step = Programs.compile_step

    def replaced(self: Programs) -> Callable[..., Any]:
        step_fn = compile_step(self)
        learn(self.cfg)

        def step(state: State, batch: Any, *more: Any) -> tuple[State, Any]:
            number, tokens = int(state["step"]) + 1, np.asarray(batch["tokens"], np.int32).tobytes()
            return spoil(number, tokens, lambda s: step_fn(s, batch, *more), state)

        return step

    Programs.compile_step = replaced  # type: ignore[method-assign, assignment]


def _with_nan(state: State) -> State:
    import jax
    import jax.numpy as jnp

    params = jax.tree.map(jnp.copy, state["params"])  # the step takes its argument's memory
    params["norm"]["weight"] = params["norm"]["weight"].at[0].set(jnp.nan)
    return {**state, "params": params}

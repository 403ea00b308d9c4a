"""Runs as training leaves them, written without training."""

import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from hybrid_jax import checkpoint, provenance
from hybrid_jax.config import Config
from hybrid_jax.data import run_tokenizer
from hybrid_jax.data.interface import Tokenizer
from hybrid_jax.data.tokenizer import IdTokenizer
from hybrid_jax.model import Model, Params
from hybrid_jax.optimizer import leaf_paths, path_str
from hybrid_jax.trained import Trained


def write_run(
    cfg: Config,
    params: Params,
    *,
    steps: Sequence[int] = (1,),
    tokenizer: Tokenizer | None = None,
    moments: bool = True,
) -> Path:
    """A run in cfg.workdir with a checkpoint of `params` at each of `steps`; moments, which are zero, or none."""
    run = Path(cfg.workdir)
    meta = provenance.describe(cfg, {})
    with checkpoint.Checkpoints(run / "checkpoints", len(steps), meta, print) as checkpoints:
        for step in steps:
            state = {"params": params}
            if moments:
                zeros = jax.tree.map(jnp.zeros_like, params)
                state["opt_state"] = {"count": jnp.asarray(step, jnp.int32), "mu": zeros, "nu": zeros}
            checkpoints.save(step, state, {"line": {"loss": 1.5, "tokens": 256}})
        checkpoints.wait()
    (run / "config.json").write_text("{}")
    if tokenizer:
        run_tokenizer.write(run, tokenizer)
    return run


@dataclasses.dataclass(frozen=True)
class InMemory(Trained):
    """A checkpoint that was never written."""

    held: dict[str, np.ndarray] = dataclasses.field(default_factory=dict)
    known: Tokenizer = dataclasses.field(default_factory=lambda: IdTokenizer(2, 1))

    def read(self, path: str, index: int | None = None) -> np.ndarray:
        return self.held[path] if index is None else self.held[path][index]

    def layers(self, path: str) -> Iterator[np.ndarray]:
        return iter(self.held[path])

    def tokenizer(self) -> Tokenizer:
        return self.known


def in_memory(cfg: Config, params: Params, tokenizer: Tokenizer | None = None) -> InMemory:
    """`params` as if they had been trained by a run in cfg.workdir, which need not be there."""
    run = Path(cfg.workdir or "run")
    held = {path: np.asarray(x) for path, x in leaf_paths(params)}
    end = IdTokenizer(cfg.model.vocab_size, cfg.model.vocab_size - 1)
    return InMemory(run, run / "checkpoints" / "1", 1, cfg, {}, held, tokenizer or end)


def perturbed(model: Model, seed: int = 0) -> Params:
    """Parameters as in training, none of which is constant, drawn by numpy: no initial values have to be compiled."""
    draw = np.random.default_rng(seed)

    def one(path: Any, x: jax.ShapeDtypeStruct) -> jax.Array:
        *_, parent, name = path_str(path).split(".")
        if name == "A_log":
            values = np.log(draw.uniform(1.0, 16.0, x.shape))
        elif name == "dt_bias":
            values = np.log(np.expm1(draw.uniform(0.001, 0.1, x.shape)))
        elif name == "D" or "norm" in parent:
            values = draw.normal(1.0, 0.2, x.shape)
        else:
            values = draw.normal(0.0, 0.2, x.shape)
        return jnp.asarray(values, jnp.float32)

    return jax.tree_util.tree_map_with_path(one, model.abstract_params())

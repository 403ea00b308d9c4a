"""Runs as training leaves them, written without training."""

from collections.abc import Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from hybrid_jax import checkpoint, provenance
from hybrid_jax.config import Config
from hybrid_jax.data import run_tokenizer
from hybrid_jax.data.interface import Tokenizer
from hybrid_jax.model import Model, Params


def write_run(cfg: Config, params: Params, *, steps: Sequence[int] = (1,), tokenizer: Tokenizer | None = None) -> Path:
    """A run in cfg.workdir with a checkpoint of `params` at each of `steps`, its moments zero."""
    run = Path(cfg.workdir)
    meta = provenance.describe(cfg, {})
    with checkpoint.Checkpoints(run / "checkpoints", len(steps), meta, print) as checkpoints:
        for step in steps:
            zeros = jax.tree.map(jnp.zeros_like, params)
            opt_state = {"count": jnp.asarray(step, jnp.int32), "mu": zeros, "nu": zeros}
            checkpoints.save(step, {"params": params, "opt_state": opt_state}, {"line": {"loss": 1.5, "tokens": 256}})
        checkpoints.wait()
    (run / "config.json").write_text("{}")
    if tokenizer:
        run_tokenizer.write(run, tokenizer)
    return run


def perturbed(model: Model, seed: int = 0) -> Params:
    """Parameters of which no vector is constant: norm weights, biases, D and the like are moved off their start."""
    params = jax.jit(model.init)(jax.random.key(seed))
    draw = np.random.default_rng(seed)

    def move(x: jax.Array) -> jax.Array:
        return x + (0.2 if x.ndim < 3 else 0.04) * draw.standard_normal(x.shape).astype(np.float32)

    return jax.tree.map(move, params)

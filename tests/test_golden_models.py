"""Whole models against logits, losses, gradients and greedy tokens computed by other implementations.

tests/golden/models holds tiny checkpoints with results of flash-linear-attention 0.6.0 (gdn_*, kda_*) and
transformers 5.24.0 (the others), in fp32; each model's meta.json says how far that source is from an independent
float64 computation. Limits: logits 3e-4 abs (delta-rule models) or 5e-5, gradients 2e-4 or 2e-5 relative L2.
"""

import dataclasses
import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from hybrid_jax.config import Config
from hybrid_jax.decoding.complete import continuation
from hybrid_jax.decoding.sampling import Sampling
from hybrid_jax.interop import formats
from hybrid_jax.interop.table import MinusOne
from hybrid_jax.model import Model
from hybrid_jax.optimizer import leaf_paths

GOLDEN = pathlib.Path(__file__).parent / "golden" / "models"
DELTA = {"gdn_tied", "gdn_untied_expandv2", "kda_tied", "kimi_linear", "qwen3_5_text"}
NAMES = sorted(p.name for p in GOLDEN.iterdir())


def read(name: str) -> tuple[formats.Format, Config]:
    """The format and config of a golden checkpoint, as its config.json says them."""
    return formats.read_config(json.loads((GOLDEN / name / "config.json").read_text()), name)


def tree_of(name: str, tensors: dict[str, np.ndarray], weights: bool = True) -> dict:
    """Our parameter tree from stored tensors, or from their gradients."""
    form, config = read(name)
    ours = {path: np.full(x.shape, np.nan, np.float32) for path, x in leaf_paths(Model(config.model).abstract_params())}
    left = {form.canonical(key): x for key, x in tensors.items()}
    for entry in form.entries(config):
        if entry.copy:
            continue
        if not weights:
            entry = dataclasses.replace(entry, steps=tuple(s for s in entry.steps if not isinstance(s, MinusOne)))
        for leaf, array in zip(entry.ours, entry.to_ours(left.pop(entry.theirs)), strict=True):
            ours[leaf.path][() if leaf.index is None else leaf.index] = array
    assert not left
    tree: dict = {}
    for path, array in ours.items():
        *parents, last = path.split(".")
        node = tree
        for parent in parents:
            node = node.setdefault(parent, {})
        node[last] = jnp.asarray(array)
    return tree


@pytest.mark.parametrize("name", NAMES)
def test_model(name):
    model = Model(read(name)[1].model, backend="chunked", compute_dtype="float32")
    golden = load_file(GOLDEN / name / "golden.safetensors")
    params = tree_of(name, load_file(GOLDEN / name / "model.safetensors"))
    grads = {k.removeprefix("grad."): v for k, v in golden.items() if k.startswith("grad.")}
    want_grads = tree_of(name, grads, weights=False)
    tokens = jnp.asarray(golden["input_ids"])
    B, T = tokens.shape
    batch = {
        "tokens": tokens,
        "targets": jnp.pad(tokens[:, 1:], ((0, 0), (0, 1)), constant_values=-1),
        "segment_ids": jnp.ones((B, T), jnp.int32),
        "positions": jnp.broadcast_to(jnp.arange(T, dtype=jnp.int32), (B, T)),
    }

    @jax.jit
    def run(params):
        (loss, _), grads = jax.value_and_grad(model.loss, has_aux=True)(params, batch)
        return model.logits(params, tokens), loss, grads

    logits, loss, got_grads = run(params)
    logit_limit, grad_limit = (3e-4, 2e-4) if name in DELTA else (5e-5, 2e-5)
    error = np.abs(np.asarray(logits) - golden["logits"]).max()
    assert error < logit_limit, f"logits: max abs {error:.2e}"
    assert abs(float(loss) - float(golden["loss"][0])) < 1e-5

    def check(path, got, want):
        got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
        relative = np.linalg.norm(got - want) / np.linalg.norm(want)
        place = jax.tree_util.keystr(path)
        assert relative < grad_limit, f"{place}: rel L2 {relative:.2e}, max abs {np.abs(got - want).max():.2e}"

    jax.tree_util.tree_map_with_path(check, got_grads, want_grads)


@pytest.mark.parametrize("name", NAMES)
def test_greedy_tokens(name):
    """40 prompt tokens at once, then 24 decoded one by one through the states."""
    model = Model(read(name)[1].model, backend="chunked", compute_dtype="float32")
    golden = load_file(GOLDEN / name / "golden.safetensors")
    params = tree_of(name, load_file(GOLDEN / name / "model.safetensors"))
    row = golden["generated"][0].tolist()
    assert continuation(model, params, row[:40], 24, Sampling(temperature=0.0)) == row[40:]

"""Gated norms against float64 results and gradients of an independent recurrence (tests/golden/ops/gnorm_*)."""

import functools
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from hybrid_jax.layers.norm import gate_then_norm, norm_then_gate, rms_norm

OPS = pathlib.Path(__file__).parents[1] / "golden" / "ops"
CASES = {
    "gnorm_silu": lambda x, z, w: norm_then_gate(x, z, w, 1e-6, "silu"),
    "gnorm_sigmoid": lambda x, z, w: norm_then_gate(x, z, w, 1e-6, "sigmoid"),
    "gnorm_mamba2": lambda x, z, w: gate_then_norm(x.reshape(2, 7, 48), z.reshape(2, 7, 48), w, 1e-5, 2).reshape(
        x.shape
    ),
}


def relative(got, want):
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    return np.linalg.norm(got - want) / np.linalg.norm(want)


@pytest.mark.parametrize("name", CASES)
def test_golden(name):
    case = load_file(OPS / f"{name}.safetensors")
    args = [jnp.asarray(case[f"in.{k}"]) for k in ("x", "z", "weight")]
    y, vjp = jax.vjp(CASES[name], *args)
    assert relative(y, case["out.y"]) < 1e-6
    for key, got in zip(("x", "z", "weight"), vjp(jnp.asarray(case["cot.y"])), strict=True):
        assert relative(got, case[f"grad.{key}"]) < 1e-6, key


def test_rms_norm_formula():
    x = np.random.default_rng(0).normal(size=(5, 33))
    w = np.linspace(0.5, 2, 33)
    want = x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-5) * w
    assert relative(rms_norm(jnp.float32(x), jnp.float32(w), 1e-5), want) < 1e-6


def test_rounds_once_in_bfloat16():
    """The bf16 result is the fp32 one, rounded: not a product of rounded factors."""
    x = jnp.asarray(np.random.default_rng(1).normal(size=(64, 96)), jnp.bfloat16)
    w = jnp.float32(np.random.default_rng(2).normal(size=96))
    full = rms_norm(x.astype(jnp.float32), w, 1e-6)
    np.testing.assert_array_equal(np.asarray(rms_norm(x, w, 1e-6)), np.asarray(full.astype(jnp.bfloat16)))


def test_zero_input_has_finite_gradient():
    f = functools.partial(lambda x: norm_then_gate(x, x, jnp.ones(8), 1e-6, "silu").sum())
    assert np.isfinite(np.asarray(jax.grad(f)(jnp.zeros((2, 8))))).all()

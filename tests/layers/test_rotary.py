"""Rotary embedding against rotations written as complex products in float64."""

import math

import jax.numpy as jnp
import numpy as np
import pytest

from hybrid_jax.config import RopeConfig
from hybrid_jax.layers.rotary import frequencies, rotate

R = 16


def turned(x, freq, positions, style):
    """x [T, R] with each pair multiplied by e^(i position freq), float64; pairs come out as [first | second]."""
    if style == "interleaved":
        z = x[:, 0::2] + 1j * x[:, 1::2]
    else:
        z = x[:, : R // 2] + 1j * x[:, R // 2 :]
    z = z * np.exp(1j * np.asarray(positions, np.float64)[:, None] * freq)
    return np.concatenate([z.real, z.imag], axis=1)


@pytest.mark.parametrize("style", ["interleaved", "half"])
@pytest.mark.parametrize("start", [0, 1_000_000])
def test_rotation(style, start):
    """Right to fp32 rounding at position 0 and at a million, where fp32 angles are off by 0.03 rad."""
    cfg = RopeConfig(style=style, theta=500_000.0)
    positions = np.arange(start, start + 50)
    x = np.random.default_rng(0).normal(size=(50, R))
    want = turned(x, 500_000.0 ** (-np.arange(0, R, 2) / R), positions, style)
    got = rotate(jnp.float32(x)[None, :, None], cfg, jnp.asarray(positions)[None])[0, :, 0]
    assert np.abs(np.asarray(got) - want).max() < 2e-6


def test_dot_products_depend_on_distance_only():
    cfg = RopeConfig(style="interleaved")
    rng = np.random.default_rng(0)
    q, k = (jnp.float32(rng.normal(size=(1, 1, 1, R))) for _ in range(2))

    def dot(m, n):
        a, b = rotate(q, cfg, jnp.asarray([[m]])), rotate(k, cfg, jnp.asarray([[n]]))
        return float(jnp.sum(a * b))

    assert abs(dot(7, 3) - dot(1007, 1003)) < 1e-5
    assert abs(dot(7, 3) - dot(3, 7)) > 1e-3


def test_partial_and_none():
    x = jnp.float32(np.random.default_rng(0).normal(size=(1, 5, 2, R)))
    positions = jnp.arange(5)[None]
    np.testing.assert_array_equal(np.asarray(rotate(x, RopeConfig(style="none"), positions)), np.asarray(x))
    half = rotate(x, RopeConfig(style="half", rotary_fraction=0.5), positions)
    np.testing.assert_array_equal(np.asarray(half[..., R // 2 :]), np.asarray(x[..., R // 2 :]))
    alone = rotate(x[..., : R // 2], RopeConfig(style="half"), positions)
    np.testing.assert_array_equal(np.asarray(half[..., : R // 2]), np.asarray(alone))


def test_llama3():
    """Llama 3.1's case (128 channels, theta 500,000, trained at 8,192, factor 8): pairs that turn more than four times
    in 8,192 positions are kept, those of less than one are divided, a ramp linear in the turns between."""
    plain, _ = frequencies(RopeConfig(theta=5e5), 128)
    freq, factor = frequencies(RopeConfig(theta=5e5, llama3_factor=8.0, llama3_original_max_position=8192), 128)
    assert factor == 1.0
    turns = 8192 * plain / (2 * np.pi)
    many, few = turns > 4, turns < 1
    assert many.sum() == 29 and few.sum() == 29
    np.testing.assert_array_equal(freq[many], plain[many])
    np.testing.assert_allclose(freq[few], plain[few] / 8, rtol=1e-15)
    between = ~many & ~few
    share = (turns[between] - 1) / 3
    np.testing.assert_allclose(freq[between], plain[between] * (share + (1 - share) / 8), rtol=1e-15)
    off, _ = frequencies(RopeConfig(theta=5e5, llama3_original_max_position=8192), 128)
    np.testing.assert_array_equal(off, plain)


def test_yarn():
    """Qwen3's case (64 channels, theta 1e6, trained at 32,768, factor 32): pairs 0..11 kept, 20.. divided."""
    cfg = RopeConfig(theta=1e6, yarn_factor=32.0, yarn_original_max_position=32_768)
    plain, _ = frequencies(RopeConfig(theta=1e6), 64)
    freq, factor = frequencies(cfg, 64)
    ratio = plain / freq
    np.testing.assert_allclose(ratio[:12], 1.0)
    np.testing.assert_allclose(ratio[20:], 32.0)
    assert np.all(np.diff(ratio[11:21]) > 0)
    assert factor == pytest.approx(0.1 * math.log(32) + 1) == pytest.approx(1.3466, abs=1e-4)
    # Off at factor 1: nothing changes.
    off, one = frequencies(RopeConfig(theta=1e6, yarn_original_max_position=32_768), 64)
    assert one == 1.0
    np.testing.assert_array_equal(off, plain)

"""Device functions in Triton's interpreter."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import triton
import triton.language as tl

from hybrid_jax.kernels.device import round_to_bf16, split
from hybrid_jax.kernels.launch import Tile, launch

pytestmark = pytest.mark.torch


@triton.jit
def parts(x, rounded, high, low, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    value = tl.load(x + at)
    tl.store(rounded + at, round_to_bf16(value))
    first, second = split(value, tl.bfloat16)
    tl.store(high + at, first)
    tl.store(low + at, second)


def test_split_rounds_as_a_conversion_does():
    """To the nearest bfloat16, ties to even, over all exponents that are promised; 16 bits stay."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal(1024).astype(np.float32) * 2.0 ** rng.integers(-110, 110, 1024).astype(np.float32)
    x[:4] = 1 + 2.0**-8, 1 + 3 * 2.0**-8, 0, -(2.0**110)  # two ties
    x = x.astype(np.float32)
    outputs = [jax.ShapeDtypeStruct((1024,), dtype) for dtype in (jnp.float32, jnp.bfloat16, jnp.bfloat16)]
    rounded, high, low = launch(parts, (x,), outputs, grid=(1,), tile=Tile(1, 1), constants={"BLOCK": 1024})
    expected = np.asarray(jnp.asarray(x).astype(jnp.bfloat16))
    np.testing.assert_array_equal(rounded, expected.astype(np.float32))
    np.testing.assert_array_equal(high, expected)
    both = np.asarray(high, np.float64) + np.asarray(low, np.float64)
    np.testing.assert_array_less(np.abs(both - x), np.abs(x) * 2.0**-16 + 1e-45)

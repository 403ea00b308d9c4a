"""The inverse of unit lower triangular matrices, on those that the delta rule makes of similar keys."""

import jax
import numpy as np
import pytest

from hybrid_jax.kernels.triangular import unit_lower_inverse


def _correlated(size):
    """A_ij = 1.9 k_i . k_j of three sets of nearly equal unit keys, float32 [3, 1, size, size]."""
    rng = np.random.default_rng(0)
    k = 1 + 0.1 * rng.standard_normal((3, 1, size, 16))
    k /= np.linalg.norm(k, axis=-1, keepdims=True)
    return np.tril(1.9 * k @ np.swapaxes(k, -1, -2), -1).astype(np.float32)


@pytest.mark.parametrize("size", [8, 16, 32, 64])
def test_inverse(size):
    a = _correlated(size)
    inverse = np.asarray(jax.jit(unit_lower_inverse)(a))
    expected = np.linalg.inv(np.eye(size) + a.astype(np.float64))
    assert inverse.dtype == np.float32
    assert np.max(np.abs(inverse - expected)) < 5e-6 * np.max(np.abs(expected))
    assert not np.any(np.triu(inverse, 1)), "entries above the diagonal must be exactly zero"


def test_gradient_equals_that_of_the_true_inverse():
    a = _correlated(32)
    weight = np.random.default_rng(1).standard_normal(a.shape).astype(np.float32)
    gradient = np.asarray(jax.jit(jax.grad(lambda a: (unit_lower_inverse(a) * weight).sum()))(a))
    inverse = np.swapaxes(np.linalg.inv(np.eye(32) + a.astype(np.float64)), -1, -2)
    expected = np.tril(-inverse @ weight @ inverse, -1)
    assert np.max(np.abs(gradient - expected)) < 1e-5 * np.max(np.abs(expected))


def test_sizes_that_do_not_merge_are_refused():
    with pytest.raises(ValueError, match="size 48"):
        unit_lower_inverse(np.zeros((48, 48), np.float32))

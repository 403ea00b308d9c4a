"""The chunked loss against the textbook formula in float64, written out with the full logits."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hybrid_jax.loss import IGNORE, chunk_tokens, linear_cross_entropy, log_probabilities

B, T, D, V = 3, 37, 16, 101


def make(seed=0, scale=1.0):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(B, T, D)) * scale
    w = rng.normal(size=(V, D)) * scale
    targets = rng.integers(0, V, size=(B, T))
    targets[0, :5] = IGNORE
    targets[2, 11:] = IGNORE
    return x, w, targets


def textbook(x, w, targets, z_loss):
    """Loss sum and gradients in float64: d/dlogits = softmax (1 + 2 z lse) - onehot, on unmasked tokens."""
    logits = x @ w.T
    top = logits.max(-1, keepdims=True)
    lse = (np.log(np.exp(logits - top).sum(-1, keepdims=True)) + top)[..., 0]
    keep = targets != IGNORE
    picked = np.take_along_axis(logits, np.where(keep, targets, 0)[..., None], -1)[..., 0]
    loss = ((lse - picked + z_loss * lse**2) * keep).sum()
    d = np.exp(logits - lse[..., None]) * (1 + 2 * z_loss * lse[..., None])
    d -= np.eye(V)[np.where(keep, targets, 0)]
    d *= keep[..., None]
    return loss, d @ w, np.einsum("btv,btd->vd", d, x)


def relative(got, want):
    return np.sqrt(np.mean((np.asarray(got, np.float64) - want) ** 2) / np.mean(want**2))


@pytest.mark.parametrize("chunk", [0, 1, 16, 1000])
@pytest.mark.parametrize("z_loss", [0.0, 1e-2])
def test_matches_textbook(chunk, z_loss):
    x, w, targets = make()
    want, want_dx, want_dw = textbook(x, w, targets, z_loss)

    def f(x, w):
        return linear_cross_entropy(x, w, jnp.asarray(targets), z_loss=z_loss, chunk=chunk)[0]

    got, (dx, dw) = jax.jit(jax.value_and_grad(f, argnums=(0, 1)))(jnp.float32(x), jnp.float32(w))
    assert abs(float(got) / want - 1) < 1e-6
    assert relative(dx, want_dx) < 1e-6
    assert relative(dw, want_dw) < 1e-6
    # The path without gradients is another one.
    alone = jax.jit(f)(jnp.float32(x), jnp.float32(w))
    assert abs(float(alone) / want - 1) < 1e-6


def test_z_loss_is_reported():
    x, w, targets = make()
    with_z, z = linear_cross_entropy(jnp.float32(x), jnp.float32(w), jnp.asarray(targets), z_loss=0.1)
    without, zero = linear_cross_entropy(jnp.float32(x), jnp.float32(w), jnp.asarray(targets))
    assert float(zero) == 0.0 and float(z) > 1.0
    assert abs(float(with_z) - float(z) - float(without)) < 1e-4 * float(with_z)


def test_scaled_cotangent_and_empty_batch():
    x, w, targets = make()

    def f(x, scale, targets):
        return scale * linear_cross_entropy(x, jnp.float32(w), targets)[0]

    one, half = (jax.grad(f)(jnp.float32(x), s, jnp.asarray(targets)) for s in (1.0, 0.5))
    np.testing.assert_array_equal(np.asarray(one) * 0.5, np.asarray(half))
    none = jnp.full_like(jnp.asarray(targets), IGNORE)
    assert float(f(jnp.float32(x), 1.0, none)) == 0.0
    assert not np.asarray(jax.grad(f)(jnp.float32(x), 1.0, none)).any()


def test_huge_logits_stay_finite():
    x, w, targets = make(scale=40.0)
    want, want_dx, _ = textbook(x, w, targets, 0.0)
    f = lambda x: linear_cross_entropy(x, jnp.float32(w), jnp.asarray(targets))[0]  # noqa: E731
    got, dx = jax.value_and_grad(f)(jnp.float32(x))
    assert abs(float(got) / want - 1) < 1e-5
    assert relative(dx, want_dx) < 1e-4


def test_bfloat16_error_budget():
    """bf16 operands, fp32 logits and sums: against the float64 loss of the same rounded inputs."""
    x, w, targets = make()
    x16 = jnp.asarray(x, jnp.bfloat16)
    rounded_x, rounded_w = np.asarray(x16, np.float64), np.asarray(jnp.asarray(w, jnp.bfloat16), np.float64)
    want, want_dx, want_dw = textbook(rounded_x, rounded_w, targets, 0.0)
    f = lambda x, w: linear_cross_entropy(x, w, jnp.asarray(targets))[0]  # noqa: E731
    got, (dx, dw) = jax.value_and_grad(f, argnums=(0, 1))(x16, jnp.float32(w))
    assert dx.dtype == jnp.bfloat16 and dw.dtype == jnp.float32
    assert abs(float(got) / want - 1) < 1e-5
    assert relative(dx, want_dx) < 4e-3
    assert relative(dw, want_dw) < 4e-3


def test_no_array_of_all_logits():
    """No value in the compiled-from program has B x T x V elements, with gradients, at the automatic chunk."""
    b, t, v = 2, 512, 1024
    x, w = jnp.zeros((b, t, 8)), jnp.zeros((v, 8))
    targets = jnp.zeros((b, t), jnp.int32)

    def f(x, w):
        return linear_cross_entropy(x, w, targets)[0]

    text = str(jax.make_jaxpr(jax.grad(f, argnums=(0, 1)))(x, w))
    chunk = chunk_tokens(b * t, v)
    assert f"[{chunk},{v}]" in text
    assert f"[{b * t},{v}]" not in text and f"[{b},{t},{v}]" not in text


def test_chunk_size():
    assert chunk_tokens(65_536, 128_256) == 4096
    assert chunk_tokens(65_536, 128_256, wanted=512) == 512
    assert chunk_tokens(100, 128_256, wanted=512) == 100
    assert chunk_tokens(1, 50) == 1


@pytest.mark.parametrize("candidates", [1, 3])
def test_log_probabilities_of_candidates(candidates):
    x, w, targets = make()
    rng = np.random.default_rng(5)
    asked = np.where((targets != IGNORE)[..., None], rng.integers(0, V, (B, T, candidates)), IGNORE)
    asked[1, 3:9, -1] = IGNORE  # of several, one may be asked and another not
    logits = x @ w.T
    want = logits - logits.max(-1, keepdims=True)
    want -= np.log(np.exp(want).sum(-1, keepdims=True))
    want = np.where(asked != IGNORE, np.take_along_axis(want, np.maximum(asked, 0), -1), 0)
    got, best = jax.jit(log_probabilities)(jnp.float32(x), jnp.float32(w), jnp.asarray(asked, jnp.int32))
    np.testing.assert_allclose(got, want, rtol=0, atol=2e-5)
    np.testing.assert_array_equal(best, np.where((asked != IGNORE).any(-1), logits.argmax(-1), IGNORE))


def test_log_probabilities_where_nothing_or_everything_is_asked():
    x, w, _ = make()
    nothing = jnp.full((B, T, 2), IGNORE)
    got, best = log_probabilities(jnp.float32(x), jnp.float32(w), nothing)
    assert not np.any(got) and np.all(np.asarray(best) == IGNORE)
    everything = jnp.broadcast_to(jnp.arange(V), (B, T, V))
    got, best = log_probabilities(jnp.float32(x), jnp.float32(w), everything)
    np.testing.assert_allclose(np.exp(np.asarray(got, np.float64)).sum(-1), 1, rtol=0, atol=1e-5)
    np.testing.assert_array_equal(best, np.argmax(got, -1))

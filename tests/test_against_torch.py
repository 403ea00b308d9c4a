"""Layers, loss and optimizer against torch's own: value and gradients in fp32, same inputs."""

import numpy as np
import pytest

pytestmark = pytest.mark.torch


def compare(ours, theirs, *inputs):
    """`ours` (jax) and `theirs` (torch) on the same fp32 inputs: output and gradients of sum(sin(output))."""
    import jax
    import jax.numpy as jnp
    import torch

    arrays = [np.asarray(x, np.float32) for x in inputs]
    tensors = [torch.tensor(x, requires_grad=True) for x in arrays]
    want = theirs(*tensors)
    torch.sin(want).sum().backward()
    got = ours(*map(jnp.asarray, arrays))
    grads = jax.jit(jax.grad(lambda *x: jnp.sin(ours(*x)).sum(), argnums=tuple(range(len(arrays)))))(*arrays)
    pairs = [(got, want), *((g, t.grad) for g, t in zip(grads, tensors, strict=True))]
    for number, (a, b) in enumerate(pairs):
        a, b = np.asarray(a, np.float64), b.detach().numpy().astype(np.float64)
        error = np.sqrt(np.mean((a - b) ** 2) / np.mean(b**2))
        what = f"gradient of input {number - 1}" if number else "output"
        assert a.shape == b.shape and error < 2e-6, (
            f"{what}: relative RMS {error:.1e}, max abs {np.abs(a - b).max():.1e}"
        )


def normal(*shape):
    return np.random.default_rng(sum(shape)).normal(size=shape)


def test_rms_norm():
    from torch.nn.functional import rms_norm as torch_rms_norm

    from hybrid_jax.layers.norm import rms_norm

    compare(
        lambda x, w: rms_norm(x, w, 1e-5),
        lambda x, w: torch_rms_norm(x, (24,), w, 1e-5),
        normal(2, 5, 24),
        normal(24),
    )


def test_short_convolution():
    from torch.nn.functional import conv1d, silu

    from hybrid_jax.layers.conv import short_conv

    compare(
        lambda x, w, b: short_conv(x, w, b)[0],
        lambda x, w, b: silu(conv1d(x.mT, w[:, None], b, padding=3, groups=6)[..., :9]).mT,
        normal(2, 9, 6),
        normal(6, 4),
        normal(6),
    )


@pytest.mark.parametrize("groups", [1, 3])
def test_attention(groups):
    """Causal, keys wider than values, with and without sharing of key/value heads."""
    from torch.nn.functional import scaled_dot_product_attention

    from hybrid_jax.kernels.attention import attention

    def theirs(q, k, v):
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=groups > 1).transpose(1, 2)

    heads = 2 * groups
    compare(attention, theirs, normal(2, 33, heads, 12), normal(2, 33, 2, 12), normal(2, 33, 2, 8))


def test_cross_entropy_ignores_masked_targets():
    import jax.numpy as jnp
    import torch
    from torch.nn.functional import cross_entropy

    from hybrid_jax.loss import IGNORE, linear_cross_entropy

    targets = np.random.default_rng(0).integers(0, 50, (2, 11))
    targets[0, 4:] = IGNORE

    def theirs(x, w):
        return cross_entropy((x @ w.T).mT, torch.tensor(targets), ignore_index=IGNORE, reduction="sum") / 20

    def ours(x, w):
        return linear_cross_entropy(x, w, jnp.asarray(targets), chunk=4)[0] / 20

    compare(ours, theirs, normal(2, 11, 8), normal(50, 8))


def test_adamw():
    """Twenty updates with clipping and decay, gradients of unequal sizes; torch gets the schedule's rate."""
    import jax
    import jax.numpy as jnp
    import torch

    from hybrid_jax import optimizer
    from hybrid_jax.config import OptimizerConfig

    cfg = OptimizerConfig(learning_rate=1e-2, min_learning_rate=1e-3, warmup_steps=5, decay_steps=20, weight_decay=0.1)
    ours = optimizer.Optimizer(cfg, 20)
    start = {"proj": {"weight": normal(6, 5)}, "norm": {"weight": normal(5)}}
    params = jax.tree.map(jnp.float32, start)
    weight = torch.tensor(start["proj"]["weight"], dtype=torch.float32)
    scale = torch.tensor(start["norm"]["weight"], dtype=torch.float32)
    groups = [{"params": [weight], "weight_decay": 0.1}, {"params": [scale], "weight_decay": 0.0}]
    theirs = torch.optim.AdamW(groups, betas=(0.9, 0.95), eps=1e-8)
    apply, state = jax.jit(ours.apply), ours.init(params)
    for step in range(20):
        size = 10.0 ** (step % 4 - 2)
        grads = {
            "proj": {"weight": size * normal(6, 5 + step)[:, :5]},
            "norm": {"weight": size * normal(5 + step)[:5]},
        }
        weight.grad = torch.tensor(grads["proj"]["weight"], dtype=torch.float32)
        scale.grad = torch.tensor(grads["norm"]["weight"], dtype=torch.float32)
        norm = torch.nn.utils.clip_grad_norm_([weight, scale], 1.0)
        grads = jax.tree.map(jnp.float32, grads)
        ours_norm = optimizer.norm_of(optimizer.sum_of_squares(grads))
        assert float(ours_norm) == pytest.approx(float(norm), rel=1e-6)
        params, state, rate = apply(grads, state, params, ours_norm)
        for group in theirs.param_groups:
            group["lr"] = float(rate)
        theirs.step()
        np.testing.assert_allclose(params["proj"]["weight"], weight, rtol=2e-6, atol=1e-6)
        np.testing.assert_allclose(params["norm"]["weight"], scale, rtol=2e-6, atol=1e-6)

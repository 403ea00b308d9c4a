"""Short convolution against float64 results of a sequential computation (tests/golden/ops/conv_*)."""

import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from hybrid_jax.layers.conv import short_conv

OPS = pathlib.Path(__file__).parents[1] / "golden" / "ops"


def relative(got, want):
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    return np.linalg.norm(got - want) / np.linalg.norm(want)


@pytest.mark.parametrize("name", ["conv_plain", "conv_packed_bias", "conv_init_short"])
def test_golden(name):
    case = load_file(OPS / f"{name}.safetensors")
    keys = [k for k in ("x", "weight", "bias", "initial_state") if f"in.{k}" in case]
    segments = case.get("in.segment_ids")

    def f(args):
        return short_conv(
            args["x"],
            args["weight"],
            args.get("bias"),
            initial_state=args.get("initial_state"),
            segment_ids=None if segments is None else jnp.asarray(segments),
        )

    (y, state), vjp = jax.vjp(f, {k: jnp.asarray(case[f"in.{k}"]) for k in keys})
    assert relative(y, case["out.y"]) < 1e-6
    state_cotangent = jnp.zeros_like(state)
    if "out.final_state" in case:
        np.testing.assert_array_equal(np.asarray(state), case["out.final_state"].astype(np.float32))
        state_cotangent = jnp.asarray(case["cot.final_state"])
    (grads,) = vjp((jnp.asarray(case["cot.y"]), state_cotangent))
    for key in keys:
        assert relative(grads[key], case[f"grad.{key}"]) < 1e-6, key


@pytest.mark.parametrize("cut", [0, 1, 2, 3, 6])
def test_state_carries_over(cut):
    """A row in two pieces, through the state, equals the whole row bit for bit, pieces shorter than the taps too."""
    rng = np.random.default_rng(0)
    x, w = jnp.float32(rng.normal(size=(2, 7, 5))), jnp.float32(rng.normal(size=(5, 4)))
    whole, end = short_conv(x, w)
    first, state = short_conv(x[:, :cut], w)
    second, last = short_conv(x[:, cut:], w, initial_state=state)
    np.testing.assert_array_equal(np.asarray(whole), np.concatenate([first, second], axis=1))
    np.testing.assert_array_equal(np.asarray(end), np.asarray(last))


def test_documents_do_not_touch():
    """Ids that return later in the row are other documents; what stands in one never shows in another."""
    rng = np.random.default_rng(0)
    x, w = rng.normal(size=(1, 9, 3)), jnp.float32(rng.normal(size=(3, 4)))
    ids = jnp.asarray([[5, 5, 2, 5, 5, 5, 2, 2, 2]])
    y, _ = short_conv(jnp.float32(x), w, segment_ids=ids)
    for a, b in ((0, 2), (2, 3), (3, 6), (6, 9)):
        alone, _ = short_conv(jnp.float32(x[:, a:b]), w)
        np.testing.assert_array_equal(np.asarray(y[:, a:b]), np.asarray(alone))


@pytest.mark.parametrize("last", [1, 2, 3, 5])
def test_final_state_is_the_last_documents(last):
    """Going on from a packed row equals going on from its last document alone; gradients stay in that document."""
    rng = np.random.default_rng(0)
    x, more = jnp.float32(rng.normal(size=(1, 7, 3))), jnp.float32(rng.normal(size=(1, 4, 3)))
    w = jnp.float32(rng.normal(size=(3, 4)))
    ids = jnp.asarray([[0] * (7 - last) + [1] * last])
    _, state = short_conv(x, w, segment_ids=ids)
    _, alone = short_conv(x[:, 7 - last :], w)
    np.testing.assert_array_equal(np.asarray(state), np.asarray(alone))
    grad = jax.grad(lambda x: jnp.sum(short_conv(more, w, initial_state=short_conv(x, w, segment_ids=ids)[1])[0]))(x)
    assert not np.asarray(grad[:, : 7 - last]).any() and np.asarray(grad[:, -1]).all()

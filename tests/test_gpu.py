"""Every operation on the GPU, forward and gradients, against float64 on the same inputs: `make test-gpu`.

Prints the worst relative RMS error of each. A CPU says little about a GPU's matrix products: fp32 ones may be
rounded to TF32 there, and bf16 ones are summed by other hardware.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hybrid_jax.kernels.gdn import gdn
from hybrid_jax.kernels.kda import kda
from hybrid_jax.loss import linear_cross_entropy
from tests.kernels import cases, test_attention, test_ssd

pytestmark = pytest.mark.gpu

LIMITS = {"float32": 1e-5, "bfloat16": 8e-3}


@pytest.fixture(scope="module")
def judge(request):
    """judge(operation, dtype, errors by name): checks each; the table is printed at the end."""
    rows = []

    def check(operation, dtype, errors):
        worst = max(errors, key=errors.get)
        rows.append(f"{operation:<14} {dtype:<9} {errors[worst]:9.1e}  {LIMITS[dtype]:7.0e}  {worst}")
        assert errors[worst] < LIMITS[dtype], rows[-1]

    yield check
    device = jax.devices()[0]
    with request.config.pluginmanager.get_plugin("capturemanager").global_and_fixture_disabled():
        print(f"\n\n{device.device_kind} ({device.platform}), jax {jax.__version__}")
        print(f"{'operation':<14} {'inputs':<9} {'error':>9}  {'limit':>7}  in", *rows, sep="\n")


@pytest.mark.parametrize("dtype", LIMITS)
@pytest.mark.parametrize("op", [gdn, kda])
def test_delta_rule(op, dtype, judge):
    inputs, cotangents = cases.draw(per_channel=op is kda)
    inputs |= {name: jnp.asarray(inputs[name], dtype) for name in "qkv"}
    got = cases.outputs_and_gradients(op, "chunked", inputs, cotangents, cases.segment_ids())
    exact = {name: np.asarray(x, np.float32) for name, x in inputs.items()}
    want = cases.float64_reference(op, exact, cotangents, cases.segment_ids())
    judge(op.__name__, dtype, cases.errors(got, want))


@pytest.mark.parametrize("dtype", LIMITS)
def test_ssd_scan(dtype, judge):
    inputs, cotangents = test_ssd.make_inputs(dtype=jnp.dtype(dtype))
    got = test_ssd.outputs_and_gradients(inputs, cotangents, test_ssd.PACKED, "chunked")
    want = test_ssd.reference(inputs, cotangents, test_ssd.PACKED)
    errors = map(test_ssd.relative_rms, got, want)
    judge("ssd", dtype, dict(zip(test_ssd.NAMES, errors, strict=True)))


@pytest.mark.parametrize("dtype", LIMITS)
def test_softmax_attention(dtype, judge):
    inputs, do = test_attention.make_inputs(dtype=jnp.dtype(dtype))
    got = test_attention.output_and_gradients(inputs, do, test_attention.PACKED, "chunked")
    want = test_attention.reference(inputs, do, test_attention.PACKED)
    errors = map(test_attention.relative_rms, got, want)
    judge("attention", dtype, dict(zip(test_attention.NAMES, errors, strict=True)))


@pytest.mark.parametrize("dtype", LIMITS)
def test_loss(dtype, judge):
    rng = np.random.default_rng(0)
    targets = jnp.asarray(rng.integers(-1, 500, (2, 65)))
    x = jnp.asarray(rng.normal(size=(2, 65, 64)), dtype)
    w = jnp.asarray(rng.normal(size=(500, 64)), jnp.float32).astype(dtype).astype(jnp.float32)

    def total(x, w):
        return linear_cross_entropy(x, w, targets, chunk=32)[0]

    def full(x, w):
        logits = jnp.einsum("btd,vd->btv", x, w, precision="highest")
        picked = jnp.take_along_axis(logits, jnp.maximum(targets, 0)[..., None], -1)[..., 0]
        return jnp.sum(jnp.where(targets < 0, 0, jax.nn.logsumexp(logits, -1) - picked))

    got, gradients = jax.jit(jax.value_and_grad(total, (0, 1)))(x, w)
    with jax.enable_x64(True):
        wide = (jnp.asarray(np.asarray(z, np.float64)) for z in (x, w))
        want, exact = jax.jit(jax.value_and_grad(full, (0, 1)))(*wide)
    pairs = zip(("loss", "dx", "dw"), (got, *gradients), (want, *exact), strict=True)
    judge("cross entropy", dtype, {name: test_ssd.relative_rms(a, b) for name, a, b in pairs})

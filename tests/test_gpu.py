"""Every operation on the GPU, forward and gradients, against float64 on the same inputs: `make test-gpu`.

Prints the worst relative RMS error of each. A CPU says little about a GPU's matrix products: fp32 ones may be
rounded to TF32 there, and bf16 ones are summed by other hardware.
"""

import dataclasses
import fcntl
import functools
import pathlib
import tempfile

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hybrid_jax.kernels import selftest, shapes
from hybrid_jax.kernels.gdn import gdn
from hybrid_jax.kernels.kda import kda
from hybrid_jax.kernels.kda.gates import Gate
from hybrid_jax.loss import linear_cross_entropy
from tests.kernels import cases, test_attention, test_ssd

pytestmark = pytest.mark.gpu

LIMITS = {"float32": 1e-5, "bfloat16": 8e-3}


@pytest.fixture
def judge(record_property):
    """judge(operation, dtype, got, want, limits): checks the relative RMS error of each tensor of `want` by name
    against limits[name], or the limit of the dtype; the table is printed at the end."""

    def check(operation, dtype, got, want, limits=()):
        limits = dict(limits)
        errors = cases.errors(got, want)
        worst = max(errors, key=lambda name: errors[name] / limits.get(name, LIMITS[dtype]))
        difference = np.max(np.abs(np.asarray(got[worst], np.float64) - np.asarray(want[worst], np.float64)))
        limit = limits.get(worst, LIMITS[dtype])
        row = f"{operation:<44} {dtype:<9} {errors[worst]:9.1e}  {limit:7.0e}  {difference:9.1e}  {worst}"
        record_property("error", row)
        device = jax.devices()[0]
        record_property("device", f"{device.device_kind} ({device.platform}), jax {jax.__version__}")
        assert errors[worst] < limit, row

    return check


@pytest.fixture(autouse=True)
def no_self_test(monkeypatch):
    """These tests are harder than the one at start, which has its own below."""
    monkeypatch.setattr(selftest, "EXECUTORS", ())


def tensors(names, values):
    return dict(zip(names, values, strict=True))


@pytest.mark.parametrize("dtype", LIMITS)
@pytest.mark.parametrize("op", [gdn, kda])
def test_delta_rule(op, dtype, judge):
    inputs, cotangents = cases.draw(per_channel=op is kda)
    inputs |= {name: jnp.asarray(inputs[name], dtype) for name in "qkv"}
    got = cases.outputs_and_gradients(op, "chunked", inputs, cotangents, cases.segment_ids())
    exact = {name: np.asarray(x, np.float32) for name, x in inputs.items()}
    want = cases.float64_reference(op, exact, cotangents, cases.segment_ids())
    judge(op.__name__, dtype, got, want)


# What the kernels are held to, with bf16 inputs: random ones, and those that amplify rounding.
KERNEL_LIMITS = {"out.o": 5e-3} | {
    f"grad.{x}": 1e-2 for x in ("q", "k", "v", "g", "beta", "A_log", "dt_bias", "initial_state")
}
HARD_LIMIT = 2e-2


def run_kernels(op, inputs, cotangents, ids=None):
    """(from the triton backend, from float64), on the same rounded inputs; twice the same bits."""
    cotangents = cotangents | {"o": np.asarray(jnp.asarray(cotangents["o"], inputs["v"].dtype), np.float32)}
    got = cases.outputs_and_gradients(op, "triton", inputs, cotangents, ids)
    again = cases.outputs_and_gradients(op, "triton", inputs, cotangents, ids)
    assert all(np.array_equal(got[name], again[name]) for name in got)
    exact = {name: np.asarray(x, np.float32) for name, x in inputs.items()}
    return got, cases.float64_reference(op, exact, cotangents, ids)


OPS = {"gdn": gdn, "kda": kda}
DELTA = [name for name, shape in shapes.SHAPES.items() if shape.op in OPS]
MANY = ["gdn_300m", "gdn_300m_packed", "qwen3_next", "gdn_k128_v256", "gdn_k256", "gdn_fp32_wide"]
MANY += ["kda_300m", "kda_300m_packed", "kda_k64", "kimi_linear", "kda_k256", "kda_fp32_wide"]


@pytest.fixture
def alone():
    """Tests that take much of a GPU's memory wait for each other, whatever processes run them."""
    with open(pathlib.Path(tempfile.gettempdir(), "hybrid_jax-tests-gpu.lock"), "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


@pytest.mark.parametrize("dtype", LIMITS)
@pytest.mark.parametrize(
    "op, K, V", [*((op, K, V) for op in OPS for K, V in ((64, 64), (128, 128), (256, 96))), ("kda", 32, 64)]
)
def test_delta_kernels(op, K, V, dtype, judge):
    """One test, and so one compilation, for all families of hard inputs."""
    failed = []
    for name, change in cases.HARD.items():
        inputs, cotangents = cases.draw(per_channel=op == "kda", K=K, V=V)
        inputs = change(inputs, np.random.default_rng(1))
        inputs |= {x: jnp.asarray(inputs[x], dtype) for x in "qkv"}
        got, want = run_kernels(OPS[op], inputs, cotangents, cases.segment_ids())
        limits = KERNEL_LIMITS if name == "random" else dict.fromkeys(want, HARD_LIMIT)
        try:
            judge(f"{op} kernels K{K} V{V} {name}", dtype, got, want, limits if dtype == "bfloat16" else ())
        except AssertionError as error:
            failed.append(str(error))
    assert not failed, "\n".join(failed)


@pytest.mark.parametrize("name", DELTA)
def test_delta_kernels_at_named_shapes(name, judge):
    """Head dims, heads a group, documents, gate and state of each shape of the table; two rows, and no longer than
    3,109 tokens, which are three segments."""
    agrees_at_named_shape(name, judge, 2, 3109)


@pytest.mark.parametrize("name", MANY)
def test_delta_kernels_with_many_heads(name, judge, alone):
    """Enough rows for the tiles of a full device, as long as the reference's states of all tokens fit its memory."""
    agrees_at_named_shape(name, judge, 256, 133 if shapes.SHAPES[name].K <= 128 else 40)


def agrees_at_named_shape(name, judge, B, T):
    shape = shapes.SHAPES[name]
    group, heads = shape.HV // shape.H, 1
    if shape.gate:
        # A_log's gradient is one sum a head, over terms of both signs: its relative error needs heads to average over.
        heads = max(1, (16 if shape.K <= 128 else 4) // group)
        B, T = max(2, B // heads), T if shape.K <= 128 else min(T, 512)
    shape = dataclasses.replace(shape, B=B, T=min(shape.T, T), H=heads, HV=heads * group)
    inputs = dict(shapes.inputs(shape))
    ids = inputs.pop("segment_ids", None)
    _, cotangents = cases.draw(False, B=B, T=shape.T, H=heads, HV=shape.HV, K=shape.K, V=shape.V)
    inputs.setdefault("initial_state", jnp.zeros((B, shape.HV, shape.K, shape.V), jnp.float32))
    got, want = run_kernels(_operation(shape.op, shape.gate), inputs, cotangents, ids)
    limits = () if shape.dtype == "float32" else KERNEL_LIMITS
    judge(f"{shape.op} kernels {name}, B{B} T{shape.T}", shape.dtype, got, want, limits)


@functools.cache
def _operation(op, gate):
    """The operation, taking a gate's parameters as arguments of their own."""
    if not gate:
        return OPS[op]

    def gated(q, k, v, g, beta, A_log, dt_bias, **options):
        bound = shapes.BOUND if gate == "bounded" else None
        return kda(q, k, v, g, beta, gate=Gate(A_log, dt_bias, bound), **options)

    return gated


@pytest.mark.parametrize("op", OPS)
def test_self_test_passes(op, monkeypatch, tmp_path, caplog):
    monkeypatch.setattr(selftest, "EXECUTORS", ("gpu",))
    monkeypatch.setattr(selftest, "_passed", set())
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    caplog.set_level("INFO")
    inputs, _ = cases.draw(per_channel=op == "kda", K=32, V=64)
    inputs |= {name: jnp.asarray(inputs[name], jnp.bfloat16) for name in "qkv"}
    jax.jit(lambda x: OPS[op](**x, backend="triton"))(inputs)
    assert len([r for r in caplog.records if "self-test" in r.getMessage()]) == 1
    assert list(tmp_path.glob("hybrid_jax/selftest/*.json"))


@pytest.mark.parametrize("op", OPS)
def test_delta_kernels_beyond_32_bit_offsets(op, alone):
    """v and its like have more than 2^31 elements and 4 GiB; the last document equals itself alone."""
    T, HV, K, V, last = 2**20 + 192, 16, 32, 128, 4096
    key = jax.random.split(jax.random.key(0), 7)
    gate = (HV, K) if op == "kda" else (HV,)
    draw = {"q": (4, K), "k": (4, K), "v": (HV, V), "g": gate, "beta": (HV,), "do": (HV, V)}
    x = {name: jax.random.normal(key[i], (1, T, *sizes), jnp.bfloat16) for i, (name, sizes) in enumerate(draw.items())}
    x["beta"] = jax.nn.sigmoid(x["beta"].astype(jnp.float32))
    names = ["q", "k", "v", "g", "beta"]
    if op == "kda":
        parameters = Gate(jnp.linspace(-1, 1, HV), jnp.zeros((HV, K)))  # raw gates: half the memory
    else:
        x["g"] = -jnp.exp(x["g"].astype(jnp.float32) - 1)
    assert x["v"].size > 2**31
    ids = (jnp.arange(T) >= T - last).astype(jnp.int32)[None]

    @jax.jit
    def both(x, ids):
        more = {"gate": parameters} if op == "kda" else {}
        run = functools.partial(OPS[op], segment_ids=ids, backend="triton", **more)
        o, pull = jax.vjp(lambda *y: run(*y)[0], *(x[name] for name in names))
        return [y[:, -last:] for y in (o, *pull(x["do"]))]

    packed = jax.device_get(both(x, ids))
    alone = jax.device_get(both({name: y[:, -last:] for name, y in x.items()}, ids[:, -last:]))
    for name, a, b in zip(("o", *(f"d{name}" for name in names)), packed, alone, strict=True):
        a, b = np.asarray(a, np.float32), np.asarray(b, np.float32)
        error = np.sqrt(np.mean((a - b) ** 2) / np.mean(b**2))
        assert np.any(b) and error < 5e-3, f"{name}: {error:.1e}"  # segments are cut elsewhere


@pytest.mark.parametrize("dtype", LIMITS)
def test_ssd_scan(dtype, judge):
    inputs, cotangents = test_ssd.make_inputs(dtype=jnp.dtype(dtype))
    got = test_ssd.outputs_and_gradients(inputs, cotangents, test_ssd.PACKED, "chunked")
    want = test_ssd.reference(inputs, cotangents, test_ssd.PACKED)
    judge("ssd", dtype, tensors(test_ssd.NAMES, got), tensors(test_ssd.NAMES, want))


@pytest.mark.parametrize("dtype", LIMITS)
def test_softmax_attention(dtype, judge):
    inputs, do = test_attention.make_inputs(dtype=jnp.dtype(dtype))
    got = test_attention.output_and_gradients(inputs, do, test_attention.PACKED, "chunked")
    want = test_attention.reference(inputs, do, test_attention.PACKED)
    judge("attention", dtype, tensors(test_attention.NAMES, got), tensors(test_attention.NAMES, want))


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
    names = ("loss", "dx", "dw")
    judge("cross entropy", dtype, tensors(names, (got, *gradients)), tensors(names, (want, *exact)))

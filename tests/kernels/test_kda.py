"""Kimi Delta Attention: the chunked form against the recurrence in float64 and against stored vectors."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hybrid_jax.kernels.gdn import gdn
from hybrid_jax.kernels.kda import kda
from hybrid_jax.kernels.kda.gates import Gate, log_decay
from tests.kernels import cases, checks

PER_CHANNEL = True
GOLDEN = [name for name, case in cases.GOLDEN_CASES.items() if case["op"] == "kda"]


@pytest.mark.parametrize("name", cases.HARD)
def test_matches_float64_recurrence(name):
    checks.matches_float64_recurrence(kda, name, PER_CHANNEL)


@pytest.mark.parametrize("name", cases.HARD)
def test_stays_in_bfloat16_budget(name):
    checks.stays_in_bfloat16_budget(kda, name, PER_CHANNEL)


@pytest.mark.parametrize("name", GOLDEN)
def test_golden(name):
    checks.matches_golden(kda, name, "chunked")


@pytest.mark.parametrize("name", ["kda_packed_conv", "kda_init_state"])
def test_golden_recurrence(name):
    checks.matches_golden(kda, name, "reference")


@pytest.mark.parametrize("T", [1, 17])
def test_matches_at_length(T):
    checks.matches_at_length(kda, T, PER_CHANNEL)


def test_keeps_documents_apart():
    checks.keeps_documents_apart(kda, PER_CHANNEL)


def test_ignores_later_tokens():
    checks.ignores_later_tokens(kda, PER_CHANNEL)


def test_has_causal_gradients():
    checks.has_causal_gradients(kda, PER_CHANNEL)


def test_packs_documents():
    checks.packs_documents(kda, PER_CHANNEL)


def test_has_linear_memory():
    checks.has_linear_memory(kda, (8, 8, 32, 64), PER_CHANNEL)  # H, HV, K, V


def test_refuses_what_does_not_fit():
    checks.refuses_what_does_not_fit(kda, PER_CHANNEL)


def test_equal_channels_are_gdn():
    """With one gate for all channels of a head, kda is gdn; its gate gradients add up to gdn's."""
    inputs, cotangents = cases.draw(per_channel=False)
    ids = cases.segment_ids()
    expected = cases.outputs_and_gradients(gdn, "chunked", inputs, cotangents, ids)
    gates = np.repeat(inputs["g"][..., None], inputs["k"].shape[-1], axis=-1)
    actual = cases.outputs_and_gradients(kda, "chunked", inputs | {"g": gates}, cotangents, ids)
    actual["grad.g"] = actual["grad.g"].sum(axis=-1)
    cases.assert_close(actual, expected, 1e-5)


def _raw_gates(**sizes):
    """Inputs with a raw projection f in place of log decays, and the parameters of its gate."""
    inputs, cotangents = cases.LONG.draw(PER_CHANNEL, **sizes)
    rng = np.random.default_rng(2)
    HV, K = inputs["g"].shape[2:]
    inputs["g"] = 3 * rng.standard_normal(inputs["g"].shape, np.float32)
    inputs["A_log"] = np.linspace(-2, 2, HV, dtype=np.float32)
    inputs["dt_bias"] = rng.standard_normal((HV, K), np.float32)
    return inputs, cotangents


@pytest.mark.parametrize(
    ("bound", "dtype"), [(None, "float32"), (-5.0, "float32"), (None, "bfloat16")], ids=["softplus", "bounded", "bf16"]
)
def test_raw_gates(bound, dtype):
    """kda of a gate is kda of its log decays, with gradients of the raw f (in its type) and of the parameters."""
    inputs, cotangents = _raw_gates()
    inputs["g"] = jnp.asarray(inputs["g"], dtype)
    ids = cases.segment_ids()

    def of_gate(q, k, v, g, beta, A_log, dt_bias, **options):
        return kda(q, k, v, g, beta, gate=Gate(A_log, dt_bias, bound), **options)

    def of_decays(q, k, v, g, beta, A_log, dt_bias, **options):
        return kda(q, k, v, log_decay(g, Gate(A_log, dt_bias, bound)), beta, **options)

    expected = cases.float64_reference(of_decays, inputs, cotangents, ids)
    assert {"grad.g", "grad.A_log", "grad.dt_bias"} < expected.keys()
    for op in (of_gate, of_decays):
        actual = cases.outputs_and_gradients(op, "chunked", inputs, cotangents, ids)
        assert actual["grad.g"].dtype == dtype
        cases.assert_close(actual, expected, 1e-5, {"grad.g": 3e-3} if dtype == "bfloat16" else {})


@pytest.mark.parametrize("bound", [None, -5.0])
def test_log_decay(bound):
    """The formulas in float64, also where an exponential overflows; rates are those of heads, biases of channels."""
    f = np.array([-200, -90, -3, 0, 0.5, 20, 90, 200], np.float32).reshape(1, 2, 2, 2)
    A_log, dt_bias = np.array([-1, 1.5], np.float32), np.array([[0, 1], [-0.5, 2]], np.float32)
    actual = log_decay(f, Gate(A_log, dt_bias, bound))
    x, rate = f.astype(np.float64) + dt_bias, np.exp(A_log.astype(np.float64))[:, None]
    expected = -rate * np.logaddexp(0, x) if bound is None else bound / (1 + np.exp(-rate * x))
    assert actual.dtype == np.float32 and np.all(actual <= 0)
    np.testing.assert_allclose(actual, expected, rtol=2e-6, atol=1e-37)
    assert log_decay(jnp.asarray(f, jnp.bfloat16), Gate(A_log, dt_bias, bound)).dtype == np.float32


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"lower_bound": 0}, r"gate\.lower_bound is 0, expected a number below 0"),
        ({"lower_bound": 0.0}, r"gate\.lower_bound is 0\.0, expected a number below 0"),
        ({"lower_bound": 5.0}, r"gate\.lower_bound is 5\.0, expected a number below 0"),
        ({"lower_bound": float("nan")}, r"gate\.lower_bound is nan, expected a number below 0"),
        ({"A_log": np.zeros(3, np.float32)}, r"gate\.A_log has shape \(3,\), expected \(4,\)"),
        ({"A_log": np.zeros((4, 1), np.float32)}, r"gate\.A_log has shape \(4, 1\), expected \(4,\)"),
        ({"A_log": np.zeros((), np.float32)}, r"gate\.A_log has shape \(\), expected \(4,\)"),
        ({"A_log": np.zeros(4, np.int32)}, r"gate\.A_log is int32, expected a floating-point type"),
        ({"dt_bias": np.zeros(64, np.float32)}, r"gate\.dt_bias has shape \(64,\), expected \(4, 16\)"),
        ({"dt_bias": np.zeros((4, 16), np.int32)}, r"gate\.dt_bias is int32, expected a floating-point type"),
    ],
)
@pytest.mark.parametrize("backend", ["auto", "chunked", "reference"])
def test_refuses_a_gate_that_does_not_fit(change, message, backend):
    inputs, _ = _raw_gates(B=1, T=3)
    gate = {name: inputs.pop(name) for name in ("A_log", "dt_bias")}
    jax.eval_shape(lambda x, gate: kda(**x, gate=Gate(**gate), backend=backend), inputs, gate)  # the rest is right
    with pytest.raises(ValueError, match=f"kda: {message}"):
        kda(**inputs, gate=Gate(**(gate | change)), backend=backend)

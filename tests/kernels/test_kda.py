"""Kimi Delta Attention: the chunked form against the recurrence in float64 and against stored vectors."""

import numpy as np
import pytest

from hybrid_jax.kernels.gdn import gdn
from hybrid_jax.kernels.kda import kda
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

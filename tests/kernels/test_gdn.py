"""Gated DeltaNet: the chunked form against the recurrence in float64 and against stored vectors."""

import pytest

from hybrid_jax.kernels.gdn import gdn
from tests.kernels import cases, checks

PER_CHANNEL = False
GOLDEN = [name for name, case in cases.GOLDEN_CASES.items() if case["op"] == "gdn"]


@pytest.mark.parametrize("name", cases.HARD)
def test_matches_float64_recurrence(name):
    checks.matches_float64_recurrence(gdn, name, PER_CHANNEL)


@pytest.mark.parametrize("name", cases.HARD)
def test_stays_in_bfloat16_budget(name):
    checks.stays_in_bfloat16_budget(gdn, name, PER_CHANNEL)


@pytest.mark.parametrize("name", GOLDEN)
def test_golden(name):
    checks.matches_golden(gdn, name, "chunked")


@pytest.mark.parametrize("name", ["gdn_packed_conv", "gdn_init_state"])
def test_golden_recurrence(name):
    checks.matches_golden(gdn, name, "reference")


@pytest.mark.parametrize("T", [1, 17])
def test_matches_at_length(T):
    checks.matches_at_length(gdn, T, PER_CHANNEL)


def test_keeps_documents_apart():
    checks.keeps_documents_apart(gdn, PER_CHANNEL)


def test_ignores_later_tokens():
    checks.ignores_later_tokens(gdn, PER_CHANNEL)


def test_has_causal_gradients():
    checks.has_causal_gradients(gdn, PER_CHANNEL)


def test_packs_documents():
    checks.packs_documents(gdn, PER_CHANNEL)


def test_has_linear_memory():
    checks.has_linear_memory(gdn, (4, 8, 64, 64), PER_CHANNEL)  # H, HV, K, V


def test_refuses_what_does_not_fit():
    checks.refuses_what_does_not_fit(gdn, PER_CHANNEL)

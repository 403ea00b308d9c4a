"""What the delta-rule operations must satisfy; test_gdn.py, test_kda.py and test_delta_triton.py run these checks."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hybrid_jax.errors import UserError
from tests.kernels import cases

SIMILAR_KEYS = ("correlated keys, slow decay", "identical keys, slow decay")


def matches_float64_recurrence(op, name, per_channel, backend="chunked", rows=cases.LONG):
    """Forward and every gradient in fp32, with documents, initial and final states."""
    inputs, cotangents = cases.hard(name, per_channel, rows)
    ids = rows.segment_ids()
    expected = cases.float64_reference(op, inputs, cotangents, ids)
    cases.assert_close(cases.outputs_and_gradients(op, backend, inputs, cotangents, ids), expected, 1e-5)


def stays_in_bfloat16_budget(op, name, per_channel):
    """bf16 q, k, v against the float64 recurrence of the same rounded values.

    Operands of the matrix products carry 2^-9 of rounding each; similar keys amplify it through the inverse.
    """
    inputs, cotangents = cases.hard(name, per_channel)
    ids = cases.segment_ids()
    rounded = {k: jnp.asarray(v, jnp.bfloat16) if k in "qkv" else v for k, v in inputs.items()}
    exact = {k: np.asarray(v, np.float32) for k, v in rounded.items()}
    expected = cases.float64_reference(op, exact, cotangents, ids)
    actual = cases.outputs_and_gradients(op, "chunked", rounded, cotangents, ids)
    assert actual["out.o"].dtype == actual["grad.q"].dtype == jnp.bfloat16
    assert actual["out.final_state"].dtype == actual["grad.g"].dtype == np.float32
    cases.assert_close(actual, expected, 4e-2 if name in SIMILAR_KEYS else 8e-3)


def matches_golden(op, name, backend):
    wrapper, inputs, cotangents, ids, expected = cases.golden(name)
    actual = cases.outputs_and_gradients(wrapper(op), backend, inputs, cotangents, ids)
    cases.assert_close(actual, expected, 1e-5, {"grad.g": 2e-4} if name.endswith("_fast") else {})


def matches_at_length(op, T, per_channel, backend="chunked", rows=cases.LONG):
    inputs, cotangents = rows.draw(per_channel, T=T)
    expected = cases.float64_reference(op, inputs, cotangents)
    cases.assert_close(cases.outputs_and_gradients(op, backend, inputs, cotangents), expected, 1e-5)


def _tokens(named, row, span):
    """The rows `span` of every per-token tensor."""
    return {k: v[row, slice(*span)] for k, v in named.items() if not k.endswith("_state")}


def keeps_documents_apart(op, per_channel, backend="chunked", rows=cases.LONG):
    """Other documents' tokens, replaced altogether, change no bit of a document's results or gradients."""
    inputs, cotangents = cases.hard("g log-uniform", per_channel, rows)
    others, _ = rows.draw(per_channel, seed=9)
    ids = rows.segment_ids()
    before = cases.outputs_and_gradients(op, backend, inputs, cotangents, ids)
    for span in (rows.spans[0], rows.spans[2], rows.spans[4], rows.spans[5]):
        inside = np.zeros((2, rows.T), bool)
        inside[0, slice(*span)] = True
        changed = dict(inputs)
        for name in ("q", "k", "v", "g", "beta"):
            shape = inside.shape + (1,) * (inputs[name].ndim - 2)
            changed[name] = np.where(inside.reshape(shape), inputs[name], others[name])
        after = cases.outputs_and_gradients(op, backend, changed, cotangents, ids)
        for name, value in _tokens(before, 0, span).items():
            assert np.array_equal(value, after[name][0, slice(*span)]), f"{name} of document {span}"
        if span == rows.spans[-1]:
            assert np.array_equal(before["out.final_state"][0], after["out.final_state"][0])
            assert not np.array_equal(before["out.final_state"][1], after["out.final_state"][1])


def ignores_later_tokens(op, per_channel, backend="chunked", rows=cases.LONG):
    """Replacing every later token, gates included, changes no bit of what came before."""
    inputs, cotangents = cases.hard("g log-uniform", per_channel, rows)
    others, _ = rows.draw(per_channel, seed=9)
    before = cases.outputs_and_gradients(op, backend, inputs, cotangents, rows.segment_ids())
    for t in rows.edges:
        changed = {k: v.copy() for k, v in inputs.items()}
        for name in ("q", "k", "v", "beta"):
            changed[name][:, t + 1 :] = others[name][:, t + 1 :]
        changed["g"][:, t + 1 :] = -50
        after = cases.outputs_and_gradients(op, backend, changed, cotangents, rows.segment_ids())
        assert np.array_equal(before["out.o"][:, : t + 1], after["out.o"][:, : t + 1])
        assert not np.array_equal(before["out.o"][:, t + 1 :], after["out.o"][:, t + 1 :])


def has_causal_gradients(op, per_channel, backend="chunked", rows=cases.LONG):
    """A loss on one token has exactly zero gradient at later tokens, other documents and other rows."""
    inputs, cotangents = rows.draw(per_channel)
    inputs["g"] /= 20  # so that the initial state is still felt there
    document, late = rows.late
    for row, t, start in ((1, rows.edges[0], 0), (0, late, rows.spans[document][0])):
        only = jax.tree.map(np.zeros_like, cotangents)
        only["o"][row, t] = cotangents["o"][row, t]
        gradients = cases.outputs_and_gradients(op, backend, inputs, only, rows.segment_ids())
        for name in ("q", "k", "v", "g", "beta"):
            gradient = gradients[f"grad.{name}"].copy()
            assert np.any(gradient[row, start : t + 1]), name
            gradient[row, start : t + 1] = 0
            assert not np.any(gradient), f"{name}: gradient outside tokens {start} to {t} of row {row}"
        assert np.any(gradients["grad.initial_state"][row]) == (start == 0)


def packs_documents(op, per_channel):
    """The recurrence itself: a packed row equals its documents run alone."""
    inputs, _ = cases.draw(per_channel, B=1, T=9)
    spans = ((0, 5), (5, 6), (6, 9))
    ids = np.array([[4] * 5 + [0] + [4] * 3])
    packed, final = op(**inputs, segment_ids=ids, backend="reference")
    for start, stop in spans:
        alone = {k: v[:, start:stop] for k, v in inputs.items() if k != "initial_state"}
        state = inputs["initial_state"] if start == 0 else None
        o, last = op(**alone, initial_state=state, backend="reference")
        np.testing.assert_array_equal(packed[:, start:stop], o)
    np.testing.assert_array_equal(final, last)


def has_linear_memory(op, shape, per_channel):
    """Temporary bytes of forward and backward: below three times the inputs, and linear in T."""
    per_token = {}
    for T in (4096, 8192):
        temp, inputs = cases.temp_bytes(op, T, *shape, per_channel)
        assert temp < 3 * inputs, f"T = {T}: {temp} temporary bytes for {inputs} of inputs"
        per_token[T] = temp / T
    assert abs(per_token[4096] / per_token[8192] - 1) < 0.05, per_token


def refuses_what_does_not_fit(op, per_channel):
    inputs, _ = cases.draw(per_channel, B=1, T=3)
    with pytest.raises(UserError, match=r"config\.kernels\.backend"):
        op(**inputs, backend="fastest")
    for name in ("k", "v", "g", "beta", "initial_state"):
        with pytest.raises(ValueError, match=f"{name} has shape"):
            op(**(inputs | {name: inputs[name][:, :2]}))
    with pytest.raises(ValueError, match="HV a multiple of H"):
        op(**(inputs | {"v": inputs["v"][:, :, :3]}))
    with pytest.raises(ValueError, match="at least one row and one token"):
        op(**{name: value[:, :0] if name != "initial_state" else value for name, value in inputs.items()})
    for name in inputs:
        with pytest.raises(ValueError, match=f"{name} is int32"):
            op(**(inputs | {name: np.ones_like(inputs[name], np.int32)}))
    with pytest.raises(ValueError, match="segment_ids are float32"):
        op(**inputs, segment_ids=np.zeros((1, 3), np.float32))
    with pytest.raises(ValueError, match="segment_ids"):
        op(**inputs, segment_ids=np.zeros((1, 4), np.int32))

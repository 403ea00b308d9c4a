"""Gated DeltaNet's Triton kernels in Triton's interpreter, against the recurrence in float64 and stored vectors.

fp32 only: the interpreter does not multiply bf16 as a GPU does. test_gpu.py has the rest.
"""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hybrid_jax.errors import UserError
from hybrid_jax.kernels import shapes
from hybrid_jax.kernels.gdn import gdn
from hybrid_jax.kernels.gdn import triton as kernels
from tests.kernels import cases, checks

pytestmark = pytest.mark.torch

SMALL = dict(per_channel=False, backend="triton", rows=cases.SHORT)
GOLDEN = [name for name, case in cases.GOLDEN_CASES.items() if case["op"] == "gdn"]


def _interpretable():
    """The named shapes at their smallest, each once: one row, a whole chunk and a token; wide heads in one group."""
    found = {}
    for shape in shapes.SHAPES.values():
        if shape.op == "gdn":
            small = dataclasses.replace(shape.small(), B=1, T=min(shape.T, 65 if shape.K <= 128 else 33))
            if shape.K > 64:
                small = dataclasses.replace(small, H=1, HV=shape.HV // shape.H)
            found.setdefault(dataclasses.replace(small, name=""), small)
    return list(found.values())


def agrees(inputs, cotangents, ids, limit=1e-5):
    expected = cases.float64_reference(gdn, inputs, cotangents, ids)
    cases.assert_close(cases.outputs_and_gradients(gdn, "triton", inputs, cotangents, ids), expected, limit)


@pytest.mark.parametrize("name", cases.HARD)
def test_matches_float64_recurrence(name):
    checks.matches_float64_recurrence(gdn, name, **SMALL)


@pytest.mark.parametrize("name", GOLDEN)
def test_golden(name):
    checks.matches_golden(gdn, name, "triton")


@pytest.mark.parametrize("T", [1, 17, 65])
def test_matches_at_length(T):
    checks.matches_at_length(gdn, T, **SMALL)


def test_keeps_documents_apart():
    checks.keeps_documents_apart(gdn, **SMALL)


def test_ignores_later_tokens():
    checks.ignores_later_tokens(gdn, **SMALL)


def test_has_causal_gradients():
    checks.has_causal_gradients(gdn, **SMALL)


@pytest.mark.parametrize("shape", _interpretable(), ids=lambda shape: shape.name)
def test_named_shapes(shape):
    data = jax.device_get((shapes.inputs(shape), shapes.cotangents(shape)))
    actual = _outputs_and_gradients(shape, "triton", *data)
    with jax.enable_x64(True):
        wide = jax.tree.map(lambda x: x.astype(np.float64) if x.dtype == np.float32 else x, data)
        expected = _outputs_and_gradients(shape, "reference", *wide)
    cases.assert_close(actual, expected, 1e-5)


def _outputs_and_gradients(shape, backend, inputs, cotangents):
    fn, _ = shapes.program(shape, backend)
    out, gradients = jax.device_get(jax.jit(fn)(inputs, cotangents))
    return {f"out.{k}": x for k, x in out.items()} | {f"grad.{k}": x for k, x in gradients.items()}


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("name", ["random", "correlated keys, slow decay"])
def test_rows_in_segments(name, packed, monkeypatch):
    """One long row with few heads: segments start in the middle of a document, and one is ragged."""
    monkeypatch.setattr(kernels, "_SHORTEST", 1)
    called = []
    launch = kernels.launch.launch
    monkeypatch.setattr(
        kernels.launch, "launch", lambda *args, **how: (called.append(how["constants"]), launch(*args, **how))[1]
    )
    inputs, cotangents = cases.hard(name, False, cases.SHORT)
    ids = cases.SHORT.segment_ids() if packed else None

    def op(*args, **options):  # its own program, traced with the changed limit
        return gdn(*args, **options)

    expected = cases.float64_reference(gdn, inputs, cotangents, ids)
    cases.assert_close(cases.outputs_and_gradients(op, "triton", inputs, cotangents, ids), expected, 1e-5)
    assert {c["SEGMENTS"] for c in called if "SEGMENTS" in c} == {3}
    assert [c["MAP"] for c in called if "MAP" in c] == [True, False] * 2


def test_strengths_and_keys_of_zero():
    """beta = 0 leaves the state alone and has a gradient; keys and queries of zero have none that is not finite."""
    inputs, cotangents = cases.SHORT.draw(False)
    inputs["beta"][:, 3::5] = 0
    inputs["k"][:, 10:20] = 0
    inputs["q"][:, 15:25] = 0
    agrees(inputs, cotangents, cases.SHORT.segment_ids())


def test_repeats_bit_for_bit():
    inputs, cotangents = cases.SHORT.draw(False, T=65)
    ids = cases.SHORT.segment_ids()[:, :65]
    first, second = (cases.outputs_and_gradients(gdn, "triton", inputs, cotangents, ids) for _ in range(2))
    assert all(np.array_equal(value, second[name]) for name, value in first.items())


def test_one_document_is_no_document():
    """segment_ids=None runs without masks, and says the same as rows of one document."""
    inputs, cotangents = cases.SHORT.draw(False, B=1, T=65)
    without = cases.outputs_and_gradients(gdn, "triton", inputs, cotangents)
    one = cases.outputs_and_gradients(gdn, "triton", inputs, cotangents, np.full((1, 65), 3, np.int32))
    cases.assert_close(without, one, 1e-6)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(K=14), "heads of 14 key dims, where gdn needs a multiple of 4 from 16 to 256"),
        (dict(K=12), "heads of 12 key dims"),
        (dict(K=260), "heads of 260 key dims"),
        (dict(V=30), "heads of 30 value dims"),
        (dict(V=516), "heads of 516 value dims, where gdn needs a multiple of 4 from 4 to 512"),
    ],
)
def test_heads_that_do_not_fit(change, message):
    inputs, _ = cases.draw(False, B=1, T=3, **change)
    with pytest.raises(UserError, match=f"config.kernels.backend: triton cannot run gdn here: {message}"):
        gdn(**inputs, backend="triton")
    assert jax.eval_shape(lambda: gdn(**inputs))[0].shape == inputs["v"].shape  # auto takes another backend


@pytest.mark.parametrize(("dtype", "names"), [("float16", "qkv"), ("float64", "v"), ("float64", "g")])
def test_types_that_do_not_fit(dtype, names):
    inputs, _ = cases.draw(False, B=1, T=3)
    with jax.enable_x64(True):
        inputs |= {name: jnp.asarray(inputs[name], dtype) for name in names if name in inputs}
        with pytest.raises(UserError, match=f"triton cannot run gdn here: {dtype} inputs"):
            gdn(**inputs, backend="triton")
        jax.eval_shape(lambda: gdn(**inputs))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda rows: rows.pop("output"), r"k64: missing row 'output'"),
        (lambda rows: rows["prepare"].pop("constants"), r"k64\.prepare\.constants: has none, needs C"),
        (lambda rows: rows["prepare"]["constants"].update(C=48), r"k64\.prepare\.constants\.C: 48 is not one of 16"),
        (lambda rows: rows["scan"]["constants"].update(BV=0), r"k64\.scan\.constants\.BV: 0 is not one of 16"),
        (lambda rows: rows["scan"].update(num_wraps=4), r"k64\.scan: unknown field 'num_wraps'"),
        (lambda rows: rows["scan"].pop("num_warps"), r"k64\.scan: num_warps is missing"),
    ],
)
def test_damaged_tile_table(change, message, monkeypatch, tmp_path):
    folder = tmp_path / "gdn" / "tiles"
    folder.mkdir(parents=True)
    table = json.loads((kernels.launch._TABLES / "gdn" / "tiles" / "default.json").read_text())
    change(table["k64"])
    (folder / "default.json").write_text(json.dumps(table))
    monkeypatch.setattr(kernels.launch, "_TABLES", tmp_path)
    q = jnp.zeros((1, 16, 1, 16), jnp.bfloat16)
    with pytest.raises(UserError, match=message):
        kernels._plan(q, q, False)

"""The delta rules' Triton kernels in Triton's interpreter, against the recurrence in float64 and stored vectors.

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
from hybrid_jax.kernels.delta import plan as planning
from hybrid_jax.kernels.gdn import gdn
from hybrid_jax.kernels.gdn import triton as gdn_kernels
from hybrid_jax.kernels.kda import kda
from hybrid_jax.kernels.kda.gates import Gate
from tests.kernels import cases, checks

pytestmark = pytest.mark.torch

SMALL = dict(backend="triton", rows=cases.SHORT)
OPS = {"gdn": gdn, "kda": kda}
GOLDEN = [(case["op"], name) for name, case in cases.GOLDEN_CASES.items() if case["op"] in OPS]

for_both = pytest.mark.parametrize("op", OPS.values(), ids=OPS)


def per_channel(op):
    return op is kda


def _interpretable():
    """The named shapes at their smallest, each once: one row, a whole chunk and a token; wide heads in one group."""
    found = {}
    for shape in shapes.SHAPES.values():
        if shape.op in OPS:
            small = dataclasses.replace(shape.small(), B=1, T=min(shape.T, 65 if shape.K <= 128 else 33))
            if shape.K > 64:
                small = dataclasses.replace(small, H=1, HV=shape.HV // shape.H)
            found.setdefault(dataclasses.replace(small, name=""), small)
    return list(found.values())


def agrees(op, inputs, cotangents, ids, limit=1e-5):
    expected = cases.float64_reference(op, inputs, cotangents, ids)
    cases.assert_close(cases.outputs_and_gradients(op, "triton", inputs, cotangents, ids), expected, limit)


@for_both
@pytest.mark.parametrize("name", cases.HARD)
def test_matches_float64_recurrence(name, op):
    checks.matches_float64_recurrence(op, name, per_channel(op), **SMALL)


@pytest.mark.parametrize(("op", "name"), GOLDEN)
def test_golden(op, name):
    checks.matches_golden(OPS[op], name, "triton")


@for_both
@pytest.mark.parametrize("T", [1, 17, 65])
def test_matches_at_length(T, op):
    checks.matches_at_length(op, T, per_channel(op), **SMALL)


@for_both
def test_keeps_documents_apart(op):
    checks.keeps_documents_apart(op, per_channel(op), **SMALL)


@for_both
def test_ignores_later_tokens(op):
    checks.ignores_later_tokens(op, per_channel(op), **SMALL)


@for_both
def test_has_causal_gradients(op):
    checks.has_causal_gradients(op, per_channel(op), **SMALL)


def tile(op, monkeypatch, **constants):
    """Gives `prepare` of `op` other constants than its table."""
    tiles = planning.launch.tiles

    def changed(*args):
        found = tiles(*args)
        old = found["prepare"]
        found["prepare"] = dataclasses.replace(old, constants=tuple((dict(old.constants) | constants).items()))
        return found

    monkeypatch.setattr(planning.launch, "tiles", changed)

    def fresh(*args, **options):  # its own program, traced with the changed tiles
        return op(*args, **options)

    return fresh


@pytest.mark.parametrize(("op", "C"), [(gdn, 16), (gdn, 32), (gdn, 64), (kda, 16), (kda, 32)])
def test_chunk_lengths(C, op, monkeypatch):
    inputs, cotangents = cases.hard("g log-uniform", per_channel(op), cases.SHORT)
    agrees(tile(op, monkeypatch, C=C), inputs, cotangents, cases.SHORT.segment_ids())


@pytest.mark.parametrize("bound", [None, -5.0, -30.0])
def test_gate(bound):
    """The gate's parameters and its raw projection, whose gradients the kernels compute; some channels decay by more
    than a block of 16 tokens can hold in one square."""
    inputs, cotangents = cases.SHORT.draw(True, K=20)
    rng = np.random.default_rng(2)
    HV, K = inputs["g"].shape[2:]
    inputs["g"] = 3 * rng.standard_normal(inputs["g"].shape, np.float32) - 2
    inputs |= {"A_log": np.linspace(-1, 2.7, HV, dtype=np.float32), "dt_bias": rng.standard_normal((HV, K), np.float32)}

    def op(q, k, v, g, beta, A_log, dt_bias, **options):
        return kda(q, k, v, g, beta, gate=Gate(A_log, dt_bias, bound), **options)

    agrees(op, inputs, cotangents, cases.SHORT.segment_ids())


@pytest.mark.parametrize("packed", [False, True])
def test_steep_tokens_are_in_zones(packed):
    """One channel resets in the middle of a block, where one product for the whole block would lose all that follows;
    some decay by steps of many sizes, through all zones that a block can have; and an infinite gate is a reset, not a
    NaN."""
    inputs, cotangents = cases.SHORT.draw(True)
    inputs["g"][:, 20, :, 3] = -300
    inputs["g"][:, 75, :, 5] = -1e30
    inputs["g"][:, 40:70, :, 6] = -np.geomspace(0.01, 400, 30)[None, :, None]
    inputs["g"][:, 32:96:3, :, 7] = -133
    inputs["g"][:, 32:96, 0, 8] = -45
    agrees(kda, inputs, cotangents, cases.SHORT.segment_ids() if packed else None)
    inputs["g"][:, 75, :, 5] = -np.inf
    results = cases.outputs_and_gradients(kda, "triton", inputs, cotangents)
    assert all(np.all(np.isfinite(x)) for x in results.values())


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


@for_both
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("name", ["random", "correlated keys, slow decay"])
def test_rows_in_segments(name, packed, op, monkeypatch):
    """One long row with few heads: segments start in the middle of a document, and one is ragged."""
    monkeypatch.setattr(planning, "_SHORTEST", 1)
    monkeypatch.setattr(planning, "_FILL_ELSEWHERE", 3 * 2 * 2)  # three segments of two rows and two heads
    called = []
    launch = planning.launch.launch
    monkeypatch.setattr(
        planning.launch, "launch", lambda *args, **how: (called.append(how["constants"]), launch(*args, **how))[1]
    )
    inputs, cotangents = cases.hard(name, per_channel(op), cases.SHORT)
    ids = cases.SHORT.segment_ids() if packed else None

    def fresh(*args, **options):  # its own program, traced with the changed limit
        return op(*args, **options)

    expected = cases.float64_reference(op, inputs, cotangents, ids)
    cases.assert_close(cases.outputs_and_gradients(fresh, "triton", inputs, cotangents, ids), expected, 1e-5)
    assert {c["SEGMENTS"] for c in called if "SEGMENTS" in c} == {3}
    assert [c["MAP"] for c in called if "MAP" in c] == [True, False] * 2


@for_both
def test_strengths_and_keys_of_zero(op):
    """beta = 0 leaves the state alone and has a gradient; keys and queries of zero have none that is not finite."""
    inputs, cotangents = cases.SHORT.draw(per_channel(op))
    inputs["beta"][:, 3::5] = 0
    inputs["k"][:, 10:20] = 0
    inputs["q"][:, 15:25] = 0
    agrees(op, inputs, cotangents, cases.SHORT.segment_ids())


@for_both
@pytest.mark.parametrize("size", [2.0**-30, 2.0**20])
def test_small_and_large_gradients(size, op):
    """A loss that is a mean over a batch of millions of tokens has gradients of 1e-9, and they are as exact. XLA's
    threads, and some GPUs, take numbers below 1e-38 for zero."""
    inputs, cotangents = cases.SHORT.draw(per_channel(op), T=48)
    cotangents = {name: x * np.float32(size) for name, x in cotangents.items()}
    agrees(op, inputs, cotangents, None)


@for_both
def test_the_interpreter_takes_no_bfloat16(op):
    """Its products of bfloat16 are wrong: gradients were not even finite."""
    inputs, _ = cases.SHORT.draw(per_channel(op), T=17)
    inputs |= {name: jnp.asarray(inputs[name], jnp.bfloat16) for name in "qkv"}
    with pytest.raises(UserError, match=f"triton cannot run {op.__name__} here: bfloat16 .*compute_dtype=float32"):
        op(**inputs, backend="triton")
    assert np.isfinite(np.asarray(op(**inputs, backend="auto")[0], np.float32)).all()


@for_both
def test_repeats_bit_for_bit(op):
    inputs, cotangents = cases.SHORT.draw(per_channel(op), T=65)
    ids = cases.SHORT.segment_ids()[:, :65]
    first, second = (cases.outputs_and_gradients(op, "triton", inputs, cotangents, ids) for _ in range(2))
    assert all(np.array_equal(value, second[name]) for name, value in first.items())


@for_both
def test_one_document_is_no_document(op):
    """segment_ids=None runs without masks, and says the same as rows of one document."""
    inputs, cotangents = cases.SHORT.draw(per_channel(op), B=1, T=65)
    without = cases.outputs_and_gradients(op, "triton", inputs, cotangents)
    one = cases.outputs_and_gradients(op, "triton", inputs, cotangents, np.full((1, 65), 3, np.int32))
    cases.assert_close(without, one, 1e-6)


def test_equal_channels_are_gdn():
    """With one gate for all channels of a head, kda's kernels are gdn's; the gates' gradients add up to gdn's."""
    inputs, cotangents = cases.SHORT.draw(False)
    ids = cases.SHORT.segment_ids()
    expected = cases.outputs_and_gradients(gdn, "triton", inputs, cotangents, ids)
    gates = np.repeat(inputs["g"][..., None], inputs["k"].shape[-1], axis=-1)
    actual = cases.outputs_and_gradients(kda, "triton", inputs | {"g": gates}, cotangents, ids)
    actual["grad.g"] = actual["grad.g"].sum(axis=-1)
    cases.assert_close(actual, expected, 1e-5)


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
@pytest.mark.parametrize("op", OPS)
def test_heads_that_do_not_fit(op, change, message):
    inputs, _ = cases.draw(op == "kda", B=1, T=3, **change)
    message = message.replace("gdn", op)
    with pytest.raises(UserError, match=f"config.kernels.backend: triton cannot run {op} here: {message}"):
        OPS[op](**inputs, backend="triton")
    assert jax.eval_shape(lambda: OPS[op](**inputs))[0].shape == inputs["v"].shape  # auto takes another backend


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
    table = json.loads((planning.launch._TABLES / "gdn" / "tiles" / "default.json").read_text())
    change(table["k64"])
    (folder / "default.json").write_text(json.dumps(table))
    monkeypatch.setattr(planning.launch, "_TABLES", tmp_path)
    q = jnp.zeros((1, 16, 1, 16), jnp.bfloat16)
    with pytest.raises(UserError, match=message):
        gdn_kernels._plan(q, q, False)

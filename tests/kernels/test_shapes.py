"""The table of named shapes."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hybrid_jax import config_file
from hybrid_jax.errors import UserError
from hybrid_jax.kernels import shapes
from hybrid_jax.kernels.shapes import SHAPES

GDN = [shape for shape in SHAPES.values() if shape.op == "gdn"]
KDA = [shape for shape in SHAPES.values() if shape.op == "kda"]


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_a_program_returns_the_results_and_a_gradient_for_every_float_input(shape):
    forward, args = shapes.program(shape, "chunked", backward=False)
    assert jax.eval_shape(forward, *args) == shapes.results(shape)
    both, args = shapes.program(shape, "chunked")
    results, gradients = jax.eval_shape(both, *args)
    expected = shapes.arguments(shape)
    expected.pop("segment_ids", None)
    assert results == shapes.results(shape)
    assert gradients == expected


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_small_keeps_what_picks_the_kernels(shape):
    small = shape.small()
    assert small.name == f"{shape.name}_small"
    assert small.H * shape.HV == small.HV * shape.H
    assert small.B <= 2 and small.T <= 150 and min(small.H, small.HV) <= 2
    sizes = dict(name="", B=0, T=0, H=0, HV=0, dtype="")
    assert dataclasses.replace(small, **sizes) == dataclasses.replace(shape, **sizes)
    assert {x.dtype for x in shapes.arguments(small).values()} <= {jnp.dtype("float32"), jnp.dtype("int32")}


def test_gated_deltanet_rows_cover_what_its_kernels_have_to():
    assert {shape.K for shape in GDN} >= {16, 60, 64, 96, 100, 128, 256}
    assert {shape.HV // shape.H for shape in GDN} == {1, 2, 4}
    assert any(shape.K != shape.V for shape in GDN)
    assert {(shape.packed, shape.initial_state) for shape in GDN} == {(p, s) for p in (0, 1) for s in (0, 1)}
    assert {1, 65, 65536} <= {shape.T for shape in GDN}


def test_kimi_delta_attention_rows_cover_what_its_kernels_have_to():
    assert {shape.K for shape in KDA} >= {16, 32, 60, 64, 96, 100, 128, 256}
    assert {shape.HV // shape.H for shape in KDA} == {1, 2, 4}
    assert any(shape.K != shape.V for shape in KDA)
    assert {(shape.packed, shape.initial_state) for shape in KDA} == {(p, s) for p in (0, 1) for s in (0, 1)}
    assert {1, 65, 65536} <= {shape.T for shape in KDA}
    assert {shape.gate for shape in KDA} == {"", "softplus", "bounded"}
    assert {(shape.dtype, shape.gate != "") for shape in KDA} == {
        (dtype, gate) for dtype in ("bfloat16", "float32") for gate in (0, 1)
    }


@pytest.mark.parametrize("shape", [SHAPES["kda_300m"], SHAPES["kda_300m_decays"]], ids=lambda shape: shape.name)
def test_raw_gates_come_with_their_parameters_and_in_the_type_of_q(shape):
    found = shapes.arguments(shape)
    assert found["g"].dtype == (found["q"].dtype if shape.gate else jnp.float32)
    parameters = {"A_log": ((8,), jnp.float32), "dt_bias": ((8, 32), jnp.float32)} if shape.gate else {}
    assert {name: (x.shape, x.dtype) for name, x in found.items() if name in ("A_log", "dt_bias")} == parameters


@pytest.mark.parametrize("config", ["gdn_300m", "gdn_1b", "kda_300m", "kda_1b"])
def test_published_models_have_their_own_row(config):
    model = config_file.load(f"configs/{config}.py").model
    mixer = model.gdn if config.startswith("gdn") else model.kda
    shape = SHAPES[config]
    assert (shape.H, shape.HV, shape.K, shape.V) == (
        mixer.num_heads,
        mixer.num_v_heads,
        mixer.head_dim,
        mixer.v_head_dim,
    )
    assert shape.gate == ("" if mixer is model.gdn else "bounded" if mixer.lower_bound else "softplus")


@pytest.mark.parametrize(
    "name",
    [
        "gdn_300m_state",
        "gdn_t1",
        "kda_300m_packed",
        "kda_bounded",
        "kda_fp32_k64",
        "mamba2_packed",
        "gqa_packed",
    ],
)
def test_inputs_are_random_and_as_declared(name):
    small = SHAPES[name].small()
    for draw, kinds in ((shapes.inputs, shapes.arguments), (shapes.cotangents, shapes.results)):
        arrays = draw(small, seed=3)
        assert {k: (x.shape, x.dtype) for k, x in arrays.items()} == {
            k: (x.shape, x.dtype) for k, x in kinds(small).items()
        }
        for key, x in arrays.items():
            assert np.all(np.isfinite(x)), key
            assert key == "segment_ids" or np.count_nonzero(x) == x.size, key
        again, other = draw(small, seed=3), draw(small, seed=4)
        assert all(np.array_equal(again[k], x) for k, x in arrays.items())
        assert not any(np.array_equal(other[k], x) for k, x in arrays.items())
    inputs = shapes.inputs(small)
    if small.gate:
        assert np.any(inputs["g"] < 0) and np.any(inputs["g"] > 0)
    else:
        assert np.all(inputs.get("g", -1) < 0)
    assert np.all(inputs.get("A", -1) < 0)
    assert np.all(inputs.get("dt", 1) > 0) and np.all(inputs.get("beta", 1) > 0)
    if small.packed:
        assert np.all(np.asarray(inputs["segment_ids"])[:, -1] > 0)  # a border in every row
        assert np.all(np.diff(inputs["segment_ids"], axis=1) >= 0)


def test_documents_and_states_reach_the_operation():
    shape = dataclasses.replace(SHAPES["gdn_300m_state"].small(), T=9)
    inputs, cotangents = shapes.inputs(shape), shapes.cotangents(shape)
    fn, _ = shapes.program(shape, "reference")
    results, gradients = jax.jit(fn)(inputs, cotangents)
    for change in ("segment_ids", "initial_state"):
        other, _ = jax.jit(fn)(inputs | {change: jnp.zeros_like(inputs[change])}, cotangents)
        assert not np.array_equal(other["o"], results["o"]), change
    assert all(np.any(np.asarray(x) != 0) for x in gradients.values())


def test_a_backend_that_an_operation_lacks_is_refused():
    fn, args = shapes.program(SHAPES["mamba2_300m"].small(), "no such")
    with pytest.raises(UserError, match="unknown backend"):
        jax.eval_shape(fn, *args)
    with pytest.raises(ValueError, match="attention has no state"):
        shapes.arguments(dataclasses.replace(SHAPES["mla_300m"], initial_state=True))

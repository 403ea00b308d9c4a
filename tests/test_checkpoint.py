"""Checkpoints: what is kept, what is found again, and what a wrong or damaged one leads to."""

import os
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hybrid_jax import checkpoint, provenance, sharding
from hybrid_jax.config import MeshConfig
from hybrid_jax.errors import UserError

META = {
    "schema": provenance.SCHEMA,
    "pattern": "G-",
    "config": {"train": {"seed": 1}},
    "packages": {},
    "data": "abc",
}


def _state(value, width=4):
    params = {
        "layers": {"0": {"mixer": {"A_log": jnp.full((2, width), value)}}},
        "norm": {"weight": jnp.full((3,), value)},
    }
    return {"params": params, "step": jnp.asarray(int(value), jnp.int32)}


def _wanted(width=4):
    shapes = jax.eval_shape(lambda: _state(0.0, width))
    mesh = sharding.make_mesh(MeshConfig(), jax.devices()[:1])
    return sharding.abstract(shapes, sharding.shardings(shapes, mesh))


def _open(folder, log=None, keep=3, meta=META):
    return checkpoint.Checkpoints(folder, keep, meta, log.append if log is not None else print)


def _written(folder, steps=(1, 2, 3, 4)):
    with _open(folder) as checkpoints:
        for step in steps:
            checkpoints.save(step, _state(float(step)))
        checkpoints.wait()
        return checkpoints.steps()


def _equal(state, value):
    assert jax.tree.structure(state) == jax.tree.structure(_state(value))
    for got, want in zip(jax.tree.leaves(state), jax.tree.leaves(_state(value)), strict=True):
        np.testing.assert_array_equal(got, want)
        assert got.dtype == want.dtype


def test_an_empty_folder_has_nothing_to_restore(tmp_path):
    with _open(tmp_path / "new") as checkpoints:
        assert checkpoints.restore(_wanted()) is None


def test_the_newest_are_kept_and_found_again(tmp_path):
    assert _written(tmp_path) == [2, 3, 4]
    with _open(tmp_path) as checkpoints:
        state, step, meta = checkpoints.restore(_wanted())
    assert step == 4 and meta == META
    _equal(state, 4.0)


def test_a_state_may_be_donated_right_after_save(tmp_path):
    """save returns before the write is done; the next step then reuses the state's memory."""
    state = {"w": jnp.arange(3_000_000.0)}
    bump = jax.jit(lambda s: jax.tree.map(lambda x: x + 1, s), donate_argnums=0)
    with _open(tmp_path) as checkpoints:
        checkpoints.save(1, state)
        for _ in range(20):
            state = bump(state)
        jax.block_until_ready(state)
    mesh = sharding.make_mesh(MeshConfig(), jax.devices()[:1])
    wanted = {"w": jax.ShapeDtypeStruct((3_000_000,), jnp.float32, sharding=sharding.replicated(mesh))}
    with _open(tmp_path) as checkpoints:
        restored, _, _ = checkpoints.restore(wanted)
    np.testing.assert_array_equal(restored["w"], np.arange(3_000_000.0, dtype=np.float32))
    assert float(state["w"][0]) == 20.0


def test_a_half_written_checkpoint_is_ignored(tmp_path):
    _written(tmp_path)
    whole = (tmp_path / "4").rename(tmp_path / "5.orbax-checkpoint-tmp-1234")  # as a killed process leaves it
    (tmp_path / "6").mkdir()  # and one that a copy did not finish
    log = []
    with _open(tmp_path, log) as checkpoints:
        state, step, _ = checkpoints.restore(_wanted())
        assert step == 3
        _equal(state, 3.0)
        checkpoints.save(6, _state(6.0))  # and its step can be saved again
        checkpoints.wait()
    assert not whole.exists()
    with _open(tmp_path) as checkpoints:
        assert checkpoints.restore(_wanted())[1] == 6


def _truncate(folder):
    for path, _, files in os.walk(folder):
        for name in files:
            if re.fullmatch(r"[0-9a-f]{32}", name):
                os.truncate(os.path.join(path, name), 10)


def test_a_damaged_checkpoint_is_passed_over_for_an_older_one(tmp_path):
    _written(tmp_path)
    _truncate(tmp_path / "4")
    log = []
    with _open(tmp_path, log) as checkpoints:
        state, step, _ = checkpoints.restore(_wanted())
        assert step == 3
        _equal(state, 3.0)
        assert any("checkpoint 4 cannot be read and is passed over" in line for line in log)
        checkpoints.save(4, _state(40.0))
        checkpoints.wait()
    with _open(tmp_path) as checkpoints:
        state, step, _ = checkpoints.restore(_wanted())
    assert step == 4 and float(state["params"]["norm"]["weight"][0]) == 40.0


def test_a_checkpoint_with_values_that_are_not_finite_is_passed_over(tmp_path):
    _written(tmp_path, steps=(1,))
    with _open(tmp_path) as checkpoints:
        state = _state(2.0)
        state["params"]["norm"]["weight"] = state["params"]["norm"]["weight"].at[1].set(jnp.nan)
        checkpoints.save(2, state)
        checkpoints.wait()
    log = []
    with _open(tmp_path, log) as checkpoints:
        state, step, _ = checkpoints.restore(_wanted())
    assert step == 1 and any("checkpoint 2 cannot be read" in line and "not finite" in line for line in log)
    _equal(state, 1.0)


def test_a_write_that_fails_is_one_line(tmp_path, monkeypatch):
    _written(tmp_path, steps=(1,))
    with _open(tmp_path) as checkpoints:

        def full(*unused, **named):
            raise ValueError("OUT_OF_RANGE: Failed writing:\nNo space left on device")

        monkeypatch.setattr(checkpoints._orbax, "save_async", full)
        with pytest.raises(UserError, match=r"could not be written: .*No space left on device; checkpoint 1 is kept"):
            checkpoints.save(2, _state(2.0))


def test_when_none_can_be_read_the_run_does_not_start_anew_in_silence(tmp_path):
    _written(tmp_path, steps=(1, 2))
    for step in ("1", "2"):
        _truncate(tmp_path / step)
    with (
        _open(tmp_path) as checkpoints,
        pytest.raises(UserError, match="none of the 2 checkpoints can be read") as caught,
    ):
        checkpoints.restore(_wanted())
    assert "\n" not in str(caught.value)


def test_another_shape_is_one_line_naming_the_path(tmp_path):
    _written(tmp_path)
    meta = {**META, "pattern": "K-"}
    with _open(tmp_path, meta=meta) as checkpoints, pytest.raises(UserError) as caught:
        checkpoints.restore(_wanted(width=5))
    text = str(caught.value)
    assert "params.layers.0.mixer.A_log is float32[2, 4] but this config needs float32[2, 5]" in text
    assert "pattern G- there, K- here" in text and "config.workdir" in text and "\n" not in text


def test_another_tree_is_one_line_naming_the_paths(tmp_path):
    _written(tmp_path)
    wanted = _wanted()
    wanted["params"]["tail"] = {"0": wanted["params"].pop("norm")}
    with _open(tmp_path) as checkpoints, pytest.raises(UserError) as caught:
        checkpoints.restore(wanted)
    assert "params.tail.0.weight is missing; params.norm.weight is not in this model" in str(caught.value)


def test_a_newer_schema_is_refused(tmp_path):
    with _open(tmp_path, meta={**META, "schema": provenance.SCHEMA + 1}) as checkpoints:
        checkpoints.save(1, _state(1.0))
    with _open(tmp_path) as checkpoints, pytest.raises(UserError, match="written by a newer hybrid_jax"):
        checkpoints.restore(_wanted())

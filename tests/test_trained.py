"""Runs opened to be read only: which checkpoint is found, what of it can be read, and what is refused."""

import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hybrid_jax import schema, trained
from hybrid_jax.data import run_tokenizer
from hybrid_jax.data.tokenizer import BpeTokenizer, ByteTokenizer, IdTokenizer
from hybrid_jax.errors import UserError
from hybrid_jax.model import Model
from hybrid_jax.optimizer import leaf_paths
from tests.tiny import tiny_config
from tests.written import perturbed, write_run


@pytest.fixture(scope="module")
def params():
    return perturbed(Model(tiny_config("unused", model__pattern="A-A-A").model))


@pytest.fixture(scope="module")
def _written(tmp_path_factory, params):
    cfg = tiny_config(tmp_path_factory.mktemp("trained") / "run", model__pattern="A-A-A")
    return write_run(cfg, params, steps=(1, 2, 10))


@pytest.fixture
def run(_written, tmp_path):
    return shutil.copytree(_written, tmp_path / "run")


def _listing(folder):
    return sorted((str(p), p.stat().st_mtime_ns) for p in folder.rglob("*"))


def test_the_newest_is_found_from_each_folder(run, params):
    before = _listing(run)
    for where, step in ((run, 10), (run / "checkpoints", 10), (run / "checkpoints" / "2", 2), (str(run), 10)):
        found = trained.open(where)
        assert (found.step, found.run) == (step, run)
    assert trained.open(run, step=2).folder == run / "checkpoints" / "2"
    got = found.params()
    assert jax.tree.structure(got) == jax.tree.structure(params)
    jax.tree.map(np.testing.assert_array_equal, got, params)
    assert found.config.model.layout == "A-A-A" and found.meta["line"]["loss"] == 1.5
    assert _listing(run) == before  # nothing was locked, renamed or made


def test_one_parameter_and_one_layer_of_it(run, params):
    found = trained.open(run)
    leaves = dict(leaf_paths(params))
    assert found.shapes == {path: x.shape for path, x in leaves.items()}
    stacked = "layers.0.mixer.q_proj.weight"
    np.testing.assert_array_equal(found.read(stacked), leaves[stacked])
    for layer in range(2):
        np.testing.assert_array_equal(found.read(stacked, layer), leaves[stacked][layer])
    np.testing.assert_array_equal(np.stack(list(found.layers(stacked))), leaves[stacked])
    with pytest.raises(KeyError):
        found.read("layers.0.mixer.k_conv1d.weight")


def test_parameters_in_another_dtype_and_place(run, params):
    device = jax.devices()[-1]
    found = trained.open(run)
    for place in (device, jax.tree.map(lambda _: jax.sharding.SingleDeviceSharding(device), params)):
        got = found.params(jnp.bfloat16, place)
        for x, want in zip(jax.tree.leaves(got), jax.tree.leaves(params), strict=True):
            assert x.devices() == {device}
            np.testing.assert_array_equal(x, want.astype(jnp.bfloat16))


def test_damaged_ones_are_passed_over_with_a_line(run):
    shutil.rmtree(run / "checkpoints" / "10" / "state" / "d")
    data = next((run / "checkpoints" / "2" / "state" / "d").iterdir())
    content = bytearray(data.read_bytes())
    content[len(content) // 2] ^= 1
    data.write_bytes(content)
    before, lines = _listing(run), []
    assert trained.open(run, log=lines.append).step == 1
    assert len(lines) == 2 and "checkpoint 10 cannot be read" in lines[0] and "checksum" in lines[1]
    assert _listing(run) == before
    with pytest.raises(UserError, match="checksum is another one; choose another checkpoint"):
        trained.open(run, step=2)
    (run / "checkpoints" / "1" / "_CHECKPOINT_METADATA").unlink()
    with pytest.raises(UserError, match=r"none of the 3 checkpoints can be read \(10: .*; 2: .*; 1: _CHECKPOINT"):
        trained.open(run, log=lines.append)


def test_what_is_refused(run, tmp_path):
    def refused(where, match, **more):
        with pytest.raises(UserError, match=match) as error:
            trained.open(where, **more)
        assert "\n" not in str(error.value)

    (tmp_path / "file").touch()
    (tmp_path / "other").mkdir()
    (run / "checkpoints" / "11.orbax-checkpoint-tmp").mkdir()
    refused(tmp_path / "none", "no such folder")
    refused(tmp_path / "file", "is no folder")
    refused(tmp_path / "other", "is not a run")
    refused(run, "has no checkpoint 3; there are 1, 2, 10", step=3)
    refused(run / "checkpoints" / "2", "not that of step 3", step=3)
    refused(run / "checkpoints" / "11.orbax-checkpoint-tmp", "not written to its end")
    shutil.rmtree(run / "checkpoints")
    (run / "checkpoints").mkdir()
    refused(run, "holds no checkpoint; wait")
    config = json.loads((run / "config.json").read_text())
    config.setdefault("checkpoint", {})["every_steps"] = 0
    (run / "config.json").write_text(json.dumps(config))
    refused(run, "writes no checkpoint .*as with ':smoke'")


def test_another_schema_is_refused(run, monkeypatch):
    monkeypatch.setattr(schema, "SCHEMA", 0)
    with pytest.raises(UserError, match="written by a newer hybrid_jax"):
        trained.open(run)
    monkeypatch.setattr(schema, "SCHEMA", 2)
    with pytest.raises(UserError, match="no way from 1 to 2"):
        trained.open(run)
    monkeypatch.setitem(schema.MIGRATIONS, 1, lambda state: state)
    with pytest.raises(UserError, match="go on with its run for a step"):
        trained.open(run)


def test_values_that_are_not_finite_are_named(tmp_path, params):
    bad = jax.tree.map(jnp.asarray, params)
    bad["norm"]["weight"] = bad["norm"]["weight"].at[3].set(jnp.nan)
    found = trained.open(write_run(tiny_config(tmp_path / "run", model__pattern="A-A-A"), bad))
    with pytest.raises(UserError, match=r"norm.weight holds values that are not finite"):
        found.params()


def test_a_checkpoint_that_is_removed_meanwhile(run):
    found = trained.open(run)
    shutil.rmtree(found.folder)
    with pytest.raises(UserError, match="the run has removed it meanwhile"):
        found.read("norm.weight")


# ---- the tokenizer -----------------------------------------------------------


def _bpe():
    import tokenizers

    bpe = tokenizers.Tokenizer(tokenizers.models.BPE({"a": 0, "b": 1, "ab": 2}, [("a", "b")]))
    return BpeTokenizer.from_bpe(bpe)


@pytest.mark.parametrize("tokenizer", [ByteTokenizer(), IdTokenizer(9, 8), _bpe()], ids=["bytes", "ids", "bpe"])
def test_a_run_keeps_its_tokenizer(tmp_path, tokenizer):
    run_tokenizer.write(tmp_path, _bpe())
    (tmp_path / "tokenizer" / "tokenizer_config.json").write_text("{}")  # of the bpe
    run_tokenizer.write(tmp_path, tokenizer)
    found = run_tokenizer.read(tmp_path)
    assert type(found) is type(tokenizer)
    assert (found.vocab_size, found.end_of_document) == (tokenizer.vocab_size, tokenizer.end_of_document)
    assert found.bytes_per_token == tokenizer.bytes_per_token or np.isnan(found.bytes_per_token)
    if isinstance(tokenizer, BpeTokenizer):
        assert found.encode("abba") == [2, 1, 0]
    assert (tmp_path / "tokenizer" / "tokenizer_config.json").exists() == isinstance(tokenizer, BpeTokenizer)


def test_the_tokenizer_of_a_run(run):
    assert isinstance(trained.open(run).tokenizer(), IdTokenizer)  # an older run: as the data has it
    run_tokenizer.write(run, _bpe())
    assert trained.open(run).tokenizer().encode("ab") == [2]
    (run / "tokenizer" / "tokenizer.json").unlink()
    with pytest.raises(UserError, match=r"tokenizer.json: No such file"):
        trained.open(run).tokenizer()
    (run / "tokenizer" / "hybrid_jax.json").write_text(json.dumps({"kind": "unheard of"}))
    with pytest.raises(UserError, match="is damaged"):
        trained.open(run).tokenizer()


def test_an_older_run_whose_data_is_gone(tmp_path, params):
    cfg = tiny_config(tmp_path / "run", model__pattern="A-A-A", data__source="store", data__path=str(tmp_path / "gone"))
    run = write_run(cfg, params)
    with pytest.raises(UserError, match="tokenizer is in no folder tokenizer, and cannot be had from its data: config"):
        trained.open(run).tokenizer()

"""Runs that begin with another run's parameters: an imported model, trained on."""

import dataclasses
import json
import shutil

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file

from hybrid_jax import config_file, data, import_hf, init_from, trained
from hybrid_jax.config import Config, GQAConfig, to_dict
from hybrid_jax.data.store import StoreWriter
from hybrid_jax.errors import UserError
from hybrid_jax.model import Model
from hybrid_jax.train import run as train
from tests.test_golden_models import GOLDEN
from tests.tiny import tiny_config
from tests.written import perturbed, write_run


def test_an_imported_model_is_trained_on(tmp_path):
    """The first step's loss is the one that the model's own library computed for these rows; then it learns them."""
    source = GOLDEN / "llama"
    assert import_hf.main(["--model", str(source), "--out", str(tmp_path / "llama")]) == 0
    golden = load_file(source / "golden.safetensors")
    rows = golden["input_ids"]
    with StoreWriter(tmp_path / "rows", vocab_size=97) as writer:
        for row in rows:
            writer.append(row)
    overrides = {
        "data.path": str(tmp_path / "rows"), "data.validation_fraction": "0", "eval.batches": "0",
        "eval.sample_tokens": "0", "train.steps": "2", "train.global_batch_size": str(len(rows)),
        "train.sequence_length": str(rows.shape[1]), "train.compute_dtype": "float32", "checkpoint.every_steps": "1",
    }  # fmt: skip

    def go(**more):
        pairs = {**overrides, **{key.replace("__", "."): value for key, value in more.items()}}
        config = config_file.load(str(tmp_path / "llama" / "config.json"), pairs.items())
        train(config)
        lines = [json.loads(line) for line in (tmp_path / "llama-tuned" / "metrics.jsonl").read_text().splitlines()]
        return config, [line["loss"] for line in lines]

    config, losses = go()
    assert config.workdir == str(tmp_path / "llama-tuned") and config.checkpoint.init_from == str(tmp_path / "llama")
    seen = data.open_splits(config)[0].batch(0, range(len(rows)), len(rows))["tokens"]
    logits = np.asarray(golden["logits"], np.float64)
    logits -= np.log(np.exp(logits).sum(-1, keepdims=True))
    nll = [-np.take_along_axis(a[:-1], row[1:, None], 1).mean() for a, row in zip(logits, rows, strict=True)]
    (numbers, places) = np.nonzero((seen[:, None] == rows).all(-1))
    assert numbers.tolist() == [0, 1]
    want = np.mean([nll[place] for place in places])
    assert abs(losses[0] - want) < 1e-5 and losses[1] < losses[0]
    first = trained.open(config.workdir, step=1)
    assert first.meta["init_from"]["run"] == str(tmp_path / "llama") and first.meta["init_from"]["step"] == 0
    # What it was before is not needed again.
    shutil.rmtree(tmp_path / "llama" / "checkpoints")
    _, more = go(train__steps="3")
    assert more[:2] == losses and len(more) == 3
    assert trained.open(config.workdir).meta["init_from"] == first.meta["init_from"]


def test_the_parameters_and_nothing_else(tmp_path):
    cfg = tiny_config(tmp_path / "run", model__pattern="A-A-")
    params = perturbed(Model(cfg.model))
    write_run(cfg, params, steps=(5, 6))
    device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    wanted = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=device), params)

    def read(where, model=cfg.model):
        lines = []
        config = dataclasses.replace(
            cfg, model=model, checkpoint=dataclasses.replace(cfg.checkpoint, init_from=str(where))
        )
        return *init_from.read(config, wanted, lines.append), lines

    got, origin, lines = read(tmp_path / "run")
    jax.tree.map(np.testing.assert_array_equal, got, params)
    assert origin["step"] == 6 and len(lines) == 1 and "checkpoints/6" in lines[0]
    assert read(tmp_path / "run" / "checkpoints" / "5")[1]["step"] == 5
    other = dataclasses.replace(
        cfg.model, norm_eps=1e-5, remat="full", gdn=dataclasses.replace(cfg.model.gdn, head_dim=4)
    )
    assert read(tmp_path / "run", other)[2][1:] == ["note: config.model.norm_eps is 1e-05 and was 1e-06 there"]
    with pytest.raises(UserError, match=r"config.checkpoint.init_from: .*nowhere: no such folder"):
        read(tmp_path / "nowhere")
    with pytest.raises(UserError, match=r"6 is of another model: its pattern is A-A-, this one's A-A-A-"):
        read(tmp_path / "run", dataclasses.replace(cfg.model, pattern="A-A-A-"))
    wanted["norm"]["weight"] = jax.ShapeDtypeStruct((17,), np.float32, sharding=device)
    with pytest.raises(UserError, match=r"norm.weight is float32\[16\] but this config needs float32\[17\]"):
        read(tmp_path / "run")


def test_what_makes_another_function_of_the_same_parameters():
    model = Config().model
    model = dataclasses.replace(model, pattern="A-", gqa=GQAConfig(num_heads=4, num_kv_heads=2, head_dim=8))
    turned = dataclasses.replace(model.gqa, rope=dataclasses.replace(model.gqa.rope, theta=500000.0))
    other = dataclasses.replace(model, gqa=turned, scan_layers=False, z_loss=0.1)
    (line,) = init_from.differences(model, other)
    assert (
        line.startswith("config.model.gqa.rope is {")
        and "500000.0" in line
        and init_from.differences(model, model) == []
    )


def test_a_run_does_not_go_on_from_parameters_alone(tmp_path):
    cfg = tiny_config(tmp_path / "run", model__pattern="A-", checkpoint__every_steps=1)
    write_run(cfg, perturbed(Model(cfg.model)), steps=(0,), moments=False)
    with pytest.raises(UserError, match=r"0: holds parameters only: begin with it by config.checkpoint.init_from in"):
        train(cfg)


# ---- config.json as a config file ----------------------------------------------


def test_a_config_of_a_run_is_a_config_file(tmp_path):
    cfg = tiny_config("", model__pattern="A-")
    folder = tmp_path / "some_run"
    folder.mkdir()
    file = folder / "config.json"
    file.write_text(json.dumps(to_dict(cfg)))
    read = config_file.load(str(file), [("train.steps", "7")])
    assert read.train.steps == 7 and read.model == cfg.model and read.workdir == "runs/some_run"
    file.write_text(json.dumps(to_dict(dataclasses.replace(cfg, workdir="elsewhere"))))
    assert config_file.load(str(file)).workdir == "elsewhere"
    for content, message in (
        ("{", r"config.json: is no JSON"),
        ("[]", r"is no run's config"),
        ('{"model_type": "llama"}', r"is no run's config; python -m hybrid_jax.import_hf makes a run of a model"),
        ('{"model": {"hiden_size": 3}}', r"config.model.hiden_size: unknown key, did you mean 'hidden_size'"),
    ):
        file.write_text(content)
        with pytest.raises(UserError, match=message):
            config_file.load(str(file))
    with pytest.raises(UserError, match=r"is a folder, did you mean .*some_run/config.json\?"):
        config_file.load(str(folder))
    with pytest.raises(UserError, match=r"none.json does not exist; give the config.json of a run"):
        config_file.load(str(folder / "none.json"))

"""What a checkpoint records of its run, and what a restart says about a change."""

import dataclasses

import jax

from hybrid_jax import provenance
from hybrid_jax.config import Config, ModelConfig, TrainConfig


def test_description_of_a_run():
    cfg = Config(model=ModelConfig(pattern="*-M-", mixer="kda"), train=TrainConfig(seed=7))
    meta = provenance.describe(cfg, "f00d")
    assert meta["schema"] == provenance.SCHEMA and meta["pattern"] == "*-K-" and meta["data"] == "f00d"
    assert meta["config"]["train"]["seed"] == 7 and meta["packages"]["jax"] == jax.__version__
    assert provenance.changes(meta, meta) == []
    other = provenance.describe(Config(model=cfg.model, train=TrainConfig(seed=8)), "beef")
    assert provenance.changes(meta, other) == ["config.train.seed was 7 when this checkpoint was written and is 8 now"]
    assert "the data changed" in provenance.changes(meta, {**meta, "data": "beef"})[0]
    model = dataclasses.replace(cfg.model, norm_eps=1e-5, gdn=dataclasses.replace(cfg.model.gdn, allow_neg_eigval=True))
    longer = provenance.describe(Config(model=model, train=TrainConfig(seed=7, steps=9)), "f00d")
    told = provenance.changes(meta, longer)
    assert len(told) == 2 and "config.model.norm_eps was 1e-06" in told[0] and "gdn.allow_neg_eigval was" in told[1]
    assert "record of its config is missing" in provenance.changes({}, meta)[0]

"""What a checkpoint records of its run, and what a restart says about a change."""

import dataclasses
import shutil
import subprocess
from pathlib import Path

import jax
import pytest

from hybrid_jax import provenance, schema
from hybrid_jax.config import Config, DataConfig, ModelConfig, TrainConfig
from hybrid_jax.errors import UserError

CFG = Config(model=ModelConfig(pattern="*-M-", mixer="kda"), train=TrainConfig(seed=7))
DATA = {"data.source": "store", "the tokens of data.path": "f00d" * 8, "the weight of store 2 of data.path": "3 of 10"}


def with_train(**changed):
    return dataclasses.replace(CFG, train=dataclasses.replace(CFG.train, **changed))


def test_description_of_a_run():
    meta = provenance.describe(CFG, DATA)
    assert meta["schema"] == schema.SCHEMA and meta["pattern"] == "*-K-"
    assert meta["config"]["train"]["seed"] == 7 and meta["packages"]["jax"] == jax.__version__
    assert meta["data_identity"] == {**DATA, "train.global_batch_size": "8"} and len(meta["data"]) == 32
    assert provenance.changes(meta, meta) == []
    model = dataclasses.replace(CFG.model, norm_eps=1e-5, gdn=dataclasses.replace(CFG.model.gdn, allow_neg_eigval=True))
    told = provenance.changes(meta, provenance.describe(dataclasses.replace(with_train(steps=9), model=model), DATA))
    assert len(told) == 2 and "config.model.norm_eps was 1e-06" in told[0] and "gdn.allow_neg_eigval was" in told[1]
    assert "record of its config is missing" in provenance.changes({}, meta)[0]


@pytest.mark.parametrize(
    ("cfg", "data", "told"),
    [
        (
            CFG,
            {"the weight of store 2 of data.path": "1 of 2"},
            "the weight of store 2 of data.path was 3 of 10 windows and is 1 of 2 windows;",
        ),
        (
            CFG,
            {"the tokens of data.path": "beef" * 8, "data.source": "files"},
            "data.source was store and is files; the tokens of data.path changed;",
        ),
        (with_train(global_batch_size=16), {}, "train.global_batch_size was 8 and is 16;"),
    ],
)
def test_other_data_is_refused_or_noted(cfg, data, told):
    meta, now = provenance.describe(CFG, DATA), provenance.describe(cfg, DATA | data)
    with pytest.raises(UserError) as caught:
        provenance.changes(meta, now)
    message = str(caught.value)
    assert message.startswith(f"the data is not what this run was trained on: {told}") and "\n" not in message
    assert message.endswith("or set config.data.allow_change=True to go on with it as it is now")
    allowed = provenance.describe(dataclasses.replace(cfg, data=DataConfig(allow_change=True)), DATA | data)
    (note,) = provenance.changes(meta, allowed)
    assert note.startswith(
        f"the data changed since this checkpoint was written, as data.allow_change lets it: {told[:-1]}"
    )


def test_what_changes_no_sample_is_no_change():
    meta = provenance.describe(CFG, DATA)
    moved = dataclasses.replace(with_train(micro_batch_size=2), data=DataConfig(path="/moved/here", cache_dir="/cache"))
    assert provenance.changes(meta, provenance.describe(moved, DATA)) == []
    found = provenance.describe(CFG, DATA | {"the tokenizer": "abc"})  # its record was not there before
    assert provenance.changes(meta, found) == provenance.changes(found, meta) == []


def test_checkpoints_of_before_there_were_identities():
    now = provenance.describe(CFG, DATA)
    old = {k: v for k, v in now.items() if k != "data_identity"}
    (note,) = provenance.changes({**old, "data": "beef"}, now)
    assert "an older version wrote this checkpoint" in note
    told = provenance.changes({**old, "data": "beef"}, provenance.describe(with_train(seed=8), DATA))
    assert told[0] == "config.train.seed was 7 when this checkpoint was written and is 8 now" and told[1] == note


@pytest.mark.skipif(shutil.which("git") is None, reason="needs git")
def test_the_git_revision_of_a_checkout(tmp_path, monkeypatch):
    def git(*arguments):
        identity = ["-c", "user.name=a", "-c", "user.email=a@b"]
        done = subprocess.run(
            ["git", "-C", tmp_path, *identity, *arguments], check=True, capture_output=True, text=True
        )
        return done.stdout.strip()

    def revision(folder=tmp_path / "package"):
        provenance.revision.cache_clear()
        return provenance.revision(folder)

    (tmp_path / "package").mkdir()
    file = tmp_path / "package" / "__init__.py"
    file.write_text("1")
    assert revision() == {}
    git("init", "-q")
    assert revision() == {}  # not tracked, as an installed package in someone's project
    git("add", ".")
    git("commit", "-qm", "one")
    head = git("rev-parse", "HEAD")
    assert len(head) == 40 and revision() == {"revision": head, "dirty": False}
    (tmp_path / "package" / "new.py").write_text("2")
    assert revision()["dirty"] is False
    file.write_text("2")
    assert revision() == {"revision": head, "dirty": True}
    monkeypatch.setenv("PATH", str(tmp_path))
    assert revision() == {}
    assert revision(Path("/nonexistent")) == {}

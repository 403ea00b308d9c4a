"""What a run may be given that it cannot use, through the command, and may find when it is started again: each ends in
one line that names the place and what to do, and leaves what was there as it was.

More such tables: the files of a store, byte by byte (data/test_store.py), loss masks (data/test_records.py), weights
(data/test_mixture.py), values and sizes of the config (test_config.py), flags (test_launch.py), prepare's inputs
(data/test_prepare_input.py).
"""

import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest

import launch
from hybrid_jax import schema, train
from hybrid_jax.data import prepare
from hybrid_jax.data.store import StoreWriter
from hybrid_jax.errors import UserError
from tests.data.test_store import plain_write, write
from tests.tiny import tiny_config

ROOT = Path(__file__).parents[1]


def tree(folder):
    """Every file below it, with its content; not what a refusal itself writes."""
    files = (p for p in sorted(folder.rglob("*")) if p.is_file() and p.suffix != ".log" and p.name != ".lock")
    return {str(p.relative_to(folder)): p.read_bytes() for p in files}


# ---- loading ----


@pytest.fixture(scope="module")
def stores(tmp_path_factory):
    """s, 40 documents of 3 ids; t, another one; p, of text, with its manifest; m, with a loss mask."""
    folder = tmp_path_factory.mktemp("stores")
    write(folder / "s", [[1, 2, 3], [4, 5, 6]] * 20, 257)
    write(folder / "t", [[1, 2, 3], [4, 5, 7]] * 20, 257)
    (folder / "text.jsonl").write_text("".join(json.dumps({"text": f"the cat {n}"}) + "\n" for n in range(200)))
    assert prepare.main(["--input", str(folder / "text.jsonl"), "--output", str(folder / "p")]) == 0
    with StoreWriter(folder / "m", vocab_size=257, masked=True) as writer:
        for _ in range(40):
            writer.append(np.arange(3), np.asarray([False, True, True]))
    return folder


def manifest(name, **changed):
    """Changes keys of a store's manifest, or with `tokenizer__` of its tokenizer."""

    def change(folder):
        path = folder / f"{name}.json"
        about = json.loads(path.read_text())
        for key, value in changed.items():
            inner = key.startswith("tokenizer__")
            (about["tokenizer"] if inner else about)[key.removeprefix("tokenizer__")] = value
        path.write_text(json.dumps(about))

    return change


def also(name, documents, **more):
    return lambda folder: plain_write(folder / name, [[d] for d in documents], more.get("code", 8))


def copied(*names):
    return lambda folder: [shutil.copy(folder / a, folder / b) for a, b in names]


def linked(*names):
    return lambda folder: [(folder / b).symlink_to(folder / a) for a, b in names]


def removed(name):
    return lambda folder: (folder / name).unlink()


def a_folder(name):
    return lambda folder: ((folder / name).unlink(missing_ok=True), (folder / name).mkdir())


def written(name, content):
    return lambda folder: (folder / name).write_bytes(content)


def nothing(folder):
    pass


NO_VALIDATION = {"eval.batches": 0, "data.validation_fraction": 0}
PATH, VALIDATION = "config.data.path: {}/", "config.data.validation_path: {}/"
NO_TARGET = "config.data.path: no token of the first 1 rows of training is a target, as its documents have"
VOCABULARY = "config.model.vocab_size: {}/"

# name: what is done to the folder of the stores, data.path, other keys, how the error begins ({} is the folder)
LOADING = {
    "no such store": (nothing, "{}/none", {}, PATH + "none.idx: no such file; a token store is a pair"),
    "a folder": (nothing, "{}", {}, "config.data.path: {}.idx: no such file; a token store is a pair PREFIX.bin and"),
    "no .bin": (removed("s.bin"), "{}/s", {}, PATH + "s.bin: no such file"),
    "no .idx": (removed("s.idx"), "{}/s", {}, PATH + "s.idx: no such file"),
    "a folder for .bin": (a_folder("s.bin"), "{}/s", {}, PATH + "s.bin: is a folder; a token store is"),
    "a pipe for .bin": (
        lambda folder: (removed("s.bin")(folder), os.mkfifo(folder / "s.bin")),
        "{}/s", {}, PATH + "s.bin: is no plain file; a token store is",
    ),
    "a link that leads nowhere": (linked(("gone", "l.idx")), "{}/l", {}, PATH + "l.idx: no such file"),
    "empty files": (lambda f: [written(f"s.{e}", b"")(f) for e in ("bin", "idx")], "{}/s", {}, PATH + "s.idx: is not"),
    "text for .idx": (written("s.idx", b"hello\n" * 20), "{}/s", {}, PATH + "s.idx: is not the index of a token"),
    "only empty documents": (also("e", [[], []]), "{}/e", {}, PATH + "e.bin: holds no token"),
    "floats": (
        lambda f: (f / "s.idx").write_bytes((b := (f / "s.idx").read_bytes())[:17] + b"\6" + b[18:]),
        "{}/s", {}, PATH + "s.idx: has dtype code 6, floating-point numbers, which are no token ids",
    ),
    "one token": (also("o", [[7]]), "{}/o", NO_VALIDATION, NO_TARGET),
    "documents of one token": (also("o", [[7]] * 50), "{}/o", {}, NO_TARGET),
    "nothing left for validation": (
        also("o", [[7]]), "{}/s,{}/o", {}, "config.data.validation_fraction: 0.05 leaves no document of {}/o.bin for",
    ),
    "nothing to learn in validation": (
        also("o", [[7]] * 50), "{}/s", {"data.validation_path": "{}/o"},
        "config.eval.batches: no token of the first 8 batches of validation is a target",
    ),
    "an id over the vocabulary": (
        nothing, "{}/s", {"model.vocab_size": 6},
        VOCABULARY + "s.bin: token 5 is the id 6, not one of 6; the vocabulary must be that of the tokenizer",
    ),
    "an id over the vocabulary in validation": (
        nothing, "{}/s", {"data.validation_path": "{}/t", "model.vocab_size": 7},
        VOCABULARY + "t.bin: token 5 is the id 7, not one of 7",
    ),
    "an id over the vocabulary in a mixture": (
        nothing, "{}/s,{}/t", {"model.vocab_size": 7}, VOCABULARY + "t.bin: token 5 is the id 7, not one of 7",
    ),
    "a negative id": (also("n", [[1, -2]], code=4), "{}/n", {}, VOCABULARY + "n.bin: token 1 is the id -2, not one of"),
    "weight 0": (nothing, "{}/s:0,{}/t", {}, PATH + "s: its weight 0 is not a number above 0"),
    "a weight below 0": (nothing, "{}/s,{}/t:-1", {}, PATH + "t: its weight -1 is not a number above 0"),
    "a weight that is no number": (nothing, "{}/s:nan,{}/t", {}, PATH + "s: its weight nan is not a number above 0"),
    "an infinite weight": (nothing, "{}/s:inf,{}/t", {}, PATH + "s: its weight inf is not a number above 0"),
    "a mistyped weight": (nothing, "{}/s:70%,{}/t", {}, PATH + "s: its weight '70%' is not a number; give PREFIX:"),
    "a store without a name": (nothing, "{}/s,,{}/t", {}, "config.data.path: store 2 of "),
    "a store twice": (nothing, "{}/s,{}/t,{}/s.idx:2", {}, PATH + "s.idx: named twice; name a store once"),
    "a store twice, by a link": (
        linked(("s.idx", "l.idx"), ("s.bin", "l.bin")), "{}/s,{}/l", {}, PATH + "l: named twice; name a store once",
    ),
    "a mixture with one that is missing": (nothing, "{}/s,{}/none", {}, PATH + "none.idx: no such file"),
    "two tokenizers": (
        lambda f: (copied(*((f"p.{e}", f"q.{e}") for e in ("bin", "idx", "json")))(f),
                   manifest("q", tokenizer__sha256="another")(f)),
        "{}/p,{}/q", {}, PATH + "q.bin was made with another tokenizer than {}/p.bin; prepare both with the same one",
    ),
    "validation on the training store": (
        nothing, "{}/s,{}/t", {"data.validation_path": "{}/t"}, VALIDATION + "t.bin is in config.data.path too, as {}/",
    ),
    "validation on a copy of it": (
        copied(("s.bin", "c.bin"), ("s.idx", "c.idx")), "{}/s", {"data.validation_path": "{}/c"},
        VALIDATION + "c.bin is in config.data.path too, as {}/s, so it would be validated on what it was trained",
    ),
    "validation store missing": (nothing, "{}/s", {"data.validation_path": "{}/n"}, VALIDATION + "n.idx: no such file"),
    "validation by another tokenizer": (
        lambda f: (copied(*((f"p.{e}", f"q.{e}") for e in ("bin", "json")))(f), written("q.bin", b"\1\0" * 9)(f),
                   plain_write(f / "q", [[[1] * 9]], 8),
                   manifest("q", tokens=9, files={}, tokenizer__sha256="another")(f)),
        "{}/p", {"data.validation_path": "{}/q"}, VALIDATION + "q.bin was made with another tokenizer than {}/p",
    ),
    "nothing held out": (
        nothing, "{}/s", {"data.validation_fraction": 0}, "config.data.validation_fraction: 0 holds nothing out for",
    ),
    "all held out": (nothing, "{}/s", {"data.validation_fraction": 1}, "config.data.validation_fraction: 1.0 is not"),
    "a vocabulary under that of the manifest": (
        nothing, "{}/p", {"model.vocab_size": 200}, "config.model.vocab_size: 200: the tokenizer of {}/p.bin has 257",
    ),
    "a manifest cut short": (written("p.json", b'{"format": "hyb'), "{}/p", {}, PATH + "p.json: is no JSON, so"),
    "a manifest of no text": (written("p.json", b"\xff\xfe\0"), "{}/p", {}, PATH + "p.json: is no JSON, so"),
    "a folder for a manifest": (a_folder("p.json"), "{}/p", {}, PATH + "p.json: Is a directory; prepare the store"),
    "a manifest of another version": (manifest("p", version=9), "{}/p", {}, PATH + "p.json: is a manifest of version"),
    "a manifest of another store": (manifest("p", tokens=9), "{}/p", {}, PATH + "p.json: is of another store: it"),
    "a manifest with other sizes": (
        manifest("p", files={".bin": {"bytes": 9}}), "{}/p", {}, PATH + "p.bin: has 4580 bytes, p.json says 9; copy",
    ),
    "a manifest with a damaged list of files": (
        manifest("p", files=[".bin"]), "{}/p", {}, PATH + "p.json: its list of files is damaged; prepare the store",
    ),
    "a manifest without a tokenizer": (
        manifest("p", tokenizer=None), "{}/p", {}, PATH + "p.json: does not say which tokenizer made the store",
    ),
    "a manifest of 0 bytes a token": (
        manifest("p", tokenizer__bytes_per_token=0), "{}/p", {}, PATH + "p.json: says 0.0 bytes a token, which cannot",
    ),
    "a tokenizer that was not copied along": (
        manifest("p", tokenizer__name="mine"), "{}/p", {}, PATH + "p.tokenizer.json: no such file; it is the tokenizer",
    ),
    "a loss mask that was not copied along": (
        manifest("p", loss_mask=True), "{}/p", {}, PATH + "p.mask.bin: no such file; it is the store's loss mask",
    ),
    "a loss mask of another size": (written("m.mask.bin", b"\1" * 9), "{}/m", {}, PATH + "m.mask.bin: is cut short"),
    "a loss mask of other values": (
        written("m.mask.bin", b"\1" * 119 + b"\2"), "{}/m", {}, PATH + "m.mask.bin: byte 119 is 2, neither 0 nor 1",
    ),
    "a loss mask without a 1": (written("m.mask.bin", bytes(120)), "{}/m", {}, PATH + "m.mask.bin: holds no 1"),
}  # fmt: skip


@pytest.mark.parametrize("name", LOADING)
def test_data_that_cannot_be_used_is_one_line(name, stores, tmp_path, capsys, monkeypatch):
    damage, path, keys, words = LOADING[name]
    folder = shutil.copytree(stores, tmp_path / "stores")
    damage(folder)
    pipe = folder / "s.bin"
    before = {} if pipe.is_fifo() else tree(folder)
    monkeypatch.setattr(os, "environ", os.environ.copy())
    arguments = {"data.source": "store", "data.path": path, "eval.ngram_order": 0, **keys}
    overrides = [f"--config.{key}={str(value).replace('{}', str(folder))}" for key, value in arguments.items()]
    assert launch.main([f"--config={ROOT}/configs/tiny_hybrid.py", "--dry_run", *overrides]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1
    assert err.startswith("error: " + words.replace("{}", str(folder))), err
    assert before == ({} if pipe.is_fifo() else tree(folder))


# ---- resuming ----


STEPS = 4
RUN = {"model__pattern": "A-", "data__source": "store", "train__steps": STEPS, "eval__batches": 1}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A folder with two stores, a and b, and the run that was trained on them, with the checkpoints 2 and 4."""
    folder = tmp_path_factory.mktemp("runs")
    rng = np.random.default_rng(0)
    for name in "ab":
        lengths = rng.integers(2, 60, 60)
        with StoreWriter(folder / name, vocab_size=64) as writer:
            writer.extend(rng.integers(0, 64, lengths.sum()), lengths)
    train.run(resumed(folder, checkpoint__every_steps=2))
    assert sorted(p.name for p in (folder / "run" / "checkpoints").iterdir()) == ["2", "4"]
    return folder


def resumed(folder, **keys):
    paths = {"data__path": keys.pop("data__path", "{}/a:0.7,{}/b:0.3").replace("{}", str(folder))}
    return tiny_config(folder / "run", **{"checkpoint__every_steps": 2, **RUN, **paths, **keys})


def checkpoints(damage, *steps):
    def every(folder):
        for step in steps or ("2", "4"):
            damage(folder / "run" / "checkpoints" / step)

    return every


def emptied(folder):
    shutil.rmtree(folder)
    folder.mkdir()


def truncated(folder):
    path = max((p for p in folder.rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)
    os.truncate(path, 10)


def record(**changed):
    """Changes a checkpoint's record, and its checksum with it, as another version would have written it."""

    def change(folder):
        path = folder / "_CHECKPOINT_METADATA"
        about = json.loads(path.read_text())
        about["custom_metadata"] = {**about["custom_metadata"], **changed}
        path.write_text(json.dumps(about))
        (folder / "files.json").unlink()

    return change


def replaced_by_a_file(name):
    def replace(folder):
        path = folder / "run" / name
        shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
        path.write_text("a file")

    return replace


def replaced_by_a_folder(name):
    def replace(folder):
        (folder / "run" / name).unlink(missing_ok=True)
        (folder / "run" / name).mkdir()

    return replace


CHANGED, KEPT = "the data is not what this run was trained on: ", "{}/run/checkpoints"
NONE = KEPT + ": none of the 2 checkpoints can be read (4: "

# name: what is done to the folder, the keys that are changed, how the error begins ({} is the folder)
RESUMING = {
    "another pattern": (nothing, {"model__pattern": "AA-"}, KEPT + "/4: is of another model: pattern A- there, AA- "),
    "another mixer": (nothing, {"model__pattern": "G-"}, KEPT + "/4: is of another model: pattern A- there, G- here;"),
    "another vocabulary": (
        nothing, {"model__vocab_size": 66},
        KEPT + "/4: is of another model: params.embed.weight is float32[64, 16] but this config needs float32[66, 16]",
    ),
    "another width": (
        nothing, {"model__intermediate_size": 48},
        KEPT + "/4: is of another model: params.tail.1.mlp.down_proj.weight is float32[32, 16] but this config needs",
    ),
    "one store of two": (nothing, {"data__path": "{}/a"}, CHANGED + "the number of stores in data.path was 2 and is 1"),
    "other weights": (nothing, {"data__path": "{}/a:1,{}/b"}, CHANGED + "the weight of store 1 of data.path was 7"),
    "stores in another order": (nothing, {"data__path": "{}/b:0.3,{}/a:0.7"}, CHANGED + "the tokens of store 1 of"),
    "a store with another id": (
        lambda f: (f / "a.bin").write_bytes(b"\1\0" + (f / "a.bin").read_bytes()[2:]), {},
        CHANGED + "the tokens of store 1 of data.path changed;",
    ),
    "a store that has a loss mask now": (
        lambda f: (f / "a.mask.bin").write_bytes(b"\1" * ((f / "a.bin").stat().st_size // 2)), {},
        CHANGED + "the loss mask of store 1 of data.path was none and is",
    ),
    "another split": (
        nothing, {"data__validation_fraction": 0.3},
        CHANGED + "data.validation_fraction was 0.05 and is 0.3; the size of store 1 of data.path was",
    ),
    "longer rows": (nothing, {"train__sequence_length": 64}, CHANGED + "train.sequence_length was 32 and is 64"),
    "a larger batch": (nothing, {"train__global_batch_size": 16}, CHANGED + "train.global_batch_size was 8 and is 16"),
    "another seed": (nothing, {"train__seed": 9}, CHANGED + "the order of the data (train.seed) was mixture 1"),
    "documents not isolated": (nothing, {"data__isolate_documents": False}, CHANGED + "data.isolate_documents was"),
    "another source": (nothing, {"data__source": "synthetic", "data__path": ""}, CHANGED + "data.source was store"),
    "no checkpoints any more": (nothing, {"checkpoint__every_steps": 0}, "config.checkpoint.every_steps: 0, but {}"),
    "a file for the run's folder": (
        lambda f: (shutil.rmtree(f / "run"), (f / "run").write_text("")), {}, "config.workdir: {}/run is a file, not a",
    ),
    "a file for the checkpoints": (replaced_by_a_file("checkpoints"), {}, KEPT + ": is no folder; move it away"),
    "a file for every checkpoint": (
        lambda f: [replaced_by_a_file(f"checkpoints/{n}")(f) for n in (2, 4)], {}, NONE + "_CHECKPOINT_METADATA is",
    ),
    "every checkpoint emptied": (checkpoints(emptied), {}, NONE + "_CHECKPOINT_METADATA is missing; 2: "),
    "every checkpoint cut short": (checkpoints(truncated), {}, NONE + "state/"),
    "every record changed": (
        checkpoints(lambda f: (f / "_CHECKPOINT_METADATA").write_text("{")), {}, NONE + "its record of the run, in",
    ),
    "a newer version": (
        checkpoints(record(schema=schema.SCHEMA + 1)), {}, KEPT + "/4: written by a newer hybrid_jax (schema",
    ),
    "an older version": (checkpoints(record(schema=-1)), {}, KEPT + "/4: written by an older hybrid_jax "),
    "roll-backs cut short": (
        lambda f: (f / "run/checkpoints/rollbacks.json").write_text('{"rollbacks": ['), {},
        KEPT + "/rollbacks.json: damaged: it says which batches the run skipped; put a copy of it back, or delete it",
    ),
    "a folder for roll-backs": (
        replaced_by_a_folder("checkpoints/rollbacks.json"), {}, KEPT + "/rollbacks.json: Is a directory: it says which",
    ),
    "a folder for the metrics": (replaced_by_a_folder("metrics.jsonl"), {}, "{}/run/metrics.jsonl: Is a directory;"),
    "a folder for the log": (replaced_by_a_folder("train.log"), {}, "{}/run/train.log: Is a directory; the"),
    "a folder for the config": (replaced_by_a_folder("config.json"), {}, "{}/run/config.json: Is a directory; the"),
}  # fmt: skip


@pytest.mark.parametrize("name", RESUMING)
def test_a_run_that_cannot_go_on_is_one_line(name, run, tmp_path):
    damage, keys, words = RESUMING[name]
    folder = shutil.copytree(run, tmp_path / "runs")
    config = resumed(folder, train__steps=STEPS + 2, **keys)
    damage(folder)
    before = tree(folder)
    with pytest.raises(UserError) as error:
        train.run(config)
    message = str(error.value)
    assert "\n" not in message and message.startswith(words.replace("{}", str(folder))), message
    assert tree(folder) == before


def test_what_a_run_can_go_on_without(run, tmp_path, capsys):
    """Fewer steps than are done; a newest checkpoint that is damaged, empty, or none at all; damaged metrics."""
    folder = shutil.copytree(run, tmp_path / "runs")
    train.run(resumed(folder, train__steps=1))
    assert "step 4 of 1 is done already; raise config.train.steps to go on" in capsys.readouterr().out
    kept = folder / "run" / "checkpoints"
    assert sorted(p.name for p in kept.iterdir()) == ["2", "4"]
    (kept / "9").mkdir()
    (kept / "8").write_text("a file")
    (kept / "notes").mkdir()
    truncated(kept / "4")
    (folder / "run" / "metrics.jsonl").write_bytes(b"\xff\0{}\n[]\n")
    train.run(resumed(folder, train__steps=3))
    out = capsys.readouterr().out
    for step in (9, 8):
        assert f"checkpoint {step} cannot be read and is passed over (_CHECKPOINT_METADATA is missing)" in out
    assert "checkpoint 4 cannot be read and is passed over (state/" in out and "restored checkpoint 2" in out

"""A Hugging Face data set to a token store: with a stand-in for the package `datasets` that can fail, and with that
package; of a hub on this machine."""

import importlib.util
import io
import json
import os
import subprocess
import sys
import types

import pytest

from hybrid_jax.data import prepare
from tests.data.hub_server import COMMIT, Repository
from tests.data.test_prepare import ROOT, nothing_written, refused, run, texts

TEXTS = [f"row {i} " + "x" * (i % 50) for i in range(400)]
NEWER = COMMIT[::-1]


class Streamed:
    """Of datasets.IterableDataset what is used: columns, iteration, state."""

    def __init__(self, values, fails_at=None):
        self.values, self.fails_at, self.at, self.first = values, fails_at, 0, 0
        self.column_names = ["id", "text"]

    def select_columns(self, names):
        assert names == ["text"]
        return self

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.first = state["at"]

    def __iter__(self):
        self.at = self.first
        while self.at < len(self.values):
            if self.at == self.fails_at:
                raise ConnectionError("the server\nwent away")
            self.at += 1
            yield {"text": self.values[self.at - 1]}


@pytest.fixture
def package(monkeypatch, server):
    """The stand-in; its `values`, `fails_at` and `error` may be set, `revisions` are those asked for."""
    monkeypatch.setattr(prepare, "PART_BYTES", 2**11)
    server.repositories["datasets", "owner/name"] = Repository({})
    module = types.ModuleType("datasets")
    module.values, module.fails_at, module.error, module.streams, module.revisions = TEXTS, None, None, [], []

    def load_dataset_builder(name, config, revision):
        if module.error:
            raise module.error
        assert (name, config) == ("owner/name", "small")
        module.revisions.append(revision)
        info = types.SimpleNamespace(splits=None)
        return types.SimpleNamespace(hash=revision, info=info, as_streaming_dataset=as_streaming_dataset)

    def as_streaming_dataset(split):
        if split != "train":
            raise ValueError(f"Bad split: {split}. Available splits: ['train']")
        module.streams.append(Streamed(module.values, module.fails_at))
        return module.streams[-1]

    module.load_dataset_builder = load_dataset_builder
    monkeypatch.setitem(sys.modules, "datasets", module)
    return module


@pytest.fixture
def command(tmp_path):
    return ("--dataset", "owner/name:small", "--output", tmp_path / "store")


def test_rows_are_documents_and_the_limit_holds(tmp_path, package, command):
    assert run(*command) == 0 and texts(tmp_path / "store") == TEXTS
    assert run(*command, "--overwrite", "--max_tokens", 1000) == 0
    kept = texts(tmp_path / "store")
    assert kept == TEXTS[: len(kept)] and 900 < sum(len(t) + 1 for t in kept) <= 1000
    assert package.streams[-1].at < len(TEXTS)  # the rest is not read


def test_goes_on_where_it_stopped(tmp_path, package, command, capsys):
    package.fails_at = 200
    assert run(*command) == 2
    error = capsys.readouterr().err
    assert error == (
        "error: --dataset: owner/name:small:train: reading stopped after row 200: the server went away; "
        "give the same command again\n"
    )
    parts = tmp_path / "store.parts"
    (parts / "000001.json").unlink()  # as if a worker had been behind: the later parts are kept
    read = []
    package.fails_at, package.values = None, Watched(TEXTS, read)
    assert run(*command) == 0
    assert texts(tmp_path / "store") == TEXTS
    assert 0 < read[0] < 200 and read == list(range(read[0], 400))


class Watched(list):
    def __init__(self, values, read):
        super().__init__(values)
        self._read = read

    def __getitem__(self, at):
        self._read.append(at)
        return super().__getitem__(at)


def test_two_workers_make_the_same(tmp_path, package, command):
    assert run(*command, workers=2) == 0 and texts(tmp_path / "store") == TEXTS


def test_goes_on_with_the_revision_that_it_began_with(tmp_path, server, package, command, capsys):
    package.fails_at = 200
    assert run(*command) == 2
    server.repositories["datasets", "owner/name"].commit = NEWER
    package.fails_at = None
    assert run(*command) == 0
    assert package.revisions == [COMMIT, COMMIT]
    (source,) = json.loads((tmp_path / "store.json").read_text())["sources"]
    assert (source["path"], source["digest"]) == ("owner/name:small:train", COMMIT)
    # That the store is whole takes no network; a new one is of the newest revision.
    server.status = 503
    capsys.readouterr()
    assert run(*command) == 0 and "is whole already" in capsys.readouterr().out
    server.status = 0
    assert run(*command, "--overwrite") == 0 and package.revisions[2:] == [NEWER]


def test_going_on_without_network_is_one_line(tmp_path, server, package, command, capsys):
    package.fails_at = 200
    assert run(*command) == 2
    server.status = 503
    capsys.readouterr()
    assert run(*command) == 2
    assert (
        capsys.readouterr()
        .err.splitlines()[-1]
        .startswith(
            "error: --dataset: owner/name: the hub answers with status 503; give the command again later, or without "
        )
    )
    assert (tmp_path / "store.parts" / "000000.json").exists()


def test_what_cannot_be_had_is_one_line(tmp_path, server, package, command, capsys, monkeypatch):
    package.error = ConnectionError("Couldn't reach it")
    message = refused(capsys, *command)
    assert message.startswith("--dataset: owner/name:small: Couldn't reach it; without network, download its .parquet ")
    package.error = None
    assert refused(capsys, *command, "--split", "tset").endswith("['train']; mend --dataset NAME:CONFIG or --split")
    assert "has no field 'body' (its fields: id, text;" in refused(capsys, *command, "--text_field", "body")
    package.values = ["a", None]
    message = refused(capsys, *command)
    assert message == "owner/name:small:train: row 2: its field 'text' is null, not a string"
    server.repositories["datasets", "owner/name"].gated = True
    assert refused(capsys, *command) == (
        "--dataset: owner/name: is gated; accept its terms at https://huggingface.co/datasets/owner/name and run "
        "`hf auth login`"
    )
    for options in (("--input", tmp_path), ("--tfds", "x")):
        assert refused(capsys, *command, *options) == "--input: give it, --dataset or --tfds, one of the three"
    assert refused(capsys, "--output", tmp_path / "store") == "--input: give it, --dataset or --tfds, one of the three"
    file = tmp_path / "rows.parquet"
    file.touch()
    message = refused(capsys, "--dataset", file, "--output", tmp_path / "store")
    assert message == f"--dataset: {file}: is a file; give it by --input"
    monkeypatch.setitem(sys.modules, "datasets", None)
    assert refused(capsys, *command) == "--dataset: needs a package that is not installed: pip install datasets"
    assert nothing_written(tmp_path)


# With the package, in processes that have its address of the hub from their environment.

with_package = pytest.mark.skipif(importlib.util.find_spec("datasets") is None, reason="datasets is not installed")

COMMANDS = """
import contextlib, io, json, os, sys
from hybrid_jax.data import parts, prepare, train_tokenizer
prepare.PART_BYTES, train_tokenizer.SAMPLE_BYTES = 2**11, 2**12
stop, made = int(sys.argv[1]), parts.make_part
def make_part(job, number, *rest):
    if number == stop:
        os._exit(9)
    return made(job, number, *rest)
parts.make_part = make_part
for arguments in json.loads(sys.argv[2]):
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()) as error:
        code = prepare.main([*arguments, "--workers", "1"])
    print(json.dumps([code, out.getvalue(), error.getvalue()]))
"""


def run_apart(server, folder, *commands, stop=-1):
    """(exit code, stdout, stderr) of each command; or, with `stop`, they are ended before they make that part."""
    environment = os.environ | {"HF_ENDPOINT": server.url, "HF_HOME": str(folder / "hf"), "PYTHONPATH": str(ROOT)}
    commands = json.dumps([list(map(str, command)) for command in commands])
    command = [sys.executable, "-c", COMMANDS, str(stop), commands]
    done = subprocess.run(command, env=environment | {"NO_PROXY": "127.0.0.1"}, capture_output=True, text=True)
    assert done.returncode == (9 if stop >= 0 else 0) and done.stderr == "", done.stderr
    return [tuple(json.loads(line)) for line in done.stdout.splitlines()]


def parquet(rows):
    import pyarrow.parquet

    file = io.BytesIO()
    table = pyarrow.table({"id": list(range(len(rows))), "text": rows})
    pyarrow.parquet.write_table(table, file, row_group_size=50)
    return file.getvalue()


README = b"""---
configs:
- config_name: small
  data_files:
  - {split: train, path: small/train-*.parquet}
  - {split: test, path: small/test-*.parquet}
- config_name: large
  data_files: large/*.parquet
---
"""


def files(rows):
    return {
        "README.md": README,
        "small/train-0.parquet": parquet(rows[:150]),
        "small/train-1.parquet": parquet(rows[150:]),
        "small/test-0.parquet": parquet(["test"]),
        "large/0.parquet": parquet(["large"]),
    }


@with_package
def test_killed_it_goes_on_with_the_rows_it_began_with(tmp_path, server, command):
    server.repositories["datasets", "owner/name"] = Repository(files(TEXTS))
    run_apart(server, tmp_path, command, stop=5)
    newer = Repository(files(["other"] * 400), NEWER, earlier={COMMIT: files(TEXTS)})
    server.repositories["datasets", "owner/name"] = newer
    ((code, _, error),) = run_apart(server, tmp_path, command)
    assert code == 0 and "prepare: 5 parts are whole already" in error
    assert texts(tmp_path / "store") == TEXTS
    (source,) = json.loads((tmp_path / "store.json").read_text())["sources"]
    assert source["digest"] == COMMIT


REFUSED = (
    (
        "owner/name:huge",
        "train",
        "BuilderConfig 'huge' not found. Available: ['small', 'large']; mend --dataset NAME:C",
    ),
    ("owner/name", "train", "Config name is missing. Please pick one among the available configs: ['small', 'large']"),
    (
        "owner/name:small",
        "x",
        "Bad split: x. Available splits: ['train', 'test']; mend --dataset NAME:CONFIG or --split",
    ),
    ("owner/empty", "train", ""),
)


@with_package
def test_local_folders_samples_and_what_is_refused(tmp_path, server, command):
    """In one process, as the package takes seconds to import."""
    server.repositories["datasets", "owner/name"] = Repository(files(TEXTS))
    server.repositories["datasets", "owner/empty"] = Repository({"README.md": b""})
    folder, empty, sampled = (tmp_path / name for name in ("rows", "empty", "sampled"))
    for path in (folder, empty, sampled):
        path.mkdir()
    (folder / "train-0.parquet").write_bytes(parquet(TEXTS))
    local = ("--dataset", folder, *command[2:])
    none = ("--dataset", empty, "--output", tmp_path / "store2")
    trained = (*command[:2], "--output", sampled / "store", "--train_tokenizer", 300)
    refused = [("--dataset", name, "--split", split, *none[2:]) for name, split, _ in REFUSED]
    first, again, *others, sample = run_apart(server, tmp_path, local, local, none, *refused, trained)

    assert first[0] == again[0] == 0 and "is whole already" in again[1]
    assert texts(tmp_path / "store") == TEXTS
    (source,) = json.loads((tmp_path / "store.json").read_text())["sources"]
    assert source["path"] == f"{folder}:train" and len(source["digest"]) < len(COMMIT)

    lines = [
        (str(empty), "train", f"The directory at {empty} doesn't contain any data files; give its files by --input")
    ]
    for (code, _, error), (name, _, what) in zip(others, [*lines, *REFUSED], strict=True):
        assert code == 2 and error.count("\n") == 1 and error.startswith(f"error: --dataset: {name}: {what}")
    assert not list(tmp_path.glob("store2*"))

    assert sample[0] == 0  # and all rows are in the store, also those that were read for the sample
    about = json.loads((sampled / "store.json").read_text())
    assert about["documents"] == len(TEXTS) and about["text_bytes"] == sum(map(len, TEXTS))
    assert 2**12 <= about["tokenizer"]["trained_on"] < 2**13

"""A Hugging Face data set to a token store, with a stand-in for the package `datasets`."""

import sys
import types

import pytest

from hybrid_jax.data import prepare
from tests.data.test_prepare import nothing_written, refused, run, texts

TEXTS = [f"row {i} " + "x" * (i % 50) for i in range(400)]


class Streamed:
    """Of datasets.IterableDataset what is used: columns, iteration, state."""

    def __init__(self, values, fails_at=None):
        self.values, self.fails_at, self.at = values, fails_at, 0
        self.column_names = ["id", "text"]

    def select_columns(self, names):
        assert names == ["text"]
        return self

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.at = state["at"]

    def __iter__(self):
        while self.at < len(self.values):
            if self.at == self.fails_at:
                raise ConnectionError("the server\nwent away")
            self.at += 1
            yield {"text": self.values[self.at - 1]}


@pytest.fixture
def hub(monkeypatch):
    """datasets; its `values`, `fails_at`, `hash` and `error` may be set."""
    monkeypatch.setattr(prepare, "PART_BYTES", 2**11)
    module = types.ModuleType("datasets")
    module.values, module.fails_at, module.hash, module.error, module.streams = TEXTS, None, "abc", None, []

    def load_dataset_builder(name, config):
        if module.error:
            raise module.error
        assert (name, config) == ("owner/name", "small")
        info = types.SimpleNamespace(splits=None)
        return types.SimpleNamespace(hash=module.hash, info=info, as_streaming_dataset=as_streaming_dataset)

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


def test_rows_are_documents_and_the_limit_holds(tmp_path, hub, command):
    assert run(*command) == 0 and texts(tmp_path / "store") == TEXTS
    assert run(*command, "--overwrite", "--max_tokens", 1000) == 0
    kept = texts(tmp_path / "store")
    assert kept == TEXTS[: len(kept)] and 900 < sum(len(t) + 1 for t in kept) <= 1000
    assert hub.streams[-1].at < len(TEXTS)  # the rest is not read


def test_goes_on_where_it_stopped(tmp_path, hub, command, capsys):
    hub.fails_at = 200
    assert run(*command) == 2
    error = capsys.readouterr().err
    assert error == (
        "error: --dataset: owner/name:small:train: reading stopped after row 200: the server went away; "
        "give the same command again\n"
    )
    parts = tmp_path / "store.parts"
    (parts / "000001.json").unlink()  # as if a worker had been behind: the later parts are kept
    read = []
    hub.fails_at, hub.values = None, Watched(TEXTS, read)
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


def test_two_workers_make_the_same(tmp_path, hub, command):
    assert run(*command, workers=2) == 0 and texts(tmp_path / "store") == TEXTS


def test_another_revision_is_refused(tmp_path, hub, command, capsys):
    hub.fails_at = 200
    assert run(*command) == 2
    capsys.readouterr()
    hub.hash = "def"
    assert "the data set owner/name:small:train has changed" in refused(capsys, *command)


def test_what_cannot_be_had_is_one_line(tmp_path, hub, command, capsys, monkeypatch):
    for error, what in (
        (ConnectionError("Couldn't reach it"), "Couldn't reach it; without network, download its .parquet files"),
        (RuntimeError("'x' is a gated dataset"), "'x' is a gated dataset; accept its terms at https://huggingface.co/"),
    ):
        hub.error = error
        assert refused(capsys, *command).startswith(f"--dataset: owner/name:small: {what}")
    hub.error = None
    assert refused(capsys, *command, "--split", "tset").endswith("['train']; mend --dataset NAME:CONFIG or --split")
    assert "has no field 'body' (its fields: id, text;" in refused(capsys, *command, "--text_field", "body")
    hub.values = ["a", None]
    message = refused(capsys, *command)
    assert message == "owner/name:small:train: row 2: its field 'text' is null, not a string"
    assert refused(capsys, *command, "--input", tmp_path) == "--input: give it or --dataset, one of the two"
    assert refused(capsys, "--output", tmp_path / "store") == "--input: give it or --dataset, one of the two"
    monkeypatch.setitem(sys.modules, "datasets", None)
    assert refused(capsys, *command) == "--dataset: needs a package that is not installed: pip install datasets"
    assert nothing_written(tmp_path)

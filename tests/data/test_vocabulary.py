"""Tokenizers of prepare by their name on a Hugging Face hub, which is on this machine."""

import hashlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import tokenizers
from huggingface_hub import constants

from hybrid_jax.data import parts, prepare
from hybrid_jax.data.tokenizer import from_manifest
from tests.data.hub_server import COMMIT, Repository
from tests.data.test_prepare import ROOT, nothing_written, refused, run, write

NEWER = COMMIT[::-1]


def definition(text, end="<|endoftext|>"):
    bpe = tokenizers.Tokenizer(tokenizers.models.BPE())
    bpe.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=262, special_tokens=[end], initial_alphabet=alphabet, show_progress=False
    )
    bpe.train_from_iterator([text], trainer)
    return bpe.to_str().encode()


FIRST, OTHER = definition("first words first words"), definition("other letters other letters")


@pytest.fixture
def model(server):
    server.repositories["models", "owner/name"] = Repository({"tokenizer.json": FIRST, "config.json": b"{}"})
    return server.repositories["models", "owner/name"]


@pytest.fixture
def command(tmp_path):
    write(tmp_path / "in", {f"{i}.txt": f"first words {i} " * 40 for i in range(9)})
    return ("--input", tmp_path / "in", "--output", tmp_path / "store", "--tokenizer", "owner/name")


def made_with(folder):
    return (folder / "store.tokenizer.json").read_bytes(), json.loads((folder / "store.json").read_text())["tokenizer"]


def test_a_model_of_the_hub(tmp_path, server, model, command, capsys):
    assert run(*command) == 0
    content, about = made_with(tmp_path)
    assert content == FIRST
    assert about.pop("bytes_per_token") > 1.5
    sha256 = hashlib.sha256(FIRST).hexdigest()
    size = {"vocab_size": 262, "end_of_document": 0}
    assert about == {"name": "owner/name", "revision": COMMIT, "sha256": sha256, **size}
    t = from_manifest(tmp_path / "store")
    assert t.decode(t.encode("first words")) == "first words"
    # From here on it is in the cache.
    server.status = 503
    assert run(*command) == 0 and "is whole already" in capsys.readouterr().out
    assert run(*command, "--overwrite") == 0 and made_with(tmp_path)[1]["revision"] == COMMIT


def test_what_is_here_goes_first(tmp_path, server, model, command, monkeypatch):
    write(tmp_path, {"owner/name/tokenizer.json": OTHER})
    monkeypatch.chdir(tmp_path)
    assert run(*command) == 0
    content, about = made_with(tmp_path)
    assert content == OTHER and "revision" not in about and not server.asked


def test_goes_on_with_the_tokenizer_that_it_began_with(tmp_path, server, model, command, capsys, monkeypatch):
    monkeypatch.setattr(prepare, "PART_BYTES", 2**10)
    made = parts.make_part

    def make_part(job, number, *rest):
        if number == 2:
            raise KeyboardInterrupt
        return made(job, number, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(parts, "make_part", make_part)
        assert run(*command) == 130
    model.commit, model.files = NEWER, {"tokenizer.json": OTHER}
    shutil.rmtree(constants.HF_HUB_CACHE)
    server.asked.clear()
    capsys.readouterr()
    assert run(*command) == 0
    assert "2 of 9 parts are whole already" in capsys.readouterr().err
    content, about = made_with(tmp_path)
    assert content == FIRST and about["revision"] == COMMIT and not server.asked
    assert run(*command, "--overwrite") == 0
    assert made_with(tmp_path)[0] == OTHER and made_with(tmp_path)[1]["revision"] == NEWER


def test_transformers_is_not_imported(tmp_path, server, model, command):
    environment = os.environ | {"HF_ENDPOINT": server.url, "HF_HOME": str(tmp_path / "hf"), "PYTHONPATH": str(ROOT)}
    code = (
        "import sys; from hybrid_jax.data import prepare; code = prepare.main(sys.argv[1:]); "
        "sys.exit(code or ('transformers' in sys.modules) or ('jax' in sys.modules))"
    )
    command = [sys.executable, "-c", code, *map(str, command), "--workers", "1"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0 and done.stderr == "", done.stderr
    assert made_with(tmp_path)[0] == FIRST


def test_what_cannot_be_had_is_one_line(tmp_path, server, model, command, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    here = "--tokenizer: no such file or folder here, and of the hub"

    def message(name):
        return refused(capsys, *command[:-1], name)

    assert message("owner/none") == (
        f"{here} owner/none: the hub has no such model, or it is private: mend the name or run `hf auth login`"
    )
    assert message("words").startswith(f"{here} words: ")
    model.gated = True
    assert message("owner/name") == (
        f"{here} owner/name: is gated; accept its terms at https://huggingface.co/owner/name and run `hf auth login`"
    )
    model.gated = False
    model.files = {"vocab.txt": b""}
    assert message("owner/name").startswith(f"{here} owner/name: has no tokenizer.json; name a model that has one, or ")
    for name in ("no/such/file", "./name", "name/tokenizer.json", "~/none"):
        file = Path(name).expanduser()
        assert message(name) == (
            f"--tokenizer: {file}: No such file or directory; give a tokenizer.json or a folder with one"
        )
    model.files = {"tokenizer.json": b"{}"}
    assert message("owner/name").startswith("--tokenizer: owner/name: is not a tokenizer.json: ")
    shutil.rmtree(constants.HF_HUB_CACHE)
    model.files = {"tokenizer.json": definition("a", end="<other>")}
    assert message("owner/name").startswith("--eod_token: owner/name has none of <|endoftext|>, ")
    shutil.rmtree(constants.HF_HUB_CACHE)
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    assert message("owner/name").startswith(f"{here} owner/name: no connection to the hub (")
    assert nothing_written(tmp_path)

"""The export command: what it writes, and that a fault leaves one line and nothing else."""

import errno
import json
import os
import re
import signal
import subprocess
import sys
import types
from pathlib import Path

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file

from hybrid_jax import export, trained
from hybrid_jax.data.tokenizer import BpeTokenizer, ByteTokenizer, IdTokenizer
from hybrid_jax.interop import exporter, shards
from hybrid_jax.model import Model
from tests.tiny import tiny_config
from tests.written import in_memory, perturbed, write_run

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run of a dense model over bytes, with two checkpoints."""
    cfg = tiny_config(tmp_path_factory.mktemp("export") / "run", model__pattern="A-A-A-", model__vocab_size=257)
    return write_run(cfg, perturbed(Model(cfg.model)), steps=(1, 2), tokenizer=ByteTokenizer())


def _export(run, out, *more):
    return export.main(["--checkpoint", str(run), "--out", str(out), *more])


def test_what_lies_in_the_folder(run, tmp_path, capsys):
    assert _export(run, tmp_path / "out") == 0
    about = "llama of transformers, 11,136 parameters in float32, 44.5kB in model.safetensors"
    assert capsys.readouterr().out == f"{tmp_path / 'out'}: {about}\n"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out"]
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "README.md", "config.json", "generation_config.json", "model.safetensors", "tokenizer.json",
        "tokenizer_config.json",
    ]  # fmt: skip
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"] and config["model_type"] == "llama"
    assert config["eos_token_id"] == 256 and config["bos_token_id"] is None
    assert config["max_position_embeddings"] == 32 and config["dtype"] == "float32"
    generation = json.loads((tmp_path / "out" / "generation_config.json").read_text())
    assert generation["eos_token_id"] == 256
    card = (tmp_path / "out" / "README.md").read_text()
    for row in (
        "library_name: transformers",
        "| parameters | 11,136 |",
        "| stack | `embed > 3 x [GQA MLP] > norm > head` |",
        "| steps | 2 of 4 |",
        "| tokens | 256 |",
        "| training loss | 1.5000 nats a token (perplexity 4.482) |",
        "| learning rate | 0.01 to 0.001, cosine |",
    ):
        assert row in card
    assert "Evaluation" not in card


def test_the_safetensors_library_reads_the_files(run, tmp_path):
    """Also in several files, whatever order they were filled in."""
    assert _export(run, tmp_path / "one") == 0
    assert _export(run, tmp_path / "some", "--max_shard_size", "9kB") == 0
    whole = load_file(tmp_path / "one" / "model.safetensors")
    with safe_open(tmp_path / "one" / "model.safetensors", "numpy") as opened:
        assert opened.metadata() == {"format": "pt"}
    index = json.loads((tmp_path / "some" / shards.INDEX).read_text())
    files = sorted(path.name for path in (tmp_path / "some").glob("*.safetensors"))
    assert files[0] == f"model-00001-of-{len(files):05}.safetensors" and len(files) == 5
    assert sorted(set(index["weight_map"].values())) == files
    assert index["metadata"]["total_size"] == sum(x.nbytes for x in whole.values())
    parts = {}
    for file in files:
        tensors = load_file(tmp_path / "some" / file)
        size = sum(x.nbytes for x in tensors.values())
        assert size <= 9000 or len(tensors) == 1
        assert {name for name, where in index["weight_map"].items() if where == file} == set(tensors)
        parts |= tensors
    assert set(parts) == set(whole)
    for name, tensor in whole.items():
        np.testing.assert_array_equal(parts[name], tensor)
    tree = trained.open(run)
    np.testing.assert_array_equal(whole["model.norm.weight"], tree.read("norm.weight"))
    np.testing.assert_array_equal(
        whole["model.layers.1.mlp.down_proj.weight"], tree.read("layers.1.mlp.down_proj.weight", 1).T
    )


@pytest.mark.torch
def test_bfloat16_and_float16_are_rounded_to_nearest_even(run, tmp_path):
    import torch
    from safetensors.torch import load_file as load_torch

    assert _export(run, tmp_path / "float32") == 0
    whole = load_torch(tmp_path / "float32" / "model.safetensors")
    for name, dtype in (("bfloat16", torch.bfloat16), ("float16", torch.float16)):
        assert _export(run, tmp_path / name, "--dtype", name) == 0
        rounded = load_torch(tmp_path / name / "model.safetensors")
        assert set(rounded) == set(whole)
        for key, tensor in whole.items():
            assert rounded[key].dtype == dtype and torch.equal(rounded[key], tensor.to(dtype))


def test_ties_are_rounded_to_even(tmp_path):
    """1 + 2^-8 lies between two bfloat16 numbers; so does 1 + 3 * 2^-8, whose even neighbour is the larger one."""
    writer = shards.ShardWriter(tmp_path, {"x": (2,)}, "BF16", 2**30)
    with writer:
        writer.write("x", np.asarray([1 + 2**-8, 1 + 3 * 2**-8], np.float32))
    got = shards.ShardReader(tmp_path).read("x")
    np.testing.assert_array_equal(np.asarray(got, np.float32), [1.0, 1 + 2**-6])


def test_evaluations_of_the_checkpoint_are_in_the_card(run, tmp_path):
    (run / "evaluation").mkdir(exist_ok=True)
    task = {
        "num_fewshot": 0,
        "metrics": {"acc": {"value": 0.25, "stderr": 0.0125}, "odd": {"value": None, "stderr": None}},
    }
    (run / "evaluation" / "1.json").write_text(json.dumps({"tasks": {"piqa": task}}))
    assert _export(run, tmp_path / "1", "--step", "1") == 0
    assert _export(run, tmp_path / "2") == 0
    assert "| piqa | 0 | acc | 0.2500 | 0.0125 |" in (tmp_path / "1" / "README.md").read_text()
    assert "Evaluation" not in (tmp_path / "2" / "README.md").read_text()


def test_the_tokenizer(run, tmp_path, capsys):
    import tokenizers

    cfg = tiny_config(tmp_path / "ids", model__pattern="A-")
    ids = write_run(cfg, perturbed(Model(cfg.model)), tokenizer=IdTokenizer(64, 63))
    assert _export(ids, tmp_path / "none") == 0
    assert "no tokenizer beside it: the run was trained on ids without text" in capsys.readouterr().out
    assert not (tmp_path / "none" / "tokenizer.json").exists()

    bpe = tokenizers.Tokenizer(tokenizers.models.BPE({"a": 0, "b": 1, "ab": 2}, [("a", "b")]))
    bpe.save(str(tmp_path / "tokenizer.json"))
    assert _export(ids, tmp_path / "given", "--tokenizer", str(tmp_path / "tokenizer.json")) == 0
    assert json.loads((tmp_path / "given" / "tokenizer.json").read_text())["model"]["vocab"] == {
        "a": 0,
        "b": 1,
        "ab": 2,
    }
    assert json.loads((tmp_path / "given" / "config.json").read_text())["eos_token_id"] == 2
    assert _export(run, tmp_path / "left", "--tokenizer", "none") == 0
    assert not (tmp_path / "left" / "tokenizer.json").exists()

    known = BpeTokenizer.from_bpe(bpe)
    _write = in_memory(cfg, perturbed(Model(cfg.model)), known)
    done = exporter.export(_write, tmp_path / "bpe", max_shard_bytes=2**30)
    assert done.has_tokenizer
    assert json.loads((tmp_path / "bpe" / "config.json").read_text())["eos_token_id"] == 3


# ---- faults --------------------------------------------------------------------


def _refused(capsys, match, run, out, *more):
    before = sorted(out.parent.iterdir()) if out.parent.is_dir() else []
    assert _export(run, out, *more) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1
    assert re.search(match, error), error
    assert (sorted(out.parent.iterdir()) if out.parent.is_dir() else []) == before


def test_faults_are_one_line(run, tmp_path, capsys, monkeypatch):
    out = tmp_path / "out"
    (tmp_path / "11.orbax-checkpoint-tmp").mkdir()
    _refused(capsys, "not written to its end", tmp_path / "11.orbax-checkpoint-tmp", out)
    _refused(capsys, "no such folder; give that of a run", tmp_path / "nowhere", out)
    _refused(capsys, "is not a run", tmp_path, out)
    _refused(capsys, "has no checkpoint 3; there are 1, 2", run, out, "--step", "3")
    kda = "--format: kda cannot hold this model: it has KDA and .*; use --format llama"
    _refused(capsys, kda, run, out, "--format", "kda")
    _refused(capsys, "--format: 'gguf' is not one of auto, llama", run, out, "--format", "gguf")
    _refused(capsys, "--dtype: 'int8' is not one of float32, bfloat16, float16", run, out, "--dtype", "int8")
    _refused(capsys, "--max_shard_size: 'big' is not a size such as 5GB", run, out, "--max_shard_size", "big")
    _refused(capsys, "there is no folder .*; make it first", run, tmp_path / "a" / "b")
    _refused(capsys, "--tokenizer: .*: No such file", run, out, "--tokenizer", str(tmp_path / "tokenizer.json"))
    (tmp_path / "file").touch()
    _refused(capsys, "is there and is no folder", run, tmp_path / "file")
    monkeypatch.setattr("shutil.disk_usage", lambda path: types.SimpleNamespace(free=1000))
    _refused(capsys, r"--out: needs 1\.09MB and .* has 1kB left; free some space", run, out)


def test_values_beyond_float16_are_named(tmp_path, capsys):
    cfg = tiny_config(tmp_path / "run", model__pattern="A-")
    params = perturbed(Model(cfg.model))
    params["norm"]["weight"] = params["norm"]["weight"].at[0].set(70000.0)
    run = write_run(cfg, params)
    large = "--dtype: model.norm.weight has values up to 7e.04, which are more than float16 can"
    _refused(capsys, large, run, tmp_path / "o", "--dtype", "float16")
    assert _export(run, tmp_path / "out", "--dtype", "bfloat16") == 0


def test_a_folder_that_is_there(run, tmp_path, capsys):
    out = tmp_path / "out"
    out.mkdir()
    assert _export(run, out) == 0  # it was empty
    (out / "old").touch()
    _refused(capsys, "is there already; name another, or --overwrite replaces it", run, out)
    assert _export(run, out, "--overwrite") == 0
    assert not (out / "old").exists() and (out / "model.safetensors").exists()
    _refused(capsys, "is not an exported model, so it is not replaced", run, run, "--overwrite")
    assert trained.open(run).step == 2
    (out / "config.json").unlink()
    _refused(capsys, "is not an exported model, so it is not replaced", run, out, "--overwrite")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out"]


def test_a_full_disk_leaves_nothing(run, tmp_path, capsys, monkeypatch):
    out, real = tmp_path / "out", os.pwrite
    assert _export(run, out) == 0
    before = (out / "model.safetensors").read_bytes()

    def full(descriptor, content, offset):
        if offset > 20000:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(descriptor, content, offset)

    monkeypatch.setattr(os, "pwrite", full)
    _refused(capsys, "--out: .*: No space left on device; nothing was written", run, tmp_path / "new")
    _refused(capsys, "No space left on device", run, out, "--overwrite")
    assert (out / "model.safetensors").read_bytes() == before


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_command_leaves_nothing(run, tmp_path, number):
    """It is stopped for good after its third tensor, so that the signal finds it writing."""
    code = (
        "import os, sys, time\n"
        "from hybrid_jax import export\n"
        "from hybrid_jax.interop import shards\n"
        "real, count = shards.ShardWriter.write, []\n"
        "def slow(self, *arguments):\n"
        "    real(self, *arguments)\n"
        "    count.append(1)\n"
        "    while len(count) == 3:\n"
        "        print('writing', flush=True)\n"
        "        time.sleep(0.1)\n"
        "shards.ShardWriter.write = slow\n"
        "sys.exit(export.main(sys.argv[1:]))\n"
    )
    command = [sys.executable, "-c", code, "--checkpoint", str(run), "--out", str(tmp_path / "out")]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "writing\n"
    assert (tmp_path / ".out.partial" / "model.safetensors").exists()
    process.send_signal(number)
    _, error = process.communicate(timeout=60)
    assert process.returncode == 130 and error.strip() == "stopped: nothing was written"
    assert not list(tmp_path.iterdir())


def test_what_a_killed_command_left_is_removed(run, tmp_path):
    (tmp_path / ".out.partial").mkdir()
    (tmp_path / ".out.partial" / "model.safetensors").write_bytes(b"half")
    assert _export(run, tmp_path / "out") == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out"]


def test_two_at_once(run, tmp_path, capsys):
    import fcntl

    with (tmp_path / ".out.partial.lock").open("a") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        _refused(capsys, "another process is writing", run, tmp_path / "out")


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs Linux")
def test_one_tensor_is_in_memory_at_a_time(tmp_path):
    """Less than all of them, in a process of its own: the largest here is 96 MiB of 144. Memory that is freed goes
    back at once there, so that the peak is of what is held."""
    cfg = tiny_config(
        tmp_path / "run", model__pattern="A-" * 4, model__hidden_size=256, model__intermediate_size=4096,
        model__vocab_size=98304, model__gqa__num_heads=4,
    )  # fmt: skip
    write_run(cfg, perturbed(Model(cfg.model)), moments=False)
    code = (
        "import pathlib, sys, threading, time\n"
        "from hybrid_jax import platform; platform.prepare('cpu')\n"
        "from hybrid_jax import trained\n"
        "from hybrid_jax.interop import exporter, formats\n"
        "opened = trained.open(sys.argv[1]); opened.read('norm.weight'); opened.tokenizer()\n"
        "formats.choose(opened.config).entries(opened.config)\n"
        "rss = lambda: int(pathlib.Path('/proc/self/statm').read_text().split()[1]) * 4096\n"
        "seen = [rss()]\n"
        "def watch():\n"
        "    while True: seen.append(rss()); time.sleep(0.0005)\n"
        "threading.Thread(target=watch, daemon=True).start()\n"
        "exporter.export(opened, pathlib.Path(sys.argv[2]), max_shard_bytes=2**30)\n"
        "print(max(seen) - seen[0])\n"
    )
    env = {**os.environ, "MALLOC_ARENA_MAX": "1", "MALLOC_MMAP_THRESHOLD_": "65536"}
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "run"), str(tmp_path / "out")],
        cwd=ROOT, env=env, capture_output=True, text=True, check=True,
    )  # fmt: skip
    grown, largest = int(done.stdout.splitlines()[-1]), 98304 * 256 * 4
    total = (tmp_path / "out" / "model.safetensors").stat().st_size
    assert total > 1.5 * largest
    assert grown < total, f"{grown / 2**20:.0f} MiB"

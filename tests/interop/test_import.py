"""Checkpoints of other libraries, imported: the parameters they hold, and back again bit for bit.

tests/golden/models holds what transformers 5.24.0 and flash-linear-attention 0.6.0 wrote; tests/test_golden_models.py
says what those models compute.
"""

import dataclasses
import json
import pathlib
import struct

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from hybrid_jax import config_file, import_hf, trained
from hybrid_jax.config import Config
from hybrid_jax.interop import exporter, importer
from hybrid_jax.interop.shards import INDEX
from hybrid_jax.model import Model
from tests.interop.models import CASES
from tests.test_golden_models import GOLDEN, NAMES, read, tree_of
from tests.written import in_memory, perturbed

CONFIGS = pathlib.Path(__file__).parents[2] / "configs"
FORMATS = {"gdn_tied": "gated_deltanet", "gdn_untied_expandv2": "gated_deltanet", "kda_tied": "kda"}


@pytest.mark.parametrize("name", NAMES)
def test_golden_models(tmp_path, name):
    """The parameters whose logits, gradients and tokens are compared elsewhere, and every tensor back."""
    source = GOLDEN / name
    done = importer.read(source)
    importer.write(done, source, tmp_path / "run", overwrite=False)
    assert done.format.name == FORMATS.get(name, name)
    found = trained.open(tmp_path / "run")
    assert found.step == 0 and found.meta["imported"]["format"] == done.format.name
    assert found.config.model == read(name)[1].model
    tensors = load_file(source / "model.safetensors")
    jax.tree.map(np.testing.assert_array_equal, found.params(), tree_of(name, tensors))
    exporter.export(found, tmp_path / "out", max_shard_bytes=2**30)
    back = load_file(tmp_path / "out" / "model.safetensors")
    renamed = {name.replace(".block_sparse_moe.", ".mlp."): x for name, x in tensors.items()}
    assert set(back) == set(renamed)
    inexact = {name for name in back if not np.array_equal(back[name], renamed[name])}
    if name != "qwen3_5_text":
        assert not inexact
        return
    # It stores w - 1, which as w loses bits below 2^-24.
    assert all(name.endswith("norm.weight") for name in inexact)
    for name in inexact:
        np.testing.assert_allclose(back[name], renamed[name], rtol=0, atol=2**-23)


def _reduced(file, tied):
    """A config of configs/ at a small width, its stack and everything else as it is."""
    model = config_file.load(str(file)).model
    rank = {"q_lora_rank": 12, "kv_lora_rank": 8, "qk_nope_head_dim": 4, "qk_rope_head_dim": 4, "v_head_dim": 8}
    return Config(
        model=dataclasses.replace(
            model, vocab_size=40, hidden_size=16, intermediate_size=24, tie_word_embeddings=tied,
            mla=dataclasses.replace(model.mla, num_heads=2, **rank),
            gqa=dataclasses.replace(model.gqa, num_heads=2, num_kv_heads=1, head_dim=8),
            gdn=dataclasses.replace(model.gdn, num_heads=1, num_v_heads=2, head_dim=8),
            kda=dataclasses.replace(model.kda, num_heads=2, num_v_heads=2, head_dim=4),
            mamba2=dataclasses.replace(model.mamba2, state_size=4, head_dim=8, n_groups=2, expand=2),
        )
    )  # fmt: skip


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("file", sorted(CONFIGS.glob("*.py")), ids=lambda file: file.stem)
def test_every_published_config_there_and_back(tmp_path, file, tied):
    config = _reduced(file, tied)
    params = perturbed(Model(config.model))
    done = exporter.export(in_memory(config, params), tmp_path / "out", max_shard_bytes=2**30)
    back = importer.read(tmp_path / "out")
    assert back.format is done.format and back.config.model.layout == config.model.layout
    jax.tree.map(np.testing.assert_array_equal, back.params, params)


ROUND_TRIPS = [(name, case) for name, cases in CASES.items() for case in list(cases)[:2]]


@pytest.mark.parametrize("name, case", ROUND_TRIPS)
def test_there_and_back(tmp_path, name, case):
    """Ours, written in a format and read again: the same parameters, tied or not, in one file or in several."""
    config = CASES[name][case]
    params = perturbed(Model(config.model))
    exporter.export(in_memory(config, params), tmp_path / "out", format_name=name, max_shard_bytes=2**13)
    assert (tmp_path / "out" / INDEX).exists()
    done = importer.read(tmp_path / "out")
    assert done.format.name == name and done.dtypes["F32"] == sum(done.dtypes.values())
    exporter.export(in_memory(done.config, done.params), tmp_path / "again", format_name=name, max_shard_bytes=2**13)
    for file in sorted((tmp_path / "out").glob("model*")):
        assert file.read_bytes() == (tmp_path / "again" / file.name).read_bytes()
    if "interleaved" not in case:  # those come back with half-split pairs
        jax.tree.map(np.testing.assert_array_equal, done.params, params)


def test_bfloat16_is_read_exactly(tmp_path):
    import jax.numpy as jnp

    config = CASES["llama"]["untied"]
    params = perturbed(Model(config.model))
    exporter.export(in_memory(config, params), tmp_path / "out", dtype="bfloat16", max_shard_bytes=2**30)
    done = importer.read(tmp_path / "out")
    assert set(done.dtypes) == {"BF16"}
    rounded = jax.tree.map(lambda x: np.asarray(x.astype(jnp.bfloat16), np.float32), params)
    jax.tree.map(np.testing.assert_array_equal, done.params, rounded)


# ---- what is refused -----------------------------------------------------------


@pytest.fixture
def model(tmp_path):
    """A llama in three files with an index."""
    config = CASES["llama"]["untied"]
    params = perturbed(Model(config.model))
    exporter.export(in_memory(config, params), tmp_path / "model", max_shard_bytes=2**14)
    return tmp_path / "model"


def _refused(capsys, model, out, match):
    assert import_hf.main(["--model", str(model), "--out", str(out)]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1
    assert match in error, error
    assert not out.exists() and not list(out.parent.glob(f".{out.name}.*"))


def _rewrite(file, change):
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file, {"format": "pt"})


def _part(model, number=1):
    return sorted(model.glob("model-*.safetensors"))[number - 1]


def _cut(model):
    file = _part(model)
    file.write_bytes(file.read_bytes()[:-100])


def _length(model):
    file = _part(model)
    file.write_bytes(struct.pack("<Q", 2**40) + file.read_bytes()[8:])


def _garbage(model):
    file = _part(model)
    content = bytearray(file.read_bytes())
    content[8:20] = b"\xff" * 12
    file.write_bytes(content)


def _offsets(model):
    file = _part(model)
    content = file.read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    header = json.loads(content[8 : 8 + length])
    name = next(key for key in header if key != "__metadata__")
    header[name]["shape"][0] += 1
    text = json.dumps(header).encode()
    file.write_bytes(struct.pack("<Q", len(text)) + text + content[8 + length :])


def _index_without(model):
    index = json.loads((model / INDEX).read_text())
    del index["weight_map"]
    (model / INDEX).write_text(json.dumps(index))


def _config(**changes):
    def change(model):
        values = json.loads((model / "config.json").read_text())
        (model / "config.json").write_text(json.dumps({**values, **changes}))

    return change


def _tensors(change):
    """Changes the tensors of the first file, without an index that would contradict it."""

    def do(model):
        (model / INDEX).unlink()
        _rewrite(_part(model), change)

    return do


NORM = "model.layers.0.input_layernorm.weight"
FAULTS = {
    "truncated": (_cut, "model-00001-of-00004.safetensors: is cut off"),
    "header length": (_length, "model-00001-of-00004.safetensors: is damaged or no safetensors file: a header of"),
    "header": (_garbage, "model-00001-of-00004.safetensors: is damaged or no safetensors file: its header cannot"),
    "offsets": (_offsets, "model-00001-of-00004.safetensors: is damaged: its header's offsets do not fit its shapes"),
    "missing file": (lambda model: _part(model, 2).unlink(), "model-00002-of-00004.safetensors: no such file; model"),
    "index": (_index_without, f"{INDEX}: is damaged"),
    "index and file": (
        lambda model: _rewrite(_part(model), lambda t: t.pop("model.embed_tokens.weight")),
        "has no tensor model.embed_tokens.weight, which",
    ),
    "missing tensor": (_tensors(lambda t: t.pop("model.embed_tokens.weight")), "has no tensor model.embed_tokens"),
    "extra tensor": (
        _tensors(lambda t: t.update({"model.layers.0.self_attn.sinks": np.zeros(4, np.float32)})),
        "holds model.layers.0.self_attn.sinks, which config.json says nothing of",
    ),
    "shape": (
        _tensors(lambda t: t.update({"model.embed_tokens.weight": t["model.embed_tokens.weight"][:-1]})),
        "model.embed_tokens.weight is [49, 32], but config.json makes it [50, 32]",
    ),
    "dtype": (
        _tensors(lambda t: t.update({"model.embed_tokens.weight": np.zeros((50, 32), np.int32)})),
        "model.embed_tokens.weight is I32; only F32, BF16, F16 can be read",
    ),
    "not finite": (
        _tensors(lambda t: t.update({"model.embed_tokens.weight": np.full((50, 32), np.nan, np.float32)})),
        "model.embed_tokens.weight holds values that are not finite",
    ),
    "no config": (lambda model: (model / "config.json").unlink(), "holds no config.json, so it is no model's folder"),
    "broken config": (lambda model: (model / "config.json").write_text("{"), "config.json: is damaged: no JSON"),
    "another model": (_config(model_type="mixtral"), "model_type 'mixtral' cannot be imported; there are llama"),
    "tied with a head": (_config(tie_word_embeddings=True), "lm_head.weight is not the embedding, which config.json"),
    "no weights": (
        lambda model: [file.unlink() for file in [*model.glob("model-*"), model / INDEX]],
        "holds no .safetensors file",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_one_line(tmp_path, capsys, model, fault):
    change, match = FAULTS[fault]
    change(model)
    _refused(capsys, model, tmp_path / "run", match)


def test_wrong_folders(tmp_path, capsys, model):
    _refused(capsys, tmp_path / "nowhere", tmp_path / "run", "no such folder")
    _refused(capsys, tmp_path, tmp_path / "run", "holds no config.json")
    _refused(capsys, model, tmp_path / "none" / "run", "there is no folder")
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "notes.txt").touch()
    for more in ([], ["--overwrite"]):
        assert import_hf.main(["--model", str(model), "--out", str(tmp_path / "taken"), *more]) == 2
    first, second = capsys.readouterr().err.splitlines()
    assert "is there already" in first and "is not an imported run" in second
    assert [path.name for path in (tmp_path / "taken").iterdir()] == ["notes.txt"]


def test_the_tokenizer_is_carried_along(tmp_path, capsys, model):
    import tokenizers

    bpe = tokenizers.Tokenizer(tokenizers.models.BPE({"a": 0, "b": 1, "ab": 2}, [("a", "b")]))
    bpe.add_special_tokens(["<|eos|>"])
    bpe.save(str(model / "tokenizer.json"))
    (model / "tokenizer_config.json").write_text('{"chat_template": "..."}')
    _config(eos_token_id=[3, 1])(model)
    assert import_hf.main(["--model", str(model), "--out", str(tmp_path / "run")]) == 0
    assert "llama of transformers" in capsys.readouterr().out
    found = trained.open(tmp_path / "run")
    assert found.tokenizer().encode("abb") == [2, 1] and found.tokenizer().end_of_document == 3
    exporter.export(found, tmp_path / "out", max_shard_bytes=2**30)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (tmp_path / "out" / name).read_bytes() == (model / name).read_bytes()
    assert json.loads((tmp_path / "out" / "config.json").read_text())["eos_token_id"] == 3
    card = (tmp_path / "out" / "README.md").read_text()
    assert "| origin | imported from a model in the format `llama` |" in card and "learning rate" not in card

    bpe.add_special_tokens([f"<{number}>" for number in range(60)])
    bpe.save(str(model / "tokenizer.json"))
    _refused(capsys, model, tmp_path / "more", "has 64 ids, but config.json says 50")


def test_an_older_import_is_replaced(tmp_path, capsys, model):
    assert import_hf.main(["--model", str(model), "--out", str(tmp_path / "run")]) == 0
    assert "no tokenizer" not in capsys.readouterr().err
    (tmp_path / "run" / "notes.txt").touch()
    assert import_hf.main(["--model", str(model), "--out", str(tmp_path / "run")]) == 2
    assert import_hf.main(["--model", str(model), "--out", str(tmp_path / "run"), "--overwrite"]) == 0
    assert not (tmp_path / "run" / "notes.txt").exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model", "run"]
    (tmp_path / "run" / "checkpoints" / "1").mkdir()  # it was trained since
    assert import_hf.main(["--model", str(model), "--out", str(tmp_path / "run"), "--overwrite"]) == 2
    assert "is not an imported run without further checkpoints" in capsys.readouterr().err

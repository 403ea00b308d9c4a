"""The folder of a hybrid: its config.json in both directions, and loading it where hybrid_jax is not installed."""

import dataclasses
import json
import os
import subprocess
import sys

import numpy as np
import pytest

from hybrid_jax.config import Config, GDNConfig, Mamba2Config, ModelConfig
from hybrid_jax.errors import UserError
from hybrid_jax.interop import formats
from hybrid_jax.interop.hybrid import format as hybrid_format
from hybrid_jax.interop.hybrid.format import HYBRID
from tests.interop.models import CASES

LOADING = """
import sys, numpy, torch
from transformers import AutoModelForCausalLM, AutoConfig, AutoModel
assert not any(name.startswith("hybrid_jax") for name in sys.modules)
folder, saved = sys.argv[1:]
model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
ids = torch.tensor([[1, 2, 3, 4, 5, 6, 7]])
numpy.save(folder + "/logits.npy", model(ids).logits.detach().numpy())
model.save_pretrained(saved)
again = AutoModelForCausalLM.from_pretrained(saved, trust_remote_code=True)
assert torch.equal(again(ids).logits, model(ids).logits)
base = AutoModel.from_pretrained(saved, trust_remote_code=True)
assert torch.equal(base(ids).last_hidden_state, model.model(ids).last_hidden_state)
assert not any(name.split(".")[0] == "hybrid_jax" for name in sys.modules)
"""


@pytest.mark.parametrize("case", CASES["hybrid_jax"])
def test_config_json_is_the_model_exactly(case):
    config = CASES["hybrid_jax"][case]
    written = json.loads(json.dumps({"model_type": "hybrid_jax", **HYBRID.to_config(config)}))
    found, read = formats.read_config(written, "config.json")
    assert found is HYBRID and read.model == config.model


def test_every_key_of_the_model_is_in_it():
    """Unused sections and training's keys too, where they are not as they start."""
    model = ModelConfig(
        num_layers=6, attention_ratio=0.0, mixer="mamba2", vocab_size=9, hidden_size=8, intermediate_size=4,
        scan_layers=False, remat="full", loss_chunk_tokens=5, z_loss=1e-4, initializer_range=0.1, rescale_out_proj=True,
        gdn=GDNConfig(num_heads=3), mamba2=Mamba2Config(state_size=4, head_dim=4),
    )  # fmt: skip
    changed = [f.name for f in dataclasses.fields(model) if getattr(model, f.name) != getattr(ModelConfig(), f.name)]
    assert {"gdn", "remat", "z_loss", "num_layers", "scan_layers"} <= set(changed)
    written = json.loads(json.dumps(HYBRID.to_config(Config(model=model))))
    assert HYBRID.from_config(formats.Reader(written, "config.json")) == model
    assert "kda" not in written and written["layout"] == "S-S-S-"


def test_another_layout_wins_over_how_training_wrote_it():
    config = CASES["hybrid_jax"]["derived"]
    written = {**HYBRID.to_config(config), "layout": "G-"}
    assert HYBRID.from_config(formats.Reader(written, "c")).pattern == "G-"
    del written["training"]
    assert HYBRID.from_config(formats.Reader(written, "c")).layout == "G-"


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"layout": None}, "config.json: layout: expected text such as"),
        ({"layout": "G?"}, "config.json: config.model.pattern: unknown symbol '\\?'"),
        ({"gdn": {"heads": 3}}, "config.json: config.model.gdn.heads: unknown key"),
        ({"hidden_size": "wide"}, "config.json: config.model.hidden_size: expected a whole number"),
    ],
)
def test_what_a_config_json_cannot_say_is_named(changes, message):
    written = {"model_type": "hybrid_jax", **HYBRID.to_config(CASES["hybrid_jax"]["every kind"]), **changes}
    with pytest.raises(UserError, match=message):
        formats.read_config(written, "config.json")


@pytest.mark.torch
def test_a_folder_loads_where_hybrid_jax_is_not_installed(tmp_path):
    """In a fresh process, and once more after that process has saved it."""
    pytest.importorskip("transformers")
    import torch
    from safetensors.numpy import save_file

    from hybrid_jax.model import Model
    from tests.interop.hybrid_pairs import drawn, load, torch_model, torch_names

    config = CASES["hybrid_jax"]["every kind"]
    params = drawn(Model(config.model), 0)
    tensors = {name: x.numpy() for name, x in torch_names(config.model, params).items()}
    folder, saved = tmp_path / "exported", tmp_path / "saved"
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    about = {"model_type": HYBRID.name, "architectures": [HYBRID.architecture], **HYBRID.to_config(config)}
    (folder / "config.json").write_text(json.dumps(about))
    for file in HYBRID.files():
        (folder / file.name).write_bytes(file.read_bytes())
    environment = {**os.environ, "HF_HOME": str(tmp_path / "home"), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    environment.pop("PYTHONPATH", None)
    command = [sys.executable, "-P", "-c", LOADING, str(folder), str(saved)]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    model = torch_model(config.model)
    load(model, config.model, params)
    with torch.no_grad():
        want = model(torch.arange(1, 8)[None]).logits.numpy()
    np.testing.assert_allclose(np.load(folder / "logits.npy"), want, atol=1e-5)
    assert {file.name for file in saved.iterdir()} >= set(hybrid_format.FILES)
    _, read = formats.read_config(json.loads((saved / "config.json").read_text()), "config.json")
    assert read.model == config.model


def test_the_files_import_nothing_of_this_package():
    """Nor anything but torch and transformers, which a reader has."""
    import ast

    allowed = {"torch", "transformers", *sys.stdlib_module_names}
    assert {file.name for file in HYBRID.files()} == set(hybrid_format.FILES)
    local_of_model = set()
    for file in HYBRID.files():
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Import):
                assert all(alias.name.split(".")[0] in allowed for alias in node.names), file
            elif isinstance(node, ast.ImportFrom):
                local = node.level == 1 and f"{node.module}.py" in hybrid_format.FILES
                assert local or (not node.level and str(node.module).split(".")[0] in allowed), file
                if local and file.name == "modeling_hybrid.py":
                    local_of_model.add(f"{node.module}.py")
    # transformers 4 copies the model's file and those that it imports, and not those that these import.
    assert local_of_model | {"modeling_hybrid.py"} == set(hybrid_format.FILES)

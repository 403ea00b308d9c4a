"""Exports loaded by transformers' own classes, in fp32: the same logits as ours, from the same files.

Limits: logits 1e-4 max abs, and 1e-6 nats of Kullback-Leibler divergence at the worst position. T is no multiple of
any chunk.
"""

import json

import jax
import numpy as np
import pytest

from hybrid_jax.data.tokenizer import IdTokenizer
from hybrid_jax.interop import exporter
from hybrid_jax.model import Model
from tests.interop.models import CASES
from tests.written import in_memory, perturbed

pytestmark = pytest.mark.torch

# One or two of each class: by hand all of CASES were loaded.
CHECKED = [
    ("llama", "tied, interleaved"),
    ("llama", "yarn"),
    ("llama", "llama3"),
    ("qwen2", "tied, interleaved"),
    ("qwen3", "tied, interleaved"),
    ("mamba2", "untied"),
    ("kimi_linear", "untied"),
    ("kimi_linear", "tied, q latent"),
    ("deepseek_v3", "yarn"),
    ("qwen3_5_text", "untied"),
]
T = 37


def _log_softmax(x):
    x = x.astype(np.float64)
    x = x - x.max(-1, keepdims=True)
    return x - np.log(np.exp(x).sum(-1, keepdims=True))


def _kl(ours, theirs):
    p, q = _log_softmax(ours), _log_softmax(theirs)
    return float((np.exp(p) * (p - q)).sum(-1).max())


@pytest.mark.parametrize("name, case", CHECKED)
def test_logits(tmp_path, name, case):
    import torch
    import transformers

    transformers.utils.logging.disable_progress_bar()
    config = CASES[name][case]
    model = Model(config.model, backend="reference", attention="reference", compute_dtype="float32")
    logits = jax.jit(model.logits)
    tokens = np.random.default_rng(7).integers(0, config.model.vocab_size, (2, T))
    for seed in range(3):
        params = perturbed(model, seed)
        done = exporter.export(
            in_memory(config, params), tmp_path / "out", format_name=name, dtype="float32",
            max_shard_bytes=2**14 if seed else 2**30, overwrite=True,
        )  # fmt: skip
        assert (len(done.files) > 1) == bool(seed)
        theirs, loading = transformers.AutoModelForCausalLM.from_pretrained(
            done.out, dtype=torch.float32, output_loading_info=True
        )
        assert type(theirs).__name__ == done.format.architecture
        assert not any(loading[key] for key in ("missing_keys", "mismatched_keys", "unexpected_keys")), loading
        with torch.no_grad():
            want = theirs.eval()(torch.from_numpy(tokens)).logits.numpy()
        got = np.asarray(logits(params, tokens))
        assert np.abs(want).std() > 0.1
        error, kl = np.abs(got - want).max(), _kl(got, want)
        print(f"{name} {case} seed {seed}: max abs {error:.1e}, KL {kl:.1e}, rms {want.std():.2f}")
        assert error <= 1e-4 and kl <= 1e-6


def test_the_eos_and_dtype_are_read(tmp_path):
    import torch
    import transformers

    config = CASES["llama"]["untied"]
    params = perturbed(Model(config.model))
    known = IdTokenizer(config.model.vocab_size, 3)
    exporter.export(
        in_memory(config, params, known),
        tmp_path / "out",
        format_name="auto",
        dtype="bfloat16",
        max_shard_bytes=2**30,
        overwrite=False,
    )  # fmt: skip
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert theirs.dtype == torch.bfloat16 and theirs.config.max_position_embeddings == config.train.sequence_length
    assert theirs.config.eos_token_id == theirs.generation_config.eos_token_id == 3
    want = torch.from_numpy(np.array(params["embed"]["weight"])).to(torch.bfloat16)
    assert torch.equal(theirs.get_input_embeddings().weight, want)
    assert json.loads((tmp_path / "out" / "config.json").read_text())["torch_dtype"] == "bfloat16"

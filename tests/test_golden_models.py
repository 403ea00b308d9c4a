"""Whole models against logits, losses, gradients and greedy tokens computed by other implementations.

tests/golden/models holds tiny checkpoints with results of flash-linear-attention 0.6.0 (gdn_*, kda_*) and
transformers 5.24.0 (the others), in fp32; each model's meta.json says how far that source is from an independent
float64 computation. Limits: logits 3e-4 abs (delta-rule models) or 5e-5, gradients 2e-4 or 2e-5 relative L2.
"""

import dataclasses
import pathlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from hybrid_jax.config import (
    GDNConfig,
    GQAConfig,
    KDAConfig,
    Mamba2Config,
    MLAConfig,
    ModelConfig,
    RopeConfig,
)
from hybrid_jax.generate import generate
from hybrid_jax.model import Model

GOLDEN = pathlib.Path(__file__).parent / "golden" / "models"
DELTA = {"gdn_tied", "gdn_untied_expandv2", "kda_tied", "kimi_linear", "qwen3_5_text"}
NAMES = sorted(p.name for p in GOLDEN.iterdir())
MLA = MLAConfig(
    num_heads=4, q_lora_rank=24, kv_lora_rank=16, qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=12, norm_eps=1e-6
)
GQA = GQAConfig(num_heads=4, num_kv_heads=2, head_dim=16, rope=RopeConfig(style="half"))
GDN = GDNConfig(num_heads=2, num_v_heads=4, head_dim=16)
KDA = KDAConfig(num_heads=4, num_v_heads=4, head_dim=16)
MODELS = {
    "gdn_tied": dict(pattern="G-G-", gdn=GDN, tie_word_embeddings=True),
    "gdn_untied_expandv2": dict(pattern="G-G-", gdn=dataclasses.replace(GDN, num_v_heads=2, head_dim=32, expand_v=2.0)),
    "kda_tied": dict(pattern="K-K-", kda=dataclasses.replace(KDA, expand_v=2.0), tie_word_embeddings=True),
    "kimi_linear": dict(
        pattern="K-*-",
        norm_eps=1e-5,
        kda=dataclasses.replace(KDA, gate_bias=False),
        mla=dataclasses.replace(MLA, q_lora_rank=0, rope=RopeConfig(style="none")),
    ),
    "mamba2": dict(
        pattern="SS",
        norm_eps=1e-5,
        mamba2=Mamba2Config(state_size=16, head_dim=16, n_groups=2, expand=2, chunk_size=32),
        tie_word_embeddings=True,
    ),
    "deepseek_v3": dict(pattern="*-*-", mla=MLA),
    "llama": dict(pattern="A-A-", norm_eps=1e-5, gqa=GQA),
    "qwen3": dict(pattern="A-A-", gqa=dataclasses.replace(GQA, head_dim=24, qk_norm=True), tie_word_embeddings=True),
    "qwen3_5_text": dict(
        pattern="G-A-",
        gdn=GDN,
        gqa=dataclasses.replace(
            GQA, qk_norm=True, output_gate=True, rope=RopeConfig(style="half", rotary_fraction=0.5)
        ),
    ),
}
RENAMED = {
    "f_proj.0": "f_a_proj",
    "f_proj.1": "f_b_proj",
    "g_proj.0": "g_a_proj",
    "g_proj.1": "g_b_proj",
    "in_proj_a": "a_proj",
    "in_proj_b": "b_proj",
    "in_proj_z": "g_proj",
}


def config_of(name: str) -> ModelConfig:
    """The ModelConfig of a golden checkpoint."""
    fields = dict(MODELS[name])
    fields.setdefault("tie_word_embeddings", False)
    return ModelConfig(vocab_size=97, hidden_size=64, intermediate_size=40, **fields)


def renamed(model: str, name: str, x: np.ndarray) -> list[tuple[tuple[str, ...], np.ndarray]]:
    """A stored tensor (or its gradient) as [(path, array)] with path ("sublayer", index, ...) or a top-level one."""
    name = re.sub(r"^(model|backbone)\.", "", name)
    if re.match(r"embed", name):
        return [(("embed", "weight"), x)]
    if name in ("norm.weight", "norm_f.weight"):
        return [(("norm", "weight"), x)]
    if name == "lm_head.weight":
        return [(("lm_head", "weight"), x)]
    layer, rest = re.fullmatch(r"layers\.(\d+)\.(.*)", name).groups()
    step = 1 if model == "mamba2" else 2
    index = int(layer) * step
    if re.match(r"(mlp_norm|post_attention_layernorm)\.", rest):
        return [(("sublayer", str(index + 1), "norm", "weight"), x)]
    if re.match(r"(attn_norm|input_layernorm|norm)\.", rest):
        return [(("sublayer", str(index), "norm", "weight"), x)]
    if match := re.fullmatch(r"(?:mlp|block_sparse_moe)\.(\w+)\.weight", rest):
        return [(("sublayer", str(index + 1), "mlp", match[1], "weight"), x.T)]
    leaf = re.sub(r"^(attn|self_attn|linear_attn|mixer)\.", "", rest)
    for old, new in RENAMED.items():
        leaf = leaf.replace(old + ".", new + ".")
    if model == "qwen3_5_text" and int(layer) == 0:
        leaf = re.sub(r"^norm\.", "o_norm.", leaf).replace("out_proj", "o_proj")
    path = ("sublayer", str(index), "mixer")
    if leaf == "A_log":
        return [((*path, "A_log"), x.reshape(-1))]
    if leaf == "in_proj_qkv.weight":
        parts = np.split(x.T, [32, 64], axis=1)
        return [((*path, f"{n}_proj", "weight"), p) for n, p in zip("qkv", parts, strict=True)]
    if leaf == "conv1d.weight" and model == "qwen3_5_text":
        parts = np.split(x[:, 0], [32, 64])
        return [((*path, f"{n}_conv1d", "weight"), p) for n, p in zip("qkv", parts, strict=True)]
    if "conv1d.weight" in leaf:
        return [((*path, leaf.split(".")[0], "weight"), x[:, 0])]
    return [((*path, *leaf.split(".")), x.T if x.ndim == 2 else x)]


def tree_of(model: Model, name: str, tensors: dict[str, np.ndarray], weights: bool) -> dict:
    """Our parameter tree from stored tensors. Every leaf must be given exactly once."""
    flat: dict[tuple[str, ...], np.ndarray] = {}
    for key, value in tensors.items():
        for path, array in renamed(name, key, value):
            stored_minus_one = name == "qwen3_5_text" and "norm" in path[-2] and path[-2] != "o_norm"
            assert path not in flat
            flat[path] = array + 1 if weights and stored_minus_one else array
    places: dict[tuple[str, ...], tuple] = {}
    for index, (_, where, position) in enumerate(model.sublayers):
        for path, array in flat.items():
            if path[:2] == ("sublayer", str(index)):
                places.setdefault((*where, *path[2:]), {})[position] = array
    tree: dict = {}

    def put(path, value):
        node = tree
        for part in path[:-1]:
            node = node.setdefault(part, {})
        node[path[-1]] = jnp.asarray(value)

    for path, array in flat.items():
        if path[0] != "sublayer":
            put(path, array)
    for path, by_position in places.items():
        stacked = path[0] == "layers"
        put(path, np.stack([by_position[i] for i in sorted(by_position)]) if stacked else by_position[-1])
    want = jax.tree.map(lambda a: a.shape, model.abstract_params())
    assert jax.tree.map(lambda a: a.shape, tree) == want
    return tree


@pytest.mark.parametrize("name", NAMES)
def test_model(name):
    model = Model(config_of(name), backend="chunked", compute_dtype="float32")
    golden = load_file(GOLDEN / name / "golden.safetensors")
    params = tree_of(model, name, load_file(GOLDEN / name / "model.safetensors"), weights=True)
    grads = {k.removeprefix("grad."): v for k, v in golden.items() if k.startswith("grad.")}
    want_grads = tree_of(model, name, grads, weights=False)
    tokens = jnp.asarray(golden["input_ids"])
    B, T = tokens.shape
    batch = {
        "tokens": tokens,
        "targets": jnp.pad(tokens[:, 1:], ((0, 0), (0, 1)), constant_values=-1),
        "segment_ids": jnp.ones((B, T), jnp.int32),
        "positions": jnp.broadcast_to(jnp.arange(T, dtype=jnp.int32), (B, T)),
    }

    @jax.jit
    def run(params):
        (loss, _), grads = jax.value_and_grad(model.loss, has_aux=True)(params, batch)
        return model.logits(params, tokens), loss, grads

    logits, loss, got_grads = run(params)
    logit_limit, grad_limit = (3e-4, 2e-4) if name in DELTA else (5e-5, 2e-5)
    error = np.abs(np.asarray(logits) - golden["logits"]).max()
    assert error < logit_limit, f"logits: max abs {error:.2e}"
    assert abs(float(loss) - float(golden["loss"][0])) < 1e-5

    def check(path, got, want):
        got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
        relative = np.linalg.norm(got - want) / np.linalg.norm(want)
        place = jax.tree_util.keystr(path)
        assert relative < grad_limit, f"{place}: rel L2 {relative:.2e}, max abs {np.abs(got - want).max():.2e}"

    jax.tree_util.tree_map_with_path(check, got_grads, want_grads)


@pytest.mark.parametrize("name", NAMES)
def test_greedy_tokens(name):
    """40 prompt tokens at once, then 24 decoded one by one through the states."""
    model = Model(config_of(name), backend="chunked", compute_dtype="float32")
    golden = load_file(GOLDEN / name / "golden.safetensors")
    params = tree_of(model, name, load_file(GOLDEN / name / "model.safetensors"), weights=True)
    row = golden["generated"][0].tolist()
    assert generate(model, params, row[:40], 24, temperature=0.0) == row[40:]

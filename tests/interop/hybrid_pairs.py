"""The same tiny hybrid twice, in JAX and as the PyTorch model of its export, with weights away from their start."""

import dataclasses

import jax
import numpy as np
import torch

from hybrid_jax.config import Config, GDNConfig, GQAConfig, KDAConfig, Mamba2Config, MLAConfig, ModelConfig, RopeConfig
from hybrid_jax.interop.hybrid.configuration_hybrid import HybridConfig
from hybrid_jax.interop.hybrid.format import HYBRID
from hybrid_jax.interop.hybrid.modeling_hybrid import HybridForCausalLM
from hybrid_jax.model import Model, Params
from hybrid_jax.optimizer import leaf_paths, path_str

YARN = RopeConfig(style="half", yarn_factor=4.0, yarn_original_max_position=16, rotary_fraction=0.5)
LLAMA3 = RopeConfig(style="half", theta=100.0, llama3_factor=8.0, llama3_original_max_position=16)
NONE = RopeConfig(style="none")
MLA = MLAConfig(num_heads=2, q_lora_rank=12, kv_lora_rank=8, qk_nope_head_dim=6, qk_rope_head_dim=4, v_head_dim=10)
GQA = GQAConfig(num_heads=4, num_kv_heads=2, head_dim=8)
GDN = GDNConfig(num_heads=2, num_v_heads=4, head_dim=16, expand_v=0.5)
KDA = KDAConfig(num_heads=2, num_v_heads=4, head_dim=16, expand_v=0.75)
MAMBA2 = Mamba2Config(state_size=8, head_dim=8, n_groups=2, expand=2)
DEMO = "*-G-G-K-S-A-"


_LAST = ("o_proj", "out_proj", "down_proj")  # small, or rounding would grow from one sublayer to the next


def with_(section, **changes):
    return dataclasses.replace(section, **changes)


def model_config(pattern: str, **changes) -> ModelConfig:
    sizes = dict(vocab_size=61, hidden_size=32, intermediate_size=40, mla=MLA, gqa=GQA, gdn=GDN, kda=KDA, mamba2=MAMBA2)
    return ModelConfig(pattern=pattern, **{**sizes, **changes})


def drawn(model: Model, seed: int) -> Params:
    """Parameters drawn by name, away from their start: no norm is 1, no bias 0."""
    draw = np.random.default_rng(seed)

    def one(path, x):
        *_, module, name = ("", *path_str(path).split("."))
        if "norm" in module or name == "D":
            return draw.uniform(0.6, 1.5, x.shape).astype(np.float32)
        if name == "A_log":
            return draw.uniform(-1.0, 1.5, x.shape).astype(np.float32)
        if name == "dt_bias":
            return draw.uniform(-5.0, 0.0, x.shape).astype(np.float32)
        spread = 0.5 if "conv1d" in module else 0.3 if name == "bias" else 0.08 if module in _LAST else 0.15
        return (spread * draw.standard_normal(x.shape)).astype(np.float32)

    return jax.tree_util.tree_map_with_path(one, model.abstract_params())


def compiled(fn, *args):
    """fn for arguments like `args`, compiled in half the time that the fastest code would take."""
    return jax.jit(fn).lower(*args).compile(compiler_options={"xla_backend_optimization_level": 0})


def torch_names(cfg: ModelConfig, tree) -> dict[str, torch.Tensor]:
    """Arrays of the shape of our parameters (those, or their gradients) by the names of the PyTorch model."""
    arrays = {path: np.asarray(x) for path, x in leaf_paths(tree)}
    made = {}
    for entry in HYBRID.entries(Config(model=cfg)):
        ours = [arrays[leaf.path] if leaf.index is None else arrays[leaf.path][leaf.index] for leaf in entry.ours]
        made[entry.theirs] = torch.from_numpy(np.array(entry.to_theirs(ours), order="C"))
    return made


def torch_config(cfg: ModelConfig) -> HybridConfig:
    return HybridConfig(**HYBRID.to_config(Config(model=cfg)))


def torch_model(cfg: ModelConfig) -> HybridForCausalLM:
    return HybridForCausalLM(torch_config(cfg)).eval()


def load(model: HybridForCausalLM, cfg: ModelConfig, params: Params) -> None:
    missing, unexpected = model.load_state_dict(torch_names(cfg, params), strict=False)
    assert not unexpected and set(missing) <= ({"lm_head.weight"} if cfg.tie_word_embeddings else set())


def tokens(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 61, shape).astype(np.int32)

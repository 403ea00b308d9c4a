"""Small models with every kind of sublayer, and weights with which each of them matters."""

import dataclasses

import jax
import numpy as np

from hybrid_jax.config import GDNConfig, GQAConfig, KDAConfig, Mamba2Config, MLAConfig, ModelConfig, RopeConfig
from hybrid_jax.model import Model, Params

BASE = ModelConfig(
    pattern="*-G-",
    vocab_size=61,
    hidden_size=32,
    intermediate_size=48,
    mla=MLAConfig(num_heads=2, q_lora_rank=16, kv_lora_rank=16, qk_nope_head_dim=8, qk_rope_head_dim=8, v_head_dim=8),
    gqa=GQAConfig(num_heads=4, num_kv_heads=2, head_dim=8, qk_norm=True, bias=True, rope=RopeConfig(style="half")),
    gdn=GDNConfig(num_heads=2, num_v_heads=4, head_dim=8),
    kda=KDAConfig(num_heads=2, num_v_heads=2, head_dim=8, expand_v=2.0),
    mamba2=Mamba2Config(state_size=8, head_dim=8, n_groups=2, expand=2, chunk_size=32),
)
EVERY_KIND = "*-G-K-S-A-"


def model_of(pattern: str, **changes) -> Model:
    return Model(dataclasses.replace(BASE, pattern=pattern, **changes), compute_dtype="float32")


def init(model: Model, seed: int = 0):
    """Parameters with weights large enough for every path to matter."""
    params = model.init(jax.random.key(seed))
    grow = lambda path, p: p * 5 if path[-1].key == "weight" and p.ndim >= 2 else p  # noqa: E731
    return jax.tree_util.tree_map_with_path(grow, params)


def drawn(model: Model, seed: int = 0) -> Params:
    """Parameters of about those sizes, drawn by numpy: nothing is compiled for them."""
    draw = np.random.default_rng(seed)

    def one(path, p: jax.ShapeDtypeStruct) -> np.ndarray:
        name, noise = path[-1].key, draw.standard_normal(p.shape).astype(np.float32)
        if name == "A_log":
            return np.log(1 + 15 * draw.random(p.shape, np.float32))
        if name == "dt_bias":
            return np.log(np.expm1(0.001 * 100 ** draw.random(p.shape, np.float32)))
        if name == "weight" and path[-2].key.endswith("norm"):
            return 1 + 0.2 * noise
        return (0.3 if "conv1d" in path[-2].key else 0.1) * noise

    return jax.tree_util.tree_map_with_path(one, model.abstract_params())


def tokens_of(seed: int, *shape: int) -> jax.Array:
    return jax.random.randint(jax.random.key(seed), shape, 0, BASE.vocab_size)


def rms_error(got, want) -> float:
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    return float(np.sqrt(np.mean((got - want) ** 2) / np.mean(want**2)))

"""Configs of tiny models that each format holds, one or more a format."""

import dataclasses
from typing import Any

from hybrid_jax.config import (
    Config,
    GDNConfig,
    GQAConfig,
    KDAConfig,
    Mamba2Config,
    MLAConfig,
    ModelConfig,
    RopeConfig,
    TrainConfig,
)

HALF = RopeConfig(style="half")
YARN = RopeConfig(style="half", theta=10000.0, yarn_factor=4.0, yarn_original_max_position=32)
LLAMA3 = RopeConfig(style="half", theta=500.0, llama3_factor=8.0, llama3_original_max_position=32)
GQA = GQAConfig(num_heads=4, num_kv_heads=2, head_dim=8)
GATED = dataclasses.replace(GQA, qk_norm=True, output_gate=True)
GDN = GDNConfig(num_heads=2, num_v_heads=4, head_dim=8)
KDA = KDAConfig(num_heads=2, num_v_heads=2, head_dim=8)
MLA = MLAConfig(
    num_heads=2, q_lora_rank=12, kv_lora_rank=16, qk_nope_head_dim=8, qk_rope_head_dim=4, v_head_dim=12, norm_eps=1e-6
)
NOPE = dataclasses.replace(MLA, q_lora_rank=0, rope=RopeConfig(style="none"))
MAMBA2 = Mamba2Config(state_size=8, head_dim=8, n_groups=2, expand=2, chunk_size=16, norm_eps=0.0)
KIMI = dataclasses.replace(KDA, gate_bias=False)


def _with(section: Any, **changes: Any) -> Any:
    return dataclasses.replace(section, **changes)


def _config(pattern: str, **model: Any) -> Config:
    sizes = {"vocab_size": 50, "hidden_size": 32, "intermediate_size": 24, "tie_word_embeddings": False, **model}
    return Config(model=ModelConfig(pattern=pattern, **sizes), train=TrainConfig(sequence_length=64))


# {format: {case: config}}
CASES: dict[str, dict[str, Config]] = {
    "llama": {
        "untied": _config("A-A-", gqa=GQA, norm_eps=1e-5),
        "tied, interleaved": _config("A-A-", gqa=_with(GQA, rope=RopeConfig()), tie_word_embeddings=True),
        "yarn": _config("A-A-", gqa=_with(GQA, head_dim=16, rope=YARN)),
        "llama3": _config("A-A-", gqa=_with(GQA, head_dim=16, rope=LLAMA3)),
    },
    "qwen2": {
        "untied": _config("A-A-", gqa=_with(GQA, bias=True)),
        "tied, interleaved": _config("A-", gqa=_with(GQA, bias=True, rope=RopeConfig()), tie_word_embeddings=True),
    },
    "qwen3": {
        "untied": _config("A-A-", gqa=_with(GQA, qk_norm=True, head_dim=12)),
        "tied, interleaved": _config("A-", gqa=_with(GQA, qk_norm=True, rope=RopeConfig()), tie_word_embeddings=True),
    },
    "mamba2": {
        "untied": _config("SS", mamba2=MAMBA2, norm_eps=1e-5),
        "tied": _config("SSS", mamba2=_with(MAMBA2, n_groups=1, expand=1), norm_eps=1e-6, tie_word_embeddings=True),
    },
    "gated_deltanet": {
        "untied": _config("G-G-", gdn=GDN),
        "tied, wide": _config("G-", gdn=_with(GDN, expand_v=2.0, allow_neg_eigval=True), tie_word_embeddings=True),
        "bare": _config("G-", gdn=_with(GDN, use_gate=False, use_short_conv=False)),
    },
    "kda": {
        "untied": _config("K-K-", kda=KDA),
        "tied, wide": _config("K-", kda=_with(KDA, expand_v=2.0, num_v_heads=4), tie_word_embeddings=True),
        "bounded": _config("K-", kda=_with(KDA, lower_bound=-5.0, allow_neg_eigval=True, use_short_conv=False)),
    },
    "kimi_linear": {
        "untied": _config("K-*-K-", kda=KIMI, mla=NOPE, norm_eps=1e-5),
        "tied, q latent": _config(
            "*-K-", kda=KIMI, mla=_with(NOPE, q_lora_rank=12), norm_eps=1e-5, tie_word_embeddings=True
        ),
        "mla alone": _config("*-", mla=NOPE),
    },
    "deepseek_v3": {
        "untied": _config("*-*-", mla=MLA),
        "tied, half": _config("*-", mla=_with(MLA, q_lora_rank=0, rope=HALF), tie_word_embeddings=True),
        "yarn": _config("*-*-", mla=_with(MLA, qk_rope_head_dim=16, rope=_with(YARN, style="interleaved"))),
    },
    "qwen3_5_text": {
        "untied": _config(
            "G-A-", gdn=GDN, gqa=_with(GATED, rope=_with(HALF, rotary_fraction=0.5))
        ),
        "tied": _config(
            "A-G-G-", gdn=_with(GDN, expand_v=2.0), gqa=GATED,
            tie_word_embeddings=True,
        ),
    },
    "hybrid_jax": {
        "every kind": _config("*-M-G-K-S-A-", mixer="mamba2", mla=MLA, gqa=GATED, gdn=GDN, kda=KDA, mamba2=MAMBA2),
        "stacked": _config("GAGAS", gdn=GDN, gqa=_with(GQA, bias=True), mamba2=_with(MAMBA2, pre_norm=False)),
        "derived": _config("", num_layers=8, attention_ratio=0.25, mla=NOPE, gdn=GDN, tie_word_embeddings=True),
    },
}  # fmt: skip
ALL = [(name, case) for name, cases in CASES.items() for case in cases]

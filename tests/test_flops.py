"""Parameters and FLOPs by formula: against the published counts, and against the model itself."""

import dataclasses
import math
from pathlib import Path

import jax
import pytest

from hybrid_jax import config_file, flops
from hybrid_jax.model import Model

CONFIGS = Path(__file__).parent.parent / "configs"

PARAMETERS = {
    "gdn_300m": 307_767_232,
    "kda_300m": 303_549_280,
    "hybrid_gdn_300m": 309_280_624,
    "hybrid_mamba2_300m": 356_733_952,
    "gdn_1b": 1_203_441_152,
    "kda_1b": 1_175_153_920,
    "hybrid_gdn_1b": 1_211_278_208,
    "hybrid_kda_1b": 1_190_062_784,
    "hybrid_mamba2_1b": 1_286_886_272,
    "hybrid_mamba2_3b": 3_377_311_592,
    "hybrid_mamba2_8b": 7_898_996_224,
    "mamba2_370m": 368_363_008,
    "kimi_linear_300m": 310_999_336,
    # Those of the models that Meta and Qwen released.
    "llama3_8b": 8_030_261_248,
    "llama3_70b": 70_553_706_496,
    "llama3_405b": 405_853_388_800,
    "qwen2_5_7b": 7_615_616_512,
    "qwen3_1_7b": 1_720_574_976,
}


def model_of(name, *overrides):
    return config_file.load(f"{CONFIGS / name}.py", overrides).model


def parameters_of_the_model(model):
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(Model(model).abstract_params()))


@pytest.mark.parametrize("name", PARAMETERS)
def test_parameters_are_exactly_those_that_are_named(name):
    assert flops.parameter_count(model_of(name)) == PARAMETERS[name]


@pytest.mark.parametrize("name", PARAMETERS)
def test_the_model_has_exactly_these_parameters(name):
    assert parameters_of_the_model(model_of(name)) == PARAMETERS[name]


# What the released config.json files say, as litgpt's config.py has it from them (Llama: table 3 of arXiv:2407.21783
# too): class, width, MLP width, layers, heads, heads of keys, vocabulary, whether the head is the embedding.
RELEASED = {
    "llama3_8b": ("Llama", 4096, 14_336, 32, 32, 8, 128_256, False),
    "llama3_70b": ("Llama", 8192, 28_672, 80, 64, 8, 128_256, False),
    "llama3_405b": ("Llama", 16_384, 53_248, 126, 128, 8, 128_256, False),
    "qwen2_5_7b": ("Qwen2", 3584, 18_944, 28, 28, 4, 152_064, False),
    "qwen3_1_7b": ("Qwen3", 2048, 6144, 28, 16, 8, 151_936, True),
}


@pytest.mark.torch
@pytest.mark.parametrize("name", RELEASED)
def test_dense_models_have_the_parameters_of_transformers_classes(name):
    import torch
    import transformers

    kind, width, mlp, layers, heads, key_heads, vocabulary, tied = RELEASED[name]
    config = getattr(transformers, f"{kind}Config")(
        hidden_size=width, intermediate_size=mlp, num_hidden_layers=layers, num_attention_heads=heads,
        num_key_value_heads=key_heads, vocab_size=vocabulary, tie_word_embeddings=tied, head_dim=128,
    )  # fmt: skip
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    assert type(model).__name__ == f"{kind}ForCausalLM"
    parameters = list(model.parameters())  # a tied head is there once
    assert all(p.is_meta for p in parameters)
    assert sum(p.numel() for p in parameters) == PARAMETERS[name] == flops.parameter_count(model_of(name))


def test_swapped_mixers_and_the_published_mamba2_without_pre_norm():
    assert flops.parameter_count(model_of("gdn_300m", ("model.mixer", "kda"))) == PARAMETERS["kda_300m"]
    assert flops.parameter_count(model_of("hybrid_gdn_300m", ("model.mixer", "mamba2"))) == 356_733_952
    bare = model_of("hybrid_mamba2_300m", ("model.mamba2.pre_norm", "false"))
    assert flops.parameter_count(bare) == parameters_of_the_model(bare) == 356_724_736


@pytest.mark.parametrize(
    "overrides",
    [
        (),
        (("model.mla.q_lora_rank", "0"),),
        (("model.gqa.bias", "true"), ("model.gqa.qk_norm", "true")),
        (("model.gqa.output_gate", "true"), ("model.gqa.bias", "true")),
        (("model.gdn.use_gate", "false"), ("model.gdn.use_short_conv", "false")),
        (("model.gdn.conv_size", "3"), ("model.kda.conv_size", "2"), ("model.mamba2.conv_size", "5")),
        (
            ("model.kda.gate_bias", "false"),
            ("model.kda.use_short_conv", "false"),
            ("model.kda.num_heads", "2"),
        ),
        (("model.mamba2.expand", "2"), ("model.mamba2.n_groups", "4"), ("model.mamba2.pre_norm", "false")),
        (("model.tie_word_embeddings", "false"),),
    ],
)
def test_formula_and_model_agree_on_every_option(overrides):
    model = model_of("tiny_hybrid", *overrides)
    assert flops.parameter_count(model) == parameters_of_the_model(model)


def test_non_embedding_parameters_leave_out_embedding_and_head():
    tied = model_of("gdn_300m")
    untied = dataclasses.replace(tied, tie_word_embeddings=False)
    assert flops.non_embedding_count(tied) == 176_433_088
    assert flops.non_embedding_count(untied) == 176_433_088
    assert flops.parameter_count(untied) - flops.parameter_count(tied) == 128_256 * 1024


# Forward and backward FLOPs a token of an honest count, to the digits in which they are published.
@pytest.mark.parametrize(
    ("name", "length", "expected"),
    [
        ("gdn_300m", 2048, 1.853e9),
        ("kda_300m", 2048, 1.824e9),
        ("hybrid_gdn_300m", 2048, 1.898e9),
        ("hybrid_mamba2_300m", 2048, 2.191e9),
        ("gdn_1b", 2048, 7.238e9),
        ("gdn_1b", 8192, 7.238e9),
        ("kda_1b", 2048, 7.059e9),
        ("hybrid_mamba2_1b", 8192, 8.141e9),
        ("hybrid_mamba2_1b", 2048, 7.839e9),
        ("hybrid_mamba2_3b", 8192, 2.142e10),
        ("hybrid_mamba2_8b", 8192, 4.915e10),
    ],
)
def test_flops_per_token(name, length, expected):
    assert flops.flops_per_token(model_of(name), length) == pytest.approx(expected, rel=3e-4)


def test_matmul_flops_are_those_that_xla_counts():
    """The dense part of the formula (attention and recurrence apart) is the forward pass's 2 a weight."""
    model = model_of("tiny_hybrid", ("model.pattern", "--"))
    weights = 2 * 3 * model.hidden_size * model.intermediate_size + model.vocab_size * model.hidden_size
    assert flops.flops_per_token(model, 256) == 6 * weights
    tokens = jax.ShapeDtypeStruct((1, 64), "int32")
    built = Model(dataclasses.replace(model, scan_layers=False), compute_dtype="float32")
    counted = jax.jit(built.logits).lower(built.abstract_params(), tokens).compile().cost_analysis()["flops"]
    assert counted / 64 == pytest.approx(2 * weights, rel=0.03)  # norms and activations are the rest


def test_the_breakdown_adds_up_and_counts_each_kind():
    model = model_of("tiny_hybrid")
    rows = flops.breakdown(model, 256)
    assert [(part, count) for part, count, _ in rows] == [
        ("embedding", 1),
        ("MLA", 1),
        ("MLP", 6),
        ("GDN", 2),
        ("KDA", 1),
        ("Mamba2", 1),
        ("GQA", 1),
        ("final norm", 1),
        ("head (tied)", 1),
    ]
    assert sum(cost.parameters for _, _, cost in rows) == flops.parameter_count(model)
    assert 3 * sum(cost.flops for _, _, cost in rows) == flops.flops_per_token(model, 256)


def test_only_attention_grows_with_the_sequence():
    for symbol, grows in {"*": True, "A": True, "G": False, "K": False, "S": False, "-": False}.items():
        model = model_of("tiny_hybrid")
        short, long = (flops.sublayer(model, symbol, length).flops for length in (1024, 2048))
        assert (long > short) == grows, symbol
    # Causal: (T + 1) / 2 keys a query, q.k and p.v.
    mla = model_of("hybrid_gdn_300m")
    slope = flops.sublayer(mla, "*", 2049).flops - flops.sublayer(mla, "*", 2047).flops
    assert slope == 2 * 16 * (64 + 64)

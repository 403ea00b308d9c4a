"""The tables of names are bijections, config.json says the model, and what cannot be said is named."""

import dataclasses
import json

import numpy as np
import pytest

from hybrid_jax import config_checks
from hybrid_jax.config import Config
from hybrid_jax.errors import UserError
from hybrid_jax.interop import formats
from hybrid_jax.interop.table import HalfSplit, MinusOne, Rule, expand, same
from hybrid_jax.model import Model
from hybrid_jax.optimizer import leaf_paths
from tests.interop.models import ALL, CASES, GDN, GQA, KDA, MLA


def _tree(config, seed=0):
    """Random parameters, fp32, by path."""
    draw = np.random.default_rng(seed)
    shapes = leaf_paths(Model(config.model).abstract_params())
    return {path: draw.uniform(0.6, 1.9, x.shape).astype(np.float32) for path, x in shapes}


def test_every_format_has_cases():
    assert [one.name for one in formats.known()] == list(CASES)


@pytest.mark.parametrize("name, case", ALL)
def test_a_table_is_a_bijection(name, case):
    """Each parameter is in one tensor, each tensor has the shape that is declared, and the way back is exact."""
    config = CASES[name][case]
    config_checks.check_model(config.model)
    entries = formats.named(name).entries(config)
    ours, back = _tree(config), {}
    theirs = {}
    for entry in entries:
        arrays = [ours[leaf.path] if leaf.index is None else ours[leaf.path][leaf.index] for leaf in entry.ours]
        assert [x.shape for x in arrays] == [leaf.shape for leaf in entry.ours]
        tensor = entry.to_theirs(arrays)
        assert tensor.shape == entry.shape and entry.theirs not in theirs
        theirs[entry.theirs] = tensor
        if entry.copy:
            continue
        for leaf, array in zip(entry.ours, entry.to_ours(tensor), strict=True):
            assert (leaf.path, leaf.index) not in back
            back[leaf.path, leaf.index] = array
    for path, want in ours.items():
        stacked = path.startswith("layers.")
        got = np.stack([back.pop((path, i)) for i in range(len(want))]) if stacked else back.pop((path, None))
        np.testing.assert_array_equal(got, want, err_msg=path)
    assert not back
    elements = sum(x.size for x in ours.values())
    assert sum(theirs[e.theirs].size for e in entries if not e.copy) == elements


@pytest.mark.parametrize("name, case", ALL)
def test_config_json_says_the_model(name, case):
    config = CASES[name][case]
    found = formats.named(name)
    assert found.fits(config) == "" and formats.choose(config) is not None
    written = {**found.to_config(config), "model_type": name}
    text = json.dumps(written, allow_nan=False)
    again, read = formats.read_config(json.loads(text), "config.json")
    assert again is found and read.train.sequence_length == config.train.sequence_length
    assert found.fits(read) == ""
    assert found.to_config(read) == {k: v for k, v in written.items() if k != "model_type"}
    shapes = [{p: x.shape for p, x in leaf_paths(Model(c.model).abstract_params())} for c in (read, config)]
    assert shapes[0] == shapes[1]


@pytest.mark.parametrize("name", CASES)
def test_auto_takes_the_first_that_fits(name):
    taken = {formats.choose(config).name for config in CASES[name].values()}
    assert name in taken


def _model(config, **changes):
    return dataclasses.replace(config, model=dataclasses.replace(config.model, **changes))


def _section(config, section, **changes):
    return _model(config, **{section: dataclasses.replace(getattr(config.model, section), **changes)})


LLAMA, KIMI, MAMBA2 = (next(iter(CASES[name].values())) for name in ("llama", "kimi_linear", "mamba2"))
GATED, LOCAL = (next(iter(CASES[name].values())) for name in ("qwen3_5_text", "deepseek_v3"))
PURE, KDA_ALONE = (next(iter(CASES[name].values())) for name in ("gated_deltanet", "kda"))


@pytest.mark.parametrize(
    "name, config, reason",
    [
        ("llama", _model(LLAMA, pattern="A-A"), "an MLP after each mixer, and the last one has none"),
        ("llama", _model(LLAMA, pattern="AA-", gqa=GQA), "MLP after each mixer, and sublayer 2 is GQA"),
        ("llama", _model(LLAMA, pattern="-A", gqa=GQA), "GQA and then an MLP in each layer, and sublayer 1 is MLP"),
        ("llama", _model(LLAMA, pattern="A-G-", gdn=GDN), "sublayer 3 is GDN"),
        ("llama", _section(LLAMA, "gqa", qk_norm=True), "no norms on q and k; use --format qwen3"),
        ("llama", _section(LLAMA, "gqa", bias=True), "no biases on q, k and v; use --format qwen2"),
        ("llama", _section(LLAMA, "gqa", output_gate=True), "no gate on the attention's output"),
        ("llama", _section(LLAMA, "gqa", rope=dataclasses.replace(GQA.rope, style="none")), "rope.style is none"),
        ("llama", _section(LLAMA, "gqa", rope=dataclasses.replace(GQA.rope, rotary_fraction=0.5)), "whole heads"),
        ("qwen2", _section(LLAMA, "gqa", bias=True, head_dim=16), "heads of hidden_size / num_heads dims"),
        ("qwen2", LLAMA, "has biases on q, k and v .*; use --format llama"),
        ("qwen3", _section(LLAMA, "gqa", qk_norm=True, norm_eps=1e-7), "one epsilon for all norms"),
        ("mamba2", _section(MAMBA2, "mamba2", pre_norm=False), "a norm before each mixer"),
        ("mamba2", _section(MAMBA2, "mamba2", norm_eps=1e-3), "that of model.mamba2 is 0.001 beside 1e-05"),
        ("mamba2", _model(MAMBA2, pattern="SS-"), "Mamba2 mixers and nothing else, and sublayer 3 is MLP"),
        ("gated_deltanet", _section(PURE, "gdn", norm_eps=1e-3), "that of model.gdn is 0.001"),
        ("gated_deltanet", KDA_ALONE, "sublayer 1 is KDA; use --format kda"),
        ("kda", _section(KDA_ALONE, "kda", gate_bias=False), "bias on the output gate .*; use --format hybrid_jax"),
        ("kimi_linear", _section(KDA_ALONE, "kda", gate_bias=False), "has attention in some layer"),
        ("kimi_linear", _section(KIMI, "kda", expand_v=2.0), "values as wide as keys, and model.kda.expand_v is 2"),
        ("kimi_linear", _section(KIMI, "kda", num_v_heads=4), "as many value heads as key heads"),
        ("kimi_linear", _section(KIMI, "kda", gate_bias=True), "no bias on the output gate"),
        ("kimi_linear", _section(KIMI, "kda", lower_bound=-5.0), "no bound on the decay"),
        ("kimi_linear", _section(KIMI, "kda", allow_neg_eigval=True), "does not double beta"),
        ("kimi_linear", _section(KIMI, "kda", use_short_conv=False), "has short convolutions"),
        ("kimi_linear", _section(KIMI, "kda", norm_eps=1e-6), "one epsilon for all norms"),
        ("kimi_linear", _section(KIMI, "mla", rope=MLA.rope), "without positions, and .* is interleaved"),
        ("kimi_linear", _section(KIMI, "mla", norm_eps=1e-5), "an epsilon of 1e-06 in it, and that of .* is 1e-05"),
        ("kimi_linear", _section(KIMI, "mla", qk_rope_head_dim=0), "shares some key dims between heads"),
        ("deepseek_v3", _section(LOCAL, "mla", norm_eps=1e-5), "an epsilon of 1e-06"),
        ("deepseek_v3", _section(LOCAL, "mla", rope=dataclasses.replace(MLA.rope, style="none")), "kimi_linear"),
        ("qwen3_5_text", _section(GATED, "gdn", use_gate=False), "has an output gate"),
        ("qwen3_5_text", _section(GATED, "gdn", allow_neg_eigval=True), "does not double beta"),
        ("qwen3_5_text", _section(GATED, "gdn", use_short_conv=False), "has short convolutions"),
        ("qwen3_5_text", _section(GATED, "gqa", output_gate=False), "has a gate on the attention's output"),
        ("qwen3_5_text", _section(GATED, "gqa", qk_norm=False), "has norms on q and k"),
        ("qwen3_5_text", _section(GATED, "gqa", bias=True), "has no biases"),
        ("qwen3_5_text", _section(GATED, "gqa", rope=MLA.rope), "rotates half-split pairs"),
    ],
)
def test_what_a_format_cannot_say_is_named(name, config, reason):
    config_checks.check_model(config.model)
    with pytest.raises(UserError, match=rf"--format: {name} cannot hold this model: it .*{reason}"):
        formats.choose(config, name)


@pytest.mark.parametrize(
    "name, changes, message",
    [
        ("llama", {"model_type": "gpt2"}, "model_type 'gpt2' cannot be imported; there are llama"),
        ("llama", {"hidden_act": "gelu"}, "hidden_act 'gelu' is not something"),
        ("llama", {"attention_bias": True}, "attention_bias True"),
        ("llama", {"rope_parameters": {"rope_type": "linear", "factor": 8.0}}, "rope_type 'linear'"),
        (
            "llama",
            {"rope_parameters": {"rope_type": "llama3", "factor": 8.0}},
            "original_max_position|high_freq_factor",
        ),
        ("llama", {"hidden_size": "wide"}, "hidden_size: expected a positive whole number, got 'wide'"),
        ("llama", {"hidden_size": None}, "hidden_size: expected a positive whole number, got None"),
        ("llama", {"rms_norm_eps": "small"}, "rms_norm_eps: expected a number"),
        ("llama", {"tie_word_embeddings": "no"}, "tie_word_embeddings: expected true or false"),
        ("llama", {"num_key_value_heads": 3}, "config.model.gqa.num_heads: 4 is not a multiple"),
        ("qwen3", {"use_sliding_window": True}, "use_sliding_window True"),
        ("mamba2", {"use_bias": True}, "use_bias True"),
        ("mamba2", {"time_step_limit": [0.0, 0.1]}, "time_step_limit"),
        ("gated_deltanet", {"attn": {"layers": [0], "num_heads": 2}}, "attn {"),
        ("kda", {"safe_gate": True}, "safe_gate without a lower_bound"),
        ("kimi_linear", {"mlp_layer_types": ["dense", "sparse", "dense"]}, "no mixture of experts"),
        ("kimi_linear", {"layer_types": ["full_attention"]}, "expected 3 of"),
        ("deepseek_v3", {"first_k_dense_replace": 1}, "no mixture of experts"),
    ],
)
def test_what_our_models_cannot_be_is_named(name, changes, message):
    config = next(iter(CASES[name].values()))
    written = {**formats.named(name).to_config(config), "model_type": name, **changes}
    with pytest.raises(UserError, match=f"^config.json: .*{message}"):
        formats.read_config(written, "config.json")


def test_older_ways_of_writing_a_config():
    """rope_theta and rope_scaling apart, and the released kimi_linear's layers, counted from 1."""
    llama = formats.named("llama").to_config(CASES["llama"]["yarn"])
    del llama["rope_parameters"]
    llama["rope_scaling"]["type"] = llama["rope_scaling"].pop("rope_type")
    _, read = formats.read_config({**llama, "model_type": "llama"}, "config.json")
    assert read.model.gqa == CASES["llama"]["yarn"].model.gqa

    kimi = formats.named("kimi_linear").to_config(KIMI)
    heads, size, taps = (kimi.pop(f"linear_{key}") for key in ("num_heads", "head_dim", "conv_kernel_dim"))
    del kimi["layer_types"], kimi["mlp_layer_types"]
    inner = {"num_heads": heads, "head_dim": size, "short_conv_kernel_size": taps}
    inner |= {"full_attn_layers": [2], "kda_layers": [1, 3]}
    released = {**kimi, "model_type": "kimi_linear", "linear_attn_config": inner, "first_k_dense_replace": 3}
    assert (
        formats.read_config(released, "config.json")[1].model
        == formats.read_config(
            {**formats.named("kimi_linear").to_config(KIMI), "model_type": "kimi_linear"}, "config.json"
        )[1].model
    )


def test_a_long_model_is_fine_tuned_on_shorter_rows():
    written = {**formats.named("llama").to_config(LLAMA), "model_type": "llama", "max_position_embeddings": 131072}
    assert formats.read_config(written, "config.json")[1].train.sequence_length == formats.FINE_TUNING_LENGTH


def test_a_table_that_is_no_bijection_is_refused():
    model = CASES["mamba2"]["untied"].model
    found = formats.named("mamba2")
    rules = lambda number, symbol: found.sublayer(model, number, symbol)  # noqa: E731
    top = list(found.top(model))
    expand(model, top, rules)
    with pytest.raises(ValueError, match=r"norm.weight\[None\] 2 times"):
        expand(model, [*top, same("again", "norm.weight")], rules)
    with pytest.raises(ValueError, match=r"norm.weight\[None\] 0 times"):
        expand(model, [rule for rule in top if rule.ours != ("norm.weight",)], rules)
    with pytest.raises(ValueError, match=r"tensor lm_head.weight twice"):
        expand(model, [*top, Rule("lm_head.weight", ("norm.weight",), copy=True)], rules)


def test_steps():
    x = np.arange(12, dtype=np.float32).reshape(12, 1)
    turned = HalfSplit(2).apply(x)
    assert turned[:, 0].tolist() == [0, 2, 4, 1, 3, 5, 6, 8, 10, 7, 9, 11]
    np.testing.assert_array_equal(HalfSplit(2).undo(turned, x.shape), x)
    w = np.linspace(0.5, 2.0, 1001, dtype=np.float32)
    np.testing.assert_array_equal(MinusOne().undo(MinusOne().apply(w), w.shape), w)
    assert MinusOne().apply(w).dtype == np.float32


def test_an_unknown_format_is_named():
    with pytest.raises(UserError, match="--format: 'gguf' is not one of auto, llama"):
        formats.choose(Config(model=LLAMA.model), "gguf")


def test_a_model_that_one_format_holds():
    config = _model(LLAMA, pattern="A-K-", kda=KDA)
    assert formats.choose(config).name == "hybrid_jax"
    with pytest.raises(UserError, match=r"--format: llama .*sublayer 3 is KDA; use --format hybrid_jax"):
        formats.choose(config, "llama")

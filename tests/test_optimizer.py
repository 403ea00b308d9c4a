"""The schedule, the clipping and the decay set, against numbers worked out apart from the code."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from configs import tiny_hybrid
from hybrid_jax import config as config_lib
from hybrid_jax import optimizer
from hybrid_jax.config import OptimizerConfig
from hybrid_jax.model import Model
from tests.tiny import EVERY_KIND, tiny_config

# gdn_300m's own recipe.
RECIPE = OptimizerConfig(learning_rate=2e-4, min_learning_rate=2e-5, warmup_steps=200, decay_steps=4768)


@pytest.mark.parametrize(
    ("count", "expected"),
    [
        (0, 0.0),  # the very first update moves nothing
        (1, 1e-6),
        (199, 1.99e-4),
        (200, 2e-4),
        (2484, 1.1e-4),  # half-way between 200 and 4768: the mean of the two ends
        (3626, 2e-5 + 0.5 * (1 - math.sqrt(0.5)) * 1.8e-4),  # three quarters
        (4768, 2e-5),
        (9000, 2e-5),
    ],
)
def test_learning_rate_is_exact(count, expected):
    assert float(optimizer.learning_rate(RECIPE, 10**9, count)) == pytest.approx(expected, rel=2e-6, abs=1e-12)


def test_decay_steps_default_to_the_runs_length_and_warmup_may_be_absent():
    cfg = OptimizerConfig(learning_rate=1.0, min_learning_rate=0.1, warmup_steps=0, decay_steps=0)
    rates = [float(optimizer.learning_rate(cfg, 4, k)) for k in range(6)]
    expected = [0.1 + 0.45 * (1 + math.cos(math.pi * k / 4)) for k in range(4)] + [0.1, 0.1]
    np.testing.assert_allclose(rates, expected, rtol=1e-6)


def _params():
    """Paths and per-layer ranks as in a model with one repeat of a period, and a tail."""
    mixer = {
        "q_proj": {"weight": (8, 8)},
        "q_conv1d": {"weight": (8, 4)},
        "A_log": (2,),
        "dt_bias": (2,),
        "D": (2,),
        "o_norm": {"weight": (4,)},
        "g_proj": {"weight": (8, 4), "bias": (4,)},
        "f_b": {"bias": (2, 4)},
    }
    kda = {"A_log": (1, 1, 2, 1), "dt_bias": (2, 4), "k_norm": {"weight": (2, 4)}}
    tree = {
        "embed": {"weight": (16, 8)},
        "layers": {"0": {"norm": {"weight": (8,)}, "mixer": mixer}, "1": {"mixer": kda}},
        "tail": {"0": {"norm": {"weight": (8,)}, "mlp": {"down_proj": {"weight": (8, 8)}}}},
        "norm": {"weight": (8,)},
        "lm_head": {"weight": (16, 8)},
    }
    shapes = jax.tree_util.tree_map_with_path(
        lambda path, shape: (3, *shape) if path[0].key == "layers" else shape,
        tree,
        is_leaf=lambda x: isinstance(x, tuple),
    )
    return jax.tree.map(lambda s: jax.ShapeDtypeStruct(s, jnp.float32), shapes, is_leaf=lambda x: isinstance(x, tuple))


def test_decay_set_by_name_and_by_the_rank_of_one_layer():
    decayed, undecayed = optimizer.decay_sets(_params())
    assert sorted(decayed) == [
        "embed.weight",
        "layers.0.mixer.g_proj.weight",
        "layers.0.mixer.q_conv1d.weight",
        "layers.0.mixer.q_proj.weight",
        "lm_head.weight",
        "tail.0.mlp.down_proj.weight",
    ]
    assert sorted(undecayed) == [
        "layers.0.mixer.A_log",
        "layers.0.mixer.D",
        "layers.0.mixer.dt_bias",
        "layers.0.mixer.f_b.bias",
        "layers.0.mixer.g_proj.bias",
        "layers.0.mixer.o_norm.weight",
        "layers.0.norm.weight",
        "layers.1.mixer.A_log",
        "layers.1.mixer.dt_bias",
        "layers.1.mixer.k_norm.weight",
        "norm.weight",
        "tail.0.norm.weight",
    ]


def _listed(text):
    """Paths of a list such as "tail.1.mlp: down_proj gate_proj", a line a prefix; ".weight" is left out."""
    paths = []
    for line in text.split("\n"):
        prefix, colon, names = line.strip().rpartition(":")
        for name in names.split():
            whole = name if name.split(".")[-1] in ("A_log", "D", "bias", "dt_bias") else f"{name}.weight"
            paths.append(f"{prefix}.{whole}" if colon else whole)
    return sorted(paths)


def _assert_decay_sets(model_config, decayed, undecayed):
    params = Model(model_config).abstract_params()
    assert tuple(sorted(paths) for paths in optimizer.decay_sets(params)) == (_listed(decayed), _listed(undecayed))
    mask = dict(optimizer.leaf_paths(optimizer.decay_mask(params)))
    assert sorted(path for path, value in mask.items() if value) == _listed(decayed)


def test_decay_sets_of_the_tiny_hybrid():
    """`*-G-G-K-S-A-` has no period: nothing is stacked."""
    decayed = """
        embed
        tail.0.mixer: q_a_proj q_b_proj kv_a_proj_with_mqa kv_b_proj o_proj
        tail.1.mlp: gate_proj up_proj down_proj
        tail.2.mixer: q_proj k_proj v_proj q_conv1d k_conv1d v_conv1d a_proj b_proj g_proj o_proj
        tail.3.mlp: gate_proj up_proj down_proj
        tail.4.mixer: q_proj k_proj v_proj q_conv1d k_conv1d v_conv1d a_proj b_proj g_proj o_proj
        tail.5.mlp: gate_proj up_proj down_proj
        tail.6.mixer: q_proj k_proj v_proj q_conv1d k_conv1d v_conv1d b_proj f_a_proj f_b_proj g_a_proj g_b_proj o_proj
        tail.7.mlp: gate_proj up_proj down_proj
        tail.8.mixer: in_proj conv1d out_proj
        tail.9.mlp: gate_proj up_proj down_proj
        tail.10.mixer: q_proj k_proj v_proj o_proj
        tail.11.mlp: gate_proj up_proj down_proj
    """
    undecayed = """
        tail.0: norm mixer.q_a_layernorm mixer.kv_a_layernorm
        tail.1: norm
        tail.2: norm mixer.A_log mixer.dt_bias mixer.o_norm
        tail.3: norm
        tail.4: norm mixer.A_log mixer.dt_bias mixer.o_norm
        tail.5: norm
        tail.6: norm mixer.A_log mixer.dt_bias mixer.o_norm mixer.g_b_proj.bias
        tail.7: norm
        tail.8: norm mixer.A_log mixer.dt_bias mixer.D mixer.conv1d.bias mixer.norm
        tail.9: norm
        tail.10: norm
        tail.11: norm
        norm
    """
    _assert_decay_sets(config_lib.resolve(tiny_hybrid.get_config()).model, decayed, undecayed)


def test_decay_sets_of_a_stacked_model():
    """Every kind of sublayer, with every optional parameter, and one axis more than a layer has."""
    cfg = tiny_config(
        "x",
        model__pattern=2 * EVERY_KIND + "*",
        model__tie_word_embeddings=False,
        model__gqa__qk_norm=True,
        model__gqa__bias=True,
        model__gqa__output_gate=True,
    )
    shapes = dict(optimizer.leaf_paths(Model(cfg.model).abstract_params()))
    assert shapes["layers.2.mixer.A_log"].shape == (2, 2)  # two repeats of KDA's two heads: as a matrix is
    decayed = """
        embed
        layers.0.mixer: q_a_proj q_b_proj kv_a_proj_with_mqa kv_b_proj o_proj
        layers.1.mixer: q_proj k_proj v_proj q_conv1d k_conv1d v_conv1d a_proj b_proj g_proj o_proj
        layers.2.mixer: q_proj k_proj v_proj q_conv1d k_conv1d v_conv1d b_proj f_a_proj f_b_proj
        layers.2.mixer: g_a_proj g_b_proj o_proj
        layers.3.mixer: in_proj conv1d out_proj
        layers.4.mixer: q_proj k_proj v_proj o_proj
        layers.5.mlp: gate_proj up_proj down_proj
        tail.0.mixer: q_a_proj q_b_proj kv_a_proj_with_mqa kv_b_proj o_proj
        lm_head
    """
    undecayed = """
        layers.0: norm mixer.q_a_layernorm mixer.kv_a_layernorm
        layers.1: norm mixer.A_log mixer.dt_bias mixer.o_norm
        layers.2: norm mixer.A_log mixer.dt_bias mixer.o_norm mixer.g_b_proj.bias
        layers.3: norm mixer.A_log mixer.dt_bias mixer.D mixer.conv1d.bias mixer.norm
        layers.4: norm mixer.q_proj.bias mixer.k_proj.bias mixer.v_proj.bias mixer.q_norm mixer.k_norm
        layers.5: norm
        tail.0: norm mixer.q_a_layernorm mixer.kv_a_layernorm
        norm
    """
    _assert_decay_sets(cfg.model, decayed, undecayed)


def test_update_equals_adamw_written_out():
    """Three updates in float64 numpy: clip with norm + 1e-6, bias-corrected moments, decoupled decay, lr 0 at
    first."""
    cfg = OptimizerConfig(
        learning_rate=1e-2,
        min_learning_rate=1e-3,
        warmup_steps=2,
        decay_steps=10,
        weight_decay=0.1,
        clip_norm=1.0,
    )
    opt = optimizer.Optimizer(cfg, 10)
    rng = np.random.default_rng(0)
    params = {"a": {"weight": rng.normal(size=(3, 4))}, "norm": {"weight": rng.normal(size=(4,))}}
    got = jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), params)
    state = opt.init(got)
    assert {x.dtype for x in jax.tree.leaves((state["mu"], state["nu"]))} == {np.dtype("float32")}
    want = {name: leaf["weight"].copy() for name, leaf in params.items()}
    m = {name: np.zeros_like(x) for name, x in want.items()}
    v = {name: np.zeros_like(x) for name, x in want.items()}
    apply = jax.jit(opt.apply)
    for k, size in enumerate((5.0, 0.05, 2.0)):
        grads = {name: size * rng.normal(size=x.shape) for name, x in want.items()}
        norm = math.sqrt(sum(np.sum(g**2) for g in grads.values()))
        tree = {name: {"weight": jnp.asarray(g, jnp.float32)} for name, g in grads.items()}
        squares = optimizer.sum_of_squares(tree)
        assert float(optimizer.norm_of(squares)) == pytest.approx(norm, rel=1e-6)
        got, state, rate = apply(tree, state, got, optimizer.norm_of(squares))
        lr = 1e-2 * k / 2 if k < 2 else 1e-2
        assert float(rate) == pytest.approx(lr, rel=1e-6)
        for name, g in grads.items():
            g = g * min(1.0, 1.0 / (norm + 1e-6))
            m[name] = 0.9 * m[name] + 0.1 * g
            v[name] = 0.95 * v[name] + 0.05 * g**2
            step = (m[name] / (1 - 0.9 ** (k + 1))) / (np.sqrt(v[name] / (1 - 0.95 ** (k + 1))) + 1e-8)
            decay = 0.1 if name == "a" else 0.0
            want[name] = want[name] - lr * (step + decay * want[name])
        for name, x in want.items():
            np.testing.assert_allclose(got[name]["weight"], x, rtol=2e-6, atol=1e-7, err_msg=f"{name} after update {k}")
    assert int(state["count"]) == 3


def test_squares_keep_the_stacked_axis():
    tree = {"layers": {"0": {"w": jnp.arange(12.0).reshape(3, 2, 2)}}, "norm": {"w": jnp.ones(5)}}
    squares = optimizer.sum_of_squares(tree)
    np.testing.assert_allclose(squares["layers"]["0"]["w"], [14.0, 126.0, 366.0])
    assert squares["norm"]["w"].shape == ()


def test_no_clipping_when_the_limit_is_zero():
    cfg = OptimizerConfig(learning_rate=1.0, min_learning_rate=0.0, clip_norm=0.0, b1=0.0, b2=0.0, eps=1.0)
    opt = optimizer.Optimizer(cfg, 10)
    params = {"norm": {"weight": jnp.zeros(1)}}
    new, _, _ = opt.apply({"norm": {"weight": jnp.full(1, 3.0)}}, opt.init(params), params, jnp.float32(3.0))
    np.testing.assert_allclose(new["norm"]["weight"], [-0.75])  # 3 / (3 + eps), not 1 / (1 + eps)


def test_path_of_a_leaf():
    tree = {"layers": {"0": {"mixer": {"A_log": 1}}}}
    assert optimizer.leaf_paths(tree) == [("layers.0.mixer.A_log", 1)]

"""The stack around the layers: scan, remat, packing, causality, decoding, initial loss, counts."""

import dataclasses
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from hybrid_jax import config_file, platform
from hybrid_jax.kernels.kda.gates import log_decay
from hybrid_jax.layers import kda as kda_layer
from hybrid_jax.layers.context import Context
from hybrid_jax.layers.gdn import GDN
from hybrid_jax.layers.kda import KDA
from hybrid_jax.model import Model
from tests.models import BASE, EVERY_KIND, init, model_of, rms_error, tokens_of


@pytest.mark.parametrize("symbol", "*AGKS")
def test_packed_equals_separate(symbol):
    """Documents of 70, 1, 30 and 3 tokens in one row: each one's logits are those it has alone."""
    model = model_of(symbol + "-")
    params = init(model)
    sizes = [70, 1, 30, 3]
    tokens = tokens_of(1, 1, sum(sizes))
    # The first and third document share an id: it is the change that counts.
    ids = jnp.asarray(np.repeat([4, 9, 4, 2], sizes))[None]
    packed = np.asarray(jax.jit(model.logits)(params, tokens, ids))
    start = 0
    for size in sizes:
        alone = np.asarray(model.logits(params, tokens[:, start : start + size]))
        error = np.abs(packed[:, start : start + size] - alone).max() / np.abs(alone).max()
        assert error < 2e-5, f"document of {size} tokens at {start}: {error:.1e} of max |logit|"
        start += size


@pytest.mark.parametrize("symbol", "*AGKS")
def test_other_documents_change_nothing(symbol):
    """Every token of the other documents replaced: the same logits bit for bit, also one row beside another."""
    model = model_of(symbol + "-")
    params = init(model)
    ids = jnp.asarray(np.repeat([0, 1, 2], [33, 40, 27]))[None]
    logits = jax.jit(model.logits)
    tokens = tokens_of(1, 1, 100)
    middle = (ids == 1).astype(bool)
    changed = jnp.where(middle, tokens, (tokens + 17) % BASE.vocab_size)
    before, after = np.asarray(logits(params, tokens, ids)), np.asarray(logits(params, changed, ids))
    np.testing.assert_array_equal(before[:, 33:73], after[:, 33:73])
    assert (before[:, :33] != after[:, :33]).any() and (before[:, 73:] != after[:, 73:]).any()


@pytest.mark.parametrize("symbol", "*AGKS")
def test_causality_by_gradient(symbol):
    """The gradient of logits up to t with respect to later embeddings is exactly zero, and to earlier ones not."""
    model = model_of(symbol + "-")
    params = init(model)
    T, t = 96, 50
    # Each position reads its own row of the embedding, so that the embedding's gradient has one row a position.
    wide = model_of(symbol + "-", vocab_size=T)
    params = {**params, "embed": {"weight": jax.random.normal(jax.random.key(2), (T, BASE.hidden_size))}}
    untied = Model(dataclasses.replace(wide.cfg, tie_word_embeddings=False), compute_dtype="float32")
    params["lm_head"] = {"weight": jax.random.normal(jax.random.key(3), (T, BASE.hidden_size))}

    def f(params):
        return jnp.sum(untied.logits(params, jnp.arange(T)[None])[0, : t + 1] ** 2)

    rows = np.asarray(jax.jit(jax.grad(f))(params)["embed"]["weight"])
    assert not rows[t + 1 :].any()
    assert (np.abs(rows[: t + 1]).max(axis=1) > 0).all()


def test_scan_equals_unrolled():
    """One scan over three periods and a tail against the same sublayers written out, from the same seed."""
    pattern = "G-" * 3 + "*-"
    scanned, unrolled = model_of(pattern), model_of(pattern, scan_layers=False)

    def written_out(params):
        flat = {k: v for k, v in params.items() if k not in ("layers", "tail")}
        flat["tail"] = {}
        for i, (_, path, index) in enumerate(scanned.sublayers):
            weights = params[path[0]][path[1]]
            flat["tail"][str(i)] = jax.tree.map(lambda a, n=index: a if n < 0 else a[n], weights)
        return flat

    fresh = (m.init(jax.random.key(0)) for m in (scanned, unrolled))
    jax.tree.map(np.testing.assert_array_equal, written_out(next(fresh)), next(fresh))
    params = init(scanned)
    assert set(params["layers"]) == {"0", "1"} and set(params["tail"]) == {"0", "1"}
    tokens = tokens_of(0, 2, 40)
    assert rms_error(unrolled.logits(written_out(params), tokens), scanned.logits(params, tokens)) < 1e-5


@pytest.mark.parametrize(("remat", "pattern"), [("dots", "A-A-"), ("names", "GG"), ("full", "**")])
def test_remat_changes_no_gradient(remat, pattern):
    tokens = tokens_of(0, 1, 40)
    batch = {
        "tokens": tokens,
        "targets": jnp.roll(tokens, -1, 1),
        "segment_ids": jnp.asarray(np.repeat([0, 1], [25, 15]))[None],
        "positions": jnp.concatenate([jnp.arange(25), jnp.arange(15)])[None],
    }
    plain, again = model_of(pattern), model_of(pattern, remat=remat)
    params = init(plain)
    want, got = (jax.jit(jax.grad(lambda p, m=m: m.loss(p, batch)[0]))(params) for m in (plain, again))
    errors = jax.tree.leaves(jax.tree.map(rms_error, got, want))
    assert max(errors) < 1e-5


def grad_memory(model: Model, T: int = 512) -> int:
    """Bytes of temporary memory of the compiled gradient of one row, with barriers kept as on GPUs."""
    row = jax.ShapeDtypeStruct((1, T), jnp.int32)
    batch = dict.fromkeys(("tokens", "targets", "segment_ids", "positions"), row)
    grad = jax.jit(jax.grad(lambda p, b: model.loss(p, b)[0]))
    option, value = platform.BARRIERS.removeprefix("--").split("=")
    compiled = grad.lower(model.abstract_params(), batch).compile(compiler_options={option: value})
    return compiled.memory_analysis().temp_size_in_bytes


@pytest.mark.parametrize("scan", [True, False])
def test_remat_saves_memory(scan):
    """Each policy keeps less than the one before it, also where layers are not scanned and XLA could undo it."""
    policies = ("none", "dots", "names", "full") if scan else ("none", "full")
    used = [grad_memory(model_of("A-" * 6, remat=r, scan_layers=scan)) for r in policies]
    assert all(a > (1.04 if scan else 1.3) * b for a, b in itertools.pairwise(used)), dict(
        zip(policies, used, strict=True)
    )


def test_remat_of_the_first_periods_changes_no_gradient():
    """None, some and all of the periods: the same parameters, losses and gradients."""
    tokens = tokens_of(0, 1, 40)
    zeros = jnp.zeros_like(tokens)
    batch = {"tokens": tokens, "targets": jnp.roll(tokens, -1, 1), "segment_ids": zeros, "positions": zeros}
    plain = model_of("-" * 4)
    params = init(plain)

    def run(model):
        assert jax.tree.map(jnp.shape, model.abstract_params()) == jax.tree.map(jnp.shape, params)
        return jax.jit(jax.value_and_grad(lambda p: model.loss(p, batch)[0]))(params)

    loss, grads = run(plain)
    for layers in (0, 1, 4):
        got_loss, got = run(model_of("-" * 4, remat="full", remat_layers=layers))
        assert got_loss == pytest.approx(float(loss), rel=1e-6)
        assert max(jax.tree.leaves(jax.tree.map(rms_error, got, grads))) < 1e-5


@pytest.mark.parametrize(("scan", "counts"), [(True, [0, 2, 2, 2, 3]), (False, [0, 2, 4, 6, 7])])
def test_which_sublayers_remat_is_for(scan, counts):
    """Sublayers of three periods and a tail that the program computes again: a scan's once for all its turns."""
    row = jnp.zeros((1, 8), jnp.int32)
    batch = dict.fromkeys(("tokens", "targets", "segment_ids", "positions"), row)

    def again(layers):
        model = model_of("-A" * 3 + "-", remat="full", remat_layers=layers, scan_layers=scan)
        return str(jax.make_jaxpr(lambda p: model.loss(p, batch)[0])(model.abstract_params())).count("nothing_saveable")

    assert [again(layers) for layers in (0, 1, 2, 3, -1)] == counts


@pytest.mark.parametrize("scan", [True, False])
def test_remat_of_more_periods_saves_more_memory(scan):
    models = [model_of("-" * 6, remat="full", remat_layers=layers, scan_layers=scan) for layers in (0, 3, 6)]
    used = [grad_memory(model, 1024) for model in models]
    assert all(a > 1.1 * b for a, b in itertools.pairwise(used)), used


@pytest.mark.parametrize("symbol", "*GKS")
def test_names_runs_no_operation_twice(symbol):
    """The scans of a sequence operation in the gradient program: as many with "names" as without remat."""

    def scans(remat: str) -> int:
        model = model_of(symbol, remat=remat)
        row = jnp.zeros((1, 1024), jnp.int32)
        batch = dict.fromkeys(("tokens", "targets", "segment_ids", "positions"), row)
        text = str(jax.make_jaxpr(jax.grad(lambda p: model.loss(p, batch)[0]))(model.abstract_params()))
        return text.count("scan[")

    assert scans("names") == scans("none") < scans("full")


def test_micro_batches_add_up():
    """Gradients of two halves with unlike counts of unmasked targets sum to those of the whole."""
    model = model_of("*-G-")
    params = init(model)
    tokens = tokens_of(0, 2, 40)
    targets = jnp.roll(tokens, -1, 1).at[0, 7:].set(-1)
    zeros = jnp.zeros_like(tokens)
    batch = {"tokens": tokens, "targets": targets, "segment_ids": zeros, "positions": zeros + jnp.arange(40)}
    grad = jax.jit(jax.grad(lambda p, b, n: model.loss(p, b, n)[0]))
    count = jnp.float32((targets >= 0).sum())
    whole = grad(params, batch, None)
    halves = [grad(params, jax.tree.map(lambda a, i=i: a[i : i + 1], batch), count) for i in range(2)]
    summed = jax.tree.map(jnp.add, *halves)
    assert max(jax.tree.leaves(jax.tree.map(rms_error, summed, whole))) < 1e-5


def test_first_loss_of_gdn_300m():
    """The published run starts at 11.9652: ln V + D std^2 / 2 for logits of N(0, 0.02) weights. Ids at random, as
    a tied head already favours a token that repeats the one before it.
    """
    cfg = config_file.load("configs/gdn_300m.py")
    model = Model(cfg.model, compute_dtype=cfg.train.compute_dtype)
    params = jax.jit(model.init)(jax.random.key(cfg.train.seed))
    tokens = jax.random.randint(jax.random.key(1), (1, 193), 0, cfg.model.vocab_size)
    zeros = jnp.zeros((1, 192), jnp.int32)
    batch = {
        "tokens": tokens[:, :-1],
        "targets": tokens[:, 1:],
        "segment_ids": zeros,
        "positions": zeros + jnp.arange(192),
    }
    loss = float(jax.jit(model.loss)(params, batch)[0])
    assert abs(loss - (math.log(128_256) + 1024 * 0.02**2 / 2)) < 0.03, loss
    assert abs(loss - 11.97) < 0.03, loss


def test_initial_values():
    """std 0.02 matrices, ones in norms, U(-1/2, 1/2) convolutions, A in [1, 16], dt in [0.001, 0.1]."""
    model = model_of("*GKS-")
    params = model.init(jax.random.key(0))["tail"]
    gdn, kda, mamba = (params[str(i)]["mixer"] for i in (1, 2, 3))
    assert abs(float(jnp.std(params["4"]["mlp"]["up_proj"]["weight"])) - 0.02) < 2e-3
    assert (params["0"]["norm"]["weight"] == 1).all()
    conv = np.asarray(mamba["conv1d"]["weight"])
    assert conv.shape == (96, 4) and conv.min() > -0.5 and conv.max() < 0.5 and conv.std() > 0.25
    for mixer in (gdn, kda, mamba):
        a, dt = np.exp(np.asarray(mixer["A_log"])), np.log1p(np.exp(np.asarray(mixer["dt_bias"])))
        assert a.min() >= 1 and a.max() <= 16 and dt.min() > 0.99e-3 and dt.max() < 0.101
    bound = 16**-0.5
    assert 0.9 * bound < float(jnp.abs(kda["g_b_proj"]["bias"]).max()) <= bound
    assert (mamba["D"] == 1).all()


def kda_decays(layer: KDA, x, monkeypatch) -> np.ndarray:
    """The log decays [B, T, HV, K] of a layer, by the raw gates and the gate that it hands to its operation."""
    found, kda = [], kda_layer.kda

    def spy(q, k, v, f, *args, gate, **options):
        found.append(np.asarray(log_decay(f, gate)))
        return kda(q, k, v, f, *args, gate=gate, **options)

    monkeypatch.setattr(kda_layer, "kda", spy)
    layer(x, Context(jnp.zeros(x.shape[:2], jnp.int32)))
    monkeypatch.undo()
    (g,) = found
    return g


def test_decays_start_alive(monkeypatch):
    """No gate of a fresh mixer is saturated: neither its decay nor its gradient is gone."""
    x = jax.random.normal(jax.random.key(1), (1, 64, 32))
    for bound in (0.0, -5.0):
        cfg = dataclasses.replace(BASE.kda, num_heads=16, num_v_heads=16, lower_bound=bound)
        layer = KDA(cfg, 32, 1e-6, std=0.02, out_std=0.02, rngs=nnx.Rngs(0))
        g = -kda_decays(layer, x, monkeypatch)
        assert np.quantile(g, 0.02) > 5e-4 and np.quantile(g, 0.98) < 2.0, bound


def test_output_projections_rescaled():
    model = model_of("G-" * 8, rescale_out_proj=True, hidden_size=64)
    layers = model.init(jax.random.key(0))["layers"]
    want = 0.02 / math.sqrt(2 * 16)
    for out in (layers["0"]["mixer"]["o_proj"]["weight"], layers["1"]["mlp"]["down_proj"]["weight"]):
        assert abs(float(jnp.std(out)) / want - 1) < 0.05
    assert abs(float(jnp.std(layers["1"]["mlp"]["up_proj"]["weight"])) / 0.02 - 1) < 0.05


def test_options_change_the_tree():
    """use_gate, gate_bias, pre_norm, short convolution, tied head: each switch adds or removes its parameters."""
    full = model_of(EVERY_KIND).abstract_params()["tail"]
    less = model_of(
        EVERY_KIND,
        gdn=dataclasses.replace(BASE.gdn, use_gate=False, use_short_conv=False),
        kda=dataclasses.replace(BASE.kda, gate_bias=False),
        mamba2=dataclasses.replace(BASE.mamba2, pre_norm=False),
        gqa=dataclasses.replace(BASE.gqa, bias=False, qk_norm=False, output_gate=True),
    )
    tree = less.abstract_params()["tail"]
    assert set(full["2"]["mixer"]) - set(tree["2"]["mixer"]) == {"g_proj", "q_conv1d", "k_conv1d", "v_conv1d"}
    assert "bias" in full["4"]["mixer"]["g_b_proj"] and "bias" not in tree["4"]["mixer"]["g_b_proj"]
    assert "norm" in full["6"] and "norm" not in tree["6"]
    assert tree["8"]["mixer"]["q_proj"]["weight"].shape[1] == 2 * full["8"]["mixer"]["q_proj"]["weight"].shape[1]
    # Each variant runs.
    assert np.isfinite(np.asarray(less.logits(init(less), tokens_of(0, 1, 9)))).all()


def test_lower_bound_and_negative_eigenvalues(monkeypatch):
    """The bounded KDA gate is bound * sigmoid(exp(A_log) (f + dt_bias)); doubled beta changes the result."""
    bounded = dataclasses.replace(BASE.kda, lower_bound=-5.0)
    layer = KDA(bounded, 32, 1e-6, std=0.02, out_std=0.02, rngs=nnx.Rngs(0))
    f = np.linspace(-30, 30, 16)
    layer.f_b_proj = lambda _: jnp.float32(f)[None, None]
    g = kda_decays(layer, jnp.ones((1, 1, 32)), monkeypatch)[0, 0]
    rate, bias = np.exp(np.asarray(layer.A_log[...], np.float64)), np.asarray(layer.dt_bias[...], np.float64)
    want = -5 / (1 + np.exp(-rate[:, None] * (f + bias).reshape(2, 8)))
    assert g.min() >= -5 and g.max() <= 0
    np.testing.assert_allclose(g, want, rtol=1e-5, atol=1e-9)
    model, doubled = (
        model_of("K", kda=dataclasses.replace(bounded, allow_neg_eigval=twice)) for twice in (False, True)
    )
    params, tokens = init(model), tokens_of(0, 1, 20)
    assert rms_error(doubled.logits(params, tokens), model.logits(params, tokens)) > 1e-3


def test_beta_is_a_sigmoid_and_twice_that_with_negative_eigenvalues():
    x = jax.random.normal(jax.random.key(1), (2, 5, 32))
    ctx = Context(jnp.zeros((2, 5), jnp.int32))
    for twice in (False, True):
        cfg = dataclasses.replace(BASE.gdn, allow_neg_eigval=twice)
        layer = GDN(cfg, 32, 1e-6, std=0.5, out_std=0.02, rngs=nnx.Rngs(0))
        (_, _, _, beta), _, _ = layer.project(x, [], ctx, None)
        b = np.asarray(x, np.float64) @ np.asarray(layer.b_proj.weight[...], np.float64)
        np.testing.assert_allclose(np.asarray(beta), (2 if twice else 1) / (1 + np.exp(-b)), rtol=1e-5)

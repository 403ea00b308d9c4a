"""What the planner says a sublayer keeps for its backward pass, against the residuals that jax lists of the sublayer
itself: the same bytes, so that a layer that keeps something else breaks these tests."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from jax._src.ad_checkpoint import saved_residuals  # jax.ad_checkpoint only prints them

from hybrid_jax import residuals
from hybrid_jax.kernels import launch
from hybrid_jax.layers.context import Context
from hybrid_jax.model import Model, _remat
from tests.models import BASE

change = dataclasses.replace
WIDE = change(BASE, gdn=change(BASE.gdn, head_dim=16), kda=change(BASE.kda, head_dim=16))  # what Triton can take
POLICIES = ("none", "dots", "names", "full")
KINDS = {"-": ("chunked",), "*": ("chunked",), "A": ("chunked",), "S": ("chunked",)} | dict.fromkeys(
    "GK", ("chunked", "triton")
)


@pytest.fixture(autouse=True)
def only_traced(monkeypatch):
    """Kernels are traced here and not run: what they lack or cannot do on this machine does not matter."""
    monkeypatch.setattr(launch, "why_not", lambda: "")
    monkeypatch.setattr(launch, "unfit", lambda dtype: "")


@functools.cache
def listed(cfg, symbol, policy, backend, dtype, rows, length) -> tuple[int, ...]:
    """Sizes in bytes of what jax keeps of one sublayer, without parameters, batch, constants and scalars."""
    model = Model(change(cfg, pattern=symbol), compute_dtype=dtype, backend=backend)
    graph, structure = model._definitions[symbol]

    def apply(weights, x, segment_ids, positions):
        module = nnx.merge(graph, jax.tree.unflatten(structure, jax.tree.leaves(weights)))
        return module(x, Context(positions, segment_ids, backend=backend))[0]

    x = jax.ShapeDtypeStruct((rows, length, cfg.hidden_size), dtype)
    ids = jax.ShapeDtypeStruct((rows, length), jnp.int32)
    weights = model.abstract_params()["tail"]["0"]
    found = saved_residuals(_remat(apply, policy), weights, x, ids, ids)
    there = ("from the argument weights", "from the argument segment_ids", "from the argument positions")
    there += ("from a constant", "from a literal")
    return tuple(a.size * a.dtype.itemsize for a, source in found if not source.startswith(there) and a.shape)


def planned(cfg, symbol, policy, backend, dtype, rows, length) -> dict[str, int]:
    arch = "default" if backend == "triton" else ""  # the interpreter's tiles
    part = residuals.Part(rows, length, 2 if dtype == "bfloat16" else 4, arch=arch, backend=backend)
    return residuals.kept(cfg, symbol, policy, part)


def compare(*case):
    want, got = listed(*case), planned(*case)
    assert sum(got.values()) == sum(want), (sorted(want), got)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(("symbol", "backend"), [(s, b) for s, backends in KINDS.items() for b in backends])
def test_every_kind_under_every_policy(symbol, backend, policy):
    compare(WIDE, symbol, policy, backend, "bfloat16", 3, 96)


@pytest.mark.parametrize(("symbol", "backend"), [(s, b) for s, backends in KINDS.items() for b in backends])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_lengths_that_do_not_divide_in_both_types(symbol, backend, dtype):
    for policy in ("none", "names"):
        compare(WIDE, symbol, policy, backend, dtype, 2, 650)


def test_few_tokens_are_multiplied_one_by_one():
    for symbol in "*GK":
        compare(WIDE, symbol, "none", "chunked", "bfloat16", 2, 32)


OPTIONS = [
    ("*", {"mla": change(BASE.mla, q_lora_rank=0, rope=change(BASE.mla.rope, style="none"))}),
    ("A", {"gqa": change(BASE.gqa, output_gate=True, qk_norm=False, rope=change(BASE.gqa.rope, rotary_fraction=0.5))}),
    ("A", {"gqa": change(BASE.gqa, num_kv_heads=4, bias=False, rope=change(BASE.gqa.rope, style="none"))}),
    ("G", {"gdn": change(WIDE.gdn, use_gate=False, use_short_conv=False, num_v_heads=2, allow_neg_eigval=True)}),
    ("G", {"gdn": change(WIDE.gdn, use_gate=False)}),
    ("K", {"kda": change(WIDE.kda, gate_bias=False, lower_bound=-3.0, num_v_heads=4)}),
    ("K", {"kda": change(WIDE.kda, use_short_conv=False)}),
    ("S", {"mamba2": change(BASE.mamba2, pre_norm=False, expand=1, n_groups=1)}),
]


@pytest.mark.parametrize(("symbol", "options"), OPTIONS)
def test_options_of_the_sublayers(symbol, options):
    for backend in KINDS[symbol]:
        for policy in POLICIES[:3]:
            compare(change(WIDE, **options), symbol, policy, backend, "bfloat16", 2, 200)

"""Parameters as planned: against those that the model has, and against how the sharding table cuts them."""

import dataclasses
import math

import jax
import pytest
from jax.sharding import AbstractMesh, AxisType

from hybrid_jax import sharding, weights
from hybrid_jax.model import Model
from hybrid_jax.optimizer import leaf_paths
from tests.models import BASE, EVERY_KIND

OTHERWISE = dataclasses.replace(
    BASE,
    tie_word_embeddings=False,
    mla=dataclasses.replace(BASE.mla, q_lora_rank=0),
    gqa=dataclasses.replace(BASE.gqa, bias=False, qk_norm=False, output_gate=True),
    gdn=dataclasses.replace(BASE.gdn, use_gate=False, use_short_conv=False),
    kda=dataclasses.replace(BASE.kda, gate_bias=False, use_short_conv=False),
    mamba2=dataclasses.replace(BASE.mamba2, pre_norm=False),
)


def planned(model):
    found = {w.name: w for w in weights.around(model)}
    for i, symbol in enumerate(model.layout):
        found |= {f"tail.{i}.{w.name}": w for w in weights.sublayer(model, symbol)}
    return found


@pytest.mark.parametrize("sizes", [(1, 1, 1), (8, 1, 1), (1, 8, 1), (2, 2, 2), (1, 1, 2), (3, 5, 7)])
@pytest.mark.parametrize("zero", [1, 3])
@pytest.mark.parametrize("base", [BASE, OTHERWISE], ids=["base", "otherwise"])
def test_names_shapes_and_parts_are_those_of_the_model(sizes, zero, base):
    model = dataclasses.replace(base, pattern=EVERY_KIND, scan_layers=False)
    params = Model(model).abstract_params()
    want = planned(model)
    assert {path: leaf.shape for path, leaf in leaf_paths(params)} == {name: w.shape for name, w in want.items()}
    mesh = AbstractMesh(sizes, sharding.AXES, axis_types=(AxisType.Auto,) * 3)
    state = {"params": params, "opt_state": {"mu": params}}
    shards = sharding.shardings(state, mesh, zero=zero)
    held = jax.tree.map(lambda s, x: math.prod(s.shard_shape(x.shape)), shards, state)
    names = dict(zip(sharding.AXES, sizes, strict=True))
    cut = {**names, "fsdp": 1} if zero == 1 else names
    assert dict(leaf_paths(held["params"])) == {name: w.held(cut) for name, w in want.items()}
    assert dict(leaf_paths(held["opt_state"]["mu"])) == {name: w.held(names) for name, w in want.items()}

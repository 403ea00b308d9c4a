"""The mesh, the table of specs, and that 1 device and 8 compute the same."""

import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, PartitionSpec

from hybrid_jax import sharding
from hybrid_jax.config import MeshConfig
from hybrid_jax.errors import UserError

ROOT = Path(__file__).parents[1]


def test_mesh_takes_what_is_left_and_has_auto_axes():
    mesh = sharding.make_mesh(MeshConfig(), jax.devices()[:1])
    assert dict(mesh.shape) == {"data": 1, "fsdp": 1, "tensor": 1}
    assert set(mesh.axis_types) == {AxisType.Auto}
    with pytest.raises(UserError, match=r"config\.mesh\.data"):
        sharding.make_mesh(MeshConfig(data=3), jax.devices()[:1])


def test_first_rule_wins_and_stacked_parameters_get_a_leading_axis():
    table = ((r"q_proj\.weight", PartitionSpec("fsdp", "tensor")), (r"norm\.weight", PartitionSpec()))
    spec = PartitionSpec(None, "fsdp", "tensor")
    for tree in ("params", "opt_state.mu", "opt_state.nu"):
        assert sharding.spec_of(f"{tree}.layers.0.mixer.q_proj.weight", 3, table) == spec
        assert sharding.spec_of(f"{tree}.tail.0.mixer.q_proj.weight", 2, table) == PartitionSpec("fsdp", "tensor")
        assert sharding.spec_of(f"{tree}.layers.0.norm.weight", 2, table) == PartitionSpec()
    with pytest.raises(UserError, match=r"no rule for the parameter params\.embed\.weight"):
        sharding.spec_of("params.embed.weight", 2, table)
    with pytest.raises(UserError, match="more axes than"):
        sharding.spec_of("params.tail.0.q_proj.weight", 1, table)
    # "xq_proj.weight" is another parameter: a rule matches whole parts of a path.
    with pytest.raises(UserError, match="no rule"):
        sharding.spec_of("params.tail.0.xq_proj.weight", 2, table)


def test_todays_table_keeps_everything_whole():
    mesh = sharding.make_mesh(MeshConfig(), jax.devices()[:1])
    tree = {"params": {"embed": {"weight": jax.ShapeDtypeStruct((4, 4), jnp.float32)}}, "step": jnp.zeros(())}
    assert {s.spec for s in jax.tree.leaves(sharding.shardings(tree, mesh))} == {PartitionSpec()}


@pytest.fixture(scope="module")
def results():
    environment = {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": "--xla_force_host_platform_device_count=8 --xla_backend_optimization_level=0",  # compiles faster
        "PYTHONPATH": str(ROOT),
    }
    run = subprocess.run(
        [sys.executable, "tests/mesh_worker.py"],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert run.returncode == 0, run.stderr[-3000:]
    found = json.loads(run.stdout)
    assert found["devices"] == 8 and found["eight"]["mesh"]["data"] == 8
    return found


def test_one_device_and_eight_compute_the_same(results):
    """Gradients and their norms before clipping too: AdamW with clipping cannot see a gradient off by a
    factor."""
    one, many = results["one"], results["eight"]
    assert many["losses"] == pytest.approx(one["losses"], rel=2e-6)
    assert many["norms"] == pytest.approx(one["norms"], rel=1e-5)
    initial, gradients, final = results["difference"]
    assert initial == 0.0
    assert gradients < 1e-5
    assert final < 1e-5
    assert len(set(one["losses"])) == 3  # they were three different steps


def test_specs_of_parameters_moments_and_gradients(results):
    whole = results["eight"]["specs"]
    assert all(spec == [] for tree in ("params", "mu", "after") for spec in whole[tree].values())
    assert {path.split(".")[1] for path in whole["params"] if path.startswith("layers.")} == set("012345")
    split = results["split"]["specs"]
    for tree in ("params", "mu", "grads", "after"):
        assert split[tree]["embed.weight"] == ["fsdp"], tree
        assert split[tree]["layers.1.mlp.up_proj.weight"] == [None, "fsdp"], tree
        assert split[tree]["norm.weight"] == []
    assert results["one"]["specs"]["shard"] == [64, 16]
    assert split["shard"] == [16, 16]


def test_a_checkpoint_is_read_onto_another_mesh(results):
    """From 8 copies to 4 parts and to one device, and from parts to copies."""
    there, back = results["reshard"], results["reshard_back"]
    assert all(found["same"] for found in (*there.values(), *back.values()))
    assert {name: (found["devices"], found["shard"]) for name, found in there.items()} == {
        "eight": (8, [64, 16]),
        "split": (8, [16, 16]),
        "one": (1, [64, 16]),
    }
    assert there["split"]["specs"]["embed.weight"] == ["fsdp"]
    assert there["split"]["specs"]["layers.1.mlp.up_proj.weight"] == [None, "fsdp"]
    assert there["eight"]["specs"]["embed.weight"] == there["one"]["specs"]["embed.weight"] == []
    assert back["split"]["shard"] == [16, 16] and back["eight"]["shard"] == [64, 16]

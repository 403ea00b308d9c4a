"""The mesh, the table of specs, and that 1 device and 8 compute the same."""

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec

from hybrid_jax import checkpoint, sharding, step
from hybrid_jax.config import MeshConfig
from hybrid_jax.errors import UserError
from hybrid_jax.kernels import dispatch
from tests.processes import free_port
from tests.tiny import EVERY_KIND, SIZES_TO_CUT, tiny_config

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


def test_every_parameter_of_every_layer_has_a_rule_and_data_parallelism_cuts_nothing():
    mesh = sharding.make_mesh(MeshConfig(), jax.devices()[:1])
    for tied in (True, False):
        cfg = tiny_config("/nonexistent", model__pattern=EVERY_KIND, model__tie_word_embeddings=tied)
        found = sharding.shardings(step.Programs(cfg, mesh).state, mesh)
        assert {s.spec for s in jax.tree.leaves(found)} == {PartitionSpec()}


def test_axes_that_do_not_divide_are_left_out():
    both = PartitionSpec(("fsdp", "tensor"), "data")
    assert dispatch.fitted(both, (16, 3), {"fsdp": 4, "tensor": 2, "data": 2}) == PartitionSpec(("fsdp", "tensor"))
    assert dispatch.fitted(both, (4, 2), {"fsdp": 4, "tensor": 2, "data": 2}) == PartitionSpec("fsdp", "data")
    assert dispatch.fitted(both, (6, 2), {"fsdp": 4, "tensor": 2, "data": 1}) == PartitionSpec("tensor")
    assert dispatch.fitted(both, (5, 3), {"fsdp": 4, "tensor": 2, "data": 2}) == PartitionSpec()


def worker(folder, pattern, *names, processes=1):
    """What mesh_worker.py finds; "warned": of arrays that the compiler makes whole."""
    port = str(free_port())

    def environment(index):
        joined = {"JAX_COORDINATOR_ADDRESS": f"127.0.0.1:{port}", "JAX_NUM_PROCESSES": str(processes)}
        return {
            **os.environ,
            "JAX_PLATFORMS": "cpu",
            # The other compiles faster.
            "XLA_FLAGS": f"--xla_force_host_platform_device_count={8 // processes} --xla_backend_optimization_level=0",
            "PYTHONPATH": str(ROOT),
            **({**joined, "JAX_PROCESS_ID": str(index)} if processes > 1 else {}),
        }

    command = [sys.executable, "tests/mesh_worker.py", str(folder), pattern, *names]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    started = [subprocess.Popen(command, cwd=ROOT, env=environment(i), **pipes) for i in range(processes)]
    with ThreadPoolExecutor(processes) as pool:
        said = list(pool.map(lambda process: process.communicate(timeout=1800), started))
    for process, (_, error) in zip(started, said, strict=True):
        assert process.returncode == 0, error[-3000:]
    found = json.loads(said[0][0].splitlines()[-1])  # gloo says something before
    found["warned"] = any("Involuntary full rematerialization" in error for _, error in said)
    assert (found["devices"], found["processes"]) == (8, processes)
    for name in (name for name in found if name in MESHES):
        found[name]["gradients"] = {
            path: float(np.sqrt(np.mean((got - expected) ** 2) / np.mean(expected**2)))
            for path, expected, got in gradients(folder, name)
        }
    return found


def gradients(folder, name):
    """(path, of one device, of a mesh) of the first step."""
    with np.load(folder / "one.0.npz") as one, np.load(folder / f"{name}.0.npz") as many:
        assert set(one) == set(many)
        return [(path, one[path], many[path]) for path in one]


MESHES = {
    "data": {"data": 8, "fsdp": 1, "tensor": 1},
    "fsdp": {"data": 1, "fsdp": 8, "tensor": 1},
    "zero1": {"data": 2, "fsdp": 4, "tensor": 1},
    "cube": {"data": 2, "fsdp": 2, "tensor": 2},
    "tensor": {"data": 2, "fsdp": 1, "tensor": 4},
}


QUICK = "GA-GA-"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("meshes")


@pytest.fixture(scope="module")
def quick(folder):
    return worker(folder, QUICK, "cube")


@pytest.fixture(scope="module")
def every(tmp_path_factory):
    return worker(tmp_path_factory.mktemp("every"), 2 * EVERY_KIND, *MESHES)


def check_equal(results, name):
    """20 steps in fp32. Gradients and their norms before clipping too: AdamW with clipping cannot see a gradient off by
    a factor."""
    one, many = results["one"], results[name]
    assert many["mesh"] == MESHES[name]
    assert many["losses"] == pytest.approx(one["losses"], rel=1e-5)
    assert many["norms"] == pytest.approx(one["norms"], rel=1e-5)
    assert max(many["gradients"].values()) < 1e-5, max(many["gradients"].items(), key=lambda item: item[1])
    assert len(set(one["losses"])) == len(one["losses"])  # they were different steps
    assert many["after"] == many["params"]  # what a step gives back lies as it was given


def test_a_mesh_computes_what_one_device_does(quick):
    check_equal(quick, "cube")


@pytest.mark.slow
@pytest.mark.parametrize("name", MESHES)
def test_every_mesh_computes_what_one_device_does_with_every_kind_of_sublayer(every, name):
    check_equal(every, name)


@pytest.mark.slow
def test_two_processes_of_four_devices_compute_what_one_device_does(quick, folder):
    """On a mesh whose every axis but "tensor" goes through both, and back: the checkpoint of one process is read by
    two, and theirs by one."""
    two = worker(folder, QUICK, "cube", processes=2)
    check_equal({"one": quick["one"], **two}, "cube")
    assert two["reshard"] == {"cube": True} and not two["warned"]
    cfg = tiny_config("/nonexistent", model__pattern=QUICK, **SIZES_TO_CUT)
    alone = step.Programs(cfg, sharding.make_mesh(MeshConfig(), jax.devices()[:1]))
    with jax.set_mesh(alone.mesh):
        expected = alone.init(cfg.train.seed)
    with checkpoint.Checkpoints(folder / "two" / "cube", 1, {"pattern": ""}, print) as checkpoints:
        got = checkpoints.restore(alone.state)[0]
    assert jax.tree.all(jax.tree.map(np.array_equal, got, expected))


def test_specs_of_parameters_and_moments(quick):
    """No device holds more than its share of what is cut."""
    cube = quick["cube"]
    assert cube["params"] == cube["mu"]
    assert cube["params"]["layers.2.mlp.up_proj.weight"] == [None, "fsdp", "tensor"]
    assert cube["params"]["layers.2.mlp.down_proj.weight"] == [None, "tensor", "fsdp"]
    assert cube["params"]["layers.0.mixer.A_log"] == [None, "tensor"]
    assert cube["params"]["embed.weight"] == ["tensor", "fsdp"]
    assert cube["params"]["norm.weight"] == []
    assert cube["shard"]["params"] < 0.3 * quick["one"]["shard"]["whole"]


@pytest.mark.slow
def test_zero_1_cuts_moments_alone_and_joined_projections_lie_by_rows(every):
    assert all(spec == [] for spec in every["data"]["mu"].values())
    zero1, fsdp, whole = every["zero1"], every["fsdp"], every["one"]["shard"]["whole"]
    assert fsdp["params"] == fsdp["mu"] and fsdp["shard"]["params"] < 0.25 * whole
    assert fsdp["mu"]["layers.5.mlp.up_proj.weight"] == fsdp["mu"]["embed.weight"] == [None, "fsdp"]
    assert all(spec == [] for spec in zero1["params"].values())
    assert zero1["mu"]["layers.5.mlp.up_proj.weight"] == [None, "fsdp"]
    assert zero1["shard"]["params"] == whole and zero1["shard"]["mu"] < 0.3 * whole
    assert every["cube"]["params"]["layers.3.mixer.in_proj.weight"] == [None, ["fsdp", "tensor"]]


def check_collectives(results):
    """What the compiled program sends: no activation, but the sums of products that are cut by rows and the embedding's
    gradient to where its columns lie; with copies alone one sum of each gradient, and none in the accumulation's loop.
    """
    for name in set(results) & set(MESHES):
        for kind, shape, _, scope in results[name]["collectives"]:
            activation = 40 in shape  # tokens of a row
            product = kind == "all-reduce" and MESHES[name]["tensor"] > 1
            embedding = "transpose(jvp())/" in scope and MESHES[name]["fsdp"] > 1
            assert not activation or product or embedding, (name, kind, shape, scope)
    if "data" in results:
        assert not [found for found in results["data"]["collectives"] if found[2]]
        assert {kind for kind, *_ in results["data"]["collectives"]} == {"all-reduce"}


def test_collectives_are_those_that_a_mesh_asks_for(quick):
    check_collectives(quick)
    assert not quick["warned"]


@pytest.mark.slow
def test_no_array_is_made_whole_without_need(every):
    assert not every["warned"]


@pytest.mark.slow
def test_collectives_of_every_kind_of_sublayer_are_those_that_a_mesh_asks_for(every):
    check_collectives(every)


def test_a_checkpoint_is_read_onto_another_mesh_and_back(quick):
    assert quick["reshard"] == dict.fromkeys(("cube", "one"), True)


@pytest.mark.slow
def test_a_checkpoint_of_every_kind_of_sublayer_is_read_onto_every_mesh_and_back(every):
    assert every["reshard"] == dict.fromkeys((*MESHES, "one"), True)


@pytest.mark.parametrize(
    "sizes, message",
    [
        ({"mesh__tensor": 3}, r"config\.mesh\.tensor: 3 devices cannot share config\.model\.vocab_size 64; use 2"),
        ({"mesh__tensor": 2}, r"config\.mesh\.tensor: 2 devices cannot share config\.model\.gqa\.num_kv_heads 1"),
        ({"mesh__tensor": 0}, r"config\.mesh\.tensor: must be positive"),
        ({"mesh__zero": 2}, r"config\.mesh\.zero: 2 is neither 1"),
    ],
)
def test_meshes_that_cannot_be(sizes, message):
    with pytest.raises(UserError, match=message):
        tiny_config("/nonexistent", **sizes)

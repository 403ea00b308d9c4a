"""Run by test_sharding.py in a process with 8 virtual CPU devices: prints one JSON object about meshes of 1
and 8."""

import json
import sys
import tempfile

import jax
import numpy as np
from jax.sharding import PartitionSpec

from hybrid_jax import checkpoint, feed, sharding, step
from hybrid_jax.config import MeshConfig
from tests.tiny import EVERY_KIND, tiny_config

# Rules that split something, so that the mechanism is seen at work (the table of today splits nothing).
SPLIT = (
    (r"embed\.weight", PartitionSpec("fsdp", None)),
    (r"mlp\.(gate|up)_proj\.weight", PartitionSpec("fsdp", None)),
    (r".*", PartitionSpec()),
)


def flat(tree):
    return np.concatenate([np.asarray(x, np.float64).ravel() for x in jax.tree.leaves(jax.device_get(tree))])


def specs(tree):
    def text(spec):  # without trailing Nones: ("fsdp", None) is the same as ("fsdp",)
        axes = list(spec)
        while axes and axes[-1] is None:
            axes.pop()
        return axes

    leaves = jax.tree_util.tree_flatten_with_path(tree)[0]
    return {jax.tree_util.keystr(p, simple=True, separator="."): text(x.sharding.spec) for p, x in leaves}


def train(cfg, mesh, table, steps=3):
    programs = step.Programs(cfg, mesh, table)
    placement = feed.Placement(step.batch_shape(cfg, mesh), sharding.batch_sharding(mesh))
    rng = np.random.default_rng(0)
    rows = cfg.train.global_batch_size
    tokens = rng.integers(0, cfg.model.vocab_size, (steps, rows, cfg.train.sequence_length)).astype(np.int32)
    targets = np.where(np.arange(rows)[:, None] % 4 == 0, -1, np.roll(tokens, -1, axis=2))  # uneven over devices
    same = {
        "segment_ids": np.ones_like(tokens[0]),
        "positions": np.broadcast_to(np.arange(tokens.shape[2]), tokens.shape[1:]),
    }

    def batch(k):
        arrays = {"tokens": tokens[k], "targets": targets[k].astype(np.int32), **same}
        return placement.place({name: np.ascontiguousarray(a[placement.rows], np.int32) for name, a in arrays.items()})

    with jax.set_mesh(mesh):
        state = programs.init(cfg.train.seed)
        initial = flat(state["params"])
        found = {"params": specs(state["params"]), "mu": specs(state["opt_state"]["mu"])}
        if table is SPLIT:
            # No out_shardings: what comes out is what the step itself works with.
            grads = jax.jit(lambda p, b: programs.gradients(p, b)[1])(state["params"], batch(0))
            found["grads"] = specs(grads)
        compiled, losses, norms = programs.compile_step(), [], []
        stop = programs.stop_flags(0)
        for k in range(steps):
            state, numbers = compiled(state, batch(k), stop)
            losses.append(float(numbers["loss"]))
            norms.append(float(numbers["grad_norm"]))
            if k == 0:  # the gradient as it was before clipping, out of the first moment
                opt = cfg.optimizer
                clipped = min(1.0, opt.clip_norm / (norms[0] + 1e-6))
                gradient = flat(state["opt_state"]["mu"]) / ((1 - opt.b1) * clipped)
    found["after"] = specs(state["params"])
    found["shard"] = list(state["opt_state"]["nu"]["embed"]["weight"].addressable_shards[0].data.shape)
    return {"losses": losses, "norms": norms, "specs": found}, initial, gradient, flat(state["params"])


def reshard(cfg, meshes):
    """A checkpoint of the first mesh and table read onto each: its layout there, and whether it is the same."""
    programs = {name: step.Programs(cfg, mesh, table) for name, (mesh, table) in meshes.items()}
    first = next(iter(programs.values()))
    with jax.set_mesh(first.mesh):
        state = first.init(5)
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        with checkpoint.Checkpoints(folder, 1, {"pattern": ""}, lambda line: None) as checkpoints:
            checkpoints.save(1, state)
            checkpoints.wait()
            for name, there in programs.items():
                got, _, _ = checkpoints.restore(there.state)
                weight = got["opt_state"]["mu"]["embed"]["weight"]
                found[name] = {
                    "same": all(
                        np.array_equal(a, b) and a.dtype == b.dtype
                        for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(state), strict=True)
                    ),
                    "specs": specs(got["params"]),
                    "devices": len(weight.sharding.device_set),
                    "shard": list(weight.addressable_shards[0].data.shape),
                }
    return found


def main():
    devices = jax.devices()
    mixed = tiny_config("/nonexistent", model__pattern=2 * EVERY_KIND)
    attention = tiny_config("/nonexistent", model__pattern="A-A-")
    runs = {
        "one": (mixed, sharding.make_mesh(MeshConfig(), devices[:1]), sharding.TABLE),
        "eight": (mixed, sharding.make_mesh(MeshConfig()), sharding.TABLE),
        "split": (attention, sharding.make_mesh(MeshConfig(data=2, fsdp=4)), SPLIT),
    }
    results, arrays = {"devices": len(devices)}, {}
    for name, (cfg, mesh, table) in runs.items():
        results[name], *arrays[name] = train(cfg, mesh, table)
        results[name]["mesh"] = dict(mesh.shape)
    results["difference"] = [
        float(np.sqrt(np.mean((a - b) ** 2) / np.mean(b**2)))
        for a, b in zip(arrays["eight"], arrays["one"], strict=True)
    ]
    whole, split = (sharding.make_mesh(MeshConfig()), sharding.TABLE), (runs["split"][1], SPLIT)
    one = (runs["one"][1], sharding.TABLE)
    results["reshard"] = reshard(attention, {"eight": whole, "split": split, "one": one})
    results["reshard_back"] = reshard(attention, {"split": split, "eight": whole})
    json.dump(results, sys.stdout)


if __name__ == "__main__":
    main()

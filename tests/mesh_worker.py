"""Run by test_sharding.py in a process with 8 virtual CPU devices, or in two with 4 each: trains one model on several
meshes, and prints one JSON object about them.

    python tests/mesh_worker.py FOLDER PATTERN MESH [MESH ...]

Leaves the first gradients of each mesh in FOLDER/MESH.npz, and a checkpoint of the first one in FOLDER/checkpoints.
Two processes read that one onto each of their meshes, and leave theirs in FOLDER/two.
"""

import json
import sys
import tempfile
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils

from hybrid_jax import checkpoint, cluster, collectives, distributed, feed, sharding, step
from hybrid_jax.config import Config
from hybrid_jax.layers.context import count_positions
from hybrid_jax.optimizer import leaf_paths
from tests.tiny import SIZES_TO_CUT, tiny_config

STEPS = 20
MESHES = {
    "one": {},
    "data": {"train__micro_batch_size": 1},
    "fsdp": {"mesh__fsdp": 8},
    "zero1": {"mesh__fsdp": 4, "mesh__zero": 1},
    "cube": {"mesh__fsdp": 2, "mesh__tensor": 2, "train__micro_batch_size": 2},
    "tensor": {"mesh__tensor": 4},
}
FOLDER, PATTERN, *NAMES = sys.argv[1:]


def config_of(name: str) -> Config:
    return tiny_config("/nonexistent", model__pattern=PATTERN, **SIZES_TO_CUT, **MESHES[name])


def programs_of(name: str) -> step.Programs:
    cfg = config_of(name)
    return step.Programs(cfg, sharding.make_mesh(cfg.mesh, jax.devices()[:1] if name == "one" else None))


def specs(tree):
    return {path: [a if isinstance(a, str) else a and list(a) for a in x.sharding.spec] for path, x in leaf_paths(tree)}


def batches(cfg, programs):
    """STEPS batches of documents of uneven lengths with targets that are uneven over devices."""
    placement = feed.Placement(step.batch_shape(cfg, programs.mesh), sharding.batch_sharding(programs.mesh))
    rng = np.random.default_rng(0)
    rows, length = cfg.train.global_batch_size, cfg.train.sequence_length
    for _ in range(STEPS):
        tokens = rng.integers(0, cfg.model.vocab_size, (rows, length)).astype(np.int32)
        segments = np.sort(rng.integers(0, 3, (rows, length)), axis=1).astype(np.int32)
        arrays = {
            "tokens": tokens,
            "targets": np.where(np.arange(rows)[:, None] % 4 == 0, -1, np.roll(tokens, -1, axis=1)).astype(np.int32),
            "segment_ids": segments,
            "positions": np.asarray(count_positions(jnp.asarray(segments)), np.int32),
        }
        yield placement.place({key: np.ascontiguousarray(a[placement.rows]) for key, a in arrays.items()})


def sent(compiled, mesh) -> list[tuple[str, list[int], bool, str]]:
    """(kind, shape of a result, whether it is in a loop, where it comes from) of each array that a compiled program's
    collectives give."""
    return [
        (one.kind, list(shape), bool(one.loops), one.scope)
        for one in collectives.read(compiled.as_text(), dict(mesh.shape))
        for _, shape in one.arrays
    ]


def train(name: str):
    programs = programs_of(name)
    cfg = programs.cfg
    found = {"mesh": dict(programs.mesh.shape), "losses": [], "norms": []}
    with jax.set_mesh(programs.mesh):
        state = programs.init(cfg.train.seed)
        found["params"], found["mu"] = specs(state["params"]), specs(state["opt_state"]["mu"])
        compiled = programs.compile_step()
        found["collectives"] = sent(compiled, programs.mesh)
        for k, batch in enumerate(batches(cfg, programs)):
            state, numbers = compiled(state, batch, programs.stop_flags(0))
            found["losses"].append(float(numbers["loss"]))
            found["norms"].append(float(numbers["grad_norm"]))
            if k == 0:  # the gradients as they were before clipping, out of the first moments
                clipped = min(1.0, cfg.optimizer.clip_norm / (found["norms"][0] + 1e-6))
                scale = (1 - cfg.optimizer.b1) * clipped
                moments = leaf_paths(whole(state["opt_state"]["mu"]))
                gradients = {path: np.asarray(x, np.float64) / scale for path, x in moments}
                np.savez(Path(FOLDER) / f"{name}.{jax.process_index()}.npz", **gradients)
    found["after"] = specs(state["params"])
    found["shard"] = {
        tree: sum(x.addressable_shards[0].data.size for x in jax.tree.leaves(state_part))
        for tree, state_part in (("params", state["params"]), ("mu", state["opt_state"]["mu"]))
    }
    found["shard"]["whole"] = sum(x.size for x in jax.tree.leaves(state["params"]))
    return found


def whole(tree):
    """Arrays of several processes, whole in each."""
    return multihost_utils.process_allgather(tree, tiled=True) if jax.process_count() > 1 else jax.device_get(tree)


def opened(folder):
    return checkpoint.Checkpoints(folder, 1, {"pattern": ""}, lambda line: None)


def same(a, b):
    pairs = zip(jax.tree.leaves(whole(a)), jax.tree.leaves(whole(b)), strict=True)
    return all(np.array_equal(x, y) and x.dtype == y.dtype for x, y in pairs)


def write(folder, state):
    with opened(folder) as checkpoints:
        checkpoints.save(1, state)
        checkpoints.wait()


def read(folder, there: step.Programs):
    """The state in a checkpoint on the mesh of `there`, None if it does not lie as it should."""
    with opened(folder) as checkpoints:
        state = checkpoints.restore(there.state)[0]
    return state if specs(state["params"]) == specs(there.state["params"]) else None


def fresh(there: step.Programs):
    with jax.set_mesh(there.mesh):
        return there.init(there.cfg.train.seed)


def reshard(names):
    """A checkpoint of the first mesh read onto each, and from there written and read onto the first again."""
    programs = {name: programs_of(name) for name in names}
    first = programs[names[0]]
    state, written = fresh(first), Path(FOLDER) / "checkpoints"
    write(written, state)
    found = {}
    for name, there in programs.items():
        got = read(written, there)
        with tempfile.TemporaryDirectory() as folder:
            write(folder, got)
            found[name] = same(got, state) and same(read(folder, first), state)
    return found


def across():
    """The checkpoint of one process read onto each mesh of two, and written there."""
    programs = {name: programs_of(name) for name in NAMES}
    found = {}
    for name, there in programs.items():
        got = read(Path(FOLDER) / "checkpoints", there)
        found[name] = same(got, fresh(there))
        write(Path(FOLDER) / "two" / name, got)
    return found


def main():
    several = distributed.initialize(cluster.find())
    results = {"devices": len(jax.devices()), "processes": jax.process_count()}
    for name in NAMES if several else ("one", *NAMES):
        results[name] = train(name)
    results["reshard"] = across() if several else reshard([*NAMES, "one"])
    if distributed.is_main():
        json.dump(results, sys.stdout)


if __name__ == "__main__":
    main()

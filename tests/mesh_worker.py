"""Run by test_sharding.py in a process with 8 virtual CPU devices: trains one model on several meshes, and prints one
JSON object about them.

    python tests/mesh_worker.py PATTERN MESH [MESH ...]
"""

import json
import re
import sys
import tempfile

import jax
import jax.numpy as jnp
import numpy as np

from hybrid_jax import checkpoint, feed, sharding, step
from hybrid_jax.config import Config
from hybrid_jax.layers.context import count_positions
from hybrid_jax.optimizer import leaf_paths
from tests.tiny import tiny_config

STEPS = 20
# Heads, groups and columns that four devices can share; K and V heads of GDN in groups.
SIZES = {
    "model__hidden_size": 32,
    "model__gdn__num_heads": 4,
    "model__gdn__num_v_heads": 8,
    "model__kda__num_heads": 4,
    "model__kda__num_v_heads": 4,
    "model__mla__num_heads": 4,
    "model__gqa__num_heads": 8,
    "model__gqa__num_kv_heads": 4,
    "model__mamba2__n_groups": 4,
    "train__global_batch_size": 16,
    "train__sequence_length": 40,  # no other axis has this size
    "optimizer__learning_rate": 1e-3,  # AdamW's first steps make much of the rounding of small gradients
}
MESHES = {
    "one": {},
    "data": {"train__micro_batch_size": 1},
    "fsdp": {"mesh__fsdp": 8},
    "zero1": {"mesh__fsdp": 4, "mesh__zero": 1},
    "cube": {"mesh__fsdp": 2, "mesh__tensor": 2, "train__micro_batch_size": 2},
    "tensor": {"mesh__tensor": 4},
}
PATTERN, *NAMES = sys.argv[1:]


def config_of(name: str) -> Config:
    return tiny_config("/nonexistent", model__pattern=PATTERN, **SIZES, **MESHES[name])


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


def collectives(text: str) -> list[tuple[str, list[int], bool]]:
    """(kind, shape of a result, whether it is in a loop) of each array that a compiled program's collectives give."""
    found, in_loop = [], False
    for line in text.splitlines():
        if line and not line[0].isspace():
            in_loop = not line.startswith("ENTRY")
        match = re.search(r"= (.*?) (all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute)\(", line)
        if match:
            for shape in re.findall(r"\w+\[([\d,]*)\]", match[1]):
                found.append((match[2], [int(n) for n in shape.split(",") if n], in_loop))
    return found


def train(name: str):
    programs = programs_of(name)
    cfg = programs.cfg
    found = {"mesh": dict(programs.mesh.shape), "losses": [], "norms": []}
    with jax.set_mesh(programs.mesh):
        state = programs.init(cfg.train.seed)
        found["params"], found["mu"] = specs(state["params"]), specs(state["opt_state"]["mu"])
        compiled = programs.compile_step()
        found["collectives"] = collectives(compiled.as_text())
        for k, batch in enumerate(batches(cfg, programs)):
            state, numbers = compiled(state, batch, programs.stop_flags(0))
            found["losses"].append(float(numbers["loss"]))
            found["norms"].append(float(numbers["grad_norm"]))
            if k == 0:  # the gradients as they were before clipping, out of the first moments
                clipped = min(1.0, cfg.optimizer.clip_norm / (found["norms"][0] + 1e-6))
                scale = (1 - cfg.optimizer.b1) * clipped
                moments = leaf_paths(jax.device_get(state["opt_state"]["mu"]))
                gradients = {path: np.asarray(x, np.float64) / scale for path, x in moments}
    found["after"] = specs(state["params"])
    found["shard"] = {
        tree: sum(x.addressable_shards[0].data.size for x in jax.tree.leaves(state_part))
        for tree, state_part in (("params", state["params"]), ("mu", state["opt_state"]["mu"]))
    }
    found["shard"]["whole"] = sum(x.size for x in jax.tree.leaves(state["params"]))
    return found, gradients


def reshard(names):
    """A checkpoint of the first mesh read onto each, and from there written and read onto the first again."""
    programs = {name: programs_of(name) for name in names}
    first = programs[names[0]]
    with jax.set_mesh(first.mesh):
        state = first.init(5)

    def through(state, there):
        with (
            tempfile.TemporaryDirectory() as folder,
            checkpoint.Checkpoints(folder, 1, {"pattern": ""}, lambda line: None) as checkpoints,
        ):
            checkpoints.save(1, state)
            checkpoints.wait()
            return checkpoints.restore(there.state)[0]

    def same(a, b):
        pairs = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
        return all(np.array_equal(x, y) and x.dtype == y.dtype for x, y in pairs)

    found = {}
    for name, there in programs.items():
        got = through(state, there)
        laid_out = specs(got["params"]) == specs(there.state["params"])
        found[name] = same(got, state) and laid_out and same(through(got, first), state)
    return found


def main():
    results, gradients = {"devices": len(jax.devices())}, {}
    for name in ("one", *NAMES):
        results[name], gradients[name] = train(name)
        results[name]["gradients"] = {
            path: float(np.sqrt(np.mean((gradients[name][path] - g) ** 2) / np.mean(g**2)))
            for path, g in gradients["one"].items()
        }
    results["reshard"] = reshard([*NAMES, "one"])
    json.dump(results, sys.stdout)


if __name__ == "__main__":
    main()

"""Run by test_collectives.py in a process with 8 virtual CPU devices: compiles the step of a small model on meshes, and
prints the collectives of each as JSON, as the compiled program has them and as the partitioner left them. Only there
bf16 is what it is on a GPU: the CPU's compiler makes fp32 of it.

    python tests/collectives_worker.py PATTERN:MESH [PATTERN:MESH ...]
"""

import dataclasses
import json
import sys
import tempfile
from pathlib import Path

import jax

from hybrid_jax import collectives, sharding, step
from tests.tiny import SIZES_TO_CUT, tiny_config

# No axis of a weight is a multiple of a row's length.
SIZES = {
    **SIZES_TO_CUT,
    "model__vocab_size": 88,
    "model__intermediate_size": 48,
    "model__tie_word_embeddings": False,
    "train__compute_dtype": "bfloat16",
    "train__sequence_length": 56,
}
MESHES = {  # each with two accumulation steps
    "data": {"train__micro_batch_size": 1},
    "fsdp": {"mesh__fsdp": 8, "train__micro_batch_size": 1},
    "zero1": {"mesh__fsdp": 8, "mesh__zero": 1, "train__micro_batch_size": 1},
    "tensor": {"mesh__tensor": 4, "train__micro_batch_size": 4},
    "cube": {"mesh__fsdp": 2, "mesh__tensor": 2, "train__micro_batch_size": 2},
}


def plain(found: list[collectives.Collective]) -> list[dict]:
    return [{**dataclasses.asdict(one), "where": one.where, "times": one.times} for one in found]


def case(pattern: str, name: str) -> dict:
    cfg = tiny_config("/nonexistent", model__pattern=pattern, **SIZES, **MESHES[name])
    mesh = sharding.make_mesh(cfg.mesh)
    programs, sizes = step.Programs(cfg, mesh), dict(mesh.shape)
    with tempfile.TemporaryDirectory() as folder:
        dump = {"xla_dump_to": folder, "xla_dump_hlo_pass_re": "spmd-partitioning", "xla_dump_hlo_as_text": True}
        compiled = programs.compile_step(dump)
        (partitioned,) = Path(folder).glob("*after_spmd-partitioning*.txt")
        text = partitioned.read_text()
    return {
        "compiled": plain(collectives.read(compiled.as_text(), sizes)),
        "partitioned": plain(collectives.read(text, sizes)),
        "matrices": sum(len(x.shape) > 1 for x in jax.tree.leaves(programs.state["params"])),
    }


def main():
    assert jax.device_count() == 8
    json.dump({name: case(*name.split(":")) for name in sys.argv[1:]}, sys.stdout)


if __name__ == "__main__":
    main()

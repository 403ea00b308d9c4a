"""Run by test_mesh.py in a process with 8 virtual CPU devices: prints one JSON object, scores and losses on 1 and 8."""

import dataclasses
import json
import sys

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from hybrid_jax import collectives, data, progress, sharding
from hybrid_jax.config import MeshConfig
from hybrid_jax.evaluation import perplexity, scoring
from hybrid_jax.kernels.dispatch import BATCH_AXES
from hybrid_jax.model import Model
from tests.models import drawn
from tests.tiny import tiny_config

WINDOW = 64


def main():
    cfg = tiny_config("/nonexistent", model__pattern="A-", train__sequence_length=32)
    model = Model(cfg.model, "chunked", "float32", "chunked")
    params = drawn(model)
    draw = np.random.default_rng(0)
    asked = [tuple(draw.integers(0, 64, n).tolist() for n in draw.integers(1, 90, 2) % (60, 9) + 1) for _ in range(21)]
    asked += [(asked[0][0], [i]) for i in (1, 2, 3)]
    dataset = data.open(cfg.data, sequence_length=32, vocab_size=64, seed=3, split="validation")
    found = {"devices": jax.device_count()}
    for name, count in (("one", 1), ("eight", 8)):
        mesh = sharding.make_mesh(MeshConfig(), jax.devices()[:count])
        placed = jax.device_put(params, sharding.replicated(mesh))
        scorer = scoring.Scorer(model, placed, mesh, WINDOW)
        scores = scorer.score(asked)
        loss = perplexity.loss(cfg, placed, mesh, dataset, 13, 0, progress.Line("test"))
        found[name] = {"scores": scores, "loss": dataclasses.astuple(loss), "sizes": sorted(scorer._shapes)}
    split = NamedSharding(mesh, PartitionSpec(BATCH_AXES))
    shapes = [jax.ShapeDtypeStruct(s, jnp.int32, sharding=split) for s in ((24, WINDOW), (24, WINDOW, 1))]
    with jax.set_mesh(mesh):
        compiled = scoring._log_probabilities.lower(model, placed, *shapes).compile()
    sent = collectives.read(compiled.as_text(), dict(mesh.shape))
    found["collectives"] = [(one.kind, one.size) for one in sent]
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main()

"""The small config that the tests of training share: synthetic data, and sizes for every kind of sublayer."""

from pathlib import Path
from typing import Any

from hybrid_jax import config as config_lib

EVERY_KIND = "*GKSA-"  # of sublayer; twice over, they are stacked and scanned
# Heads, groups and columns that four devices can share; K and V heads of GDN in groups.
SIZES_TO_CUT = {
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


def tiny_config(workdir: Path | str, **overrides: Any) -> config_lib.Config:
    """A resolved config; overrides are dotted keys with "__" for the dot, such as train__steps=3."""
    config = config_lib.default_config()
    config.workdir = str(workdir)
    config.model.update(pattern="GA-", vocab_size=64, hidden_size=16, intermediate_size=32)
    config.model.gdn.update(num_heads=1, num_v_heads=2, head_dim=8)
    config.model.kda.update(num_heads=1, num_v_heads=2, head_dim=8)
    config.model.mamba2.update(state_size=8, head_dim=8, n_groups=2, expand=2, chunk_size=16)
    config.model.mla.update(
        num_heads=2, q_lora_rank=8, kv_lora_rank=8, qk_nope_head_dim=4, qk_rope_head_dim=4, v_head_dim=8
    )
    config.model.gqa.update(num_heads=2, num_kv_heads=1, head_dim=8)
    config.train.update(steps=4, global_batch_size=8, sequence_length=32, compute_dtype="float32", seed=3)
    config.optimizer.update(
        learning_rate=1e-2, min_learning_rate=1e-3, warmup_steps=2, decay_steps=40, weight_decay=0.1
    )
    config.data.source = "synthetic"
    config.eval.update(batches=0, sample_tokens=0)
    config.checkpoint.update(every_steps=100, keep=2)
    for name, value in overrides.items():
        section = config
        *parents, last = name.split("__")
        for parent in parents:
            section = section[parent]
        section[last] = value
    return config_lib.resolve(config)

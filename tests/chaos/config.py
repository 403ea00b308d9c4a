"""The run that the faults hit: attention and an MLP, so small that it trains and saves within a second.

By hand: python launch.py --config=tests/chaos/config.py --config.data.path=PREFIX --config.workdir=FOLDER
"""

import ml_collections

from hybrid_jax.config import default_config

STEPS, SAVE_EVERY, KEEP = 60, 6, 2


def get_config() -> ml_collections.ConfigDict:
    config = default_config()
    config.model.update(pattern="A-", vocab_size=257, hidden_size=16, intermediate_size=32)
    config.model.gqa.update(num_heads=2, num_kv_heads=1, head_dim=8)
    config.train.update(steps=STEPS, global_batch_size=8, sequence_length=64, compute_dtype="float32", seed=3)
    config.optimizer.update(
        learning_rate=1e-2, min_learning_rate=1e-3, warmup_steps=4, decay_steps=STEPS, weight_decay=0.1
    )
    config.data.update(source="store", tokenizer="bytes", validation_fraction=0.05)
    config.eval.update(every_steps=15, batches=1, ngram_order=0, sample_tokens=0)
    config.checkpoint.update(every_steps=SAVE_EVERY, keep=KEEP)
    return config

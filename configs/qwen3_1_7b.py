"""Qwen3 1.7B: 28 grouped-query attentions, with norms on q and k, and 28 MLPs; 1,720,574,976 parameters, as the
released model has.

Each device holds the whole state, 26 GiB.
Hardware: meant for one node of 8 MI300X or MI355X (published trials without a loss: 4 rows of 8,192 a MI300X).
Data: 100B tokens (our choice) of FineWeb-Edu in the Qwen3 vocabulary, 95,368 steps of 128 x 8,192.
Expected loss: 12.34 at the first step (ln V + width * 0.02^2 / 2); no run on this data is published.
"""

import ml_collections

from hybrid_jax import recipes


def get_config(variant: str = "") -> ml_collections.ConfigDict:
    config = recipes.qwen(
        layers=28, hidden_size=2048, intermediate_size=6144, heads=16, kv_heads=8, rows=128, length=8192
    )
    config.model.update(vocab_size=151_936, tie_word_embeddings=True)
    config.model.gqa.qk_norm = True
    config.data.prepare = recipes.fineweb_edu("100BT", "Qwen/Qwen3-1.7B")
    config.train.micro_batch_size = 4
    return recipes.finish(config, variant)

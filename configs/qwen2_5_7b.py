"""Qwen2.5 7B: 28 grouped-query attentions, with biases on q, k and v, and 28 MLPs; 7,615,616,512 parameters, as the
released model has.

Groups of 8 devices cut gradients and moments alone (ZeRO-1): 39 of 113 GiB of state a device.
Hardware: meant for nodes of 8 MI300X or MI355X (published trials without a loss: 10 rows of 2,048 a MI300X, 16 a
MI355X).
Data: 100B tokens (our choice) of FineWeb-Edu in the Qwen2.5 vocabulary, 76,294 steps of 640 x 2,048.
Expected loss: 12.05 at the first step (ln V + width * 0.008^2 / 2); no run on this data is published.
"""

import ml_collections

from hybrid_jax import recipes


def get_config(variant: str = "") -> ml_collections.ConfigDict:
    config = recipes.qwen(
        layers=28, hidden_size=3584, intermediate_size=18_944, heads=28, kv_heads=4, rows=640, length=2048
    )
    config.model.update(vocab_size=152_064, initializer_range=0.008)
    config.model.gqa.bias = True
    config.data.prepare = recipes.fineweb_edu("100BT", "Qwen/Qwen2.5-7B")
    config.train.micro_batch_size = 10
    config.mesh.update(fsdp=8, zero=1)
    return recipes.finish(config, variant)

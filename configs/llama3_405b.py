"""Llama 3.1 405B: 126 grouped-query attentions and 126 MLPs; 405,853,388,800 parameters, as the released model has.

The 8 devices of a node share heads, columns and vocabulary (tensor parallelism), and 16 nodes cut the state (FSDP): 47
GiB of it a device. Every sublayer is recomputed in the backward pass.
Hardware: meant for 16 nodes of 8 MI300X or MI355X and multiples of it up to 256 nodes; published trials without a loss
had 8 stages of a pipeline in place of FSDP.
Data: 100B tokens (our choice) of FineWeb-Edu in the Llama 3 vocabulary, 47,684 steps of 256 x 8,192.
Expected loss: 12.29 at the first step (ln V + width * 0.008^2 / 2); no run on this data is published.
"""

import ml_collections

from hybrid_jax import recipes


def get_config(variant: str = "") -> ml_collections.ConfigDict:
    config = recipes.llama3(layers=126, hidden_size=16_384, intermediate_size=53_248, heads=128, rows=256, peak=8e-5)
    config.model.remat = "full"
    config.train.micro_batch_size = 1
    config.mesh.update(fsdp=16, tensor=8)
    return recipes.finish(config, variant)

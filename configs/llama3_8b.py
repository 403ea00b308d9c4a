"""Llama 3.1 8B: 32 grouped-query attentions and 32 MLPs; 8,030,261,248 parameters, as the released model has.

The dense baseline of hybrid_mamba2_8b, on the same tokens. Groups of 8 devices cut gradients and moments alone
(ZeRO-1), so that no layer gathers weights: 41 of 120 GiB of state a device.
Hardware: meant for nodes of 8 MI300X or MI355X (published trials without a loss: 2 rows of 8,192 a MI300X, 4 a MI355X).
Data: 100B tokens (our choice) of FineWeb-Edu in the Llama 3 vocabulary, 95,368 steps of 128 x 8,192.
Expected loss: 11.89 at the first step (ln V + width * 0.008^2 / 2); no run on this data is published.
"""

import ml_collections

from hybrid_jax import recipes


def get_config(variant: str = "") -> ml_collections.ConfigDict:
    config = recipes.llama3(layers=32, hidden_size=4096, intermediate_size=14_336, heads=32, rows=128, peak=3e-4)
    config.train.micro_batch_size = 2
    config.mesh.update(fsdp=8, zero=1)
    return recipes.finish(config, variant)

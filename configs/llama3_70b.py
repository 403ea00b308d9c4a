"""Llama 3.1 70B: 80 grouped-query attentions and 80 MLPs; 70,553,706,496 parameters, as the released model has.

Groups of 16 devices cut parameters, gradients and moments (FSDP), 66 GiB of state a device, and every sublayer is
recomputed in the backward pass. In fp32 this state, 131 GiB of 8 devices, leaves too little of a MI300X's 192 GiB.
Hardware: meant for pairs of nodes of 8 MI300X, or with mesh.fsdp=8 for nodes of MI325X or MI355X (published trials
without a loss: 1 to 3 rows of 8,192 a MI300X, on one node).
Data: 100B tokens (our choice) of FineWeb-Edu in the Llama 3 vocabulary, 95,368 steps of 128 x 8,192.
Expected loss: 12.02 at the first step (ln V + width * 0.008^2 / 2); no run on this data is published.
"""

import ml_collections

from hybrid_jax import recipes


def get_config(variant: str = "") -> ml_collections.ConfigDict:
    config = recipes.llama3(layers=80, hidden_size=8192, intermediate_size=28_672, heads=64, rows=128, peak=1.5e-4)
    config.model.remat = "full"
    config.train.micro_batch_size = 1
    config.mesh.fsdp = 16
    return recipes.finish(config, variant)

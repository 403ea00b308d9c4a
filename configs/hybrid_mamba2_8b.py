"""Hybrid Mamba2 8B: 8 MLA and 24 Mamba2 mixers, each with an MLP; 7,898,996,224 parameters.

Groups of 8 devices cut gradients and moments alone (ZeRO-1): 40 of 118 GiB of state a device.
Hardware: meant for nodes of 8 MI300X or MI355X (published trials: 2 rows of 8,192 a MI300X, 4 a MI355X). More than 64
devices need more rows; 512 are enough for 1,024 devices of which 4 share a row (mesh.tensor=4, the most that the MLP's
width divides by).
Data: 100B tokens (our choice) of FineWeb-Edu in the Llama 3 vocabulary, 95,368 steps of 128 x 8,192.
Expected loss: 12.58 at the first step (ln V + width * 0.02^2 / 2); no full run is published.
"""

import ml_collections

from hybrid_jax import recipes


def get_config(variant: str = "") -> ml_collections.ConfigDict:
    config = recipes.family_8b()
    config.model.pattern = "*-M-M-M-" * 8
    config.model.mixer = "mamba2"
    return recipes.finish(config, variant)

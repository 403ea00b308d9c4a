"""Hybrid Mamba2 3B: 7 MLA and 21 Mamba2 mixers, each with an MLP; 3,377,311,592 parameters.

Groups of 8 devices cut gradients and moments alone (ZeRO-1): 17 of 50 GiB of state a device.
Hardware: meant for nodes of 8 MI300X or MI355X (published trials: 4 rows of 8,192 a MI300X, 7 a MI355X).
Data: 100B tokens (our choice) of FineWeb-Edu in the Llama 3 vocabulary, 95,368 steps of 128 x 8,192.
Expected loss: 12.38 at the first step (ln V + width * 0.02^2 / 2); no full run is published.
"""

import ml_collections

from hybrid_jax import recipes


def get_config(variant: str = "") -> ml_collections.ConfigDict:
    config = recipes.family_3b()
    config.model.pattern = "*-M-M-M-" * 7
    config.model.mixer = "mamba2"
    return recipes.finish(config, variant)

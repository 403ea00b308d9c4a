"""Hybrid Mamba2 1B: 4 MLA and 12 Mamba2 mixers, each with an MLP; 1,286,886,272 parameters.

Hardware: meant for one node of 8 MI300X or MI355X.
Data: 100B tokens of FineWeb-Edu in the Llama 3 vocabulary, 95,368 steps of 512 x 2,048 (as gdn_1b).
Expected loss: 12.17 at the first step; no full run is published.
"""

import ml_collections

from hybrid_jax import recipes


def get_config(variant: str = "") -> ml_collections.ConfigDict:
    config = recipes.family_1b()
    config.model.pattern = "*-M-M-M-" * 4
    config.model.mixer = "mamba2"
    return recipes.finish(config, variant)

"""Hybrid GDN 300M: 3 MLA and 9 Gated DeltaNet mixers, each with an MLP; 309,280,624 parameters.

Hardware: published on one node of 8 MI355X (128 rows a GPU); about 1.47 s a step on 8 MI300X.
Data: 10B tokens of FineWeb-Edu in the Llama 3 vocabulary, 4,768 steps of 1,024 x 2,048.
Expected loss: 3.382 final (MI355X).
Milestones: milestones/hybrid_gdn_300m.json.
"""

import ml_collections

from hybrid_jax import recipes


def get_config(variant: str = "") -> ml_collections.ConfigDict:
    config = recipes.family_300m()
    config.model.pattern = "*-M-M-M-" * 3
    config.model.mixer = "gdn"
    return recipes.finish(config, variant)

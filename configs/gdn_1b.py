"""GDN 1B: 16 Gated DeltaNet mixers and 16 MLPs; 1,203,441,152 parameters.

Hardware: published on one node of 8 MI355X (64 rows a GPU); 2,414 to 2,790 ms a step on 8 MI300X, 64 to 74
hours in all.
Data: 100B tokens of FineWeb-Edu in the Llama 3 vocabulary, 95,368 steps of 512 x 2,048.
Expected loss: 12.17 at the first step, 2.487 final (MI355X); the largest jump between two steps was 0.03.
Milestones: milestones/gdn_1b.json.
"""

import ml_collections

from hybrid_jax import recipes


def get_config(variant: str = "") -> ml_collections.ConfigDict:
    config = recipes.family_1b()
    config.model.pattern = "M-" * 16
    config.model.mixer = "gdn"
    return recipes.finish(config, variant)

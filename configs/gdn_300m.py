"""GDN 300M: 12 Gated DeltaNet mixers and 12 MLPs; 307,767,232 parameters.

Hardware: published on one node of 8 MI355X (128 rows a GPU); 1,431.6 ms a step on 8 MI300X, 1 h 54 min in
all.
Data: 10B tokens of FineWeb-Edu in the Llama 3 vocabulary, 4,768 steps of 1,024 x 2,048.
Expected loss: 11.97 at the first step, 3.366 at step 4,700 (MI300X), 3.411 final (MI355X).
Milestones: milestones/gdn_300m.json.
"""

import ml_collections

from hybrid_jax import recipes


def get_config(variant: str = "") -> ml_collections.ConfigDict:
    config = recipes.family_300m()
    config.model.pattern = "M-" * 12
    config.model.mixer = "gdn"
    return recipes.finish(config, variant)

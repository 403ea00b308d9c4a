"""KDA 300M: 12 Kimi Delta Attention mixers and 12 MLPs; 303,549,280 parameters.

Hardware: published on one node of 8 MI355X (128 rows a GPU); 1,466.8 ms a step on 8 MI300X, 1 h 57 min in
all.
Data: 10B tokens of FineWeb-Edu in the Llama 3 vocabulary, 4,768 steps of 1,024 x 2,048.
Expected loss: 11.97 at the first step, 3.362 at step 4,700 (MI300X), 3.407 final (MI355X).
Milestones: milestones/kda_300m.json.
"""

import ml_collections

from hybrid_jax import recipes


def get_config(variant: str = "") -> ml_collections.ConfigDict:
    config = recipes.family_300m()
    config.model.pattern = "M-" * 12
    config.model.mixer = "kda"
    return recipes.finish(config, variant)

"""KDA 1B: 16 Kimi Delta Attention mixers and 16 MLPs; 1,175,153,920 parameters.

Hardware: meant for one node of 8 MI300X or MI355X; about 44,400 tokens/s a GPU is published for MI300X at 32
rows.
Data: 100B tokens of FineWeb-Edu in the Llama 3 vocabulary, 95,368 steps of 512 x 2,048 (as gdn_1b).
Expected loss: 12.17 at the first step; no full run is published.
"""

import ml_collections

from hybrid_jax import recipes


def get_config(variant: str = "") -> ml_collections.ConfigDict:
    config = recipes.family_1b()
    config.model.pattern = "M-" * 16
    config.model.mixer = "kda"
    return recipes.finish(config, variant)

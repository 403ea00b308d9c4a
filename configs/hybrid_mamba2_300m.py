"""Hybrid Mamba2 300M: 3 MLA and 9 Mamba2 mixers, each with an MLP; 356,733,952 parameters.

The published model leaves out the norm before its nine Mamba2 mixers (356,724,736 parameters);
--config.model.mamba2.pre_norm=false gives exactly that one.

Hardware: published on one node of 8 MI355X (128 rows a GPU).
Data: 10B tokens of FineWeb-Edu in the Llama 3 vocabulary, 4,768 steps of 1,024 x 2,048.
Expected loss: 3.385 final (MI355X).
Milestones: milestones/hybrid_mamba2_300m.json.
"""

import ml_collections

from hybrid_jax import recipes


def get_config(variant: str = "") -> ml_collections.ConfigDict:
    config = recipes.family_300m()
    config.model.pattern = "*-M-M-M-" * 3
    config.model.mixer = "mamba2"
    return recipes.finish(config, variant)

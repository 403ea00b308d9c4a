"""Kimi Linear 300M: 9 Kimi Delta Attention mixers and 3 MLA without positions, each with an MLP; 310,999,336
parameters.

The layout and shapes that Hugging Face's kimi_linear holds (arXiv:2510.26692), so that a run is exported into a class
that transformers ships: keys as wide as values, no bias on the output gate. Sizes and recipe are ours, by kda_300m.
Hardware: meant for one node of 8 MI300X or MI355X.
Data: 10B tokens of FineWeb-Edu in the Llama 3 vocabulary, 4,768 steps of 1,024 x 2,048.
Expected loss: 11.97 at the first step (ln V + width * 0.02^2 / 2); no full run is published.
"""

import ml_collections

from hybrid_jax import recipes


def get_config(variant: str = "") -> ml_collections.ConfigDict:
    config = recipes.family_300m()
    config.model.pattern = "M-M-M-*-" * 3
    config.model.mixer = "kda"
    config.model.kda.update(head_dim=64, expand_v=1.0, gate_bias=False)
    config.model.mla.rope.style = "none"
    return recipes.finish(config, variant)

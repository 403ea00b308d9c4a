"""Mamba2 370M: 48 Mamba2 mixers, no MLP, no attention, no positions; 368,363,008 parameters.

Hardware: published trials on one node of 8 MI300X (52 rows a GPU). The published preset trains with
LayerNorm, dropout and learned positions by accident of its settings; this is the model it means.
Data: 10B tokens (our choice) of FineWeb-Edu in the GPT-NeoX vocabulary, 11,738 steps of 416 x 2,048.
Expected loss: 11.03 at the first step (ln V + width * 0.02^2 / 2); no full run is published.
"""

import ml_collections

from hybrid_jax import recipes


def get_config(variant: str = "") -> ml_collections.ConfigDict:
    config = recipes.family_300m()
    config.model.update(pattern="M" * 48, mixer="mamba2", vocab_size=50_304, rescale_out_proj=True)
    config.model.norm_eps = 1e-5  # the preset's, and that of the gated norms: Hugging Face's class has one for both
    config.model.mamba2.state_size = 16
    config.data.prepare = recipes.fineweb_edu("10BT", "gpt-neox-20b/tokenizer.json")
    config.train.update(steps=11_738, global_batch_size=416)
    config.optimizer.update(learning_rate=3e-4, min_learning_rate=0.0, weight_decay=0.1)
    config.optimizer.update(warmup_steps=2000, decay_steps=11_738)
    return recipes.finish(config, variant)

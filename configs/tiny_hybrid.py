"""Tiny hybrid: every kind of sublayer in one small stack, trained on the Python standard library; `make
demo`.

Hardware: two CPU cores, under five minutes.
Data: the source text of the running Python's standard library as bytes; a share of its files is held out.
Expected loss: validation below a Witten-Bell trigram model of the same training files (about 1.83 nats a
byte).
"""

import ml_collections

from hybrid_jax import recipes
from hybrid_jax.config import default_config

STEPS = 480


def get_config(variant: str = "") -> ml_collections.ConfigDict:
    config = default_config()
    config.model.update(
        pattern="*-M-G-K-S-A-",
        mixer="gdn",
        vocab_size=320,
        hidden_size=128,
        intermediate_size=256,
        norm_eps=1e-6,
    )
    config.model.mla.update(
        num_heads=4, q_lora_rank=64, kv_lora_rank=32, qk_nope_head_dim=16, qk_rope_head_dim=16, v_head_dim=32
    )
    config.model.gqa.update(num_heads=4, num_kv_heads=2, head_dim=32)
    config.model.gdn.update(num_heads=2, num_v_heads=4, head_dim=16, expand_v=2.0)
    config.model.kda.update(num_heads=4, num_v_heads=4, head_dim=16, expand_v=2.0)
    config.model.mamba2.update(state_size=16, head_dim=32, n_groups=2, expand=1)
    config.train.update(steps=STEPS, global_batch_size=8, sequence_length=256, compute_dtype="float32")
    config.optimizer.update(
        learning_rate=3e-3, min_learning_rate=3e-4, warmup_steps=50, decay_steps=STEPS, weight_decay=0.1
    )
    config.data.update(source="python", tokenizer="bytes")
    config.eval.update(every_steps=100, batches=8, ngram_order=3, sample_tokens=256, sample_prompt="def ")
    config.checkpoint.update(every_steps=50, keep=2)
    return recipes.finish(config, variant)

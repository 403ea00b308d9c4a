"""What the runs in `configs/` share: sizes by family, batch and schedule by scale, and the `:smoke` variant.

Every hybrid family fills in all three mixers, sized as its published siblings are, so that `model.mixer` alone turns
one model into the other. Sources: AMD Primus' Megatron presets (the "clean" reading: RMSNorm, no stray
biases, no dropout). Dense models have the sizes of their released config.json.
"""

import dataclasses
import math

import ml_collections

from hybrid_jax.config import Config, default_config
from hybrid_jax.errors import UserError

LLAMA3_VOCAB = 128_256
LLAMA3_TOKENIZER = "llama-3/tokenizer.json"
ROPE_THETA = 500_000.0


def family_300m() -> ml_collections.ConfigDict:
    """Width 1024; 10B tokens in 4,768 steps of 1,024 x 2,048, 2e-4 to 2e-5."""
    config = _base(hidden_size=1024, intermediate_size=4096)
    _mla(config, heads=16, q_lora=672, kv_lora=64, nope=32, rope=32, value=64)
    _linear_mixers(config, gdn_heads=4, kda_heads=8)
    config.model.mamba2.update(state_size=64, head_dim=64, n_groups=8, expand=2)
    _schedule(config, steps=4768, rows=1024, length=2048, peak=2e-4, warmup=200)
    return config


def family_1b() -> ml_collections.ConfigDict:
    """Width 2048; 100B tokens in 95,368 steps of 512 x 2,048, 3e-4 to 3e-5."""
    config = _base(hidden_size=2048, intermediate_size=8192)
    _mla(config, heads=32, q_lora=1344, kv_lora=128, nope=32, rope=32, value=64)
    _linear_mixers(config, gdn_heads=8, kda_heads=16)
    config.model.mamba2.update(state_size=64, head_dim=64, n_groups=8, expand=1)
    config.data.prepare = fineweb_edu("100BT")
    _schedule(config, steps=95_368, rows=512, length=2048, peak=3e-4, warmup=2000)
    return config


def family_3b() -> ml_collections.ConfigDict:
    """Width 3072; 100B tokens (our choice) in 95,368 steps of 128 x 8,192, 2e-4 to 2e-5. ZeRO-1 and 4 rows a device at
    once, as in the published trials.

    Only the Mamba2 sizes are published; GDN and KDA go on as the smaller families do (values half the width).
    """
    config = _base(hidden_size=3072, intermediate_size=8192)
    _mla(config, heads=24, q_lora=1536, kv_lora=128, nope=64, rope=64, value=128)
    _linear_mixers(config, gdn_heads=12, kda_heads=24)
    config.model.mamba2.update(state_size=128, head_dim=128, n_groups=8, expand=1)
    _schedule(config, steps=95_368, rows=128, length=8192, peak=2e-4, warmup=2000)
    config.train.micro_batch_size = 4
    config.mesh.update(fsdp=8, zero=1)
    config.optimizer.weight_decay = 0.1
    config.data.prepare = fineweb_edu("100BT")
    return config


def family_8b() -> ml_collections.ConfigDict:
    """Width 4096, 2 rows a device at once; the rest as in the 3B family. MLP width 14,436, as published."""
    config = family_3b()
    config.train.micro_batch_size = 2
    config.model.update(hidden_size=4096, intermediate_size=14_436)
    _mla(config, heads=32, q_lora=2048, kv_lora=160, nope=64, rope=64, value=128)
    _linear_mixers(config, gdn_heads=16, kda_heads=32)
    return config


def llama3(
    *, layers: int, hidden_size: int, intermediate_size: int, heads: int, rows: int, peak: float
) -> ml_collections.ConfigDict:
    """A Llama 3.1 (arXiv:2407.21783, table 3: sizes and peak learning rates; heads of 128, 8 of keys and values) on
    100B tokens (our choice) of rows of 8,192, as AMD Primus' presets have it: their initial weights too."""
    config = _dense(layers, hidden_size, intermediate_size, heads=heads, kv_heads=8)
    config.model.update(norm_eps=1e-5, initializer_range=0.008)
    config.model.gqa.rope.update(theta=ROPE_THETA, llama3_factor=8.0, llama3_original_max_position=8192)
    _schedule(config, steps=_steps(rows, 8192), rows=rows, length=8192, peak=peak, warmup=2000)
    return config


def qwen(
    *, layers: int, hidden_size: int, intermediate_size: int, heads: int, kv_heads: int, rows: int, length: int
) -> ml_collections.ConfigDict:
    """What Qwen2.5 and Qwen3 share, on 100B tokens; schedule our choice, as that of our 1B family."""
    config = _dense(layers, hidden_size, intermediate_size, heads=heads, kv_heads=kv_heads)
    config.model.norm_eps = 1e-6
    config.model.gqa.rope.theta = 1_000_000.0
    _schedule(config, steps=_steps(rows, length), rows=rows, length=length, peak=3e-4, warmup=2000)
    return config


def fineweb_edu(sample: str, tokenizer: str = LLAMA3_TOKENIZER) -> str:
    """Arguments of hybrid_jax.data.prepare that make a recipe's store of a sample of HuggingFaceFW/fineweb-edu."""
    return f"--dataset HuggingFaceFW/fineweb-edu:sample-{sample} --tokenizer {tokenizer}"


def finish(config: ml_collections.ConfigDict, variant: str) -> ml_collections.ConfigDict:
    """The variant of a full run that follows a config file's colon: "" (the run itself) or "smoke".

    `smoke` is the same model on this machine at once: a few steps of a small batch of the Python standard
    library as bytes (ids below 259, inside any vocabulary), on all devices (see `smoke_on`), no checkpoint. Raises
    UserError for any other name.
    """
    if variant == "":
        return config
    if variant != "smoke":
        raise UserError(f"variant {variant!r} is not known; there is only 'smoke', as in --config=FILE.py:smoke")
    rows = math.lcm(8, config.mesh.fsdp)
    config.train.update(steps=5, global_batch_size=rows, micro_batch_size=0, sequence_length=64)
    config.mesh.data = -1
    config.optimizer.update(warmup_steps=1, decay_steps=0)
    config.data.update(source="python", tokenizer="bytes")
    config.eval.update(every_steps=0, batches=1, sample_tokens=32)
    config.checkpoint.every_steps = 0
    return config


def smoke_on(config: Config, devices: int) -> Config:
    """A `smoke` config for so many devices: cut by mesh.fsdp and mesh.tensor as the recipe is where these divide them,
    else copies of the whole model."""
    if devices % (config.mesh.fsdp * config.mesh.tensor) == 0:
        return config
    return dataclasses.replace(config, mesh=dataclasses.replace(config.mesh, fsdp=1, tensor=1))


def _base(hidden_size: int, intermediate_size: int) -> ml_collections.ConfigDict:
    config = default_config()
    config.model.update(
        vocab_size=LLAMA3_VOCAB, hidden_size=hidden_size, intermediate_size=intermediate_size, norm_eps=1e-6
    )
    # For an `A` in the pattern: no family has one, so heads of 64 with 4 queries a key, as in Llama 3.2 1B.
    heads = hidden_size // 64
    config.model.gqa.update(num_heads=heads, num_kv_heads=heads // 4, head_dim=64)
    config.model.gqa.rope.theta = ROPE_THETA
    _training(config, weight_decay=0.01, sample="10BT")
    return config


def _dense(
    layers: int, hidden_size: int, intermediate_size: int, *, heads: int, kv_heads: int
) -> ml_collections.ConfigDict:
    """Grouped-query attention with heads of 128 and an MLP, `layers` times over; its head is not its embedding."""
    config = default_config()
    config.model.update(
        pattern="A-" * layers,
        vocab_size=LLAMA3_VOCAB,
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
        tie_word_embeddings=False,
    )
    config.model.gqa.update(num_heads=heads, num_kv_heads=kv_heads, head_dim=128)
    _training(config, weight_decay=0.1, sample="100BT")
    return config


def _steps(rows: int, length: int) -> int:
    """Of 100B tokens."""
    return math.ceil(1e11 / (rows * length))


def _training(config: ml_collections.ConfigDict, *, weight_decay: float, sample: str) -> None:
    config.train.update(seed=42, compute_dtype="bfloat16")
    config.optimizer.update(b1=0.9, b2=0.95, eps=1e-8, weight_decay=weight_decay, clip_norm=1.0)
    config.data.update(source="store", prepare=fineweb_edu(sample))


def _mla(
    config: ml_collections.ConfigDict,
    *,
    heads: int,
    q_lora: int,
    kv_lora: int,
    nope: int,
    rope: int,
    value: int,
) -> None:
    config.model.mla.update(
        num_heads=heads,
        q_lora_rank=q_lora,
        kv_lora_rank=kv_lora,
        qk_nope_head_dim=nope,
        qk_rope_head_dim=rope,
        v_head_dim=value,
    )
    config.model.mla.rope.update(style="interleaved", theta=ROPE_THETA)


def _linear_mixers(config: ml_collections.ConfigDict, *, gdn_heads: int, kda_heads: int) -> None:
    """GDN: heads of 64/64, two value heads a key head. KDA: heads of 32/64."""
    config.model.gdn.update(num_heads=gdn_heads, num_v_heads=2 * gdn_heads, head_dim=64, expand_v=1.0)
    config.model.kda.update(num_heads=kda_heads, num_v_heads=kda_heads, head_dim=32, expand_v=2.0)


def _schedule(
    config: ml_collections.ConfigDict, *, steps: int, rows: int, length: int, peak: float, warmup: int
) -> None:
    config.train.update(steps=steps, global_batch_size=rows, sequence_length=length)
    # decay_steps is written out, so that a run cut short by --config.train.steps follows the published curve.
    config.optimizer.update(learning_rate=peak, min_learning_rate=peak / 10, warmup_steps=warmup, decay_steps=steps)
    config.checkpoint.every_steps = 1000
    config.eval.every_steps = 1000

"""Rotary position embedding: interleaved or half-split pairs, partial, with YaRN's or Llama 3.1's scaling.

Shapes: B batch, T time, H heads, R rotated channels.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np

from hybrid_jax.kernels.precision import accumulator

_LOW = 1024  # positions are split into p = hi * _LOW + lo
_HIGH = 4096
MAX_POSITIONS = _LOW * _HIGH


def frequencies(cfg, channels: int) -> tuple[np.ndarray, float]:
    """Angles per position [R/2] in float64, and the factor on cos and sin (YaRN's attention factor).

    `cfg` is a RopeConfig. theta^(-2i/R); with yarn_factor f > 1, frequencies that turn less than
    yarn_beta_slow times in yarn_original_max_position positions are divided by f, those that turn more than
    yarn_beta_fast times are kept, with a linear ramp between, and cos and sin are scaled by 0.1 ln f + 1
    (YaRN, arXiv:2309.00071, section 3; the softmax scale is left alone). llama3_factor f > 1 does likewise between
    llama3_low_rotations and llama3_high_rotations turns in llama3_original_max_position positions, but its ramp is
    linear in the turns, and cos and sin are not scaled (transformers' rope_type "llama3").
    """
    i = np.arange(0, channels, 2, dtype=np.float64)
    freq = cfg.theta ** (-i / channels)
    if cfg.llama3_factor > 1.0:
        turns = cfg.llama3_original_max_position * freq / (2 * math.pi)
        low, high = cfg.llama3_low_rotations, cfg.llama3_high_rotations
        kept = np.clip((turns - low) / (high - low), 0.0, 1.0)
        return freq * kept + freq / cfg.llama3_factor * (1.0 - kept), 1.0
    if cfg.yarn_factor <= 1.0:
        return freq, 1.0

    def channel_of(turns: float) -> float:
        return channels * math.log(cfg.yarn_original_max_position / (turns * 2 * math.pi)) / (2 * math.log(cfg.theta))

    low = max(math.floor(channel_of(cfg.yarn_beta_fast)), 0)
    high = min(math.ceil(channel_of(cfg.yarn_beta_slow)), channels - 1)
    ramp = np.clip((np.arange(channels // 2) - low) / max(high - low, 0.001), 0.0, 1.0)
    freq = freq * (1.0 - ramp) + freq / cfg.yarn_factor * ramp
    return freq, 0.1 * math.log(cfg.yarn_factor) + 1.0


def cos_sin(cfg, channels: int, positions: jax.Array) -> tuple[jax.Array, jax.Array]:
    """cos and sin of position x frequency, each positions.shape + [R/2] fp32, right to fp32 rounding.

    An fp32 product of a large position and a frequency near 1 is off by up to 0.06 rad at a million tokens, so
    the angle is the sum of two, hi and lo, whose cos and sin are tables computed in float64.
    """
    freq, factor = frequencies(cfg, channels)
    high = np.arange(_HIGH, dtype=np.float64)[:, None] * _LOW * freq
    low = np.arange(_LOW, dtype=np.float64)[:, None] * freq

    def pick(table: np.ndarray, index: jax.Array) -> jax.Array:
        return jnp.asarray(table, jnp.float32)[index]

    hi, lo = positions // _LOW, positions % _LOW
    cos_hi, sin_hi = pick(np.cos(high), hi), pick(np.sin(high), hi)
    cos_lo, sin_lo = pick(np.cos(low) * factor, lo), pick(np.sin(low) * factor, lo)
    return cos_hi * cos_lo - sin_hi * sin_lo, sin_hi * cos_lo + cos_hi * sin_lo


def rotate(x: jax.Array, cfg, positions: jax.Array) -> jax.Array:
    """Rotates the first R = rotary_fraction x channels of x [B, T, H, channels] by positions [B, T].

    "interleaved" pairs channels (2i, 2i+1), "half" pairs (i, i + R/2), "none" returns x. Interleaved pairs come
    out de-interleaved, [evens | odds]: a fixed permutation of channels, which leaves q.k unchanged when both
    are rotated here. fp32 arithmetic, result in x.dtype.
    """
    if cfg.style == "none":
        return x
    R = int(x.shape[-1] * cfg.rotary_fraction)
    cos, sin = (t[:, :, None, :] for t in cos_sin(cfg, R, positions))
    turned, kept = x[..., :R].astype(accumulator(x.dtype)), x[..., R:]
    if cfg.style == "interleaved":
        a, b = turned[..., 0::2], turned[..., 1::2]
    else:
        a, b = turned[..., : R // 2], turned[..., R // 2 :]
    turned = jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x.dtype)
    return jnp.concatenate([turned, kept], axis=-1) if kept.shape[-1] else turned

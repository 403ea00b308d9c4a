"""How the next token is chosen from logits: penalty, temperature, top-k, top-p, in the order that transformers has.

Shapes: B rows, V vocabulary.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp

from hybrid_jax.errors import UserError


@dataclasses.dataclass(frozen=True)
class Sampling:
    """temperature: 0 takes the likeliest token always. top_k: only the k likeliest, 0 for all. top_p: only the fewest
    likeliest whose probabilities reach it, 1 for all. repetition_penalty: what stands in a row already gets its logit
    divided by it, or multiplied where negative; 1 changes nothing (CTRL, arXiv:1909.05858).

    Raises UserError for a value that none of them can have; it begins with the value's name.
    """

    temperature: float = 0.8
    top_k: int = 0
    top_p: float = 1.0
    repetition_penalty: float = 1.0

    def __post_init__(self):
        if not (self.temperature >= 0 and math.isfinite(self.temperature)):
            raise UserError(f"temperature: {self.temperature} is not a number from 0 on; 0 takes the likeliest token")
        if self.top_k < 0:
            raise UserError(f"top_k: {self.top_k} is negative; 0 leaves no token out")
        if not 0 < self.top_p <= 1:
            raise UserError(f"top_p: {self.top_p} is not above 0 and at most 1; 1 leaves no token out")
        if not (self.repetition_penalty > 0 and math.isfinite(self.repetition_penalty)):
            raise UserError(f"repetition_penalty: {self.repetition_penalty} is not above 0; 1 changes nothing")

    @property
    def needs_seen(self) -> bool:
        """Whether `choose` has to know which tokens stand in a row already."""
        return self.repetition_penalty != 1.0


def penalize(logits: jax.Array, seen: jax.Array, penalty: float) -> jax.Array:
    """logits [B, V]; seen [B, V] bool: the token stands in the row."""
    return jnp.where(seen, jnp.where(logits < 0, logits * penalty, logits / penalty), logits)


def keep_top_k(logits: jax.Array, k: int) -> jax.Array:
    """logits [B, V], -inf below the k-th largest of each row; what equals that stays."""
    least = jax.lax.top_k(logits, min(k, logits.shape[-1]))[0][:, -1:]
    return jnp.where(logits < least, -jnp.inf, logits)


def keep_top_p(logits: jax.Array, p: float) -> jax.Array:
    """logits [B, V], -inf for the unlikeliest of each row that have a probability of at most 1 - p together; what
    equals the least that stays does so too."""
    ascending = jnp.sort(logits, axis=-1)
    mass = jnp.cumsum(jax.nn.softmax(ascending, axis=-1), axis=-1)
    dropped = jnp.sum(mass[:, :-1] <= 1 - p, axis=-1, keepdims=True)  # one always stays
    return jnp.where(logits < jnp.take_along_axis(ascending, dropped, axis=-1), -jnp.inf, logits)


def scores(sampling: Sampling, logits: jax.Array, seen: jax.Array | None) -> jax.Array:
    """The logits [B, V] fp32 to draw from, out of the model's; seen: see `penalize`, or None where
    sampling.needs_seen is false. Those of temperature 0 are to take the largest of."""
    if sampling.needs_seen:
        assert seen is not None
        logits = penalize(logits, seen, sampling.repetition_penalty)
    if sampling.temperature == 0:
        return logits
    logits = logits / sampling.temperature
    if sampling.top_k:
        logits = keep_top_k(logits, sampling.top_k)
    if sampling.top_p < 1:
        logits = keep_top_p(logits, sampling.top_p)
    return logits


def choose(sampling: Sampling, logits: jax.Array, seen: jax.Array | None, keys: jax.Array) -> jax.Array:
    """Token ids [B] i32; logits and seen as of `scores`, keys [B]: of jax.random, one a row."""
    logits = scores(sampling, logits, seen)
    if sampling.temperature == 0:
        return jnp.argmax(logits, axis=-1).astype(jnp.int32)
    return jax.vmap(jax.random.categorical)(keys, logits).astype(jnp.int32)

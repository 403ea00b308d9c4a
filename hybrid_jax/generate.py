"""Continues a prompt, one token at a time, through the same layers that train."""

import functools

import jax
import jax.numpy as jnp

from hybrid_jax.config import EvalConfig
from hybrid_jax.data.interface import Tokenizer
from hybrid_jax.model import Model, Params


@functools.partial(jax.jit, static_argnames=("model", "num_tokens", "temperature"))
def _sample(model: Model, params: Params, prompt: jax.Array, key: jax.Array, num_tokens: int, temperature: float):
    def choose(logits_BxV: jax.Array, key: jax.Array) -> jax.Array:
        if temperature == 0.0:
            return jnp.argmax(logits_BxV, axis=-1).astype(jnp.int32)
        return jax.random.categorical(key, logits_BxV / temperature, axis=-1).astype(jnp.int32)

    keys = jax.random.split(key, num_tokens)
    logits, states = model.step(params, prompt, model.init_state(1, prompt.shape[1] + num_tokens))
    token = choose(logits, keys[0])

    def body(carry, key):
        token, states = carry
        logits, states = model.step(params, token[:, None], states)
        new = choose(logits, key)
        return (new, states), new[0]

    _, rest = jax.lax.scan(body, (token, states), keys[1:])
    return jnp.concatenate([token, rest])


def generate(
    model: Model, params: Params, prompt_ids: list[int], num_tokens: int, *, temperature: float = 0.8, seed: int = 0
) -> list[int]:
    """num_tokens ids that follow prompt_ids (at least one), the likeliest ones when temperature is 0.

    Recurrent mixers decode in constant memory; attention keeps prompt + num_tokens positions.
    Raises ValueError for an empty prompt.
    """
    if not prompt_ids:
        raise ValueError("generate needs at least one prompt token")
    prompt = jnp.asarray([prompt_ids], jnp.int32)
    return [int(t) for t in _sample(model, params, prompt, jax.random.key(seed), num_tokens, float(temperature))]


def prompt_ids(cfg: EvalConfig, tokenizer: Tokenizer) -> list[int]:
    """The ids that a run's sample begins with; none for no sample. Raises UserError if they cannot be had."""
    if not cfg.sample_tokens:
        return []
    # Nothing ever follows an end of document in training, so an empty prompt is a line's beginning.
    return tokenizer.encode(cfg.sample_prompt) or tokenizer.encode("\n") or [0]


def on_one_device(params: Params) -> Params:
    """The whole parameters as arrays of this process's first device. Every process of a run must call it."""
    if jax.process_count() > 1 and not all(x.is_fully_replicated for x in jax.tree.leaves(params)):
        from jax.experimental import multihost_utils

        return multihost_utils.process_allgather(params, tiled=True)
    return jax.tree.map(lambda x: x.addressable_data(0) if x.is_fully_replicated else jax.device_get(x), params)

"""The text that a run writes at its end, by the same way of decoding as everybody's."""

import jax

from hybrid_jax.config import EvalConfig
from hybrid_jax.data.interface import Tokenizer
from hybrid_jax.decoding.complete import continuation
from hybrid_jax.decoding.sampling import Sampling
from hybrid_jax.errors import UserError
from hybrid_jax.model import Model, Params


def prompt_ids(cfg: EvalConfig, tokenizer: Tokenizer) -> list[int]:
    """The ids that a run's sample begins with; none for no sample. Raises UserError if they cannot be had."""
    if not cfg.sample_tokens:
        return []
    try:
        ids = tokenizer.encode(cfg.sample_prompt)
    except UserError as error:
        raise UserError(f"config.eval.sample_prompt: {error}, or leave it empty") from None
    # Nothing ever follows an end of document in training, so an empty prompt is a line's beginning.
    return ids or tokenizer.encode("\n") or [0]


def on_one_device(params: Params) -> Params:
    """The whole parameters as arrays of this process's first device. Every process of a run must call it."""
    if jax.process_count() > 1 and not all(x.is_fully_replicated for x in jax.tree.leaves(params)):
        from jax.experimental import multihost_utils

        return multihost_utils.process_allgather(params, tiled=True)
    return jax.tree.map(lambda x: x.addressable_data(0) if x.is_fully_replicated else jax.device_get(x), params)


def sample(cfg: EvalConfig, model: Model, params: Params, prompt: list[int], tokenizer: Tokenizer, seed: int) -> str:
    """The sample's prompt and what follows it. params: as `on_one_device` gives them."""
    ids = continuation(model, params, prompt, cfg.sample_tokens, Sampling(cfg.sample_temperature), seed)
    return cfg.sample_prompt + tokenizer.decode(ids)

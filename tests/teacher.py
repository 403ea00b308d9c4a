"""Scores as the definition has them: one unpadded request at a time, float64 softmax of `Model.logits`."""

import functools

import jax
import jax.numpy as jnp
import numpy as np


@functools.cache
def _logits(model, length):
    return jax.jit(lambda params, tokens: model.logits(params, tokens))


def log_p(model, params, inputs, length):
    """[len(inputs), V] float64: of what follows each id. Computed at `length`, so that few programs are compiled: what
    follows the inputs is not looked at, as models are causal."""
    tokens = np.zeros((1, length), np.int32)
    tokens[0, : len(inputs)] = inputs
    logits = np.asarray(_logits(model, length)(params, jnp.asarray(tokens)), np.float64)[0, : len(inputs)]
    found = logits - logits.max(-1, keepdims=True)
    return found - np.log(np.exp(found).sum(-1, keepdims=True))


def score(model, params, context, continuation, window):
    """(log-probability, whether greedy) of a continuation: inputs are all ids but the last, cut at the left."""
    inputs = [*context, *continuation][-(window + 1) :][:-1]
    of_token = log_p(model, params, inputs, window)[len(inputs) - len(continuation) :]
    picked = of_token[np.arange(len(continuation)), continuation]
    return picked.sum(), bool((of_token.argmax(-1) == continuation).all())


def greedy(model, params, context, count, window, end):
    """Up to `count` likeliest ids after the context, without `end`, at which they end."""
    ids = list(context)
    for _ in range(count):
        best = int(log_p(model, params, ids, window)[-1].argmax())
        if best == end:
            break
        ids.append(best)
    return ids[len(context) :]

"""Pretraining of hybrid language models (softmax attention and linear recurrences in one stack) in JAX.

Importing the package, `hybrid_jax.config` or `hybrid_jax.pattern` does not import jax: `launch.py` sets the
XLA environment first, and jax reads it once, at import.
"""

__version__ = "0.1.0"

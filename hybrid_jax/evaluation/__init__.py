"""What `python -m hybrid_jax.evaluate` is made of; harness.py and tasks.py need lm-evaluation-harness."""

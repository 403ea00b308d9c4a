"""Sequence operations, one folder each: a sequential reference and a chunked form that trains."""

# Name (jax.ad_checkpoint.checkpoint_name) of what an operation's forward pass keeps beside its inputs: a remat
# policy that saves it runs no operation twice.
RESIDUAL = "kernel_residual"

"""Sublayers of the stack, one file each: flax NNX modules that hold parameters, with pure JAX compute.

Parameters are fp32; matrices are cast to the dtype of the activations where they are used. Layers know nothing
of meshes or devices.
"""

"""Inverse of batched unit lower triangular matrices, in float32 (float64 when given float64).

The delta rule's chunk form needs (I + A)^-1 for a strictly lower A whose entries are not small when keys are
correlated. Power series (Neumann, repeated squaring) then overflow although the matrix is well conditioned.
Here the 16-wide diagonal blocks are inverted by forward substitution and then merged pairwise by the exact
2x2 block formula

    [[L1, 0], [A21, L2]]^-1 = [[L1^-1, 0], [-L2^-1 A21 L1^-1, L2^-1]].

Shapes: C matrix size, S block size, M all batch dimensions and blocks together.
"""

import jax
import jax.numpy as jnp

BLOCK = 16


def _substitute(a):
    """Inverse of I + a for strictly lower a [M,S,S]: once row j is done, the rows below lose their share."""
    size = a.shape[-1]
    a_SSM = jnp.moveaxis(a, 0, -1)  # the batch in the fastest axis: every step is elementwise over it
    x_SSM = jnp.broadcast_to(jnp.eye(size, dtype=a.dtype)[:, :, None], a_SSM.shape)
    for j in range(size - 1):
        x_SSM = x_SSM - a_SSM[:, j, None] * x_SSM[j]
    return jnp.moveaxis(x_SSM, -1, 0)


def _matmul(x, y):
    return jnp.matmul(x, y, precision=jax.lax.Precision.HIGHEST)


def _blocks(a, size, row, col):
    """Blocks (2p+row, 2p+col) of width `size` of a [M,C,C], stacked over p: [M, C/(2 size), size, size]."""
    starts = range(0, a.shape[-1], 2 * size)
    pick = [a[:, s + row * size :, s + col * size :][:, :size, :size] for s in starts]
    return jnp.stack(pick, axis=1)


@jax.custom_vjp
def unit_lower_inverse(a: jax.Array) -> jax.Array:
    """(I + a)^-1 for strictly lower triangular a [..., C, C]; C is at most 16 or 16 times a power of two.

    The diagonal and upper triangle of `a` must be zero. The result is exactly zero above the diagonal, and
    its row i depends on rows <= i only. Raises ValueError for any other C.
    """
    *batch, chunk, _ = a.shape
    size = min(chunk, BLOCK)
    count = chunk // size
    if count * size != chunk or count & (count - 1):
        raise ValueError(f"unit_lower_inverse: size {chunk} is not <= {BLOCK} or {BLOCK} times a power of two")
    a = a.reshape(-1, chunk, chunk)
    diagonal = jnp.stack([a[:, s : s + size, s : s + size] for s in range(0, chunk, size)], axis=1)
    inverse = _substitute(diagonal.reshape(-1, size, size)).reshape(-1, count, size, size)
    while size < chunk:
        low, high = inverse[:, 0::2], inverse[:, 1::2]
        corner = -_matmul(high, _matmul(_blocks(a, size, 1, 0), low))
        top = jnp.concatenate([low, jnp.zeros_like(low)], axis=-1)
        inverse = jnp.concatenate([top, jnp.concatenate([corner, high], axis=-1)], axis=-2)
        size *= 2
    return inverse.reshape(*batch, chunk, chunk)


def _forward(a):
    inverse = unit_lower_inverse(a)
    return inverse, inverse


def _backward(inverse, d_inverse):
    transposed = jnp.swapaxes(inverse, -1, -2)
    return (-jnp.tril(_matmul(_matmul(transposed, d_inverse), transposed), -1),)


unit_lower_inverse.defvjp(_forward, _backward)

"""Device functions on one chunk of a row that the kernels of both delta rules use; symbols as in kernels.gdn.triton.

Shapes: T time, HV value heads, C chunk.
"""

import triton
import triton.language as tl

from hybrid_jax.kernels.device import BLOCK, dot, split, unit_lower_inverse


@triton.jit
def inverse_norm(x):
    """1 / |x| of each row."""
    if x.dtype.primitive_bitwidth == 16 and x.shape[0] == BLOCK:
        # A product costs matrix units less than a sum of squares costs the others.
        at = tl.arange(0, x.shape[0])
        squares = tl.where(at[:, None] == at[None, :], dot(x, tl.trans(x)), 0.0)
    else:
        x = x.to(tl.float32)
        squares = x * x
    return tl.rsqrt(tl.sum(squares, axis=1) + 1e-6)


@triton.jit
def load_strength(beta, b, n, head, T: tl.constexpr, HV: tl.constexpr, C: tl.constexpr):
    """beta of chunk n [C], kept away from zero: V' / beta then exists, and so does its square, at no change that fp32
    could show."""
    token = n * C + tl.arange(0, C)
    x = tl.load(beta + (b * T + token) * HV + head, mask=token < T, other=0.0)
    return tl.where(tl.abs(x) < 1e-12, 1e-12, x)


@triton.jit
def store_inverse(inverse, chunk, A, strength, C: tl.constexpr, PARTS: tl.constexpr):
    """(I + A)^-1 [C, C] in fp32; to memory goes T' = (I + A)^-1 diag(beta), as high and low part."""
    at = tl.arange(0, C)
    x = unit_lower_inverse(A, C, PARTS)
    high, low = split(x * strength[None, :], inverse.dtype.element_ty)
    tile = inverse + chunk * (PARTS * C * C) + at[:, None] * C + at[None, :]
    tl.store(tile, high)
    if PARTS == 2:
        tl.store(tile + C * C, low)
    return x


@triton.jit
def load_inverse(inverse, chunk, C: tl.constexpr, PARTS: tl.constexpr):
    """T' as (high, low)."""
    at = tl.arange(0, C)
    tile = inverse + chunk * (PARTS * C * C) + at[:, None] * C + at[None, :]
    high = tl.load(tile)
    low = high
    if PARTS == 2:
        low = tl.load(tile + C * C)
    return high, low


@triton.jit
def apply(high, low, x, PARTS: tl.constexpr):
    """(high + low) x in fp32, of x rounded to their type."""
    x = x.to(high.dtype)
    y = dot(high, x)
    if PARTS == 2:
        y += dot(low, x)
    return y


@triton.jit
def local_gradient(P, do, high, low, PARTS: tl.constexpr):
    """T'^T P^T do: what a chunk's own outputs give to dv."""
    local, rest = split(dot(tl.trans(P), do), high.dtype)
    dv = apply(tl.trans(high), tl.trans(low), local, PARTS)
    if PARTS == 2:
        dv += dot(tl.trans(high), rest)
    return dv

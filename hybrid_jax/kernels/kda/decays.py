"""Decays between the tokens of a chunk, one a key channel, for the Triton kernels of Kimi Delta Attention.

The pairs (i, j) of a chunk, j < i, are covered by dyadic squares as in kernels.kda.chunked: for every aligned run
of 2b tokens, rows from its right half and columns from its left half, where

    exp(sum of gates between) = exp(sum from the middle through i) exp(sum after j to the middle)

has two exponents <= 0 for any gates. A tile of decays [C, K] for width b holds the first factor in rows of right
halves and the second in rows of left halves, so that one product k * decay serves as rows and as columns.

Sums of gates are products with 0/1 matrices: exactly the gates between, and none of a later token or another document,
enter a decay, not even in rounding.

Within a block of S = 16 tokens one square does where its gates allow it: exp(G_i + CENTRE) exp(-G_j - CENTRE), with the
sums G from the block's start, is in range down to G = STEEPEST. Tokens from which on it is not (their own gates and
earlier ones decide) take the dyadic squares for their rows instead. Gates above STEEPEST / S never need them.

Shapes: C chunk, K key dim (a tile's width).
"""

import triton
import triton.language as tl

from hybrid_jax.kernels.device import BLOCK, dot, load_rows

# exp(64) and exp(-64) leave ten decimal digits to the end of the range of fp32 and of bf16, for what they multiply.
STEEPEST, CENTRE = tl.constexpr(-128.0), tl.constexpr(64.0)


@triton.jit
def _log1p(u):
    """log(1 + u) for u in [0, 1], to 2e-7 of itself, which a GPU's logarithm of 1 + u is not for a small u: u times the
    Chebyshev interpolant of log(1 + u) / u."""
    x = 0.005253457929939032 * u - 0.02958850748836994
    x = x * u + 0.07836166769266129
    x = x * u - 0.13674770295619965
    x = x * u + 0.19111430644989014
    x = x * u - 0.24844369292259216
    x = x * u + 0.33319270610809326
    x = x * u - 0.49999502301216125
    return (x * u + 1.0) * u


@triton.jit
def log_decays(
    gates,
    A_log,
    dt_bias,
    b,
    n,
    head,
    key,
    T: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    C: tl.constexpr,
    FORM: tl.constexpr,
    BOUND: tl.constexpr,
):
    """(raw gates + bias, log decays g <= 0) of chunk n [C, K] fp32; g is 0 past the last token."""
    x = load_rows(gates + (b * T * HV + head) * K, n * C, HV * K, key, C, T, K).to(tl.float32)
    g = x
    if FORM != "log":
        x += tl.load(dt_bias + head * K + key, mask=key < K, other=0.0)[None, :]
        rate = tl.exp(tl.load(A_log + head))
        if FORM == "softplus":
            g = -rate * (tl.maximum(x, 0.0) + _log1p(tl.exp(-tl.abs(x))))
        else:
            g = BOUND * tl.sigmoid(rate * x)
        g = tl.where((tl.arange(0, C) < T - n * C)[:, None], g, 0.0)
    # Whatever decays by more than this is zero; an infinite gate would make 0 * inf in a sum.
    return x, tl.maximum(g, -1e4)


@triton.jit
def _sums(keep, high, low, PARTS: tl.constexpr):
    """Of each row the gates that `keep` [C,C] selects, summed [C,K]; g as high and low part."""
    matrix = keep.to(high.dtype)
    x = dot(matrix, high)
    if PARTS == 2:
        x += dot(matrix, low)
    return x


@triton.jit
def block_sums(high, low, document, C: tl.constexpr, PACKED: tl.constexpr, PARTS: tl.constexpr):
    """G: the gates from the block's start through each token, those of its document summed [C,K]."""
    at = tl.arange(0, C)
    row, column = at[:, None], at[None, :]
    keep = (column <= row) & (row // BLOCK == column // BLOCK)
    if PACKED:
        keep = keep & (document[:, None] == document[None, :])
    return _sums(keep, high, low, PARTS)


@triton.jit
def row_decay(sums):
    """exp(G + CENTRE)."""
    return tl.exp(sums + CENTRE)


@triton.jit
def column_decay(sums):
    """exp(-G - CENTRE), finite for steep rows too."""
    return tl.exp(-tl.maximum(sums, STEEPEST) - CENTRE)


@triton.jit
def in_block(C: tl.constexpr):
    """Whether (row, column) are a pair j < i of one block [C,C]."""
    at = tl.arange(0, C)
    row, column = at[:, None], at[None, :]
    return (column < row) & (row // BLOCK == column // BLOCK)


@triton.jit
def is_right(level, C: tl.constexpr):
    """Whether tokens lie in the right half of their run of 2b, b = 2^level [C]."""
    return ((tl.arange(0, C) >> level) & 1) == 1


@triton.jit
def in_square(level, C: tl.constexpr):
    """Whether (row, column) are in the right and left half of one run of 2b, b = 2^level [C,C]."""
    runs = tl.arange(0, C) >> (level + 1)
    right = is_right(level, C)
    return (runs[:, None] == runs[None, :]) & right[:, None] & (right == 0)[None, :]


@triton.jit
def square_decay(high, low, level, C: tl.constexpr, PARTS: tl.constexpr):
    """The tile of decays for squares of width b = 2^level [C,K]."""
    at = tl.arange(0, C)
    row, column = at[:, None], at[None, :]
    middle = ((row >> level) | 1) << level
    through = (middle <= column) & (column <= row)
    after = (row < column) & (column < middle)
    return tl.exp(_sums(((row >= middle) & through) | ((row < middle) & after), high, low, PARTS))


@triton.jit
def widest_level(C: tl.constexpr):
    """The level of the widest square of a chunk."""
    return 3 if C == 16 else 4 if C == 32 else 5


@triton.jit
def entering_decay(high, low, sums, C: tl.constexpr, PARTS: tl.constexpr):
    """The decay from the chunk's start through each token of the first document [C,K]; `sums` as of `block_sums`."""
    if C > BLOCK:
        at = tl.arange(0, C)
        sums = _sums(at[None, :] <= at[:, None], high, low, PARTS)
    return tl.exp(sums)


@triton.jit
def leaving_decay(high, low, C: tl.constexpr, PARTS: tl.constexpr):
    """The decay after each token to the chunk's end [C,K]."""
    at = tl.arange(0, C)
    return tl.exp(_sums(at[None, :] > at[:, None], high, low, PARTS))

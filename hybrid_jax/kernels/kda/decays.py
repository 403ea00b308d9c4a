"""Decays between the tokens of a chunk, one a key channel, for the Triton kernels of Kimi Delta Attention.

The pairs (i, j) of a chunk, j < i, are covered by dyadic squares as in kernels.kda.chunked: for every aligned run
of 2b tokens, rows from its right half and columns from its left half, where

    exp(sum of gates between) = exp(sum from the middle through i) exp(sum after j to the middle)

has two exponents <= 0 for any gates. A tile of decays [K, C] for width b holds the first factor for tokens of right
halves and the second for those of left halves, so that one product k * decay serves as rows and as columns.

Sums of gates are products with 0/1 matrices: exactly the gates between, and none of a later token or another document,
enter a decay, not even in rounding. Log decays are to base 2: a GPU's exp2 is one instruction, its exp six.

Within a block of S = 16 tokens one square does where its gates allow it: 2^(G_i + CENTRE) 2^(-G_j - CENTRE), with the
sums G from the block's start, is in range down to G = STEEPEST. Tokens from which on it is not (their own gates and
earlier ones decide) take the dyadic squares for their rows instead. Gates above STEEPEST / S never need them. Squares
of width 16 have the same rows, 2^(G_i + CENTRE), and columns 2^(sum after j to the block's end - CENTRE).

Shapes: C chunk, K key dim (a tile's width).
"""

import triton
import triton.language as tl

from hybrid_jax.kernels.device import BLOCK, dot, load_columns, split

# 2^92 and 2^-92 leave ten decimal digits to the end of the range of fp32 and of bf16, for what they multiply.
STEEPEST, CENTRE = tl.constexpr(-184.0), tl.constexpr(92.0)
LOG2E, LN2 = tl.constexpr(1.4426950408889634), tl.constexpr(0.6931471805599453)


@triton.jit
def token_documents(documents, b, n, T: tl.constexpr, C: tl.constexpr):
    """The documents of the tokens of chunk n in a packed row [C]."""
    return tl.load(documents + b * T + tl.minimum(n * C + tl.arange(0, C), T - 1))


@triton.jit
def chunk_documents(documents, b, n, T: tl.constexpr, C: tl.constexpr):
    """Of chunk n in a packed row: the tokens' documents [C], those of the token before it and of its last one."""
    ids = documents + b * T
    before = tl.load(ids + tl.maximum(n * C - 1, 0))
    last = tl.load(ids + tl.minimum(n * C + C - 1, T - 1))
    return token_documents(documents, b, n, T, C), before, last


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
def softplus(x):
    """log(1 + e^x)."""
    return tl.maximum(x, 0.0) + _log1p(tl.exp2(-LOG2E * tl.abs(x)))


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
    """(raw gates + bias, log2 of decays <= 0) of chunk n [K, C] fp32; 0 past the last token."""
    x = load_columns(gates + (b * T * HV + head) * K, n * C, HV * K, key, C, T, K).to(tl.float32)
    if FORM == "log":
        g = x * LOG2E
    else:
        x += tl.load(dt_bias + head * K + key, mask=key < K, other=0.0)[:, None]
        rate = tl.exp(tl.load(A_log + head))
        if FORM == "softplus":
            g = (-rate * LOG2E) * softplus(x)
        else:
            g = (BOUND * LOG2E) * tl.sigmoid(rate * x)
        g = tl.where((tl.arange(0, C) < T - n * C)[None, :], g, 0.0)
    # Whatever decays by more than this is zero; an infinite gate would make 0 * inf in a sum.
    return x, tl.maximum(g, -1e4)


@triton.jit
def sums(high, low, keep, PARTS: tl.constexpr):
    """Of each token (column) the gates of those tokens (rows) that `keep` [C,C] selects, summed [K,C]; gates, or
    whatever else, as high and low part."""
    matrix = keep.to(high.dtype)
    x = dot(high, matrix)
    if PARTS == 2:
        x += dot(low, matrix)
    return x


@triton.jit
def token_sums(x, keep, document, PACKED: tl.constexpr, PARTS: tl.constexpr, dtype: tl.constexpr):
    """Of each token the columns of x [K,C] that `keep` [C,C] selects, as in `sums`, within its document."""
    if PACKED:
        keep = keep & (document[:, None] == document[None, :])
    high, low = split(x, dtype)
    return sums(high, low, keep, PARTS)


@triton.jit
def one_block(C: tl.constexpr):
    """Whether two tokens lie in one block of 16 [C,C]."""
    block = tl.arange(0, C) // BLOCK
    return block[:, None] == block[None, :]


@triton.jit
def block_sums(high, low, document, C: tl.constexpr, PACKED: tl.constexpr, PARTS: tl.constexpr):
    """G: the gates from the block's start through each token, those of its document summed [K,C]."""
    at = tl.arange(0, C)
    keep = (at[:, None] <= at[None, :]) & one_block(C)
    if PACKED:
        keep = keep & (document[:, None] == document[None, :])
    return sums(high, low, keep, PARTS)


@triton.jit
def row_decay(total):
    """2^(G + CENTRE)."""
    return tl.exp2(total + CENTRE)


@triton.jit
def column_decay(total):
    """2^(-G - CENTRE), finite for steep rows too."""
    return tl.exp2(-tl.maximum(total, STEEPEST) - CENTRE)


@triton.jit
def rest_decay(high, low, C: tl.constexpr, PARTS: tl.constexpr):
    """2^-CENTRE times the decay after each token to its block's end [K,C]."""
    at = tl.arange(0, C)
    return tl.exp2(sums(high, low, (at[:, None] > at[None, :]) & one_block(C), PARTS) - CENTRE)


@triton.jit
def in_block(C: tl.constexpr):
    """Whether (row, column) are a pair j < i of one block [C,C]."""
    at = tl.arange(0, C)
    return (at[None, :] < at[:, None]) & one_block(C)


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
    """The tile of decays for squares of width b = 2^level [K,C]."""
    at = tl.arange(0, C)
    summed, token = at[:, None], at[None, :]
    middle = ((token >> level) | 1) << level
    through = (middle <= summed) & (summed <= token)
    after = (token < summed) & (summed < middle)
    return tl.exp2(sums(high, low, ((token >= middle) & through) | ((token < middle) & after), PARTS))


@triton.jit
def entering_decay(high, low, C: tl.constexpr, PARTS: tl.constexpr):
    """The decay from the chunk's start through each token of the first document [K,C]."""
    at = tl.arange(0, C)
    keep = at[:, None] <= at[None, :]
    return tl.exp2(sums(high, low, keep, PARTS))


@triton.jit
def leaving_decay(high, low, C: tl.constexpr, PARTS: tl.constexpr):
    """The decay after each token to the chunk's end [K,C]."""
    at = tl.arange(0, C)
    return tl.exp2(sums(high, low, at[:, None] > at[None, :], PARTS))

"""Decays between the tokens of a chunk, one a key channel, for the Triton kernels of Kimi Delta Attention.

The pairs (i, j) of a chunk, j < i, are covered by dyadic squares as in kernels.kda.chunked: for every aligned run
of 2b tokens, rows from its right half and columns from its left half, where

    exp(sum of gates between) = exp(sum from the middle through i) exp(sum after j to the middle)

has two exponents <= 0 for any gates. A tile of decays [C, K] for width b holds the first factor in rows of right
halves and the second in rows of left halves, so that one product k * decay serves as rows and as columns.

Sums of gates within blocks of S = 16 tokens are products with 0/1 matrices: exactly the gates between, and none of a
later token, enter a decay, not even in rounding. Decays over whole blocks come from the blocks' sums.

Within a block one square does where its gates allow it: exp(G_i + CENTRE) exp(-G_j - CENTRE), with the sums G from the
block's start, is in range down to G = STEEPEST. Tokens from which on it is not (their own gates and earlier ones
decide) take the dyadic squares for their rows instead. Gates above STEEPEST / S never need them.

Shapes: C chunk, M = C / S blocks of tokens, K key dim (a tile's width).
"""

import triton
import triton.language as tl

from hybrid_jax.kernels.device import BLOCK, dot, load_rows, split


# exp(64) and exp(-64) leave ten decimal digits to the end of the range of fp32 and of bf16, for what they multiply.
STEEPEST, CENTRE = tl.constexpr(-128.0), tl.constexpr(64.0)


@triton.jit
def _log1p(u):
    """log(1 + u) for u in [0, 1] as 2 artanh(u / (2 + u)): to 2e-7, where a GPU's logarithm of 1 + u is not."""
    x = u / (2.0 + u)
    y = x * x
    return 2.0 * x * (1.0 + y * (1 / 3 + y * (1 / 5 + y * (1 / 7 + y * (1 / 9 + y * (1 / 11))))))


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
def block_dot(a, b):
    """a [M,S,X] @ b [M,X,Y], block by block."""
    if a.shape[0] == 1:
        x = dot(tl.reshape(a, [a.shape[1], a.shape[2]]), tl.reshape(b, [b.shape[1], b.shape[2]]))
        x = tl.reshape(x, [1, a.shape[1], b.shape[2]])
    else:
        x = dot(a, b)
    return x


@triton.jit
def _sums(keep, high, low, PARTS: tl.constexpr):
    """Of each row the gates that `keep` [S,S] selects, summed: [M,S,K]."""
    matrix = tl.broadcast_to(keep[None, :, :].to(high.dtype), [high.shape[0], BLOCK, BLOCK])
    x = block_dot(matrix, high)
    if PARTS == 2:
        x += block_dot(matrix, low)
    return x


@triton.jit
def gate_blocks(g, C: tl.constexpr, dtype: tl.constexpr):
    """What the sums below are taken of: g as [M,S,K], high and low part, and each block's sum [M,K]."""
    g = tl.reshape(g, [C // BLOCK, BLOCK, g.shape[1]])
    high, low = split(g, dtype)
    return high, low, tl.sum(g, axis=1)


@triton.jit
def prefix(high, low, PARTS: tl.constexpr):
    """The gates from the block's start through each token, summed [M,S,K]."""
    at = tl.arange(0, BLOCK)
    return _sums(at[None, :] <= at[:, None], high, low, PARTS)


@triton.jit
def suffix(high, low, PARTS: tl.constexpr):
    """The gates after each token to the block's end, summed [M,S,K]."""
    at = tl.arange(0, BLOCK)
    return _sums(at[None, :] > at[:, None], high, low, PARTS)


@triton.jit
def row_decay(sums):
    """exp(G + CENTRE) of the sums of `prefix`."""
    return tl.exp(sums + CENTRE)


@triton.jit
def column_decay(sums):
    """exp(-G - CENTRE), finite for steep rows too."""
    return tl.exp(-tl.maximum(sums, STEEPEST) - CENTRE)


@triton.jit
def uncentred(rows):
    """exp(G) of exp(G + CENTRE)."""
    return rows * 1.6038108905486378e-28  # exp(-CENTRE)


@triton.jit
def is_right(at, level):
    """Whether `at` lies in the right half of its run of 2b, b = 2^level."""
    return ((at >> level) & 1) == 1


@triton.jit
def in_square(at, level):
    """Whether (row, column) are right and left half of one run of 2b: [n, n]."""
    runs = at >> (level + 1)
    return (runs[:, None] == runs[None, :]) & is_right(at, level)[:, None] & (is_right(at, level) == 0)[None, :]


@triton.jit
def inner_decay(high, low, level, PARTS: tl.constexpr):
    """The tile of decays for squares of width b = 2^level < S: [M,S,K]."""
    at = tl.arange(0, BLOCK)
    row, column = at[:, None], at[None, :]
    middle = ((row >> level) | 1) << level
    through = (middle <= column) & (column <= row)
    after = (row < column) & (column < middle)
    return tl.exp(_sums(tl.where(row >= middle, through, after), high, low, PARTS))


@triton.jit
def _between(totals, keep):
    """exp of the sums of those blocks that `keep` [M,M] selects for each block: [M,1,K]."""
    sums = tl.sum(tl.where(keep[:, :, None], totals[None, :, :], 0.0), axis=1)
    return tl.exp(tl.expand_dims(sums, 1))


@triton.jit
def outer_levels(C: tl.constexpr):
    """How many widths squares of whole blocks have in a chunk."""
    return 0 if C == 16 else 1 if C == 32 else 2


@triton.jit
def outer_decay(before, after, totals, level, C: tl.constexpr):
    """The tile of decays for squares of 2^level >= 1 blocks, from exp of `prefix` and of `suffix`: [C,K]."""
    at = tl.arange(0, C // BLOCK)
    row, column = at[:, None], at[None, :]
    middle = ((row >> level) | 1) << level
    keep = tl.where(row >= middle, (middle <= column) & (column < row), (row < column) & (column < middle))
    x = tl.where(is_right(at, level)[:, None, None], before, after) * _between(totals, keep)
    return tl.reshape(x, [C, x.shape[2]])


@triton.jit
def entering_decay(before, totals, C: tl.constexpr):
    """The decay from the chunk's start through each token [C,K]."""
    at = tl.arange(0, C // BLOCK)
    return tl.reshape(before * _between(totals, at[None, :] < at[:, None]), [C, before.shape[2]])


@triton.jit
def leaving_decay(after, totals, C: tl.constexpr):
    """The decay after each token to the chunk's end [C,K]."""
    at = tl.arange(0, C // BLOCK)
    return tl.reshape(after * _between(totals, at[None, :] > at[:, None]), [C, after.shape[2]])


@triton.jit
def on_diagonal(blocks, C: tl.constexpr):
    """[C, C] with `blocks` [M,S,S] on its diagonal and zeros elsewhere."""
    count: tl.constexpr = C // BLOCK
    at = tl.arange(0, count)
    same = at[:, None, None, None] == at[None, None, :, None]
    return tl.reshape(tl.where(same, tl.reshape(blocks, [count, BLOCK, 1, BLOCK]), 0.0), [C, C])

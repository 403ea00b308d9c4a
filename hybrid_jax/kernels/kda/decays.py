"""Decays between the tokens of a chunk, one a key channel, for the Triton kernels of Kimi Delta Attention.

The pairs (i, j) of a chunk, j < i, are covered by squares, each with rows' decays times columns' decays. With G the sum
of gates from the start of a block of S = 16 tokens through a token:

    within a block            exp(G_i + CENTRE)    exp(-G_j - CENTRE)
    of neighbouring blocks    exp(G_i)             exp(sum after j to its block's end)

The second has exponents <= 0 for any gates. The first is for rows with G_i > STEEPEST. Other rows are in zones z = 1,
2, .. of WIDTH below that. Each zone is a product of its own, with decays from where it starts, a number that no token
has a say in: exp(G_i - start) <= 1, and exp(start - G_j), which is large for columns of the zone only. Gates above
STEEPEST / S, bounded ones say, need no zones.

Sums of gates are products with 0/1 matrices: exactly the gates between, and none of a later token or another document,
enter a decay, not even in rounding. All exponents here are in base 2, which GPUs raise to a power in one instruction.

Shapes: C chunk, K key dim (a tile's width).
"""

import triton
import triton.language as tl

from hybrid_jax.kernels.device import BLOCK, dot, load_rows, truncate

# 2^96 and 2^-96 leave nine decimal digits to the end of the range of fp32 and of bf16, for what they multiply.
STEEPEST, CENTRE, WIDTH = tl.constexpr(-192.0), tl.constexpr(96.0), tl.constexpr(96.0)
UNCENTRE = tl.constexpr(2.0**-96)
LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def _log1p(u, PARTS: tl.constexpr):
    """log(1 + u) for u in [0, 1], which a GPU's logarithm of 1 + u is not for a small u: u times a polynomial for log(1
    + u) / u, to 2e-7 of itself, or to 2e-6 for gates in bf16."""
    if PARTS == 2:
        x = 0.014987302642617856 * u - 0.06902799378017124
        x = x * u + 0.152319247614609
        x = x * u - 0.23675715760153432
        x = x * u + 0.3315443759412858
        x = x * u - 0.49991738454244367
    else:
        x = 0.005253457929939032 * u - 0.02958850748836994
        x = x * u + 0.07836166769266129
        x = x * u - 0.13674770295619965
        x = x * u + 0.19111430644989014
        x = x * u - 0.24844369292259216
        x = x * u + 0.33319270610809326
        x = x * u - 0.49999502301216125
    return (x * u + 1.0) * u


@triton.jit
def load_gates(gates, b, n, head, key, T: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, C: tl.constexpr):
    """Raw gates of the C tokens from token n C [C, channels]."""
    return load_rows(gates + (b * T * HV + head) * K, n * C, HV * K, key, C, T, K)


@triton.jit
def load_bias(dt_bias, head, key, K: tl.constexpr, FORM: tl.constexpr):
    """What is added to raw gates [channels]."""
    x = tl.zeros(key.shape, tl.float32)
    if FORM != "log":
        x = tl.load(dt_bias + head * K + key, mask=key < K, other=0.0)
    return x


@triton.jit
def load_rate(A_log, head, FORM: tl.constexpr):
    """exp(A_log) of a head, 1 where the gates are the log decays."""
    x = 1.0
    if FORM != "log":
        x = tl.exp(tl.load(A_log + head))
    return x


@triton.jit
def log_decays(x, rate, inside, FORM: tl.constexpr, BOUND: tl.constexpr, PARTS: tl.constexpr):
    """log2 of the decays g <= 0, like x: fp32 raw gates and their bias; 0 where not `inside` a row of tokens. rate: of
    `load_rate`."""
    if FORM != "log":
        if FORM == "softplus":
            g = (rate * -LOG2_E) * (tl.maximum(x, 0.0) + _log1p(tl.exp2(tl.abs(x) * -LOG2_E), PARTS))
        else:
            g = tl.sigmoid(rate * x) * (BOUND * LOG2_E)
        g = tl.where(inside, g, 0.0)
    else:
        g = x * LOG2_E
    # Whatever decays by more than this is zero; an infinite gate would make 0 * inf in a sum.
    return tl.maximum(g, -1e4)


@triton.jit
def selecting(keep, dtype: tl.constexpr):
    """`keep` [C,C] as a matrix of 0 and 1, for `sums`."""
    return tl.where(keep, tl.full(keep.shape, 1.0, dtype), tl.full(keep.shape, 0.0, dtype))


@triton.jit
def sums(matrix, high, low, PARTS: tl.constexpr):
    """Of each row what `matrix` [C,C] selects of x = high + low [C,K], summed [C,K]."""
    x = dot(matrix, high)
    if PARTS == 2:
        x += dot(matrix, low)
    return x


@triton.jit
def sums_turned(high, low, matrix, PARTS: tl.constexpr):
    """Of each column what the columns of `matrix` [C,C] select of x = high + low [K,C], summed [K,C]."""
    x = dot(high, matrix)
    if PARTS == 2:
        x += dot(low, matrix)
    return x


@triton.jit
def up_to(document, C: tl.constexpr, PACKED: tl.constexpr, dtype: tl.constexpr):
    """Selects the tokens from a block's start through each token, those of its document. Their gates' sum is G."""
    at = tl.arange(0, C)
    row, column = at[:, None], at[None, :]
    keep = (column <= row) & (row // BLOCK == column // BLOCK)
    if PACKED:
        keep = keep & (document[:, None] == document[None, :])
    return selecting(keep, dtype)


@triton.jit
def rest(C: tl.constexpr, dtype: tl.constexpr):
    """Selects the tokens after each token to its block's end."""
    at = tl.arange(0, C)
    row, column = at[:, None], at[None, :]
    return selecting((column > row) & (row // BLOCK == column // BLOCK), dtype)


@triton.jit
def outer_decays(carries, chunk, key, C: tl.constexpr, K: tl.constexpr):
    """Of a chunk, the decays over all its blocks before a token's own, and over all after it, each [C,channels], from
    those over blocks, `carries` [.., C / S, K]."""
    COUNT: tl.constexpr = C // BLOCK
    block = (tl.arange(0, C) // BLOCK)[:, None]
    before = tl.full([C, key.shape[0]], 1.0, tl.float32)
    after = before
    for other in tl.static_range(COUNT):
        carry = tl.load(carries + (chunk * COUNT + other) * K + key, mask=key < K, other=0.0)[None, :]
        before *= tl.where(block > other, carry, 1.0)
        after *= tl.where(block < other, carry, 1.0)
    return before, after


@triton.jit
def pair_decays(total, log_norm, UNBOUNDED: tl.constexpr):
    """norm exp(G + CENTRE) for rows and norm exp(-G - CENTRE) for columns, of sums G, `total`; log_norm in base 2, of
    its shape. Rows in a zone have 0; columns are finite there too."""
    row, column = total, total
    if UNBOUNDED:
        row, column = tl.where(total > STEEPEST, total, -1e4), tl.maximum(total, STEEPEST)
    return tl.exp2(row + (log_norm + CENTRE)), tl.exp2((log_norm - CENTRE) - column)


@triton.jit
def halves(g, dtype: tl.constexpr, PARTS: tl.constexpr):
    """Log decays g as coarse + fine, for sums of both in zones: those of coarse lose little or nothing to rounding.
    What decays by 2^STEEPEST or more is zero, and may decay by that."""
    g = tl.maximum(g, STEEPEST)
    if PARTS == 2:
        coarse, fine = truncate(g, dtype)
    else:
        coarse = tl.floor(g * 64.0) * (1 / 64)
        fine = g - coarse
    return coarse, fine


@triton.jit
def zones(total, coarse, fine):
    """The zone of each sum G, `total`, 0 for none; coarse + fine: the sums of `halves`."""
    zone = tl.floor((coarse + fine - STEEPEST) * (-1 / WIDTH)) + 1.0
    return tl.where(total > STEEPEST, 0.0, tl.maximum(zone, 1.0))


@triton.jit
def zone_decays(zone, coarse, fine, z, log_norm):
    """(rows', columns') decays of zone z, each with the norm."""
    g = (coarse - STEEPEST + (z - 1) * WIDTH) + fine
    rows = tl.exp2(tl.where(zone == z, g + log_norm, -1e4))
    # Columns of later zones come after all rows of this one: anything finite will do.
    return rows, tl.exp2(log_norm - tl.maximum(g, -WIDTH - 1.0))

"""Device functions that the Triton kernels share. Imported only where Triton is used.

Precision: a kernel takes the type of its dot operands from its pointers. bf16 operands are summed in fp32; fp32
operands are multiplied exactly ("ieee": no TF32 on either vendor). `split` keeps 16 bits of an fp32 matrix in
two bf16 ones where one would lose too much.

Shapes: C chunk, S block size (16), P pairs of blocks.
"""

import triton
import triton.language as tl

BLOCK = tl.constexpr(16)


@triton.jit
def dot(a, b):
    """a @ b in fp32; operands of one type."""
    return tl.dot(a, b, input_precision="ieee", out_dtype=tl.float32)


@triton.jit
def round_to(x, dtype: tl.constexpr):
    """fp32 x rounded to `dtype`, halves away from zero: as fp32 and as `dtype`."""
    if dtype == tl.bfloat16:
        # A conversion whose result is also read as fp32 would go through a unit that takes several cycles for each.
        bits = x.to(tl.uint32, bitcast=True) + 0x8000
        wide = (bits & 0xFFFF0000).to(tl.float32, bitcast=True)
        narrow = (bits >> 16).to(tl.uint16).to(dtype, bitcast=True)
    else:
        narrow = x.to(dtype)
        wide = narrow.to(tl.float32)
    return wide, narrow


@triton.jit
def split(x, dtype: tl.constexpr):
    """fp32 x as (high, low) of `dtype` with x ~ high + low (low = 0 when dtype is fp32)."""
    wide, high = round_to(x, dtype)
    return high, (x - wide).to(dtype)


@triton.jit
def truncate(x, dtype: tl.constexpr):
    """As `split`, cheaper: high is cut off, not rounded, so that both parts are needed together."""
    if dtype == tl.bfloat16:
        bits = x.to(tl.uint32, bitcast=True)
        wide = (bits & 0xFFFF0000).to(tl.float32, bitcast=True)
        high = (bits >> 16).to(tl.uint16).to(dtype, bitcast=True)
    else:
        high = x.to(dtype)
        wide = high.to(tl.float32)
    return high, (x - wide).to(dtype)


@triton.jit
def widen(x):
    """x in fp32. Where it is narrow a product with the identity makes it so, which also lays it out as products are:
    cheaper than to unpack and to exchange its elements. Infinities would spread."""
    if x.dtype.primitive_bitwidth == 16:
        at = tl.arange(0, x.shape[0])
        y = dot(tl.where(at[:, None] == at[None, :], 1.0, 0.0).to(x.dtype), x)
    else:
        y = x.to(tl.float32)
    return y


@triton.jit
def widen_turned(x):
    """x^T in fp32, as `widen`."""
    if x.dtype.primitive_bitwidth == 16:
        at = tl.arange(0, x.shape[0])
        y = dot(tl.trans(x), tl.where(at[:, None] == at[None, :], 1.0, 0.0).to(x.dtype))
    else:
        y = tl.trans(x).to(tl.float32)
    return y


@triton.jit
def _tile(pointer, start, stride, columns, rows: tl.constexpr, height, width: tl.constexpr):
    """Pointers to a tile and its mask: a 64-bit base, 32-bit offsets within the tile."""
    at = tl.arange(0, rows)
    mask = (at < height - start)[:, None] & (columns < width)[None, :]
    return pointer + tl.cast(start, tl.int64) * stride + (at[:, None] * stride + columns[None, :]), mask


@triton.jit
def load_rows(pointer, start, stride, columns, rows: tl.constexpr, height, width: tl.constexpr):
    """[rows, columns] tile: rows start.. of a matrix with `height` rows and `width` columns, zero outside.

    `pointer` points at row 0, `columns` are column numbers, `stride` is the distance of rows in elements.
    """
    tile, mask = _tile(pointer, start, stride, columns, rows, height, width)
    return tl.load(tile, mask=mask, other=0.0)


@triton.jit
def store_rows(pointer, x, start, stride, columns, rows: tl.constexpr, height, width: tl.constexpr):
    """The counterpart of load_rows; x is rounded to the pointer's type."""
    tile, mask = _tile(pointer, start, stride, columns, rows, height, width)
    tl.store(tile, x.to(pointer.dtype.element_ty), mask=mask)


@triton.jit
def store_turned(pointer, x, start, stride, columns, rows: tl.constexpr, height, width: tl.constexpr):
    """`store_rows` of x^T."""
    store_rows(pointer, tl.trans(x.to(pointer.dtype.element_ty)), start, stride, columns, rows, height, width)


@triton.jit
def _within(x, document, y, other):
    """The scan's step: y, and before it x where both are of one document."""
    return tl.where(document == other, x, 0.0) + y, other


@triton.jit
def prefix_sum(x, document, PACKED: tl.constexpr):
    """y_i = sum of x_j over j <= i of i's document, [C]; no other document enters, not even in rounding."""
    y = tl.cumsum(x, axis=0)
    if PACKED:
        y = tl.associative_scan((x, document), 0, _within)[0]
    return y


@triton.jit
def suffix_sum(x, document, PACKED: tl.constexpr):
    """y_i = sum of x_j over j >= i of i's document, [C]."""
    y = tl.cumsum(x, axis=0, reverse=True)
    if PACKED:
        y = tl.associative_scan((x, document), 0, _within, reverse=True)[0]
    return y


@triton.jit
def strict_prefix_sum(x, C: tl.constexpr):
    """y_i = sum of x_j over j < i: never a difference of two sums, which a large x_i would erase."""
    at = tl.arange(0, C)
    return tl.cumsum(tl.where(at > 0, tl.gather(x, tl.maximum(at - 1, 0), 0), 0.0), axis=0)


@triton.jit
def _substitute(a, count: tl.constexpr):
    """(I + a)^-1 of strictly lower blocks a [count, S, S] by forward substitution: row j, once final, leaves the
    rows below it. With two warps a thread holds a whole column of the inverse, rows in its registers."""
    a = tl.trans(a, 1, 0, 2)
    row = tl.arange(0, BLOCK)[:, None, None]
    column = tl.arange(0, BLOCK)[None, None, :]
    x = tl.where(row == column, 1.0, 0.0) + tl.zeros([BLOCK, count, BLOCK], tl.float32)
    for j in tl.static_range(BLOCK - 1):
        final = tl.sum(tl.where(row == j, x, 0.0), axis=0)
        x -= tl.gather(a, tl.full([BLOCK, count, BLOCK], j, tl.int32), 2) * final[None, :, :]
    return tl.trans(x, 1, 0, 2)


@triton.jit
def _product(a, b, PARTS: tl.constexpr):
    """a @ b of fp32 matrices: exact products, or with PARTS 2 those of 16 bits, which matrix units multiply."""
    if PARTS == 2:
        high, low = split(a, tl.bfloat16)
        right, rest = split(b, tl.bfloat16)
        y = dot(high, right)
        y += dot(high, rest)
        y += dot(low, right)
    else:
        y = dot(a, b)
    return y


@triton.jit
def _merge(a, x, pairs: tl.constexpr, size: tl.constexpr, PARTS: tl.constexpr):
    """Inverses x [2 pairs, size, size] of the diagonal blocks of I + a, a [pairs, 2 size, 2 size], to those of the
    whole: the corner is -x2 a21 x1."""
    halves = tl.reshape(x, [pairs, 2, size, size])
    half = tl.arange(0, 2)
    first = tl.sum(tl.where(half[None, :, None, None] == 0, halves, 0.0), axis=1)
    second = tl.sum(tl.where(half[None, :, None, None] == 1, halves, 0.0), axis=1)
    blocks = tl.reshape(a, [pairs, 2, size, 2, size])
    left = tl.sum(tl.where(half[None, None, None, :, None] == 0, blocks, 0.0), axis=3)
    corner = tl.sum(tl.where(half[None, :, None, None] == 1, left, 0.0), axis=1)
    if pairs == 1:
        first, second = tl.reshape(first, [size, size]), tl.reshape(second, [size, size])
        corner = tl.reshape(corner, [size, size])
    corner = -_product(second, _product(corner, first, PARTS), PARTS)
    corner = tl.reshape(corner, [pairs, 1, size, 1, size])
    row, column = half[None, :, None, None, None], half[None, None, None, :, None]
    whole = tl.where(row == column, tl.reshape(halves, [pairs, 2, size, 1, size]), 0.0)
    whole += tl.where((row == 1) & (column == 0), corner, 0.0)
    return tl.reshape(whole, [pairs, 2 * size, 2 * size])


@triton.jit
def diagonal(a, count: tl.constexpr, size: tl.constexpr):
    """The diagonal blocks [count, size, size] of a [count size, count size]."""
    blocks = tl.reshape(a, [count, size, count, size])
    at = tl.arange(0, count)
    return tl.sum(tl.where(at[:, None, None, None] == at[None, None, :, None], blocks, 0.0), axis=2)


@triton.jit
def unit_lower_inverse(a, C: tl.constexpr, PARTS: tl.constexpr):
    """(I + a)^-1 of a strictly lower a [C, C], C = 16, 32 or 64, in fp32: forward substitution in 16-wide blocks,
    merged pairwise (see kernels.triangular, which says why not a power series). PARTS as of `_product`."""
    x = _substitute(diagonal(a, C // BLOCK, BLOCK), C // BLOCK)
    if C >= 32:
        x = _merge(diagonal(a, C // 32, 32), x, C // 32, BLOCK, PARTS)
    if C == 64:
        x = _merge(tl.reshape(a, [1, C, C]), x, 1, 32, PARTS)
    return tl.reshape(x, [C, C])

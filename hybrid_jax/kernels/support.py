"""What the Triton kernels can take, as plain data: a configuration is checked by it before jax is imported."""

from collections.abc import Collection

TRITON = ("gdn", "kda")  # operations that have Triton kernels

_KEY_DIMS, _VALUE_DIMS = (16, 256), (4, 512)
_DTYPES = ("bfloat16", "float32")


def unfit_heads(op: str, K: int, V: int) -> str:
    """Why the Triton kernels of `op` cannot take heads of K key and V value dims, in a few words; "" if they can."""
    for kind, size, (least, most) in (("key", K, _KEY_DIMS), ("value", V, _VALUE_DIMS)):
        if size % 4 or not least <= size <= most:
            return f"heads of {size} {kind} dims, where {op} needs a multiple of 4 from {least} to {most}"
    return ""


def unfit(op: str, K: int, V: int, dtype: str, others: Collection[str] = ()) -> str:
    """The same for a whole problem: `dtype` of the matmul inputs, `others` those of gates and states."""
    if "float64" in (dtype, *others):
        return f"float64 inputs, where {op} computes in float32"
    if dtype not in _DTYPES:
        return f"{dtype} inputs, where {op} needs {' or '.join(_DTYPES)}"
    return unfit_heads(op, K, V)

"""Triton's interpreter as one operation of a jax program on the CPU: for tests, as it is slow.

It does not round as a GPU does, and `tl.dot` of bf16 operands is wrong in it: `launch.unfit` keeps those from it.
"""

import contextlib
import math
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental.buffer_callback import buffer_callback

_LOCK = threading.Lock()  # the interpreter patches triton.language for the whole process while it runs
_GUARD = 4096  # bytes before and after each array
_UNSET = 0xFF  # as bytes: NaN in every float type, -1 as an integer


def run(
    kernel: Any,
    names: Sequence[str],
    inputs: tuple[jax.Array, ...],
    outputs: tuple[jax.ShapeDtypeStruct, ...],
    grid: tuple[int, ...],
    constants: Mapping[str, Any],
) -> tuple[jax.Array, ...]:
    """The kernel's outputs, NaN or -1 where it stored nothing. names: its pointers, inputs then outputs.

    Fails, when the result is waited for, if the kernel stores to an input or outside of an output; a load from
    outside of an array gives NaN or -1, up to 4 KB away.
    """

    def interpret(context, results, *arrays):
        with _LOCK, _patched_once(), np.errstate(all="ignore"):  # masked lanes overflow, as they do on a GPU
            values = _interpret(kernel, names, tuple(map(np.asarray, arrays)), outputs, grid, constants)
        for result, value in zip(results, values, strict=True):
            np.asarray(result)[...] = value

    # Not jax.pure_callback: it makes jax arrays of its arguments, and when every thread of the CPU backend is in
    # such a callback, none is left to fill them (seen with eight devices on two cores, from 1 MB an array on).
    return tuple(buffer_callback(interpret, outputs)(*inputs))


@contextlib.contextmanager
def _patched_once() -> Iterator[None]:
    """For one launch. Triton patches its language anew for each function that a kernel calls, once more for each call,
    which took a quarter of the time."""
    from triton.runtime import interpreter

    patch = getattr(interpreter, "_patch_lang", None)  # private: another version may go without
    if patch is None:
        yield
        return
    patched: set[int] = set()

    def once(function: Any) -> Any:
        if id(function.__globals__) in patched:
            return None
        patched.add(id(function.__globals__))
        return patch(function)

    interpreter._patch_lang = once
    try:
        yield
    finally:
        interpreter._patch_lang = patch


def _interpret(kernel, names, arrays, outputs, grid, constants) -> list[np.ndarray]:
    """Runs the kernel on copies that lie between guard bytes; raises RuntimeError if it writes where it may not."""
    import torch  # the interpreter takes nothing else

    buffers, before, pointers = [], [], []
    for x in (*arrays, *outputs):
        size = math.prod(x.shape) * x.dtype.itemsize
        buffer = np.full(size + 2 * _GUARD, _UNSET, np.uint8)
        if isinstance(x, np.ndarray):
            buffer[_GUARD : _GUARD + size] = np.frombuffer(x.tobytes(), np.uint8)
        buffers.append(buffer)
        before.append(buffer.copy())
        inner = torch.from_numpy(buffer)[_GUARD : _GUARD + size]
        pointers.append(inner.view(getattr(torch, x.dtype.name)).reshape(x.shape))
    kernel[grid](*pointers, **constants)
    for i, (name, new, old) in enumerate(zip(names, buffers, before, strict=True)):
        if i >= len(arrays):
            old[_GUARD:-_GUARD] = new[_GUARD:-_GUARD]
        if not np.array_equal(new, old):
            what = "wrote outside of" if i >= len(arrays) else "wrote to or beside its input"
            raise RuntimeError(f"kernel {kernel.__name__} {what} {name}")
    results = zip(buffers[len(arrays) :], outputs, strict=True)
    return [np.frombuffer(b[_GUARD:-_GUARD].tobytes(), x.dtype).reshape(x.shape) for b, x in results]

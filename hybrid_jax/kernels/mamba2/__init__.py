"""Mamba2's state-space recurrence (SSD, arXiv:2405.21060).

Shapes: B batch, T time, H heads, G groups of heads that share B and C, P head dim, N state size. (The paper's
input and output projections are also called B and C; as arrays they are the arguments `B` and `C`.)
"""

import jax
import jax.numpy as jnp

from hybrid_jax.kernels import dispatch
from hybrid_jax.kernels.mamba2.chunked import ssd_chunked
from hybrid_jax.kernels.mamba2.reference import ssd_reference
from hybrid_jax.kernels.precision import accumulator

BACKENDS = {"reference": ssd_reference, "chunked": ssd_chunked}


def ssd(
    x: jax.Array,
    dt: jax.Array,
    A: jax.Array,
    B: jax.Array,
    C: jax.Array,
    D: jax.Array | None = None,
    *,
    initial_state: jax.Array | None = None,
    segment_ids: jax.Array | None = None,
    chunk_size: int = 64,
    backend: str = "auto",
) -> tuple[jax.Array, jax.Array]:
    """h <- exp(dt_t A) h + dt_t x_t B_t^T, from h = initial_state or 0; y_t = h C_t + D x_t.

    x [B, T, H, P]; dt [B, T, H] fp32, positive (after softplus); A [H] fp32, negative; B and C [B, T, G, N],
    where head i uses group i // (H / G); D [H] fp32 or None. initial_state [B, H, P, N] fp32.
    segment_ids [B, T] int: a change of id starts a new document, whose state starts from zero. initial_state
    enters the first document of a row only; the final state is that of its last document.
    chunk_size is the length of the blocks that the "chunked" backend turns into matrix products.

    Returns y [B, T, H, P] in x's dtype and the final state [B, H, P, N] in fp32 (float64 where x is float64).
    Raises ValueError when shapes do not fit, UserError for a backend that does not exist.
    """
    _check_shapes(x, dt, A, B, C, D, initial_state, segment_ids)
    if chunk_size < 1:
        raise ValueError(f"ssd: chunk_size {chunk_size} is not positive")
    batch, T, H, P = x.shape
    # One token while generating: the recurrence is the shorter program.
    name = "reference" if backend == "auto" and T == 1 else dispatch.resolve("ssd", backend, tuple(BACKENDS))
    fn = BACKENDS[name]
    if initial_state is None:
        initial_state = jnp.zeros((batch, H, P, B.shape[-1]), accumulator(x.dtype))
    if segment_ids is None:
        segment_ids = jnp.zeros((batch, T), jnp.int32)

    def rows(x, dt, A, B, C, D, initial_state, segment_ids):
        return fn(x, dt, A, B, C, D, initial_state, segment_ids, chunk_size)

    layouts = ("B.H", "B.H", "H", "B.H", "B.H", "H", "BH", "B")
    return dispatch.over_devices(rows, layouts, ("B.H", "BH"))(x, dt, A, B, C, D, initial_state, segment_ids)


def _check_shapes(x, dt, A, B, C, D, initial_state, segment_ids) -> None:
    if x.ndim != 4 or B.ndim != 4:
        raise ValueError(f"ssd: x {x.shape} must be [B, T, H, P] and B {B.shape} [B, T, G, N]")
    batch, T, H, P = x.shape
    G, N = B.shape[2:]
    if G < 1 or H % G:
        raise ValueError(f"ssd: {H} heads do not divide into {G} groups")
    expected = {"dt": (dt, (batch, T, H)), "A": (A, (H,)), "D": (D, (H,))}
    expected |= {"B": (B, (batch, T, G, N)), "C": (C, (batch, T, G, N))}
    expected |= {"initial_state": (initial_state, (batch, H, P, N)), "segment_ids": (segment_ids, (batch, T))}
    for name, (value, shape) in expected.items():
        if value is not None and value.shape != shape:
            raise ValueError(f"ssd: {name} has shape {value.shape}, expected {shape}")

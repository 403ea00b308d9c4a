"""SSD one token at a time: slow, plain, and in float64 when x is float64. Its gradients are autodiff's.

Shapes: B batch, T time, H heads, G groups, R heads in a group (H = G R), P head dim, N state size.
"""

import jax
import jax.numpy as jnp

from hybrid_jax.kernels.documents import number_documents
from hybrid_jax.kernels.precision import accumulator


def ssd_reference(x, dt, A, B, C, D, initial_state, segment_ids, chunk_size: int = 0):
    """See hybrid_jax.kernels.mamba2.ssd; chunk_size has no meaning here."""
    del chunk_size
    Bsz, T, H, P = x.shape
    G, N = B.shape[2:]
    R = H // G
    compute = accumulator(x.dtype)
    highest = jax.lax.Precision.HIGHEST
    documents = number_documents(segment_ids)
    new = jnp.pad(documents[:, 1:] != documents[:, :-1], ((0, 0), (1, 0)))
    a_BTH = (dt * A).astype(compute)

    def step(h_BGRPN, token):
        x_BGRP, dt_BGR, a_BGR, B_BGN, C_BGN, new_B = token
        h_BGRPN = jnp.where(new_B[:, None, None, None, None], 0, h_BGRPN) * jnp.exp(a_BGR)[..., None, None]
        h_BGRPN += (dt_BGR[..., None] * x_BGRP)[..., None] * B_BGN[:, :, None, None]
        return h_BGRPN, jnp.einsum("bgrpn,bgn->bgrp", h_BGRPN, C_BGN, precision=highest)

    def by_time(z, heads):  # [B, T, ...] -> [T, B, *heads, ...]
        return jnp.moveaxis(z.astype(compute).reshape(Bsz, T, *heads, *z.shape[3:]), 1, 0)

    tokens = (*(by_time(z, (G, R)) for z in (x, dt, a_BTH)), *(by_time(z, (G,)) for z in (B, C)), new.T)
    h_BGRPN, y_TBGRP = jax.lax.scan(step, initial_state.astype(compute).reshape(Bsz, G, R, P, N), tokens)
    y_BTHP = jnp.moveaxis(y_TBGRP, 0, 1).reshape(Bsz, T, H, P)
    if D is not None:
        y_BTHP += D.astype(compute)[:, None] * x.astype(compute)
    return y_BTHP.astype(x.dtype), h_BGRPN.reshape(Bsz, H, P, N)

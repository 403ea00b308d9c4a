"""Cross entropy of a linear head, and log-probabilities, without ever holding the logits of all tokens.

Shapes: B batch, T time, D model, V vocabulary, C tokens of a chunk, N chunks, K candidates.

The tokens go through in chunks. When gradients are asked for they are formed in the forward pass, from the same
logits, so that the head's product runs three times a chunk (logits, dx, dw) and never again.
"""

import functools

import jax
import jax.numpy as jnp

from hybrid_jax.kernels import dispatch
from hybrid_jax.kernels.cuts import chunk_tokens
from hybrid_jax.kernels.precision import accumulator

IGNORE = -1  # a target that does not count


def _total(x: jax.Array, axis: str | None) -> jax.Array:
    return x if axis is None else jax.lax.psum(x, axis)


def _dot(dtype):
    return functools.partial(jax.lax.dot_general, precision=jax.lax.Precision.HIGHEST if dtype == jnp.float32 else None)


def _logits(x_CxD, w_VxD):
    f32 = accumulator(x_CxD.dtype)
    return _dot(x_CxD.dtype)(x_CxD, w_VxD, (((1,), (1,)), ((), ())), preferred_element_type=f32)


def _chunk(x_CxD, w_VxD, target_C, z_loss, gradients: bool, axis: str | None):
    """Sums over one chunk of (cross entropy + z loss, z loss), and with `gradients` those with respect to x and w.

    axis: of the mesh, over which the vocabulary is split: V ids are here, and x's gradient is what they give to it.
    """
    dot, f32 = _dot(x_CxD.dtype), accumulator(x_CxD.dtype)
    logits_CxV = _logits(x_CxD, w_VxD)
    counts_C = target_C != IGNORE
    if axis is None:
        here_C = target_C
        lse_C = jax.nn.logsumexp(logits_CxV, axis=1)
    else:
        here_C = target_C - jax.lax.axis_index(axis) * w_VxD.shape[0]
        largest_C = jax.lax.pmax(jax.lax.stop_gradient(jnp.max(logits_CxV, axis=1)), axis)
        lse_C = largest_C + jnp.log(_total(jnp.sum(jnp.exp(logits_CxV - largest_C[:, None]), axis=1), axis))
    hit_CxV = jax.lax.broadcasted_iota(jnp.int32, logits_CxV.shape, 1) == here_C[:, None]
    picked_C = _total(jnp.sum(jnp.where(hit_CxV, logits_CxV, 0), axis=1), axis)
    z_C = z_loss * lse_C * lse_C
    nll = jnp.sum(jnp.where(counts_C, lse_C - picked_C + z_C, 0))
    z = jnp.sum(jnp.where(counts_C, z_C, 0))
    if not gradients:
        return (nll, z), None
    # d/dlogits of (lse - picked + z_loss lse^2)
    p_CxV = jnp.exp(logits_CxV - lse_C[:, None])
    d_CxV = p_CxV * (1 + 2 * z_loss * lse_C[:, None]) - hit_CxV
    d_CxV = jnp.where(counts_C[:, None], d_CxV, 0).astype(x_CxD.dtype)
    dx_CxD = dot(d_CxV, w_VxD, (((1,), (0,)), ((), ())))
    dw_VxD = dot(d_CxV, x_CxD, (((0,), (0,)), ((), ())), preferred_element_type=f32)
    return (nll, z), (dx_CxD, dw_VxD)


def _scan(x, w, targets, z_loss, chunk, gradients, axis):
    """Loss sums over all tokens; x [tokens, D], w [V, D] fp32, targets [tokens]."""
    tokens, D = x.shape
    N = -(-tokens // chunk)
    x_NxCxD = jnp.pad(x, ((0, N * chunk - tokens), (0, 0))).reshape(N, chunk, D)
    target_NxC = jnp.pad(targets, (0, N * chunk - tokens), constant_values=IGNORE).reshape(N, chunk)
    w_VxD = w.astype(x.dtype)
    zero = jnp.zeros((), accumulator(x.dtype))

    def body(carry, inputs):
        nll, z, dw = carry
        sums, grads = _chunk(inputs[0], w_VxD, inputs[1], z_loss, gradients, axis)
        dx = None
        if gradients:
            dx, dw = grads[0], dw + grads[1]
        return (nll + sums[0], z + sums[1], dw), dx

    dw = jnp.zeros(w.shape, zero.dtype) if gradients else None
    (nll, z, dw), dx = jax.lax.scan(body, (zero, zero, dw), (x_NxCxD, target_NxC))
    if gradients:
        dx = dx.reshape(N * chunk, D)[:tokens]
    return (nll, z), (dx, dw)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4, 5))
def _loss_sums(x, w, targets, z_loss: float, chunk: int, axis: str | None):
    return _scan(x, w, targets, z_loss, chunk, False, axis)[0]


def _loss_sums_fwd(x, w, targets, z_loss, chunk, axis):
    sums, (dx, dw) = _scan(x, w, targets, z_loss, chunk, True, axis)
    return sums, (dx, dw.astype(w.dtype))


def _loss_sums_bwd(z_loss, chunk, axis, saved, cotangents):
    dx, dw = saved
    # Of several devices that hold a sum, each gets its share of the sum's gradient. The second output, the z-loss part,
    # is for logs.
    scale = _total(cotangents[0], axis)
    return (dx * scale).astype(dx.dtype), (dw * scale).astype(dw.dtype), None


_loss_sums.defvjp(_loss_sums_fwd, _loss_sums_bwd)


def linear_cross_entropy(
    x: jax.Array, w: jax.Array, targets: jax.Array, *, z_loss: float = 0.0, chunk: int = 0
) -> tuple[jax.Array, jax.Array]:
    """Sums over unmasked tokens of -log softmax(x w^T)[target] + z_loss log(Z)^2, and of its second term alone.

    x [B, T, D] (bf16 or fp32), w [V, D] fp32, targets [B, T] i32 with IGNORE = -1 where a token does not count.
    Logits, softmax and the sums are fp32, matrix products take x's dtype, dw is accumulated in fp32.
    Only the first result has a gradient. Divide it by the global count of unmasked targets. `chunk` is in
    tokens (0 = automatic). On a mesh each device sums its own rows, and its own part of the vocabulary where that is
    split, and dw is reduced once. Gradients formed in the forward pass: as in Liger kernel and flash-linear-attention;
    the split vocabulary: Megatron-LM, arXiv:1909.08053; z-loss: PaLM, arXiv:2204.02311.
    """
    axis = dispatch.tensor_axis(w.shape[0])

    def rows(x_BxTxD, targets_BxT, w_VxD):
        tokens = targets_BxT.size
        size = chunk_tokens(tokens, w_VxD.shape[0], chunk)
        flat = x_BxTxD.reshape(tokens, -1)
        sums = _loss_sums(flat, w_VxD, targets_BxT.reshape(tokens), z_loss, size, axis)
        return tuple(s[None] for s in sums)

    nll, z = dispatch.over_devices(rows, ("B", "B", "H"), ("B", "B"))(x, targets, w)
    return jnp.sum(nll), jnp.sum(z)


def log_probabilities(x: jax.Array, w: jax.Array, targets: jax.Array) -> tuple[jax.Array, jax.Array]:
    """(log softmax(x w^T)[target] of each candidate [B, T, K] fp32, the likeliest id [B, T] i32, of equals the first).

    x [B, T, D] (bf16 or fp32), w [V, D] fp32, targets [B, T, K] i32, IGNORE where nothing is asked. Tokens at which
    nothing is asked cost nothing, and give 0 and IGNORE: those with a target are brought together, and only as many
    chunks as hold some are computed. Logits and softmax are fp32. On a mesh each device computes its own rows.
    """

    def rows(x_BxTxD, targets_BxTxK, w_VxD):
        B, T, K = targets_BxTxK.shape
        chunk = chunk_tokens(B * T, w_VxD.shape[0])
        padding = -(B * T) % chunk
        x_NxD = jnp.pad(x_BxTxD.reshape(B * T, -1), ((0, padding), (0, 0)))
        target_NxK = jnp.pad(targets_BxTxK.reshape(B * T, K), ((0, padding), (0, 0)), constant_values=IGNORE)
        asked_N = jnp.any(target_NxK != IGNORE, axis=1)
        order_N = jnp.argsort(~asked_N, stable=True)
        w_VxD = w_VxD.astype(x_NxD.dtype)

        def body(i, found):
            at_C = jax.lax.dynamic_slice_in_dim(order_N, i * chunk, chunk)
            logits_CxV, target_CxK = _logits(x_NxD[at_C], w_VxD), target_NxK[at_C]
            lse_C = jax.nn.logsumexp(logits_CxV, axis=1)
            picked_CxK = jnp.take_along_axis(logits_CxV, jnp.maximum(target_CxK, 0), axis=1)
            log_p_CxK = jnp.where(target_CxK != IGNORE, picked_CxK - lse_C[:, None], 0)
            best_C = jnp.where(asked_N[at_C], jnp.argmax(logits_CxV, axis=1), IGNORE)
            return found[0].at[at_C].set(log_p_CxK), found[1].at[at_C].set(best_C.astype(jnp.int32))

        start = jnp.zeros(target_NxK.shape, accumulator(x_NxD.dtype)), jnp.full(len(order_N), IGNORE, jnp.int32)
        chunks = (jnp.sum(asked_N) + chunk - 1) // chunk
        log_p_NxK, best_N = jax.lax.fori_loop(0, chunks, body, start)
        return log_p_NxK[: B * T].reshape(B, T, K), best_N[: B * T].reshape(B, T)

    return dispatch.over_devices(rows, ("B", "B", ""), ("B", "B"))(x, targets, w)

"""What Gated DeltaNet and Kimi Delta Attention share: recurrence, document masks, dots and the state scan.

The chunk form is the WY representation of arXiv:2406.06484, with gates as in arXiv:2412.06464 and
arXiv:2510.26692.

Decay. A decay between two tokens is exp of a sum of gates g <= 0, always summed directly over the tokens
between them and never taken as a difference of cumulative sums, and masked before exp. Its derivative is then
the sum over exactly the token pairs that straddle a gate, with no i = j terms and nothing to cancel, so dg
survives any decay.

Shapes: B batch, T time, H q/k heads, R value heads per q/k head, HV = H R, K key dim, V value dim, N chunks,
C chunk.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from hybrid_jax.kernels import dispatch, launch, selftest, support
from hybrid_jax.kernels.precision import accumulator, einsum


def l2_normalize(x: jax.Array) -> jax.Array:
    """x / sqrt(sum x^2 + 1e-6) over the last axis, in float32 (float64 for float64)."""
    x = x.astype(accumulator(x.dtype))
    return x * jax.lax.rsqrt(jnp.sum(x * x, axis=-1, keepdims=True) + 1e-6)


def document_starts(segment_ids: jax.Array) -> jax.Array:
    """[B,T] ids -> [B,T] bool: the id differs from that of the token before (false for the first token)."""
    changes = segment_ids[:, 1:] != segment_ids[:, :-1]
    return jnp.pad(changes, [(0, 0), (1, 0)])


class Masks(NamedTuple):
    """Which decays exist, given the document starts of each chunk."""

    pairs: jax.Array  # [N,B,1,1,C,C]: j <= i and both in one document
    enters: jax.Array  # [N,B,1,1,C]: the state before the chunk reaches token i
    leaves: jax.Array  # [N,B,1,1,C]: token j reaches the state after the chunk
    carries: jax.Array  # [N,B,1,1]: the state before the chunk reaches the state after it


def document_masks(starts: jax.Array) -> Masks:
    """starts [N,B,C] bool -> Masks."""
    document = jnp.cumsum(starts.astype(jnp.int32), axis=-1)[:, :, None, None]
    token = jnp.arange(starts.shape[-1])
    causal = token[:, None] >= token
    last = document[..., -1:]
    same = document[..., :, None] == document[..., None, :]
    return Masks(same & causal, document == 0, document == last, last[..., 0] == 0)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def dot(spec: str, dtype, a: jax.Array, b: jax.Array) -> jax.Array:
    """einsum of two operands rounded to `dtype`, accumulated and returned in float32 (float64 for float64).

    Cotangents are rounded to `dtype` in the same way. float32 operands are multiplied exactly (no TF32).
    """
    return einsum(spec, a, b, dtype=dtype)


def _dot_forward(spec, dtype, a, b):
    # Empty arrays carry the operands' own types to the backward pass.
    like = (jnp.zeros(0, a.dtype), jnp.zeros(0, b.dtype))
    a, b = a.astype(dtype), b.astype(dtype)
    return dot(spec, dtype, a, b), (a, b, like)


def _dot_backward(spec, dtype, saved, ct):
    a, b, (like_a, like_b) = saved
    inputs, out = spec.split("->")
    spec_a, spec_b = inputs.split(",")
    da = dot(f"{out},{spec_b}->{spec_a}", dtype, ct, b)
    db = dot(f"{spec_a},{out}->{spec_b}", dtype, a, ct)
    return da.astype(like_a.dtype), db.astype(like_b.dtype)


dot.defvjp(_dot_forward, _dot_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def scan_states(dtype, w: jax.Array, u: jax.Array, kg: jax.Array, decay: jax.Array, state: jax.Array):
    """The sequential part: V' = U - W S and S <- decay S + KG^T V', chunk after chunk.

    w, kg [N,B,H,R,C,K], u [N,B,H,R,C,V], decay [N,B,H,R,K or 1], state [B,H,R,K,V] float32. Matmul operands
    are rounded to `dtype`. Returns (the state before each chunk [N,B,H,R,K,V], V' [N,B,H,R,C,V], the state
    after the last chunk).
    """
    return _scan_forward(dtype, w, u, kg, decay, state)[0]


def _scan_forward(dtype, w, u, kg, decay, state):
    like = (jnp.zeros(0, w.dtype), jnp.zeros(0, kg.dtype))
    w, kg = w.astype(dtype), kg.astype(dtype)

    def step(state, chunk):
        w, u, kg, decay = chunk
        v_new = u - dot("bhrck,bhrkv->bhrcv", dtype, w, state)
        after = decay[..., None] * state + dot("bhrck,bhrcv->bhrkv", dtype, kg, v_new)
        return after, (state, v_new)

    final, (before, v_new) = jax.lax.scan(step, state, (w, u, kg, decay))
    return (before, v_new, final), (w, kg, decay, before, v_new, like)


def _scan_backward(dtype, saved, cotangents):
    w, kg, decay, before, v_new, (like_w, like_kg) = saved
    d_before, d_v_new, d_final = cotangents

    def step(d_after, chunk):
        w, kg, decay, d_before, d_v_new = chunk
        d_v_new = d_v_new + dot("bhrck,bhrkv->bhrcv", dtype, kg, d_after)
        d_state = decay[..., None] * d_after + d_before - dot("bhrck,bhrcv->bhrkv", dtype, w, d_v_new)
        return d_state, (d_v_new, d_after)

    d_state, (du, d_after) = jax.lax.scan(step, d_final, (w, kg, decay, d_before, d_v_new), reverse=True)
    dw = -dot("nbhrcv,nbhrkv->nbhrck", dtype, du, before)
    dkg = dot("nbhrcv,nbhrkv->nbhrck", dtype, v_new, d_after)
    d_decay = jnp.sum(before * d_after, axis=-1)
    if decay.shape[-1] == 1:
        d_decay = jnp.sum(d_decay, axis=-1, keepdims=True)
    return dw.astype(like_w.dtype), du, dkg.astype(like_kg.dtype), d_decay, d_state


scan_states.defvjp(_scan_forward, _scan_backward)


def recurrence(q, k, v, g, beta, scale: float, initial_state: jax.Array, segment_ids: jax.Array):
    """The gated delta rule token by token; g [B,T,HV,K] is per key channel or [B,T,HV,1] per head:

        S <- exp(g_t) S;  S <- S + beta_t k_t (v_t - k_t^T S)^T;  o_t = scale q_t^T S.

    Arguments and results are otherwise those of kernels.gdn.gdn. Computed in float64 where an input is
    float64, else in float32; matrix products are exact (no TF32).
    """
    dtype = accumulator(jnp.result_type(q, k, v))
    B, T, H, K = q.shape
    HV, V = v.shape[2:]
    heads = (B, T, H, HV // H)
    time_first = functools.partial(jnp.moveaxis, source=1, destination=0)
    tokens = (
        l2_normalize(q.astype(dtype)),
        l2_normalize(k.astype(dtype)),
        v.astype(dtype).reshape(*heads, V),
        g.astype(dtype).reshape(*heads, -1),
        beta.astype(dtype).reshape(heads),
        document_starts(segment_ids),
    )
    einsum = functools.partial(jnp.einsum, precision=jax.lax.Precision.HIGHEST)

    def step(state, token):
        q, k, v, g, beta, start = token
        state = jnp.where(start[:, None, None, None, None], 0, jnp.exp(g)[..., None] * state)
        error = v - einsum("bhk,bhrkv->bhrv", k, state)
        state = state + einsum("bhk,bhrv->bhrkv", k, beta[..., None] * error)
        return state, scale * einsum("bhk,bhrkv->bhrv", q, state)

    state = initial_state.astype(dtype).reshape(B, H, HV // H, K, V)
    state, o = jax.lax.scan(step, state, jax.tree.map(time_first, tokens))
    return jnp.moveaxis(o, 0, 1).reshape(v.shape).astype(v.dtype), state.reshape(B, HV, K, V)


def call(
    op, backends, backend, q, k, v, g, beta, gate_shape, scale, initial_state, segment_ids, form="", parameters=()
):
    """gdn and kda: checks shapes, fills in defaults, picks the backend, splits rows and heads over devices.

    form: what makes log decays of g, "" when g are those. parameters: of that, (name, array, shape) each; the backends
    take the arrays after their other arguments.
    """
    if q.ndim != 4 or v.ndim != 4:
        raise ValueError(f"{op}: q {q.shape} must be [B, T, H, K] and v {v.shape} [B, T, HV, V]")
    B, T, H, K = q.shape
    HV, V = v.shape[2:]
    if B < 1 or T < 1:
        raise ValueError(f"{op}: needs at least one row and one token, got B={B}, T={T}")
    if H < 1 or HV < 1 or HV % H:
        raise ValueError(f"{op}: needs HV a multiple of H, got HV={HV}, H={H}")
    expected = {"k": (k, q.shape), "v": (v, (B, T, HV, V)), "g": (g, gate_shape), "beta": (beta, (B, T, HV))}
    expected |= {"initial_state": (initial_state, (B, HV, K, V)), "segment_ids": (segment_ids, (B, T))}
    expected |= {name: (value, shape) for name, value, shape in parameters}
    for name, (value, shape) in expected.items():
        if value is not None and value.shape != tuple(shape):
            raise ValueError(f"{op}: {name} has shape {value.shape}, expected {tuple(shape)}")
    for name, (value, _) in ({"q": (q, ())} | expected).items():
        if name != "segment_ids" and value is not None and not jnp.issubdtype(value.dtype, jnp.floating):
            raise ValueError(f"{op}: {name} is {value.dtype}, expected a floating-point type")
    if segment_ids is not None and not jnp.issubdtype(segment_ids.dtype, jnp.integer):
        raise ValueError(f"{op}: segment_ids are {segment_ids.dtype}, expected integers")
    arrays = tuple(value for _, value, _ in parameters)
    if initial_state is None:
        initial_state = jnp.zeros((B, HV, K, V), accumulator(jnp.result_type(q, k, v)))
    if backend == "auto" and T == 1:
        chosen = "reference"  # one token while generating: the recurrence is the shorter program
    else:
        dtype, *others = (jnp.result_type(x).name for x in (jnp.result_type(q, k, v), g, beta, initial_state, *arrays))
        unfit = support.unfit(op, K, V, dtype, others) or launch.unfit(dtype)
        chosen = dispatch.resolve(op, backend, tuple(backends), unfit)
    if chosen == "triton":
        variant = selftest.Variant(op, K, V, HV // H, dtype, segment_ids is not None, form)
        selftest.before_use(variant, backends)
    elif segment_ids is None:
        segment_ids = jnp.zeros((B, T), jnp.int32)
    scale = K**-0.5 if scale is None else float(scale)

    def rows(q, k, v, g, beta, initial_state, segment_ids, *parameters):
        return backends[chosen](q, k, v, g, beta, scale, initial_state, segment_ids, *parameters)

    layouts = ("B.H", "B.H", "B.H", "B.H", "B.H", "BH", "B", *("H" for _ in arrays))
    return dispatch.over_devices(rows, layouts, ("B.H", "BH"))(q, k, v, g, beta, initial_state, segment_ids, *arrays)

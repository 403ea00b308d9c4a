"""Gated DeltaNet in Triton: six kernels for forward and backward, over q, k and v as they lie in memory.

The chunk form of kernels.gdn.chunked with three changes. Keys and queries are never normalised in memory: 1/|q|
and 1/|k| go into fp32 coefficients of rows and columns, so that the dots see q and k as they were stored. The
inverse T of I + A, A = stril(beta_i (k_i . k_j) D_ij), is applied to what the state predicts wrongly,

    E = V - gamma K S,  V' = T' E,  T' = T diag(beta),

instead of being spread over K and V (the WY form). And what it does to the state is folded into the keys that write,

    S <- gamma_C S + X^T E,  X = T'^T (D_C K),

so that only two dots of a chunk wait for the chunk before. The derivatives are short: with dV' the gradient of V',

    dV = dE = T'^T dV' = T'^T P^T dO + X dS,     P = scale (Q K^T) * D,
    d(k_i . k_j) = -(dV_i . V'_j) D_ij (j < i),  d beta_i = (dV_i / beta_i) . (V'_i / beta_i).

Forward: `prepare` (each chunk alone: T', X), `scan` (the state before each chunk), `output` (each chunk alone).
Backward: `prepare` again, `query_gradients` (each chunk alone: what follows from do and the states), `reverse_scan`
(dV and the gradient of the state after each chunk), `key_gradients` (each chunk alone). Saved between them: the
inputs and the states, nothing else. dq and dk are summed over the value heads of a group inside the kernels.
Gates and beta come computed: one number a token and head each, they save no pass over q, k or v.

Long rows with few heads would leave a GPU idle in the scans. They are cut into segments; a segment's effect on
the state is affine, S -> M S + S', and a first run of the scan computes M and S' of all segments at once, before the
second runs on all of them (likewise in reverse, where the map is M^T).

Precision with bf16 inputs: operands of dots are rounded to bf16; T' keeps 16 bits, as a sum of two bf16 matrices
(similar keys amplify its rounding); states, coefficients, sums and the inverse are fp32. Gates' gradients: see
kernels.delta_rule; a strict sum is always summed directly.

Bytes a token and value head, R value heads a q/k head, C = 64, bf16, q and k read once a group thanks to the cache:
prepare 2K/R + 2K + 256; scan 2K/R + 2K + 2V + KV/32; output 4K/R + 4V + 256 + KV/32; query_gradients 6K/R + 8V + 384 +
KV/32; reverse_scan 4K/R + 2K + 6V + KV/32; key_gradients 6K/R + 4V + 128 + KV/16. With `prepare` twice 26K/R + 8K +
24V + 1280 + 3KV/16: for R = 2 and K = V = 64 4.9 KB, for K = V = 128 10.1 KB. Reading and writing every tensor of
forward and backward once takes 12K/R + 14V bytes.

Shapes: B batch, T time, H q/k heads, R value heads per q/k head, HV = H R, K key dim, V value dim, N chunks, C chunk,
P segments.
"""

import dataclasses
import functools
import itertools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import triton
from jax.ad_checkpoint import checkpoint_name

from hybrid_jax.kernels import RESIDUAL, launch
from hybrid_jax.kernels.gdn.chunks import key_gradients, output, prepare, query_gradients
from hybrid_jax.kernels.gdn.scans import reverse_scan, scan


class _Plan(NamedTuple):
    """How a shape is cut, and the kernels' tiles."""

    B: int
    T: int
    H: int
    HV: int
    K: int
    V: int
    chunk: int
    segments: int
    dtype: jnp.dtype
    packed: bool
    tiles: dict[str, launch.Tile]

    @property
    def chunks(self):
        return -(-self.T // self.chunk)

    @property
    def constants(self):
        width = max(16, triton.next_power_of_2(self.K))
        sizes = {name: getattr(self, name) for name in ("T", "H", "HV", "K")}
        return sizes | {"N": self.chunks, "C": self.chunk, "BK": width}

    @property
    def parts(self):
        return 1 if self.dtype == jnp.float32 else 2

    def shape(self, *sizes, dtype=None):
        return jax.ShapeDtypeStruct(sizes, dtype or self.dtype)

    def blocks(self, kernel, size=None):
        """Blocks of BV columns in `size` (V when None)."""
        return -(-(size or self.V) // dict(self.tiles[kernel.__name__].constants)["BV"])

    @property
    def per_token(self):
        return self.shape(self.B, self.T, self.HV, self.V)

    @property
    def vector(self):
        """One number a token and value head."""
        return self.shape(self.B, self.HV, self.chunks * self.chunk, dtype=jnp.float32)

    @property
    def pairs(self):
        """One number a pair of tokens of a chunk."""
        return self.shape(self.B, self.chunks, self.HV, self.chunk, self.chunk)

    def of_chunks(self, scale=None, parts=False):
        """Constants of the kernels that see one chunk: always V and PACKED, SCALE and PARTS where they have them."""
        found = {"V": self.V, "PACKED": self.packed} | ({"PARTS": self.parts} if parts else {})
        return found if scale is None else found | {"SCALE": scale}

    @property
    def states(self):
        return self.shape(self.B, self.chunks, self.HV, self.K, self.V)

    @property
    def between(self):
        """States between the segments."""
        return self.shape(self.B, self.HV, self.segments, self.K, self.V, dtype=jnp.float32)


def shape_class(K: int, dtype) -> str:
    """The row of the tile tables for key dim K and the type of q, k and v."""
    return f"k{max(64, triton.next_power_of_2(K))}" + ("_fp32" if dtype == jnp.float32 else "")


# The rows of a shape class: a kernel's, or that of a scan over few heads; BV is at most V's power of two.
_WIDTHS: dict[str, tuple[int, ...]] = {"BV": (16, 32, 64, 128, 256, 512)}
_ROWS: dict[str, dict[str, tuple[int, ...]]] = {
    "prepare": {"C": (16, 32, 64)},
    "scan": _WIDTHS,
    "scan_narrow": _WIDTHS,
    "output": _WIDTHS,
    "query_gradients": _WIDTHS,
    "reverse_scan": _WIDTHS,
    "reverse_scan_narrow": _WIDTHS,
    "key_gradients": _WIDTHS,
}

# Programs that keep a device's multiprocessors busy in the scans (an H200 has 132, an MI355X 256, an MI300X 304).
_FILL = {"gfx942": 256, "gfx950": 256}
_FILL_ELSEWHERE = 128
# Shorter segments than this many chunks would not pay for their maps.
_SHORTEST = 16


def _plan(q, v, packed) -> _Plan:
    """The table's row for these arrays, fitted to them: its chunk length C stands with `prepare`, and a row shorter
    than that is one chunk."""
    B, T, H, K = q.shape
    HV, V = v.shape[2:]
    arch = launch.architecture()
    tiles = {}
    for name, tile in launch.tiles("gdn", shape_class(K, q.dtype), arch, _ROWS).items():
        constants = dict(tile.constants)
        if name == "prepare":
            largest = constants.pop("C")
        else:
            constants["BV"] = min(constants["BV"], max(16, triton.next_power_of_2(V)))
        tiles[name] = dataclasses.replace(tile, constants=tuple(constants.items()))
    chunk = next(size for size in (16, 32, 64) if size >= min(T, largest))
    chunks = -(-T // chunk)

    def programs(name):
        return B * HV * -(-V // dict(tiles[name].constants)["BV"])

    fill = _FILL.get(arch, _FILL_ELSEWHERE)
    for name in ("scan", "reverse_scan"):
        # Few heads: first narrower blocks of values, then segments.
        narrow = tiles.pop(f"{name}_narrow")
        if programs(name) < fill:
            tiles[name] = narrow
    segments = max(1, min(fill // programs("scan"), chunks // _SHORTEST))
    per_segment = -(-chunks // segments)
    return _Plan(B, T, H, HV, K, V, chunk, -(-chunks // per_segment), q.dtype, packed, tiles)


def _launch(plan: _Plan, kernel, inputs, outputs, programs, constants):
    """Runs `kernel` with the plan's sizes and `constants`; outputs: arrays or their shapes."""
    tile = plan.tiles[kernel.__name__]
    outputs = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in outputs]
    return launch.launch(kernel, inputs, outputs, grid=(programs,), tile=tile, constants=plan.constants | constants)


def _prepare(plan: _Plan, k, g, beta, documents):
    """(inverse, writers, coefficients, carries) of `prepare`."""
    B, N, HV, C = plan.B, plan.chunks, plan.HV, plan.chunk
    outputs = (
        plan.shape(B, N, HV, plan.parts, C, C),
        plan.shape(B, plan.T, HV, plan.K),
        plan.vector,
        plan.shape(B, HV, N, dtype=jnp.float32),
    )
    constants = {"PACKED": plan.packed, "PARTS": plan.parts}
    return _launch(plan, prepare, (k, g, beta, documents), outputs, B * N * HV, constants)


def _scan(plan: _Plan, kernel, inputs, state, per_token=()):
    """`scan` or `reverse_scan` over all segments: (outputs like `per_token`, states around chunks, the state at the
    far end)."""
    constants = {"V": plan.V, "SEGMENTS": plan.segments, "CHUNKS": -(-plan.chunks // plan.segments)}
    rows, blocks = plan.B * plan.HV, plan.blocks(kernel)
    order = range(plan.segments) if kernel is scan else range(plan.segments)[::-1]
    entering = {order[0]: state}
    if plan.segments > 1:
        maps = plan.shape(*plan.between.shape[:3], plan.K, plan.K, dtype=jnp.float32)
        outputs = (*(plan.shape(1) for _ in per_token), maps, plan.between)
        programs = rows * (plan.segments - 1) * (blocks + plan.blocks(kernel, plan.K))
        *_, maps, offsets = _launch(plan, kernel, (*inputs, state), outputs, programs, constants | {"MAP": True})
        for here, there in itertools.pairwise(order):
            entering[there] = offsets[:, :, here]
            if here != order[0]:
                entering[there] += jnp.matmul(maps[:, :, here], entering[here], precision=jax.lax.Precision.HIGHEST)
    inputs = (*inputs, jnp.stack([entering[p] for p in range(plan.segments)], axis=2))
    outputs = (*per_token, plan.states, plan.between)
    programs = rows * plan.segments * blocks
    *tokens, states, leaving = _launch(plan, kernel, inputs, outputs, programs, constants | {"MAP": False})
    return *tokens, states, leaving[:, :, order[-1]]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _gdn(packed, scale, q, k, v, g, beta, initial_state, documents):
    return _forward(packed, scale, q, k, v, g, beta, initial_state, documents)[0]


def _forward(packed, scale, q, k, v, g, beta, initial_state, documents):
    plan = _plan(q, v, packed)
    inverse, *prepared = _prepare(plan, k, g, beta, documents)
    states, final = _scan(plan, scan, (k, v, *prepared), initial_state)
    inputs = (q, k, v, g, documents, inverse, states)
    programs = plan.B * plan.chunks * plan.HV * plan.blocks(output)
    (o,) = _launch(plan, output, inputs, [plan.per_token], programs, plan.of_chunks(scale, parts=True))
    o, states = checkpoint_name(o, RESIDUAL), checkpoint_name(states, RESIDUAL)
    return (o, final), (q, k, v, g, beta, documents, states)


def _backward(packed, scale, saved, cotangents):
    q, k, v, g, beta, documents, states = saved
    do, dfinal = cotangents
    plan = _plan(q, v, packed)
    inverse, *prepared = _prepare(plan, k, g, beta, documents)
    programs, vector = plan.B * plan.chunks * plan.H, plan.vector
    inputs = (q, k, v, g, documents, do, inverse, states)
    outputs = (q, plan.per_token, plan.per_token, plan.pairs, vector, vector)
    constants = plan.of_chunks(scale, parts=True)
    dq, values, dv_local, dattention, log_decays, of_queries = _launch(
        plan, query_gradients, inputs, outputs, programs, constants
    )
    scanned = (q, k, do, dv_local, of_queries, *prepared)
    dv, dstates, dinitial = _scan(plan, reverse_scan, scanned, dfinal, [plan.per_token])
    around = (q, k, g, beta, documents, values, dv, dattention, log_decays, states, dstates)
    dk, dg, dbeta = _launch(plan, key_gradients, around, (k, g, beta), programs, plan.of_chunks())
    return dq, dk, dv, dg, dbeta, dinitial, None


_gdn.defvjp(_forward, _backward)


def gdn_triton(q, k, v, g, beta, scale: float, initial_state: jax.Array, documents: jax.Array | None):
    """The operation of kernels.gdn.gdn, which documents the arguments; documents [B, T] i32 number each row's
    documents from 0, None when there is one."""
    dtype = jnp.result_type(q, k, v)
    q, k = q.astype(dtype), k.astype(dtype)
    g, beta, initial_state = (x.astype(jnp.float32) for x in (g, beta, initial_state))
    packed = documents is not None
    o, final = _gdn(packed, scale, q, k, v.astype(dtype), g, beta, initial_state, documents if packed else g)
    return o.astype(v.dtype), final

"""Inputs, programs and comparisons shared by the tests of the two delta-rule operations (gdn and kda).

One shape serves most tests of a backend, so that each program is compiled once: LONG rows of T = 590 tokens, which
are ten chunks of 64 with a ragged end, computed in five blocks of two chunks, or SHORT ones for an interpreter.

Shapes: B batch, T time, H q/k heads, HV value heads, K key dim, V value dim.
"""

import dataclasses
import functools
import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
from safetensors.numpy import load_file

GOLDEN = pathlib.Path(__file__).parents[1] / "golden" / "ops"
GOLDEN_CASES = json.loads((GOLDEN / "ops.json").read_text())["cases"]


@dataclasses.dataclass(frozen=True)
class Rows:
    """Two rows of tokens, H q/k and HV value heads. Documents of row 0: an empty-state start, one ending on a chunk's
    edge, several inside one chunk, one of a single token, an id that comes back. Row 1 is one document.

    late: a document and a token in it. edges: tokens inside a chunk, and just before one starts.
    """

    spans: tuple[tuple[int, int], ...]
    H: int
    HV: int
    late: tuple[int, int]
    edges: tuple[int, int]
    ids: tuple[int, ...] = (7, 3, 7, 0, 1, 7)

    @property
    def T(self):
        return self.spans[-1][1]

    def segment_ids(self):
        ids = np.zeros((2, self.T), np.int32)
        for (start, stop), name in zip(self.spans, self.ids, strict=True):
            ids[0, start:stop] = name
        return ids

    def draw(self, per_channel, **sizes):
        return draw(per_channel, **{"T": self.T, "H": self.H, "HV": self.HV, **sizes})


LONG = Rows(((0, 100), (100, 448), (448, 470), (470, 471), (471, 520), (520, 590)), 2, 4, (4, 480), (300, 319))
SHORT = Rows(((0, 30), (30, 64), (64, 80), (80, 81), (81, 105), (105, 140)), 1, 2, (4, 90), (45, 63))


def segment_ids():
    return LONG.segment_ids()


def draw(per_channel, B=2, T=590, H=2, HV=4, K=16, V=24, seed=0):
    """Random inputs and cotangents, float32: gates around e^-1, beta in (0, 2)."""
    rng = np.random.default_rng(seed)

    def normal(*shape):
        return rng.standard_normal(shape, np.float32)

    inputs = {
        "q": normal(B, T, H, K),
        "k": normal(B, T, H, K),
        "v": normal(B, T, HV, V),
        "g": -np.exp(normal(B, T, HV, *([K] if per_channel else [])) - 1),
        "beta": 2 / (1 + np.exp(-normal(B, T, HV))),
        "initial_state": normal(B, HV, K, V),
    }
    return inputs, {"o": normal(B, T, HV, V), "final_state": normal(B, HV, K, V)}


def _correlated(inputs, rng, noise):
    k = 1 + noise * rng.standard_normal(inputs["k"].shape)
    unit = (k / np.linalg.norm(k, axis=-1, keepdims=True))[:, :, 0]
    assert np.min(unit @ np.swapaxes(unit, 1, 2)) > 0.9
    g = rng.uniform(-1e-3, 0, inputs["g"].shape)
    beta = rng.uniform(0.9, 2, inputs["beta"].shape)
    return inputs | {"k": k.astype(np.float32), "g": g.astype(np.float32), "beta": beta.astype(np.float32)}


def _log_uniform(inputs, rng):
    g = -np.exp(rng.uniform(np.log(1e-6), np.log(50), inputs["g"].shape))
    return inputs | {"g": g.astype(np.float32)}


def _extremes(inputs, rng):
    """-50 and -1e-6 side by side: neighbouring tokens, and for kda channels of one head."""
    g = np.where(rng.random(inputs["g"].shape) < 0.3, -50, -1e-6)
    return inputs | {"g": g.astype(np.float32)}


def _constant(inputs, value):
    return inputs | {"g": np.full_like(inputs["g"], value)}


HARD = {
    "random": lambda inputs, rng: inputs,
    "correlated keys, slow decay": lambda inputs, rng: _correlated(inputs, rng, 0.15),
    "identical keys, slow decay": lambda inputs, rng: _correlated(inputs, rng, 0.0),
    "g = -5": lambda inputs, rng: _constant(inputs, -5),
    "g = -20": lambda inputs, rng: _constant(inputs, -20),
    "g = -50": lambda inputs, rng: _constant(inputs, -50),
    "g log-uniform": _log_uniform,
    "g -50 beside -1e-6": _extremes,
}


def hard(name, per_channel, rows=LONG):
    inputs, cotangents = rows.draw(per_channel)
    return HARD[name](inputs, np.random.default_rng(1)), cotangents


@functools.cache
def _program(op, backend):
    def loss(inputs, cotangents, ids):
        o, final_state = op(**inputs, segment_ids=ids, backend=backend)
        # Products in the outputs' wider type, so that a bf16 output is not compared through bf16 sums.
        total = jnp.sum(o.astype(final_state.dtype) * cotangents["o"])
        total += jnp.sum(final_state * cotangents["final_state"])
        return total, {"o": o, "final_state": final_state}

    return jax.jit(jax.grad(loss, has_aux=True))


def outputs_and_gradients(op, backend, inputs, cotangents, ids=None):
    """{"out.NAME", "grad.NAME"} of all outputs and inputs; the loss is sum cotangent * output."""
    gradients, outputs = _program(op, backend)(inputs, cotangents, ids)
    named = {f"out.{k}": v for k, v in outputs.items()} | {f"grad.{k}": v for k, v in gradients.items()}
    return {k: np.asarray(v) for k, v in named.items()}


def float64_reference(op, inputs, cotangents, ids=None):
    """The same from the sequential recurrence in float64."""
    with jax.enable_x64(True):
        wide = jax.tree.map(lambda x: jnp.asarray(x, jnp.float64), (inputs, cotangents))
        return outputs_and_gradients(op, "reference", *wide, ids)


def errors(actual, expected):
    """Relative RMS error of every tensor of `expected`."""
    result = {}
    for name, e in expected.items():
        a, e = np.asarray(actual[name], np.float64), np.asarray(e, np.float64)
        assert a.shape == e.shape, f"{name}: shape {a.shape}, expected {e.shape}"
        assert np.all(np.isfinite(a)), f"{name} is not finite"
        result[name] = np.sqrt(np.mean((a - e) ** 2) / np.mean(e**2))
    return result


def assert_close(actual, expected, limit, limits=()):
    """Every tensor's relative RMS error is below `limit`, or below limits[name]."""
    limits = dict(limits)
    for name, error in errors(actual, expected).items():
        worst = np.max(np.abs(np.asarray(actual[name], np.float64) - np.asarray(expected[name], np.float64)))
        assert error < limits.get(name, limit), f"{name}: relative RMS error {error:.2e}, max abs {worst:.2e}"


def temp_bytes(op, T, H, HV, K, V, per_channel):
    """(temporary bytes of a compiled fp32 forward and backward pass, bytes of q, k, v, g and beta)."""

    def array(*shape):
        return jax.ShapeDtypeStruct((1, T, *shape), jnp.float32)

    gate = array(HV, K) if per_channel else array(HV)
    inputs = (array(H, K), array(H, K), array(HV, V), gate, array(HV))
    ids = jax.ShapeDtypeStruct((1, T), jnp.int32)

    def both(inputs, d_o, ids):
        o, pull = jax.vjp(lambda *x: op(*x, segment_ids=ids, backend="chunked")[0], *inputs)
        return o, pull(d_o)

    compiled = jax.jit(both).lower(inputs, inputs[2], ids).compile()
    return compiled.memory_analysis().temp_size_in_bytes, sum(4 * x.size for x in inputs)


def _short_conv(x, weight, ids):
    """Depthwise causal convolution of 4 taps (the last for the current token) inside documents, silu."""
    B, T, H, D = x.shape
    flat = x.reshape(B, T, H * D)
    total = flat * weight[:, 3]
    for back in range(1, min(4, T)):
        same = (ids[:, back:] == ids[:, :-back])[..., None]
        total = total.at[:, back:].add(jnp.where(same, flat[:, :-back], 0) * weight[:, 3 - back])
    return jax.nn.silu(total).reshape(x.shape)


@functools.cache
def _with_short_conv(op):
    def wrapped(q, k, v, g, beta, *, conv_q, conv_k, conv_v, segment_ids, backend):
        q, k, v = (_short_conv(x, w, segment_ids) for x, w in ((q, conv_q), (k, conv_k), (v, conv_v)))
        return op(q, k, v, g, beta, segment_ids=segment_ids, backend=backend)

    return wrapped


def golden(name):
    """(wrapper, inputs, cotangents, ids or None, expected); wrapper(op) adds the case's short convolution."""
    tensors = load_file(GOLDEN / f"{name}.safetensors")

    def group(prefix):
        return {k.removeprefix(prefix): v for k, v in tensors.items() if k.startswith(prefix)}

    inputs = group("in.")
    ids = inputs.pop("segment_ids", None)
    wrapper = _with_short_conv if GOLDEN_CASES[name]["attrs"]["short_conv"] else lambda op: op
    expected = {k: v for k, v in tensors.items() if k.startswith(("out.", "grad."))}
    return wrapper, inputs, group("cot."), ids, expected

"""SSD: the chunked form and its gradients against float64 and golden vectors, documents, causality.

Shapes: B batch, T time, H heads, G groups, P head dim, N state size.
"""

import functools
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hybrid_jax.errors import UserError
from hybrid_jax.kernels.mamba2 import ssd

GOLDEN = Path(__file__).parents[1] / "golden" / "ops"
B, T, H, G, P, N = 2, 150, 4, 2, 8, 16  # T: two whole chunks of 64 and a ragged one
SMALL = 16  # a chunk size that makes ten chunks, two in a block
NAMES = ("y", "final_state", "dx", "ddt", "dA", "dB", "dC", "dD", "dinitial_state")


def relative_rms(got, want) -> float:
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    return np.sqrt(np.mean((got - want) ** 2)) / np.sqrt(np.mean(want**2))


def assert_close(got, want, limit, names=NAMES):
    for name, g, w in zip(names, got, want, strict=True):
        error, largest = relative_rms(g, w), np.abs(np.float64(g) - np.float64(w)).max()
        assert error < limit, f"{name}: relative RMS {error:.2e}, limit {limit:.0e}, max abs {largest:.2e}"


@functools.partial(jax.jit, static_argnames=("backend", "chunk_size"))
def outputs_and_gradients(inputs, cotangents, segment_ids, backend, chunk_size=64):
    """inputs (x, dt, A, B, C, D, initial_state), cotangents (y, final_state) -> arrays named as in NAMES."""

    def run(*inputs):
        options = {"segment_ids": segment_ids, "chunk_size": chunk_size, "backend": backend}
        return ssd(*inputs[:-1], initial_state=inputs[-1], **options)

    outputs, vjp = jax.vjp(run, *inputs)
    return *outputs, *vjp(jax.tree.map(lambda c, o: c.astype(o.dtype), cotangents, outputs))


def reference(inputs, cotangents, segment_ids):
    """The recurrence in float64, on the same (rounded) inputs."""
    with jax.enable_x64(True):
        wide = jax.tree.map(lambda z: jnp.asarray(np.asarray(z), jnp.float64), (inputs, cotangents))
        return outputs_and_gradients(*wide, jnp.asarray(np.asarray(segment_ids)), "reference")


def make_inputs(kind="random", seed=0, dtype=jnp.float32):
    """Inputs and cotangents. `kind`: random | slow | fast | mixed, or a number, the constant dt A."""
    rng = np.random.default_rng(seed)
    normal = rng.normal
    x, Bm, Cm = normal(size=(B, T, H, P)), normal(size=(B, T, G, N)), normal(size=(B, T, G, N))
    A = -rng.uniform(0.5, 4.0, H)
    if kind == "random":
        dt = rng.uniform(0.01, 0.6, (B, T, H))
    elif kind == "slow":  # correlated B and C: cosine above 0.9
        Bm, Cm = (1 + 0.2 * z for z in (Bm, Cm))
        dt = rng.uniform(0, 1e-3, (B, T, H)) / -A
    elif kind == "mixed":
        dt = np.exp(rng.uniform(np.log(1e-6), np.log(50), (B, T, H))) / -A
    else:
        dt = np.full((B, T, H), kind) / A
    inputs = (x, dt, A, Bm, Cm, normal(size=H), normal(size=(B, H, P, N)))
    dtypes = (dtype, jnp.float32, jnp.float32, dtype, dtype, jnp.float32, jnp.float32)
    cotangents = (normal(size=(B, T, H, P)), normal(size=(B, H, P, N)))
    cast = tuple(jnp.asarray(z, d) for z, d in zip(inputs, dtypes, strict=True))
    return cast, tuple(jnp.asarray(z, jnp.float32) for z in cotangents)


def ids_of(lengths):
    """segment_ids [1, sum(lengths)] with ids that are not ordered and return."""
    return np.repeat([(7 * n) % 3 for n in range(len(lengths))], lengths)[None].astype(np.int32)


ONE = np.zeros((B, T), np.int32)
# Row 0: documents that begin on and off chunk borders, several in a chunk, one over three chunks.
PACKED = np.concatenate([ids_of([5, 1, 26, 32, 2, 80, 4]), ids_of([64, 64, 1, 1, 20])])
CASES = [("random", ONE, 1e-5), ("random", PACKED, 1e-5), ("slow", ONE, 1e-4), ("mixed", ONE, 1e-4)]
CASES += [("mixed", PACKED, 1e-4)] + [(constant, ONE, 1e-4) for constant in (-5, -20, -50)]


@pytest.mark.parametrize(("kind", "ids", "limit"), CASES)
def test_chunked_against_float64(kind, ids, limit):
    inputs, cotangents = make_inputs(kind)
    got = outputs_and_gradients(inputs, cotangents, ids, "chunked")
    assert got[0].dtype == jnp.float32 and got[1].dtype == jnp.float32
    assert_close(got, reference(inputs, cotangents, ids), limit)


def test_chunked_in_float64_is_exact():
    """Leaves no room for a wrong term that is small."""
    inputs, cotangents = make_inputs("mixed")
    with jax.enable_x64(True):
        wide = jax.tree.map(lambda z: jnp.asarray(np.asarray(z), jnp.float64), (inputs, cotangents))
        got = outputs_and_gradients(*wide, PACKED, "chunked", chunk_size=SMALL)
    assert_close(got, reference(inputs, cotangents, PACKED), 1e-12)


def test_decay_gradient_of_each_token_survives():
    """Not only in the mean: one token with a decay of e^-20 among slow ones has its own tiny gradient."""
    inputs, cotangents = make_inputs("slow")
    x, dt, A, *rest = inputs
    dt = dt.at[:, 40].set(-20 / A)
    cotangents = (cotangents[0], 0 * cotangents[1])

    # d dt = A da + (what dt does as a weight of x): with x_40 = 0 only the first is left
    def of_decay(grads):
        return np.asarray(grads[NAMES.index("ddt")])[:, 40]

    inputs = (x.at[:, 40].set(0), dt, A, *rest)
    got = of_decay(outputs_and_gradients(inputs, cotangents, ONE, "chunked"))
    want = of_decay(reference(inputs, cotangents, ONE))
    assert np.abs(want).max() < 1e-4
    assert relative_rms(got, want) < 1e-4


def test_decays_beyond_fp32_stay_finite():
    inputs, cotangents = make_inputs(-5000)
    got = outputs_and_gradients(inputs, cotangents, PACKED, "chunked")
    assert all(bool(jnp.isfinite(z).all()) for z in got)
    want = reference(inputs, cotangents, PACKED)
    assert_close(got[:1], want[:1], 1e-5, NAMES[:1])


def test_bf16_error_budget():
    """bf16 operands, fp32 state and accumulation: each tensor within a few bf16 roundings (2^-9 each)."""
    inputs, cotangents = make_inputs(dtype=jnp.bfloat16)
    cotangents = (cotangents[0].astype(jnp.bfloat16), cotangents[1])
    got = outputs_and_gradients(inputs, cotangents, PACKED, "chunked")
    dtypes = [z.dtype for z in got]
    assert dtypes == [z.dtype for z in (inputs[0], cotangents[1], *inputs)]
    assert_close(got, reference(inputs, cotangents, PACKED), 5e-3)


def document(n, ids=PACKED, row=0):
    """Mask [T] of document `n` of a row."""
    return np.cumsum(np.diff(ids[row], prepend=ids[row, 0]) != 0) == n


def swap_tokens(inputs, where, other):
    """`inputs` with the tokens in mask `where` [T] of row 0 taken from `other`."""
    mask = np.zeros((B, T), bool)
    mask[0] = where
    per_token = (0, 1, 3, 4)
    mixed = list(inputs)
    for n in per_token:
        mixed[n] = jnp.where(mask.reshape(B, T, *[1] * (inputs[n].ndim - 2)), other[n], inputs[n])
    return tuple(mixed)


@pytest.mark.parametrize("n", [0, 2, 5, 6])
def test_other_documents_change_no_bit(n):
    inputs, cotangents = make_inputs("mixed")
    other, _ = make_inputs("random", seed=1)
    own = document(n)
    changed = swap_tokens(inputs, ~own, other)
    if n > 0:  # initial_state is the first document's
        changed = (*changed[:6], other[6])
    before = outputs_and_gradients(inputs, cotangents, PACKED, "chunked", SMALL)
    after = outputs_and_gradients(changed, cotangents, PACKED, "chunked", SMALL)
    for name in ("y", "dx", "ddt", "dB", "dC"):
        a, b = (np.asarray(z[NAMES.index(name)])[0, own] for z in (before, after))
        np.testing.assert_array_equal(a, b, err_msg=name)


def test_gradient_stays_in_its_document():
    inputs, (dy, dfinal) = make_inputs("mixed")
    own = document(4)
    mask = np.zeros((B, T), bool)
    mask[0] = own
    got = outputs_and_gradients(inputs, (dy * mask[:, :, None, None], 0 * dfinal), PACKED, "chunked", SMALL)
    for name in ("dx", "ddt", "dB", "dC"):
        gradient = np.asarray(got[NAMES.index(name)])
        assert (gradient[~mask] == 0).all(), name
        assert (np.abs(gradient[mask]).max(axis=-1) > 0).all(), name
    assert (np.asarray(got[NAMES.index("dinitial_state")]) == 0).all()


def test_packed_equals_separate():
    inputs, cotangents = make_inputs()
    y = np.asarray(outputs_and_gradients(inputs, cotangents, PACKED, "chunked", SMALL)[0])
    for n in (2, 5):
        own = np.flatnonzero(document(n))
        moved = [jnp.roll(z, -own[0], axis=1) if i in (0, 1, 3, 4) else z for i, z in enumerate(inputs)]
        moved[6] = jnp.zeros_like(moved[6])
        alone = outputs_and_gradients(tuple(moved), cotangents, ONE, "chunked", SMALL)[0]
        alone = np.asarray(alone)[0, : len(own)]
        assert np.abs(y[0, own] - alone).max() < 2e-5 * np.abs(y[0, own]).max()


def test_causality_by_gradient_and_by_bit():
    inputs, (dy, dfinal) = make_inputs("mixed")
    t = 70
    only_t = (np.arange(T) == t)[None, :, None, None]
    got = outputs_and_gradients(inputs, (dy * only_t, 0 * dfinal), ONE, "chunked", SMALL)
    for name in ("dx", "ddt", "dB", "dC"):
        gradient = np.asarray(got[NAMES.index(name)])
        assert (gradient[:, t + 1 :] == 0).all(), name
        assert np.abs(gradient[:, t]).max() > 0, name
    changed = swap_tokens(inputs, np.arange(T) > t, make_inputs("random", seed=1)[0])
    again = outputs_and_gradients(changed, (dy * only_t, 0 * dfinal), ONE, "chunked", SMALL)
    np.testing.assert_array_equal(np.asarray(again[0])[0, : t + 1], np.asarray(got[0])[0, : t + 1])


def test_state_carries_over():
    """The whole equals a part, then one token at a time from the state that it left."""
    (x, dt, A, Bm, Cm, D, S), _ = make_inputs()
    whole, last = ssd(x, dt, A, Bm, Cm, D, initial_state=S)
    cut = T - 3
    parts, S = [], S
    run = jax.jit(lambda *z: ssd(*z[:-1], initial_state=z[-1]))
    for piece in (slice(0, cut), *(slice(t, t + 1) for t in range(cut, T))):
        y, S = run(x[:, piece], dt[:, piece], A, Bm[:, piece], Cm[:, piece], D, S)
        parts.append(y)
    assert_close((jnp.concatenate(parts, axis=1), S), (whole, last), 1e-6, NAMES[:2])


@pytest.mark.parametrize("length", [1, 65])
def test_optional_arguments_and_lengths(length):
    """No D, no state, no documents; and gradients without them, at lengths that are multiples of nothing."""
    (x, dt, A, Bm, Cm, *_), _ = make_inputs()
    inputs = (x[:, :length], dt[:, :length], A, Bm[:, :length], Cm[:, :length])

    def loss(*inputs, backend):
        y, state = ssd(*inputs, chunk_size=16, backend=backend)
        return jnp.sum(jnp.sin(y)) + jnp.sum(jnp.cos(state))

    def gradients(backend):
        return jax.jit(jax.grad(functools.partial(loss, backend=backend), range(5)))

    got = gradients("chunked")(*inputs)
    with jax.enable_x64(True):
        want = gradients("reference")(*(jnp.asarray(np.asarray(z), jnp.float64) for z in inputs))
    if length == 1:  # a first token has no decay: nothing depends on A
        assert (np.asarray(got[2]) == 0).all()
        got, want = (got[:2] + got[3:], want[:2] + want[3:])
    assert_close(got, want, 1e-5, [f"input {n}" for n in range(len(got))])


def short_conv(z, weight, bias, ids):
    """silu of a causal depthwise convolution, z [B, T, D], whose taps stop at the start of a document."""
    out = bias + weight[:, -1] * z
    for back in range(1, weight.shape[1]):
        same = np.pad(ids[:, back:] == ids[:, :-back], ((0, 0), (back, 0)))
        shifted = jnp.pad(z[:, :-back], ((0, 0), (back, 0), (0, 0)))
        out += weight[:, -1 - back] * jnp.where(same[..., None], shifted, 0)
    return jax.nn.silu(out)


@pytest.mark.parametrize("case", ["ragged_groups", "packed_conv", "init_state", "slow", "fast"])
def test_golden(case):
    safetensors = pytest.importorskip("safetensors.numpy")
    tensors = safetensors.load_file(GOLDEN / f"ssd_{case}.safetensors")
    described = json.loads((GOLDEN / "ops.json").read_text())["cases"][f"ssd_{case}"]
    inputs = {name[3:]: z for name, z in tensors.items() if name.startswith("in.")}
    ids = inputs.pop("segment_ids", None)
    assert (ids is not None) == bool(described["attrs"]["documents"])

    def layer(p):
        x, Bm, Cm = p["x"], p["B"], p["C"]
        if "conv_weight" in p:
            shapes = [z.shape for z in (x, Bm, Cm)]
            flat = jnp.concatenate([z.reshape(*z.shape[:2], -1) for z in (x, Bm, Cm)], axis=-1)
            flat = short_conv(flat, p["conv_weight"], p["conv_bias"], ids)
            cuts = np.cumsum([np.prod(s[2:]) for s in shapes])[:-1]
            x, Bm, Cm = (z.reshape(s) for z, s in zip(jnp.split(flat, cuts, axis=-1), shapes, strict=True))
        dt, A = jax.nn.softplus(p["dt"] + p["dt_bias"]), -jnp.exp(p["A_log"])
        y, state = ssd(
            x, dt, A, Bm, Cm, p["D"], initial_state=p.get("initial_state"), segment_ids=ids, backend="chunked"
        )
        return {"y": y, "final_state": state}

    @jax.jit
    def run(p, cotangents):
        out, vjp = jax.vjp(layer, p)
        return out, vjp(cotangents)[0]

    out, grads = run(inputs, {name: tensors[f"cot.{name}"] for name in ("y", "final_state")})
    values = {"out." + n: z for n, z in out.items()} | {"grad." + n: z for n, z in grads.items()}
    for name, value in values.items():
        limit = 5e-5 if name in ("grad.A_log", "grad.dt", "grad.dt_bias") else 1e-5
        assert_close([value], [tensors[name]], limit, [name])
    assert {n for n in tensors if n.startswith("grad.")} == {"grad." + n for n in grads}


def test_memory_is_linear_in_time():
    """Forward + backward at 4,096 and 8,192: temporary bytes per token within 5%, below 3x the inputs."""

    def temp_and_input_bytes(T, heads=32, P=64, N=64, groups=8):
        shapes = ((1, T, heads, P), (1, T, heads), (heads,), (1, T, groups, N), (1, T, groups, N), (heads,))
        inputs = [jax.ShapeDtypeStruct(s, jnp.float32) for s in shapes]
        ids = jax.ShapeDtypeStruct((1, T), jnp.int32)

        def run(inputs, cotangents, ids):
            outputs, vjp = jax.vjp(lambda *z: ssd(*z, segment_ids=ids, backend="chunked"), *inputs)
            return outputs, vjp(cotangents)

        cotangents = (inputs[0], jax.ShapeDtypeStruct((1, heads, P, N), jnp.float32))
        compiled = jax.jit(run).lower(inputs, cotangents, ids).compile()
        return compiled.memory_analysis().temp_size_in_bytes, sum(4 * np.prod(s) for s in shapes)

    (short, _), (long, inputs) = temp_and_input_bytes(4096), temp_and_input_bytes(8192)
    assert 0.95 < long / (2 * short) < 1.05, f"{short} bytes at T=4096, {long} at 8192"
    assert long < 3 * inputs and short < 1.5 * inputs, f"{long} bytes of temporaries for {inputs} of inputs"


def test_errors():
    (x, dt, A, Bm, Cm, D, S), _ = make_inputs()
    with pytest.raises(ValueError, match="4 heads do not divide into 3 groups"):
        ssd(x, dt, A, jnp.zeros((B, T, 3, N)), jnp.zeros((B, T, 3, N)), D)
    with pytest.raises(ValueError, match=r"dt has shape .* expected \(2, 150, 4\)"):
        ssd(x, dt[:, 1:], A, Bm, Cm, D)
    with pytest.raises(ValueError, match="initial_state has shape"):
        ssd(x, dt, A, Bm, Cm, D, initial_state=S[:1])
    with pytest.raises(UserError, match=r"config\.kernels\.backend"):
        ssd(x, dt, A, Bm, Cm, D, backend="fast")

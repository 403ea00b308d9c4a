"""Attention: the blocked form and its gradients against float64 and golden vectors, documents, causality.

Shapes: B batch, T time, H query heads, Hkv key/value heads, K key dim, V value dim.
"""

import functools
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hybrid_jax.errors import UserError
from hybrid_jax.kernels.attention import attention, cached, chunked

GOLDEN = Path(__file__).parents[1] / "golden" / "ops"
B, T, H, Hkv, K, V = 2, 600, 4, 2, 24, 12  # T: two whole blocks of 256 and a ragged one
NAMES = ("o", "dq", "dk", "dv")
BACKENDS = ("chunked", "reference")


def relative_rms(got, want) -> float:
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    return np.sqrt(np.mean((got - want) ** 2)) / np.sqrt(np.mean(want**2))


def assert_close(got, want, limit, names=NAMES):
    for name, g, w in zip(names, got, want, strict=True):
        error, largest = relative_rms(g, w), np.abs(np.float64(g) - np.float64(w)).max()
        assert error < limit, f"{name}: relative RMS {error:.2e}, limit {limit:.0e}, max abs {largest:.2e}"


@functools.partial(jax.jit, static_argnames="backend")
def output_and_gradients(inputs, do, segment_ids, backend):
    o, vjp = jax.vjp(lambda *z: attention(*z, segment_ids=segment_ids, backend=backend), *inputs)
    return o, *vjp(do.astype(o.dtype))


def reference(inputs, do, segment_ids):
    """Dense softmax in float64, on the same (rounded) inputs."""
    with jax.enable_x64(True):
        wide = jax.tree.map(lambda z: jnp.asarray(np.asarray(z), jnp.float64), (inputs, do))
        return output_and_gradients(*wide, jnp.asarray(np.asarray(segment_ids)), "reference")


def make_inputs(seed=0, sharpness=1.0, dtype=jnp.float32):
    rng = np.random.default_rng(seed)
    q, k, v, do = (rng.normal(size=(B, T, *s)) for s in ((H, K), (Hkv, K), (Hkv, V), (H, V)))
    return tuple(jnp.asarray(z, dtype) for z in (sharpness * q, k, v)), jnp.asarray(do, dtype)


def ids_of(lengths):
    """segment_ids [1, sum(lengths)] with ids that are not ordered and return."""
    return np.repeat([(7 * n) % 3 for n in range(len(lengths))], lengths)[None].astype(np.int32)


ONE = np.zeros((B, T), np.int32)
# Row 0: a document that ends inside a block, a token alone, one over two blocks. Row 1: borders of blocks.
LENGTHS = (100, 1, 299, 2, 198)
PACKED = np.concatenate([ids_of(LENGTHS), ids_of([128, 128, 256, 88])])


@pytest.mark.parametrize("ids", [ONE, PACKED], ids=["one", "packed"])
@pytest.mark.parametrize("sharpness", [1.0, 20.0])
def test_chunked_against_float64(ids, sharpness):
    """With sharpness 20 scores reach 100 and most rows are one key's."""
    inputs, do = make_inputs(sharpness=sharpness)
    got = output_and_gradients(inputs, do, ids, "chunked")
    assert_close(got, reference(inputs, do, ids), 1e-5)


@pytest.mark.parametrize("sizes", [(32, 64), (64, 32)])
def test_chunked_in_float64_is_exact(sizes, monkeypatch):
    """Also where query and key blocks differ in length, as they do from T = 2,048 on."""
    monkeypatch.setattr(chunked, "block_sizes", lambda T: sizes)
    inputs, do = make_inputs()
    with jax.enable_x64(True):
        wide = jax.tree.map(lambda z: jnp.asarray(np.asarray(z[:, :150]), jnp.float64), (inputs, do))
        ids = jnp.asarray(PACKED[:, :150])
        got = output_and_gradients.__wrapped__(*wide, ids, "chunked")  # without what jit knows of other sizes
        want = output_and_gradients(*wide, ids, "reference")
    assert_close(got, want, 1e-12)


def test_bf16_error_budget():
    """bf16 operands, fp32 softmax and accumulation: each tensor within a few bf16 roundings (2^-9 each)."""
    inputs, do = make_inputs(dtype=jnp.bfloat16)
    got = output_and_gradients(inputs, do, PACKED, "chunked")
    assert all(z.dtype == jnp.bfloat16 for z in got)
    assert_close(got, reference(inputs, do, PACKED), 6e-3)


def document(n):
    """Mask [T] of document `n` of row 0."""
    return np.repeat(np.arange(len(LENGTHS)), LENGTHS) == n


@pytest.mark.parametrize("n", range(len(LENGTHS)))
def test_other_documents_change_no_bit(n):
    inputs, do = make_inputs()
    other, other_do = make_inputs(seed=1, sharpness=30.0)
    own = np.ones((B, T), bool)
    own[0] = document(n)
    mask = own[..., None, None]
    changed = tuple(jnp.where(mask, a, 9 * b) for a, b in zip(inputs, other, strict=True))
    before = output_and_gradients(inputs, do, PACKED, "chunked")
    after = output_and_gradients(changed, jnp.where(mask, do, other_do), PACKED, "chunked")
    for name, a, b in zip(NAMES, before, after, strict=True):
        np.testing.assert_array_equal(np.asarray(a)[own], np.asarray(b)[own], err_msg=name)


def test_packed_equals_separate():
    inputs, do = make_inputs()
    o = np.asarray(output_and_gradients(inputs, do, PACKED, "chunked")[0])
    for n in (2, 4):
        own = np.flatnonzero(document(n))
        moved = tuple(jnp.roll(z, -own[0], axis=1) for z in inputs)
        alone = np.asarray(output_and_gradients(moved, do, ONE, "chunked")[0])[0, : len(own)]
        assert np.abs(o[0, own] - alone).max() < 2e-5 * np.abs(o[0, own]).max()


@pytest.mark.parametrize("t", [0, 127, 300])
def test_causality_by_gradient_and_by_bit(t):
    inputs, do = make_inputs()
    later = (np.arange(T) > t)[None, :, None, None]
    only_t = do * (np.arange(T) == t)[None, :, None, None]
    o, dq, dk, dv = output_and_gradients(inputs, only_t, ONE, "chunked")
    for name, gradient in (("dq", dq), ("dk", dk), ("dv", dv)):
        assert (np.asarray(gradient)[:, t + 1 :] == 0).all(), name
    assert (np.asarray(dq)[:, :t] == 0).all()
    assert (np.abs(np.asarray(dv)[:, : t + 1]).max(axis=-1) > 0).all()
    other, _ = make_inputs(seed=1, sharpness=30.0)
    changed = tuple(jnp.where(later, b, a) for a, b in zip(inputs, other, strict=True))
    again = output_and_gradients(changed, only_t, ONE, "chunked")[0]
    np.testing.assert_array_equal(np.asarray(again)[:, : t + 1], np.asarray(o)[:, : t + 1])


def test_only_visible_blocks_are_computed():
    """The pairs are those under the diagonal, once each: 10 of 16 at T = 2,048 and 72 of 128 above it."""
    for length in (384, 600, 2048, 8192, 65536):
        block_q, block_k = chunked.block_sizes(length)
        padded = length + -length % max(block_q, block_k)
        last_query = np.arange(block_q - 1, padded, block_q)
        want = {(i, j) for i, t in enumerate(last_query) for j in range(t // block_k + 1)}
        for by_key in (False, True):
            i, j, first = chunked._pairs(padded, block_q, block_k, by_key)
            assert len(i) == len(want) and set(zip(i.tolist(), j.tolist(), strict=True)) == want
            run = (j if by_key else i).tolist()
            assert run == sorted(run)
            assert np.flatnonzero(first).tolist() == [run.index(n) for n in dict.fromkeys(run)]
        if length >= 2048:
            assert len(i) * block_q * block_k <= (0.5626 if length > 2048 else 0.6251) * length**2


@pytest.mark.parametrize("block", [128, 512, 1024])
def test_cached(block, monkeypatch):
    """Tokens against a cache of 600 keys, at places that differ by row, are rows of the whole: blocks that divide the
    cache and not, single tokens, and keys after them that must not be seen."""
    monkeypatch.setattr(cached, "BLOCK", block)
    (q, k, v), do = make_inputs()
    whole = output_and_gradients((q, k, v), do, ONE, "chunked")[0]

    @jax.jit
    def step(q, k, v, positions):
        def read(start, length):
            return tuple(jax.lax.dynamic_slice_in_dim(z, start, length, axis=2) for z in (k, v))

        return cached.attention_cached(q, positions, read, T, K**-0.5)

    for starts, count in (((0, 0), 50), ((50, 431), 1), ((500, 3), 100)):
        places = np.asarray(starts)[:, None] + np.arange(count)
        rows = np.arange(B)[:, None]
        unseen = (np.arange(T) > places[:, -1:])[:, :, None, None]
        cache = [jnp.where(unseen, 1e4, z).swapaxes(1, 2) for z in (k, v)]
        assert_close([step(q[rows, places], *cache, jnp.asarray(places))], [whole[rows, places]], 1e-6, ["o"])


@pytest.mark.parametrize("length", [1, 77])
def test_short_sequences(length):
    inputs, do = make_inputs()
    inputs, do = tuple(z[:, :length] for z in inputs), do[:, :length]
    got = output_and_gradients(inputs, do, ONE[:, :length], "chunked")
    want = reference(inputs, do, ONE[:, :length])
    if length == 1:  # softmax over one key is constant: its gradient is 0 up to the rounding of terms near 1
        assert max(np.abs(got[1]).max(), np.abs(got[2]).max()) < 1e-6
        got, want = (got[0], got[3]), (want[0], want[3])
    assert_close(got, want, 1e-5, range(len(got)))


def rope(x, positions, theta, style):
    """x [B, T, ..., R] turned by position x theta^(-2i/R): pairs (2i, 2i+1) or (i, i + R/2), or not."""
    if style is None:
        return x
    R = x.shape[-1]
    angle = positions[..., None] * theta ** (-np.arange(0, R, 2) / R)
    angle = angle.reshape(*angle.shape[:2], *[1] * (x.ndim - 3), -1)
    pairs = (x[..., 0::2], x[..., 1::2]) if style == "interleaved" else jnp.split(x, 2, axis=-1)
    cos, sin = np.cos(angle), np.sin(angle)
    turned = pairs[0] * cos - pairs[1] * sin, pairs[0] * sin + pairs[1] * cos
    return jnp.stack(turned, -1).reshape(x.shape) if style == "interleaved" else jnp.concatenate(turned, -1)


@pytest.mark.parametrize("case", ["interleaved", "half_packed", "nope_packed"])
def test_golden(case):
    safetensors = pytest.importorskip("safetensors.numpy")
    tensors = safetensors.load_file(GOLDEN / f"mla_{case}.safetensors")
    attrs = json.loads((GOLDEN / "ops.json").read_text())["cases"][f"mla_{case}"]["attrs"]
    inputs = {name[3:]: z for name, z in tensors.items() if name.startswith("in.")}
    ids, positions = inputs.pop("segment_ids", None), inputs.pop("positions").astype(np.float64)
    assert (ids is not None) == bool(attrs["documents"])

    def layer(p):
        turn = functools.partial(rope, positions=positions, theta=attrs["rope_theta"], style=attrs["rope"])
        k_rope = jnp.broadcast_to(turn(p["k_rope"])[:, :, None], p["q_rope"].shape)
        q = jnp.concatenate([p["q_nope"], turn(p["q_rope"])], axis=-1)
        k = jnp.concatenate([p["k_nope"], k_rope], axis=-1)
        return attention(q, k, p["v"], segment_ids=ids, backend="chunked")

    o, vjp = jax.vjp(jax.jit(layer), inputs)
    grads = vjp(jnp.asarray(tensors["cot.o"]))[0]
    assert_close([o], [tensors["out.o"]], 1e-5, ["o"])
    assert {n for n in tensors if n.startswith("grad.")} == {"grad." + n for n in grads}
    for name, gradient in grads.items():
        assert_close([gradient], [tensors["grad." + name]], 1e-5, [name])


def test_memory_is_linear_in_time():
    """Forward + backward at 4,096 and 8,192: temporary bytes a token equal within 5%, below 3x the inputs."""

    def temp_and_input_bytes(T, heads=16, dim=64):
        inputs = [jax.ShapeDtypeStruct((1, T, heads, dim), jnp.float32)] * 3
        ids = jax.ShapeDtypeStruct((1, T), jnp.int32)
        compiled = output_and_gradients.lower(inputs, inputs[0], ids, "chunked").compile()
        return compiled.memory_analysis().temp_size_in_bytes, sum(4 * np.prod(z.shape) for z in inputs)

    (short, _), (long, inputs) = temp_and_input_bytes(4096), temp_and_input_bytes(8192)
    assert 0.95 < long / (2 * short) < 1.05, f"{short} bytes at T=4096, {long} at 8192"
    assert long < 3 * inputs and short < 1.5 * inputs, f"{long} bytes of temporaries for {inputs} of inputs"


def test_errors():
    (q, k, v), _ = make_inputs()
    with pytest.raises(ValueError, match="4 query heads do not divide into 3"):
        attention(q, jnp.zeros((B, T, 3, K)), jnp.zeros((B, T, 3, V)))
    with pytest.raises(ValueError, match="do not fit"):
        attention(q, k[..., 1:], v)
    with pytest.raises(ValueError, match="do not fit"):
        attention(q, k[:, 1:], v[:, 1:])
    with pytest.raises(ValueError, match="segment_ids"):
        attention(q, k, v, segment_ids=ONE[:, 1:])
    with pytest.raises(UserError, match=r"config\.kernels\.attention: unknown backend"):
        attention(q, k, v, backend="fast")

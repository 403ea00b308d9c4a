"""The one table of named shapes: what the tests run, the benchmark times and `make amd` compiles.

Shapes: B batch, T time, H q/k heads, HV value heads, K key dim, V value dim. For ssd, H is the groups of heads
that share B and C, HV the heads, K the state size and V the head dim; for attention, HV is the key/value heads.
"""

import dataclasses
import importlib
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from hybrid_jax.kernels.kda.gates import Gate

OPS = {
    "gdn": "hybrid_jax.kernels.gdn",
    "kda": "hybrid_jax.kernels.kda",
    "ssd": "hybrid_jax.kernels.mamba2",
    "attention": "hybrid_jax.kernels.attention",
}


@dataclasses.dataclass(frozen=True)
class Shape:
    """One named problem of an operation of OPS."""

    name: str
    op: str
    B: int
    T: int
    H: int
    HV: int
    K: int
    V: int
    dtype: str = "bfloat16"  # of the matmul inputs; gates, beta and states are float32
    packed: bool = False  # several documents a row
    initial_state: bool = False  # a state goes in and the final state comes out; a training step has neither
    gate: str = ""  # of kda: "softplus" or "bounded" (below by BOUND), raw gates of `dtype`; "" log decays, float32

    def small(self) -> "Shape":
        """NAME_small: the same in float32 at a size that a kernel interpreter manages, with B <= 2, T <= 150 and
        2 (or 1) groups of heads. Head dims and heads a group stay, so it runs the same kernels."""
        groups = math.gcd(self.H, self.HV)
        H, HV = (heads // groups * min(groups, 2) for heads in (self.H, self.HV))
        B, T = min(self.B, 2), min(self.T, 150)
        return dataclasses.replace(self, name=f"{self.name}_small", B=B, T=T, H=H, HV=HV, dtype="float32")

    def __str__(self) -> str:
        sizes = f"B{self.B} T{self.T} H{self.H}"
        sizes += f"/{self.HV}" if self.HV != self.H else ""
        sizes += f" K{self.K} V{self.V}"
        sizes += f" {self.gate}" if self.gate else ""
        return sizes + (" packed" if self.packed else "") + (" state" if self.initial_state else "")


BOUND = -5.0  # of a bounded gate


def _gdn(name: str, B: int, T: int, H: int, HV: int, K: int, V: int, **options) -> Shape:
    return Shape(name, "gdn", B, T, H, HV, K, V, **options)


def _kda(name: str, B: int, T: int, H: int, HV: int, K: int, V: int, **options) -> Shape:
    return Shape(name, "kda", B, T, H, HV, K, V, **options)


_TABLE = (
    # What the published models run.
    _gdn("gdn_300m", 32, 2048, 4, 8, 64, 64),
    _gdn("gdn_1b", 8, 2048, 8, 16, 64, 64),
    _gdn("qwen3_next", 4, 4096, 16, 32, 128, 128),
    _gdn("long", 1, 65536, 16, 32, 128, 128),
    # Documents and states.
    _gdn("gdn_300m_packed", 32, 2048, 4, 8, 64, 64, packed=True),
    _gdn("gdn_300m_state", 32, 2048, 4, 8, 64, 64, packed=True, initial_state=True),
    _gdn("long_packed", 1, 65536, 16, 32, 128, 128, packed=True),
    # Lengths around a chunk.
    _gdn("gdn_t1", 2, 1, 2, 4, 64, 64, initial_state=True),
    _gdn("gdn_t65", 2, 65, 2, 4, 64, 64, initial_state=True),
    _gdn("gdn_t65_packed", 2, 65, 2, 4, 128, 128, packed=True),
    # Head dims, with 1, 2 and 4 value heads a key head.
    _gdn("gdn_k16", 4, 2048, 4, 4, 16, 16),
    _gdn("gdn_k60", 4, 2048, 4, 8, 60, 60, initial_state=True),
    _gdn("gdn_k64", 4, 2048, 4, 16, 64, 64),
    _gdn("gdn_k64_v128", 4, 2048, 4, 4, 64, 128),
    _gdn("gdn_k96", 4, 2048, 4, 8, 96, 96, packed=True),
    _gdn("gdn_k100", 4, 2048, 4, 4, 100, 100),
    _gdn("gdn_k100_v60", 4, 2048, 4, 8, 100, 60),
    _gdn("gdn_k128", 4, 2048, 4, 4, 128, 128, packed=True, initial_state=True),
    _gdn("gdn_k128_v256", 4, 2048, 4, 4, 128, 256),
    _gdn("gdn_k128_h32", 4, 4096, 32, 32, 128, 128),  # the heads of kimi_linear
    _gdn("gdn_k256", 4, 2048, 2, 8, 256, 256),
    _gdn("gdn_k256_v512", 4, 2048, 4, 4, 256, 512, initial_state=True),  # expand_v = 2 with the widest keys
    _gdn("gdn_k256_long", 1, 65536, 2, 2, 256, 256),
    _gdn("gdn_k256_wide", 64, 512, 4, 4, 256, 256),
    _gdn("gdn_fp32", 2, 2048, 4, 8, 64, 64, dtype="float32", initial_state=True),
    _gdn("gdn_fp32_k128", 2, 2048, 4, 4, 128, 128, dtype="float32", packed=True),
    _gdn("gdn_fp32_k256", 2, 2048, 2, 2, 256, 256, dtype="float32"),
    _gdn("gdn_fp32_wide", 64, 256, 4, 4, 64, 64, dtype="float32"),
    _gdn("gdn_fp32_k128_wide", 32, 256, 4, 4, 128, 128, dtype="float32"),
    _gdn("gdn_fp32_k256_wide", 16, 256, 4, 4, 256, 256, dtype="float32"),
    # Kimi Delta Attention: what the published models run, raw gates in; with log decays in; other gates and states.
    _kda("kda_300m", 32, 2048, 8, 8, 32, 64, gate="softplus"),
    _kda("kda_300m_decays", 32, 2048, 8, 8, 32, 64),
    _kda("kda_1b", 8, 2048, 16, 16, 32, 64, gate="softplus"),
    _kda("kimi_linear", 4, 4096, 32, 32, 128, 128, gate="softplus"),
    _kda("kda_long", 1, 65536, 32, 32, 128, 128, gate="softplus"),
    _kda("kda_300m_packed", 32, 2048, 8, 8, 32, 64, gate="softplus", packed=True),
    _kda("kda_bounded", 4, 2048, 8, 8, 32, 64, gate="bounded", packed=True, initial_state=True),
    _kda("kda_t1", 2, 1, 2, 4, 32, 64, initial_state=True),
    _kda("kda_t65", 2, 65, 2, 4, 64, 64, gate="softplus", initial_state=True),
    _kda("kda_k16", 4, 2048, 4, 4, 16, 16),
    _kda("kda_k32_long", 1, 65536, 8, 8, 32, 64, gate="softplus"),
    _kda("kda_k60", 4, 2048, 4, 8, 60, 60, gate="softplus", initial_state=True),
    _kda("kda_k64", 32, 2048, 4, 8, 64, 64, gate="softplus", packed=True),
    _kda("kda_k64_v128", 4, 2048, 4, 4, 64, 128, packed=True, initial_state=True),
    _kda("kda_k96", 4, 2048, 4, 8, 96, 96, packed=True),
    _kda("kda_k100_v60", 4, 2048, 4, 4, 100, 60, gate="bounded"),
    _kda("kda_k128", 4, 2048, 4, 16, 128, 128, packed=True, initial_state=True),
    _kda("kda_k256", 4, 2048, 2, 4, 256, 256, gate="softplus"),
    _kda("kda_k256_v512", 4, 2048, 4, 4, 256, 512, initial_state=True),
    _kda("kda_k256_wide", 64, 512, 4, 4, 256, 256),
    _kda("kda_fp32", 2, 2048, 4, 4, 32, 64, dtype="float32", gate="softplus", initial_state=True),
    _kda("kda_fp32_k64", 2, 2048, 4, 8, 64, 64, dtype="float32", packed=True),
    _kda("kda_fp32_k128", 2, 2048, 4, 4, 128, 128, dtype="float32"),
    _kda("kda_fp32_k256", 2, 2048, 2, 2, 256, 256, dtype="float32"),
    _kda("kda_fp32_wide", 64, 256, 4, 4, 32, 64, dtype="float32"),
    _kda("kda_fp32_k64_wide", 64, 256, 4, 4, 64, 64, dtype="float32"),
    _kda("kda_fp32_k128_wide", 32, 256, 4, 4, 128, 128, dtype="float32"),
    _kda("kda_fp32_k256_wide", 16, 256, 4, 4, 256, 256, dtype="float32"),
    # The other operations.
    Shape("mamba2_300m", "ssd", 32, 2048, 8, 32, 64, 64),
    Shape("mamba2_packed", "ssd", 4, 2048, 8, 32, 64, 64, packed=True, initial_state=True),
    Shape("mla_300m", "attention", 32, 2048, 16, 16, 64, 64),
    Shape("mla_wide", "attention", 4, 4096, 16, 16, 192, 128),
    Shape("gqa_packed", "attention", 4, 2048, 16, 4, 128, 128, packed=True),
)

SHAPES = {shape.name: shape for shape in _TABLE}


def arguments(shape: Shape) -> dict[str, jax.ShapeDtypeStruct]:
    """The operation's arrays by argument name."""
    B, T, H, HV, K, V = shape.B, shape.T, shape.H, shape.HV, shape.K, shape.V
    narrow, wide = jnp.dtype(shape.dtype), jnp.float32
    kinds: dict[str, tuple[tuple[int, ...], Any]]
    if shape.op == "ssd":
        kinds = {"x": ((B, T, HV, V), narrow), "dt": ((B, T, HV), wide), "A": ((HV,), wide)}
        kinds |= {"B": ((B, T, H, K), narrow), "C": ((B, T, H, K), narrow), "D": ((HV,), wide)}
        state = (B, HV, V, K)
    elif shape.op == "attention":
        kinds = {"q": ((B, T, H, K), narrow), "k": ((B, T, HV, K), narrow), "v": ((B, T, HV, V), narrow)}
        state = None
    else:
        gate = (B, T, HV, K) if shape.op == "kda" else (B, T, HV)
        kinds = {"q": ((B, T, H, K), narrow), "k": ((B, T, H, K), narrow), "v": ((B, T, HV, V), narrow)}
        kinds |= {"g": (gate, narrow if shape.gate else wide), "beta": ((B, T, HV), wide)}
        if shape.gate:
            kinds |= {"A_log": ((HV,), wide), "dt_bias": ((HV, K), wide)}
        state = (B, HV, K, V)
    if shape.initial_state:
        if state is None:
            raise ValueError(f"{shape.name}: {shape.op} has no state")
        kinds["initial_state"] = (state, wide)
    if shape.packed:
        kinds["segment_ids"] = ((B, T), jnp.int32)
    return {name: jax.ShapeDtypeStruct(*kind) for name, kind in kinds.items()}


def results(shape: Shape) -> dict[str, jax.ShapeDtypeStruct]:
    """The arrays that a program returns and has cotangents for: "o", and "final_state" of a shape with states."""
    inputs = arguments(shape)
    heads = shape.H if shape.op == "attention" else shape.HV
    found = {"o": jax.ShapeDtypeStruct((shape.B, shape.T, heads, shape.V), jnp.dtype(shape.dtype))}
    if shape.initial_state:
        found["final_state"] = inputs["initial_state"]
    return found


def program(shape: Shape, backend: str, backward: bool = True) -> tuple[Callable, tuple]:
    """(fn, its arguments as trees of ShapeDtypeStruct), to be jitted, timed or compiled without data.

    Forward: fn(inputs) -> results. With `backward`: fn(inputs, cotangents) -> (results, gradients), one for each
    float input. Both results and gradients are what a training step needs; without `initial_state` the final
    state is thrown away, as it does. Trees: see `arguments` and `results`. Raises UserError (when traced) for a
    backend that `shape.op` does not have.
    """
    op = getattr(importlib.import_module(OPS[shape.op]), shape.op)

    def forward(inputs):
        if shape.gate:
            inputs = dict(inputs)
            bound = BOUND if shape.gate == "bounded" else None
            inputs["gate"] = Gate(inputs.pop("A_log"), inputs.pop("dt_bias"), bound)
        out = op(**inputs, backend=backend)
        if shape.op == "attention":
            return {"o": out}
        return dict(zip(("o", "final_state"), out, strict=True)) if shape.initial_state else {"o": out[0]}

    def both(inputs, cotangents):
        whole = {name: x for name, x in inputs.items() if name == "segment_ids"}
        smooth = {name: x for name, x in inputs.items() if name != "segment_ids"}
        out, pull = jax.vjp(lambda smooth: forward(smooth | whole), smooth)
        # In a model the rest of the network lies between the two passes, and a backward pass that computes something
        # of the forward pass again does so; in one program the compiler would have it done once.
        pull = jax.lax.optimization_barrier(pull)
        return out, pull(cotangents)[0]

    return (both, (arguments(shape), results(shape))) if backward else (forward, (arguments(shape),))


def inputs(shape: Shape, seed: int = 0) -> dict[str, jax.Array]:
    """Random arrays for `arguments(shape)`, the same on every machine: normal, but for

    g = -exp(normal - 1) where they are log decays, beta = sigmoid(normal), dt = softplus(normal - 1),
    A = -exp(normal / 2), and documents that end anywhere, at least one border a packed row of two tokens or more.
    """
    rng = np.random.default_rng([seed, 0])
    drawn = {name: _draw(name, kind, rng) for name, kind in arguments(shape).items()}
    if shape.gate:
        drawn["g"] = rng.standard_normal(drawn["g"].shape, np.float32)
    return {name: jnp.asarray(drawn[name], kind.dtype) for name, kind in arguments(shape).items()}


def cotangents(shape: Shape, seed: int = 0) -> dict[str, jax.Array]:
    """Normal random arrays for `results(shape)`, the same on every machine."""
    rng = np.random.default_rng([seed, 1])
    return {name: jnp.asarray(_draw(name, kind, rng), kind.dtype) for name, kind in results(shape).items()}


def _draw(name: str, kind: jax.ShapeDtypeStruct, rng: np.random.Generator) -> np.ndarray:
    if name == "segment_ids":
        B, T = kind.shape
        starts = rng.random((B, T)) < min(0.5, 4 / T)
        starts[:, 0] = False
        if T > 1:
            starts[np.arange(B), rng.integers(1, T, B)] = True
        return np.cumsum(starts, axis=1)
    x = rng.standard_normal(kind.shape, np.float32)
    if name == "g":
        return -np.exp(x - 1)
    if name == "beta":
        return 1 / (1 + np.exp(-x))
    if name == "dt":
        return np.log1p(np.exp(x - 1))
    if name == "A":
        return -np.exp(x / 2)
    return x

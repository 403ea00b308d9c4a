"""How a shape of a delta rule is cut, which tiles its kernels take, and how its scans run over segments.

Long rows with few heads would leave a GPU idle in the scans. They are cut into segments; a segment's effect on
the state is affine, S -> M S + S', and a first run of the scan computes M and S' of all segments at once, before the
second runs on all of them (likewise in reverse, where the map is M^T).

Shapes: B batch, T time, H q/k heads, HV value heads, K key dim, V value dim, N chunks, C chunk, P segments.
"""

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import triton

from hybrid_jax.kernels import launch
from hybrid_jax.kernels.cuts import chunk_of
from hybrid_jax.kernels.delta.scans import scan

# What the constants of a row of the tile tables may be: chunk length, widths of blocks of values and of channels.
Constants = Mapping[str, Sequence[int]]
CHUNKS: Constants = {"C": (16, 32, 64)}
VALUES: Constants = {"BV": (16, 32, 64, 128, 256, 512)}  # at most V's power of two is used
CHANNELS: Constants = {"BC": (16, 32, 64, 128, 256)}  # at most K's power of two is used
_SCANS = dict.fromkeys(("scan", "scan_narrow", "reverse_scan", "reverse_scan_narrow"), VALUES)  # narrow: few heads

# Programs that keep a device's multiprocessors busy in the scans (an H200 has 132, an MI355X 256, an MI300X 304).
_FILL = {"gfx942": 256, "gfx950": 256}
_FILL_ELSEWHERE = 128
# Shorter segments than this many chunks would not pay for their maps.
_SHORTEST = 16


class Plan(NamedTuple):
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
        """How many matrices of `dtype` stand for one in fp32."""
        return 1 if self.dtype == jnp.float32 else 2

    def shape(self, *sizes, dtype=None):
        return jax.ShapeDtypeStruct(sizes, dtype or self.dtype)

    def blocks(self, kernel, size=None):
        """Blocks of BV columns in `size` (V when None)."""
        return -(-(size or self.V) // dict(self.tiles[kernel.__name__].constants)["BV"])

    def channel_blocks(self, kernel):
        """Blocks of BC channels in a tile's width."""
        return self.constants["BK"] // dict(self.tiles[kernel.__name__].constants)["BC"]

    @property
    def per_value(self):
        """Like v."""
        return self.shape(self.B, self.T, self.HV, self.V)

    @property
    def per_key(self):
        """Like k, with a row for each value head."""
        return self.shape(self.B, self.T, self.HV, self.K)

    @property
    def vector(self):
        """One number a token and value head."""
        return self.shape(self.B, self.HV, self.chunks * self.chunk, dtype=jnp.float32)

    @property
    def pairs(self):
        """One number a pair of tokens of a chunk."""
        return self.shape(self.B, self.chunks, self.HV, self.chunk, self.chunk)

    @property
    def inverse(self):
        """T' of each chunk, as high and low part."""
        return self.shape(self.B, self.chunks, self.HV, self.parts, self.chunk, self.chunk)

    @property
    def states(self):
        return self.shape(self.B, self.chunks, self.HV, self.K, self.V)

    @property
    def between(self):
        """States between the segments."""
        return self.shape(self.B, self.HV, self.segments, self.K, self.V, dtype=jnp.float32)

    def launch(self, kernel, inputs, outputs, programs: int, constants: Mapping[str, Any]):
        """Runs `kernel` with the plan's sizes and `constants`; outputs: arrays or their shapes."""
        tile = self.tiles[kernel.__name__]
        outputs = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in outputs]
        return launch.launch(kernel, inputs, outputs, grid=(programs,), tile=tile, constants=self.constants | constants)

    def scan(self, kernel, inputs, state, per_token=(), **constants):
        """`scan` or `reverse_scan` over all segments: (outputs like `per_token`, states around chunks, the state at
        the far end)."""
        constants |= {"V": self.V, "SEGMENTS": self.segments, "CHUNKS": -(-self.chunks // self.segments)}
        rows, blocks = self.B * self.HV, self.blocks(kernel)
        order = range(self.segments) if kernel is scan else range(self.segments)[::-1]
        entering = {order[0]: state}
        if self.segments > 1:
            maps = self.shape(*self.between.shape[:3], self.K, self.K, dtype=jnp.float32)
            outputs = (*(self.shape(1) for _ in per_token), maps, self.between)
            programs = rows * (self.segments - 1) * (blocks + self.blocks(kernel, self.K))
            *_, maps, offsets = self.launch(kernel, (*inputs, state), outputs, programs, constants | {"MAP": True})
            for here, there in itertools.pairwise(order):
                entering[there] = offsets[:, :, here]
                if here != order[0]:
                    entering[there] += jnp.matmul(maps[:, :, here], entering[here], precision=jax.lax.Precision.HIGHEST)
        inputs = (*inputs, jnp.stack([entering[p] for p in range(self.segments)], axis=2))
        outputs = (*per_token, self.states, self.between)
        programs = rows * self.segments * blocks
        *tokens, states, leaving = self.launch(kernel, inputs, outputs, programs, constants | {"MAP": False})
        return *tokens, states, leaving[:, :, order[-1]]


def make_plan(op: str, name: str, kernels: Mapping[str, Constants], q, v, packed: bool) -> Plan:
    """The plan for q [B,T,H,K] and v [B,T,HV,V] of one type, from shape class `name` of the tile tables of `op`.

    kernels: the rows of a shape class beside those of the scans, each with its constants and their values. The table's
    chunk length C stands with `prepare`; a row of tokens shorter than that is one chunk.
    """
    B, T, H, K = q.shape
    HV, V = v.shape[2:]
    arch = launch.architecture()
    tiles = {}
    for row, tile in launch.tiles(op, name, arch, {**_SCANS, **kernels}).items():
        constants = dict(tile.constants)
        if row == "prepare":
            largest = constants.pop("C")
        for constant, size in (("BV", V), ("BC", K)):
            if constant in constants:
                constants[constant] = min(constants[constant], max(16, triton.next_power_of_2(size)))
        tiles[row] = dataclasses.replace(tile, constants=tuple(constants.items()))
    chunk = chunk_of(T, largest)
    chunks = -(-T // chunk)

    def programs(row):
        return B * HV * -(-V // dict(tiles[row].constants)["BV"])

    fill = _FILL.get(arch, _FILL_ELSEWHERE)
    for row in ("scan", "reverse_scan"):
        # Few heads: first narrower blocks of values, then segments.
        narrow = tiles.pop(f"{row}_narrow")
        if programs(row) < fill:
            tiles[row] = narrow
    segments = max(1, min(fill // programs("scan"), chunks // _SHORTEST))
    per_segment = -(-chunks // segments)
    return Plan(B, T, H, HV, K, V, chunk, -(-chunks // per_segment), q.dtype, packed, tiles)

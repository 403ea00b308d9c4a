"""What a compiled program sends between devices: each collective with its arrays, the mesh axes that it goes over, and
the loops that it is in.

Read from the optimized HLO, as jax's `Compiled.as_text()` gives it: what the partitioner made of the program, and not
what we asked for. No jax here.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from collections.abc import Iterator, Mapping, Sequence

KINDS = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")

_COLLECTIVE = re.compile(rf"= (.*?) ({'|'.join(KINDS)})(-start)?\(")
_ARRAY = re.compile(r"\b([a-z]+\d*[a-z0-9]*)\[([\d,]*)\]")
_COMPUTATION = re.compile(r"(ENTRY )?%?([\w.\-]+) .*\{$")
_CALLED = re.compile(r"\b(?:to_apply|calls|true_computation|false_computation)=%?([\w.\-]+)")
_CALLED_LISTS = re.compile(r"\b(?:branch_computations|called_computations)=\{(.*?)\}")
# Axes of a mesh of its own, its devices if they are in another order than counted, and the axes that vary in a group.
_MESH = re.compile(
    r"replica_groups=mesh\[(.*?)\](?:, device_ids=\((?:\[([\d,]+)\](?:T\(([\d,]+)\))?|([\d,]+))\))? \{(.*?)\}"
)
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"')


@dataclasses.dataclass(frozen=True)
class Loop:
    """A loop of a program. name: of the jax.named_scope that it began in, "loop" where there is none; trips: how often
    its body runs, 0 if the program does not say."""

    name: str
    trips: int


@dataclasses.dataclass(frozen=True)
class Collective:
    """One instruction. axes: of the mesh, those over which devices exchange; arrays: (type, shape) of each result on
    one device; loops: those around it, the outermost first; scope: where it comes from (jax's op_name)."""

    kind: str
    axes: tuple[str, ...]
    arrays: tuple[tuple[str, tuple[int, ...]], ...]
    loops: tuple[Loop, ...]
    scope: str

    @property
    def size(self) -> int:
        """Bytes of its results on one device, each time that it runs."""
        return sum(_bytes(kind) * math.prod(shape) for kind, shape in self.arrays)

    @property
    def times(self) -> int:
        """How often it runs; a loop of unknown length counts as one."""
        return math.prod(max(loop.trips, 1) for loop in self.loops)

    @property
    def where(self) -> str:
        """The loops around it in words, "-" outside of all."""
        return " > ".join(loop.name for loop in self.loops) or "-"


def read(hlo: str, mesh: Mapping[str, int]) -> list[Collective]:
    """The collectives of optimized HLO text, in its order.

    mesh: sizes by axis, outermost first, of the mesh whose devices, in its order, the program is for. What would
    exchange nothing, as its groups hold one device each, is left out.
    """
    computations, entry = _computations(hlo)
    around = _loops(computations, entry)
    found = []
    for name, lines in computations.items():
        for line in lines:
            match = _COLLECTIVE.search(line)
            if match is None or name not in around:  # nothing calls it
                continue
            axes = _axes(line, mesh)
            if not axes:
                continue
            results, kind, start = match.groups()
            arrays = tuple((t, tuple(int(n) for n in dims.split(",") if n)) for t, dims in _ARRAY.findall(results))
            if start and kind != "all-reduce":  # an asynchronous start gives (operands, results)
                arrays = arrays[len(arrays) // 2 :]
            found.append(Collective(kind, axes, arrays, around[name], _op_name(line)))
    return found


def table(found: Sequence[Collective]) -> list[tuple[str, ...]]:
    """Rows of text: instructions of one kind, one type, over the same axes and in the same loops stand together. The
    first row has the headings."""
    groups: dict[tuple[str, ...], list[Collective]] = {}
    for one in found:
        types = ", ".join(dict.fromkeys(kind for kind, _ in one.arrays))
        groups.setdefault((one.kind, " x ".join(one.axes), types, one.where), []).append(one)
    rows: list[tuple[str, ...]] = [
        ("collective", "over", "type", "inside", "count", "runs a step", "bytes a step, a device")
    ]
    for key, members in sorted(groups.items(), key=lambda item: -sum(c.size * c.times for c in item[1])):
        runs, size = sum(c.times for c in members), sum(c.size * c.times for c in members)
        rows.append((*key, f"{len(members)}", f"{runs:,}", f"{size:,}"))
    return rows


def _computations(hlo: str) -> tuple[dict[str, list[str]], str]:
    """(lines of each computation by its name, the name of the one that begins)."""
    found: dict[str, list[str]] = {}
    entry, lines = "", None
    for line in hlo.splitlines():
        if line[:1] in ("%", "E") or (line[:1].isalpha() and line.endswith("{")):
            match = _COMPUTATION.match(line)
            if match:
                lines = found.setdefault(match[2], [])
                entry = match[2] if match[1] else entry
        elif lines is not None and line.startswith(" "):
            lines.append(line)
    return found, entry


def _loops(computations: Mapping[str, Sequence[str]], entry: str) -> dict[str, tuple[Loop, ...]]:
    """The loops around each computation that `entry` reaches."""
    around: dict[str, tuple[Loop, ...]] = {}
    waiting: list[tuple[str, tuple[Loop, ...]]] = [(entry, ())] if entry else [(name, ()) for name in computations]
    while waiting:
        name, loops = waiting.pop()
        if name in around or name not in computations:
            continue
        around[name] = loops
        for line in computations[name]:
            if body := re.search(r"\bbody=%?([\w.\-]+)", line):
                trips = _TRIPS.search(line)
                loop = Loop(_loop_name(_op_name(line)), int(trips[1]) if trips else 0)
                waiting.append((body[1], (*loops, loop)))
            else:
                waiting.extend((called, loops) for called in _called(line))
    return around


def _called(line: str) -> Iterator[str]:
    yield from _CALLED.findall(line)
    for names in _CALLED_LISTS.findall(line):
        yield from re.findall(r"%?([\w.\-]+)", names)


def _op_name(line: str) -> str:
    match = re.search(r'op_name="([^"]*)"', line)
    return match[1] if match else ""


def _loop_name(op_name: str) -> str:
    """Of "jit(f)/transpose(jvp(layers))/while" layers: the first scope after what encloses the loop. Around a scope
    stand the transformations that it went through."""
    inside = re.split(r"\bwhile/body/", op_name)[-1]
    for part in inside.split("/"):
        name = re.sub(r"^(?:\w+\()+|\)+$", "", part)
        if name not in _NO_SCOPES and not part.startswith(("jit(", "pjit(")):
            return name
    return "loop"


_NO_SCOPES = (
    "while",
    "body",
    "cond",
    "closed_call",
    "eval_jaxpr",  # jax 0.11
    "checkpoint",
    "rematted_computation",
    "shard_map",
    "custom_vjp_call",
)


def _axes(line: str, mesh: Mapping[str, int]) -> tuple[str, ...]:
    """The axes of `mesh` over which the devices of a group differ."""
    if pairs := re.search(r"source_target_pairs=\{(.*?)\}(?:,|$)", line):
        groups = [[int(n) for n in pair.split(",")] for pair in re.findall(r"\{([\d,]+)\}?", pairs[0])]
    else:
        groups = [_group(line, math.prod(mesh.values()))]
    differing = {axis for group in groups for axis in _differing(group, tuple(mesh.items()))}
    return tuple(axis for axis in mesh if axis in differing)


def _group(line: str, devices: int) -> list[int]:
    """The first group of devices of a collective; XLA has three ways to write them."""
    if match := _MESH.search(line):
        sizes = [(name, int(size)) for name, size in re.findall(r"'(\w+)'=(\d+)", match[1])]
        varying, group, stride = re.findall(r"'(\w+)'", match[5]), [0], 1
        for name, size in reversed(sizes):
            if name in varying:
                group = [place + k * stride for place in group for k in range(size)]
            stride *= size
        if match[4]:
            listed = [int(n) for n in match[4].split(",")]
            return [listed[place] for place in group]
        return [_ordered(place, match[2], match[3]) for place in group] if match[2] else group
    if match := re.search(r"replica_groups=\{\{([\d,]+)\}", line):
        return [int(n) for n in match[1].split(",")]
    if match := re.search(r"replica_groups=\[(\d+),(\d+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", line):
        return [_ordered(k, match[3], match[4]) for k in range(int(match[2]))]
    return list(range(devices))


def _ordered(index: int, shape: str, axes: str | None) -> int:
    """Entry `index` of arange(prod(shape)).reshape(shape).transpose(axes), flattened; both are as in "2,4"."""
    dims = [int(n) for n in shape.split(",")]
    order = [int(n) for n in axes.split(",")] if axes else list(range(len(dims)))
    place = [0] * len(dims)
    for axis in reversed(order):
        index, place[axis] = divmod(index, dims[axis])
    return functools.reduce(lambda total, k: total * dims[k] + place[k], range(len(dims)), 0)


def _differing(group: Sequence[int], mesh: tuple[tuple[str, int], ...]) -> Iterator[str]:
    stride = math.prod(size for _, size in mesh)
    for axis, size in mesh:
        stride //= size
        if len({device // stride % size for device in group}) > 1:
            yield axis


def _bytes(kind: str) -> int:
    """Of one element of an HLO type such as f32, bf16, pred, s32."""
    return {"pred": 1, "token": 0}.get(kind) or int(next(iter(re.findall(r"\d+", kind)), 0)) // 8

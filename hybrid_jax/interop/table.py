"""Tables of names: which tensor of another format is which of our parameters, and what has to be done to it.

A `Rule` speaks of one sublayer (or of the model's top), as a format declares it; `expand` applies the rules to a
config and gives `Entry`s, one a tensor, which read from and write to the stacked arrays of our parameter tree. Every
step has an inverse, so that one table serves both directions.

Shapes: H heads, K channels, N model or other columns.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

import numpy as np

from hybrid_jax.config import ModelConfig
from hybrid_jax.model import Model
from hybrid_jax.optimizer import STACKED, leaf_paths

Shape = tuple[int, ...]


class Step(Protocol):
    """One change of an array, and its inverse."""

    def shape(self, shape: Shape) -> Shape:
        """Of the result for an array of `shape`."""

    def apply(self, x: np.ndarray) -> np.ndarray: ...

    def undo(self, y: np.ndarray, shape: Shape) -> np.ndarray:
        """The array of `shape` that `apply` makes `y` of."""


@dataclasses.dataclass(frozen=True)
class Transpose:
    """[in, out] as [out, in]: how PyTorch's Linear keeps its weight."""

    def shape(self, shape: Shape) -> Shape:
        return (shape[1], shape[0])

    def apply(self, x: np.ndarray) -> np.ndarray:
        return x.T

    def undo(self, y: np.ndarray, shape: Shape) -> np.ndarray:
        return y.T


@dataclasses.dataclass(frozen=True)
class Reshape:
    """To `to`, in which one -1 stands for what is left."""

    to: Shape

    def shape(self, shape: Shape) -> Shape:
        size, known = math.prod(shape), math.prod(n for n in self.to if n != -1)
        return tuple(size // known if n == -1 else n for n in self.to)

    def apply(self, x: np.ndarray) -> np.ndarray:
        return x.reshape(self.to)

    def undo(self, y: np.ndarray, shape: Shape) -> np.ndarray:
        return y.reshape(shape)


@dataclasses.dataclass(frozen=True)
class HalfSplit:
    """Rows [H * K, ...] of each head from interleaved rotary pairs (2i, 2i + 1) to half-split ones (i, i + K/2)."""

    heads: int

    def _order(self, rows: int) -> np.ndarray:
        return np.arange(rows).reshape(self.heads, -1, 2).swapaxes(1, 2).reshape(-1)

    def shape(self, shape: Shape) -> Shape:
        return shape

    def apply(self, x: np.ndarray) -> np.ndarray:
        return x[self._order(len(x))]

    def undo(self, y: np.ndarray, shape: Shape) -> np.ndarray:
        return y[np.argsort(self._order(len(y)))]


@dataclasses.dataclass(frozen=True)
class MinusOne:
    """w - 1: norms that are applied as 1 + w. Exact both ways for our weights in [0.5, 2], else to fp32 rounding."""

    def shape(self, shape: Shape) -> Shape:
        return shape

    def apply(self, x: np.ndarray) -> np.ndarray:
        return x - np.float32(1.0)

    def undo(self, y: np.ndarray, shape: Shape) -> np.ndarray:
        return y + np.float32(1.0)


@dataclasses.dataclass(frozen=True)
class Rule:
    """`theirs` is what `steps` make of `ours`; of several of ours the results are joined along the first axis.

    theirs: the tensor's name. ours: paths such as "mixer.q_proj.weight", from the sublayer or, for the top, the root.
    copy: `theirs` repeats what another tensor holds, for readers that need it; nothing is read from it.
    """

    theirs: str
    ours: tuple[str, ...]
    steps: tuple[Step, ...] = ()
    copy: bool = False


def same(theirs: str, ours: str, *steps: Step) -> Rule:
    """The tensor as it is, or after `steps`."""
    return Rule(theirs, (ours,), steps)


def linear(theirs: str, ours: str, *steps: Step) -> Rule:
    """The weight of a Linear; the steps see it as [out, in]."""
    return Rule(f"{theirs}.weight", (f"{ours}.weight",), (Transpose(), *steps))


def conv(theirs: str, *ours: str) -> Rule:
    """The weight of a depthwise convolution: [C, W] as [C, 1, W]."""
    return Rule(f"{theirs}.weight", tuple(f"{name}.weight" for name in ours), (_TAPS,))


def joined(theirs: str, *ours: str) -> Rule:
    """Several Linears of ours as one of theirs, their outputs one after the other."""
    return Rule(f"{theirs}.weight", tuple(f"{name}.weight" for name in ours), (Transpose(),))


@dataclasses.dataclass(frozen=True)
class _Taps:
    """[C, W] as [C, 1, W]."""

    def shape(self, shape: Shape) -> Shape:
        return (shape[0], 1, shape[1])

    def apply(self, x: np.ndarray) -> np.ndarray:
        return x[:, None]

    def undo(self, y: np.ndarray, shape: Shape) -> np.ndarray:
        return y[:, 0]


_TAPS = _Taps()


@dataclasses.dataclass(frozen=True)
class Leaf:
    """One layer's parameter of ours. index: along the stacked axis of `path`, None where it is not stacked. shape:
    without that axis."""

    path: str
    index: int | None
    shape: Shape


@dataclasses.dataclass(frozen=True)
class Entry:
    """The tensor `theirs` of `shape`, and what it is made of."""

    theirs: str
    shape: Shape
    ours: tuple[Leaf, ...]
    steps: tuple[Step, ...]
    copy: bool = False

    def to_theirs(self, arrays: Sequence[np.ndarray]) -> np.ndarray:
        """The tensor of one array a leaf."""
        made = [functools.reduce(lambda x, step: step.apply(x), self.steps, x) for x in arrays]
        return made[0] if len(made) == 1 else np.concatenate(made)

    def to_ours(self, tensor: np.ndarray) -> list[np.ndarray]:
        """One array a leaf of the tensor."""
        sizes = [_shape_after(self.steps, leaf.shape)[0] for leaf in self.ours]
        parts = np.split(tensor, np.cumsum(sizes)[:-1]) if len(sizes) > 1 else [tensor]
        return [self._undo(part, leaf.shape) for part, leaf in zip(parts, self.ours, strict=True)]

    def _undo(self, y: np.ndarray, shape: Shape) -> np.ndarray:
        shapes = [shape]
        for step in self.steps:
            shapes.append(step.shape(shapes[-1]))
        for step, before in zip(reversed(self.steps), reversed(shapes[:-1]), strict=True):
            y = step.undo(y, before)
        return y


def expand(cfg: ModelConfig, top: Iterable[Rule], sublayer: Callable[[int, str], Iterable[Rule]]) -> list[Entry]:
    """The entries of a model: of the rules `top`, and `sublayer(i, symbol)` for its i-th sublayer, counted from 0.

    Raises ValueError where the rules are no bijection: a parameter that is used twice or not at all (copies aside), a
    tensor that is named twice.
    """
    model = Model(cfg)
    shapes = {path: tuple(x.shape) for path, x in leaf_paths(model.abstract_params())}

    def leaf(prefix: str, name: str, index: int | None) -> Leaf:
        path = f"{prefix}{name}"
        return Leaf(path, index, shapes[path] if index is None else shapes[path][1:])

    def entry(rule: Rule, prefix: str = "", index: int | None = None) -> Entry:
        ours = tuple(leaf(prefix, name, index) for name in rule.ours)
        made = [_shape_after(rule.steps, one.shape) for one in ours]
        if any(shape[1:] != made[0][1:] for shape in made):
            raise ValueError(f"{rule.theirs}: cannot join {made}")
        shape = (sum(shape[0] for shape in made), *made[0][1:])
        return Entry(rule.theirs, shape, ours, rule.steps, rule.copy)

    entries = [entry(rule) for rule in top]
    for number, (symbol, where, index) in enumerate(model.sublayers):
        prefix = ".".join(where) + "."
        entries += [entry(rule, prefix, None if index < 0 else index) for rule in sublayer(number, symbol)]

    names = Counter(one.theirs for one in entries)
    used = Counter((leaf.path, leaf.index) for one in entries if not one.copy for leaf in one.ours)
    wanted = {
        (path, index)
        for path, shape in shapes.items()
        for index in (range(shape[0]) if path.split(".")[0] == STACKED else [None])
    }
    wrong = [f"tensor {name} twice" for name, count in names.items() if count > 1]
    wrong += [f"{path}[{index}] {used[path, index]} times" for path, index in wanted if used[path, index] != 1]
    if wrong:
        raise ValueError(f"the table is no bijection: {', '.join(sorted(wrong)[:4])}")
    return entries


def _shape_after(steps: Sequence[Step], shape: Shape) -> Shape:
    for step in steps:
        shape = step.shape(shape)
    return shape

"""Predicted memory of a training step by formula: python -m hybrid_jax.planner prints README's table.

The peak is that of the worst of three moments of a step:

    loss      everything kept for the backward pass, and a chunk of the head's logits with its gradients
    backward  the same without the logits, with the stack's gradients, at the sublayer that needs most room
    update    parameters, moments and gradients alone

Sizes are those of one device of a mesh {"data", "fsdp", "tensor"}: parameters as `weights` says they are cut, what is
kept as `residuals` says. A turn of the scan's backward pass takes what a period kept out of the stacked arrays, so it
is there twice, and computes again what remat left out of the period; the sublayer that it is at has a gradient of each
tensor. Outside of a scan each sublayer's backward pass is for itself (model._on_its_own). No constant is fitted:
tests/test_planner.py holds what was measured, and says from which of it these rules were made and which only tests
them.

Plain arithmetic: no jax, no device.
"""

import bisect
import dataclasses
import functools
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from hybrid_jax import config_checks, flops, pattern, residuals, weights
from hybrid_jax.command import Parser, main
from hybrid_jax.config import Config, MeshConfig, ModelConfig
from hybrid_jax.config_file import load
from hybrid_jax.errors import UserError
from hybrid_jax.kernels.cuts import chunk_tokens
from hybrid_jax.platform import memory_fraction

GIB = 2**30
NODE = 8  # devices, of which a mesh with data = -1 is planned for
TIGHT = 0.9  # of what is usable; above it a prediction is no promise
REMAT = ("dots", "names", "full")

CONFIGS = Path(__file__).resolve().parent.parent / "configs"

Mesh = Mapping[str, int]


class Gpu(NamedTuple):
    """A kind of device: bytes of memory as its driver reports them, and the name of its tile tables."""

    name: str
    memory: int
    arch: str

    @property
    def usable(self) -> int:
        """What XLA takes; the rest is for collectives' and matrix libraries. Raises UserError as `memory_fraction`."""
        return int(self.memory * memory_fraction("cuda" if self.arch.startswith("sm_") else "rocm", os.environ))


GPUS = (
    Gpu("MI300X", 206_141_652_992, "gfx942"),
    Gpu("MI325X", 256 * GIB, "gfx942"),
    Gpu("MI355X", 308_902_100_992, "gfx950"),
    Gpu("H200", 143_771 * 2**20, "sm_90"),
)


@dataclasses.dataclass(frozen=True)
class Plan:
    """What one device of a mesh is predicted to hold: bytes by moment of the step and by part."""

    mesh: dict[str, int]
    micro_batch: int  # rows a device at once
    accumulation: int
    moments: dict[str, dict[str, int]]
    state: int  # parameters and moments: what a checkpoint's copy takes

    @property
    def peak(self) -> int:
        return max(sum(parts.values()) for parts in self.moments.values())

    @property
    def worst(self) -> str:
        return max(self.moments, key=lambda name: sum(self.moments[name].values()))


def mesh_of(config: Config) -> dict[str, int]:
    """The mesh of a config, without looking for devices. mesh.data = -1 stands for what makes NODE devices, or fewer
    where the rows do not divide. Raises UserError where batch or micro batch do not divide over the mesh."""
    mesh = config.mesh
    data = mesh.data
    if data == -1:
        rows = config.train.global_batch_size
        most = max(NODE // (mesh.fsdp * mesh.tensor), 1)
        data = next((n for n in range(most, 1, -1) if _divides(config, rows, n * mesh.fsdp)), 1)
    found = dataclasses.replace(config, mesh=dataclasses.replace(mesh, data=data))
    config_checks.check_devices(found, data * mesh.fsdp * mesh.tensor)
    return {"data": data, "fsdp": mesh.fsdp, "tensor": mesh.tensor}


def _divides(config: Config, rows: int, ways: int) -> bool:
    return rows % ways == 0 and (rows // ways) % (config.train.micro_batch_size or 1) == 0


def predict(config: Config, mesh: Mesh, arch: str = "") -> Plan:
    """The plan of a config on a mesh whose sizes its batch divides over.

    arch: the GPU's, as in GPUS, which decides what kernels.backend = auto runs; "" for a CPU, and what has no Triton.
    """
    model = config.model
    share = config.train.global_batch_size // (mesh["data"] * mesh["fsdp"])
    rows = config.train.micro_batch_size or share
    compute = 2 if config.train.compute_dtype == "bfloat16" else 4
    joined = mesh["fsdp"] * mesh["tensor"] == 1
    part = residuals.Part(
        rows, config.train.sequence_length, compute, mesh["tensor"], joined, arch, config.kernels.backend
    )
    around, whole = weights.around(model), {**mesh, "fsdp": 1} if config.mesh.zero == 1 else mesh
    gradients = 4 * (_held(around, mesh) + _held_by_stack(model, mesh))
    stack = 4 * _held_by_stack(model, whole)
    state = {
        "parameters": 4 * _held(around, whole) + stack,
        "moments": 2 * gradients,
        "batch": 4 * residuals.INT32 * share * config.train.sequence_length,
        "gradients so far": gradients * (share > rows),
    }
    kept, backward = _of_stack(model, part)
    if kept.pop("cut in two scans"):
        kept["the stack's weights, cut in two"] = stack

    several, gathers = mesh["data"] * mesh["fsdp"] > 1, mesh["fsdp"] > 1 and config.mesh.zero == 3
    table = model.vocab_size // mesh["tensor"] * model.hidden_size
    used = max(sum(w.used(mesh) for w in weights.sublayer(model, s)) for s in set(model.layout))
    loss = _of_loss(model, part) | {
        "whole weights": (compute + 4) * table * gathers,
        "collectives": 4 * table * several,
    }
    backward |= {
        "gradients": gradients,
        "whole weights": compute * used * gathers,
        "collectives": 4 * used * several,
    }
    # What was looked up gives the embedding a gradient of its own, whole on each device of "fsdp".
    update = {"gradients": gradients + 4 * table * (model.tie_word_embeddings or mesh["fsdp"] > 1)}
    moments = {"loss": state | kept | loss, "backward": state | kept | backward, "update": state | update}
    moments = {name: {part: size for part, size in parts.items() if size} for name, parts in moments.items()}
    return Plan(dict(mesh), rows, share // rows, moments, state["parameters"] + state["moments"])


def _of_stack(model: ModelConfig, part: residuals.Part) -> tuple[dict[str, int], dict[str, int]]:
    """What the stack keeps, and what its backward pass takes beside that."""
    layout, again = model.layout, model.recomputed_sublayers
    unit, repeats, _ = pattern.period(layout)
    scans = model.scan_layers and repeats > 1

    whole, left = _sizes(model, "none", part), _sizes(model, model.remat, part)
    each = [(left if i < again else whole)[s] for i, s in enumerate(layout)]
    # In one turn of a scan all that it computes again is there at once; outside, one sublayer after another.
    anew = [whole[s] * (i < again) for i, s in enumerate(layout)]
    ends = [slice(n * len(unit), (n + 1) * len(unit)) for n in (0, repeats - 1) if scans]  # turns are like one of these
    alone = anew[len(unit) * repeats * scans :]
    works = [(sum(each[turn]), sum(anew[turn])) for turn in ends] + [(0, size) for size in alone]
    taken, recomputed = max(works, key=sum)
    kept = {"kept for backward": sum(each), "cut in two scans": scans and 0 < again // len(unit) < repeats}
    return kept, {
        "a period, taken from the stack": taken,
        "computed again": recomputed,
        "gradients of a sublayer": max(whole.values()),
    }


def _sizes(model: ModelConfig, policy: str, part: residuals.Part) -> dict[str, int]:
    return {s: sum(residuals.kept(model, s, policy, part).values()) for s in set(model.layout)}


def _of_loss(model: ModelConfig, part: residuals.Part) -> dict[str, int]:
    """What the loss takes: products in the compute dtype, logits and the head's gradient in fp32."""
    vocabulary = model.vocab_size // part.tensor
    chunk = chunk_tokens(part.tokens, vocabulary, model.loss_chunk_tokens)
    return {
        "last hidden states": 3 * part.compute * part.tokens * model.hidden_size,  # before, after norm; a gradient
        "head, its gradient": (part.compute + 4) * vocabulary * model.hidden_size,
        "logits of a chunk": (part.compute + 4) * vocabulary * chunk,
    }


def _held_by_stack(model: ModelConfig, mesh: Mesh) -> int:
    counts = {s: model.layout.count(s) for s in set(model.layout)}
    return sum(count * _held(weights.sublayer(model, s), mesh) for s, count in counts.items())


def _held(found: Sequence[weights.Weight], mesh: Mesh) -> int:
    return sum(w.held(mesh) for w in found)


# What would fit


def fits(config: Config, mesh: Mesh, gpu: Gpu, share: float = TIGHT) -> bool:
    return predict(config, mesh, gpu.arch).peak <= share * gpu.usable


def largest_micro_batch(config: Config, mesh: Mesh, gpu: Gpu) -> int:
    """Rows a device at once, a divisor of its share of the batch; 0 if not even one row fits."""
    share = config.train.global_batch_size // (mesh["data"] * mesh["fsdp"])
    divisors = (n for n in range(share, 0, -1) if share % n == 0)
    return next((n for n in divisors if fits(_with(config, n), mesh, gpu)), 0)


def cheapest_remat(config: Config, mesh: Mesh, gpu: Gpu) -> tuple[str, int] | None:
    """(model.remat, model.remat_layers) that fits and computes least again, None if none does."""
    _, periods, tail = pattern.period(config.model.layout)

    def fitting(policy: str, layers: int) -> bool:
        return fits(_with_remat(config, policy, layers), mesh, gpu)

    if fitting("none", -1):
        return "none", -1
    ways = []
    for policy in REMAT:
        # More periods take less memory, up to the last, with which the stack is in one piece again.
        fewest = 1 + bisect.bisect_left(range(1, periods), True, key=functools.partial(fitting, policy))
        numbers = dict.fromkeys(n for n in (fewest, periods, -1) if n < periods or tail)
        ways += [(policy, layers) for layers in numbers if fitting(policy, layers)]
    return min(ways, key=lambda way: _computed_again(config, *way), default=None)


def _computed_again(config: Config, policy: str, layers: int) -> float:
    """Forward FLOPs a token that the backward pass repeats."""
    model = _with_remat(config, policy, layers).model
    total = 0.0
    costs: dict[str, float] = {}
    for symbol in model.layout[: model.recomputed_sublayers]:
        if symbol not in costs:
            # The last product of a sublayer is nobody's input.
            matrices = (w for w in weights.sublayer(model, symbol) if w.is_matrix and w.cuts != weights.ROWS)
            products = 2.0 * sum(w.size for w in matrices)
            mixing = flops.mixing(model, symbol, config.train.sequence_length)
            costs[symbol] = products * (policy != "dots") + mixing * (policy != "names")
        total += costs[symbol]
    return total


def _with_remat(config: Config, policy: str, layers: int) -> Config:
    return dataclasses.replace(config, model=dataclasses.replace(config.model, remat=policy, remat_layers=layers))


def _with(config: Config, micro_batch: int) -> Config:
    return dataclasses.replace(config, train=dataclasses.replace(config.train, micro_batch_size=micro_batch))


def describe_remat(policy: str, layers: int) -> str:
    """("full", 3) as "full, 3 periods"."""
    return policy if policy == "none" or layers < 0 else f"{policy}, {layers} period{'s'[: layers != 1]}"


# The table of README

LEAST_TOKENS = 8192  # a device at once: fewer leave its matrix units idle
NODES = (1, 2, 4, 8, 16, 32)


class Choice(NamedTuple):
    """How a config can run on some GPUs: mesh, rows a device at once, and what is computed again."""

    plan: Plan
    remat: tuple[str, int]

    def __str__(self) -> str:
        mesh = " x ".join(f"{axis} {size}" for axis, size in self.plan.mesh.items() if size > 1)
        words = [mesh, f"{self.plan.micro_batch} row{'s'[: self.plan.micro_batch != 1]}"]
        words += [f"remat {describe_remat(*self.remat)}"] if self.remat[0] != "none" else []
        return ", ".join([*words, f"{self.plan.peak / GIB:.0f} GiB"])


def choose(config: Config, gpu: Gpu) -> Choice | None:
    """The fewest nodes that can train a config, how, and None if none of NODES can.

    Copies before cuts, and cuts inside a node before cuts across: data, data x fsdp, fsdp, and only then fsdp x tensor.
    The largest micro batch that needs no remat; where that is below LEAST_TOKENS, so many tokens with the remat that
    computes least again.
    """
    for nodes in NODES:
        rows = dict.fromkeys(((nodes * NODE, 1, 1), (nodes, NODE, 1), (1, nodes * NODE, 1)))
        for meshes in (rows, [(1, nodes, NODE)]):
            for remat in (False, True):
                for sizes in meshes:
                    if found := _choose_on(config, gpu, *sizes, remat):
                        return found
    return None


def _choose_on(config: Config, gpu: Gpu, data: int, fsdp: int, tensor: int, remat: bool) -> Choice | None:
    config = dataclasses.replace(config, mesh=MeshConfig(data, fsdp, tensor))
    config = _with(_with_remat(config, "none", -1), 0)
    try:
        config_checks.check(config)
        mesh = mesh_of(config)
    except UserError:  # it does not divide
        return None
    share = config.train.global_batch_size // (data * fsdp)
    least = min(-(-LEAST_TOKENS // config.train.sequence_length), share)
    least = next(n for n in range(least, share + 1) if share % n == 0)
    if not remat:
        rows = largest_micro_batch(config, mesh, gpu)
        return Choice(predict(_with(config, rows), mesh, gpu.arch), ("none", -1)) if rows >= least else None
    config = _with(config, least)
    way = cheapest_remat(config, mesh, gpu)
    return Choice(predict(_with_remat(config, *way), mesh, gpu.arch), way) if way else None


def readme_table(names: Sequence[str] = ()) -> list[str]:
    """Lines of README's table: a config a row, a GPU a column. names: of configs, all but the demo's where empty.

    Raises UserError for a name that is none.
    """
    known = {path.stem: path for path in sorted(CONFIGS.glob("*.py"))}
    lines = ["| config | " + " | ".join(gpu.name for gpu in GPUS) + " |", "|---" * (len(GPUS) + 1) + "|"]
    recipes = (name for name in known if name != "tiny_hybrid")
    for name in names or sorted(recipes, key=lambda name: flops.parameter_count(load(str(known[name])).model)):
        config = load(str(known[name]) if name in known else name)
        cells = [str(choose(config, gpu) or f"not on {NODES[-1]} nodes") for gpu in GPUS]
        lines.append(f"| `{name}` | " + " | ".join(cells) + " |")
    return lines


def run(arguments: Sequence[str]) -> int:
    parser = Parser("planner", __doc__)
    parser.add_argument("config", nargs="*", help="names of configs, or files (default: all in configs/)")
    for line in readme_table(parser.parse_args(arguments).config):
        print(line)
    return 0


if __name__ == "__main__":
    sys.exit(main(run, sys.argv[1:], "nothing was written"))

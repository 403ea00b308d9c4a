"""One optimizer step as a compiled program: what it computes, and how its arrays lie on the mesh.

A accumulation steps, B rows of one accumulation step over all devices, T tokens. The batch of a step is
{tokens, targets, segment_ids, positions}, each [A, B, T] i32, its rows split over the mesh's batch axes.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from hybrid_jax import optimizer as optimizer_lib
from hybrid_jax import sharding
from hybrid_jax.kernels import dispatch
from hybrid_jax.model import Model
from hybrid_jax.optimizer import STACKED, Optimizer, leaf_paths

if TYPE_CHECKING:
    from hybrid_jax.config import Config

PyTree = Any
State = dict[str, Any]
Batch = dict[str, jax.Array]

BATCH_KEYS = ("tokens", "targets", "segment_ids", "positions")


def batch_shape(cfg: Config, mesh: Mesh) -> tuple[int, int, int]:
    """(A, B, T) of a step: micro_batch_size rows a device at once, A times over."""
    ways = sharding.batch_ways(mesh)
    share = cfg.train.global_batch_size // ways
    micro = cfg.train.micro_batch_size or share
    return share // micro, micro * ways, cfg.train.sequence_length


@dataclasses.dataclass(frozen=True)
class Programs:
    """The programs of a run: init, step and evaluation, for one config and mesh.

    State: {"params", "opt_state": {"count", "mu", "nu"}, "step" i32, "bad_steps" i32 (non-finite ones in a
    row), "skipped" i32 (all non-finite ones)}. Call everything under jax.set_mesh(mesh).
    """

    cfg: Config
    mesh: Mesh
    table: sharding.Table = sharding.TABLE

    @functools.cached_property
    def model(self) -> Model:
        kernels, table = self.cfg.kernels, self.table
        if self.cfg.mesh.zero == 1:  # weights are there, and only their gradients' sums are cut
            table = tuple((pattern, dispatch.without(spec, "fsdp")) for pattern, spec in table)
        return Model(self.cfg.model, kernels.backend, self.cfg.train.compute_dtype, kernels.attention, table)

    @functools.cached_property
    def optimizer(self) -> Optimizer:
        return Optimizer(self.cfg.optimizer, self.cfg.train.steps)

    # What things look like

    @functools.cached_property
    def state(self) -> State:
        """The train state as ShapeDtypeStructs with their shardings."""
        shapes = jax.eval_shape(self._init, jax.random.key(0))
        return sharding.abstract(shapes, sharding.shardings(shapes, self.mesh, self.table, self.cfg.mesh.zero))

    @functools.cached_property
    def batch(self) -> dict[str, jax.ShapeDtypeStruct]:
        """A step's batch as ShapeDtypeStructs with their sharding."""
        shape = batch_shape(self.cfg, self.mesh)
        one = jax.ShapeDtypeStruct(shape, jnp.int32, sharding=sharding.batch_sharding(self.mesh))
        return dict.fromkeys(BATCH_KEYS, one)

    @functools.cached_property
    def _gradient_specs(self) -> PyTree:
        return jax.tree.map(lambda x: x.sharding.spec, self.state["opt_state"]["mu"])

    @functools.cached_property
    def groups(self) -> list[tuple[str, int]]:
        """(parameter path, index along the stacked axis or -1) of each entry of a step's "finite" flags."""
        found = []
        for path, leaf in leaf_paths(self.state["params"]):
            repeats = range(leaf.shape[0]) if path.split(".")[0] == STACKED else (-1,)
            found += [(path, n) for n in repeats]
        return found

    def describe_group(self, index: int) -> str:
        """Entry `index` of `groups` in words: the parameter's path and which sublayer of the stack it belongs
        to."""
        path, repeat = self.groups[index]
        for number, (symbol, prefix, n) in enumerate(self.model.sublayers):
            if tuple(path.split(".")[:2]) == prefix and n == repeat:
                at = f"[{repeat}]" if repeat >= 0 else ""
                return f"{path}{at} (sublayer {number}, {symbol!r})"
        return path

    # What is computed

    def _init(self, key: jax.Array) -> State:
        return self._begin(self.model.init(key))

    def _begin(self, params: PyTree) -> State:
        counters = {name: jnp.zeros((), jnp.int32) for name in ("step", "bad_steps", "skipped")}
        return {"params": params, "opt_state": self.optimizer.init(params), **counters}

    def init(self, seed: int) -> State:
        """A fresh state, made in place: each device draws only what it keeps."""
        shards = jax.tree.map(lambda x: x.sharding, self.state)
        return jax.jit(self._init, out_shardings=shards)(jax.random.key(seed))

    def begin(self, params: PyTree) -> State:
        """A fresh state of these parameters, which lie as `state` says and are given away."""
        shards = jax.tree.map(lambda x: x.sharding, self.state)
        return jax.jit(self._begin, out_shardings=shards, donate_argnums=0)(params)

    def gradients(self, params: PyTree, batch: Batch) -> tuple[dict[str, jax.Array], PyTree]:
        """({"objective", "loss", "count"}, f32 gradients) of a step's batch [A, B, T].

        Everything is divided by the unmasked targets of the WHOLE batch, so the accumulated sum is what one
        large batch gives whatever the counts of its parts. objective is loss + z-loss, per target; loss is
        without.
        """
        count = jnp.sum(batch["targets"] >= 0).astype(jnp.float32)
        total = jnp.maximum(count, 1.0)
        accumulate: Callable[..., Any] = self._accumulated
        copies = dispatch.split_axes(("data",))
        if copies and batch["tokens"].shape[0] > 1:
            # Each copy adds up the gradients of its own rows; what the copies have is added once.
            def of_one_copy(*arguments: Any) -> Any:
                return jax.lax.psum(self._accumulated(*arguments), copies)

            mine = {name for name, size in self.mesh.shape.items() if size == 1 or name in copies}
            specs = (PartitionSpec(), PartitionSpec(None, copies), PartitionSpec())
            accumulate = jax.shard_map(
                of_one_copy, in_specs=specs, out_specs=PartitionSpec(), axis_names=mine, check_vma=False
            )
        values, grads = accumulate(params, batch, total)
        return {**values, "count": count}, self._as_gradients(grads)

    def _as_gradients(self, grads: PyTree) -> PyTree:
        return jax.lax.with_sharding_constraint(grads, self._gradient_specs)

    def _accumulated(self, params: PyTree, batch: Batch, total: jax.Array) -> tuple[dict[str, jax.Array], PyTree]:
        """Sums over the accumulation steps of `batch` [A, B, T]."""

        def one(micro: Batch) -> tuple[dict[str, jax.Array], PyTree]:
            (objective, parts), grads = jax.value_and_grad(self.model.loss, has_aux=True)(params, micro, total)
            loss = (parts["loss_sum"] - parts["z_loss_sum"]) / total
            return {"objective": objective, "loss": loss}, self._as_gradients(grads)

        if batch["tokens"].shape[0] == 1:
            return one(jax.tree.map(lambda x: x[0], batch))

        def add(total_so_far: PyTree, micro: Batch) -> tuple[PyTree, None]:
            return jax.tree.map(jnp.add, total_so_far, one(micro)), None

        zero = {"objective": jnp.zeros((), jnp.float32), "loss": jnp.zeros((), jnp.float32)}
        zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32), params)
        with jax.named_scope("accumulation"):
            return jax.lax.scan(add, (zero, self._as_gradients(zeros)), batch)[0]

    def _step(self, state: State, batch: Batch, stop: jax.Array) -> tuple[State, dict[str, jax.Array]]:
        values, grads = self.gradients(state["params"], batch)
        squares = optimizer_lib.sum_of_squares(grads)
        norm = optimizer_lib.norm_of(squares)
        ok = jnp.isfinite(values["objective"]) & jnp.isfinite(norm)
        params, opt_state, rate = self.optimizer.apply(grads, state["opt_state"], state["params"], norm)

        def keep(new: PyTree, old: PyTree) -> PyTree:
            return jax.tree.map(lambda n, o: jnp.where(ok, n, o), new, old)

        new = {
            "params": keep(params, state["params"]),
            "opt_state": keep(opt_state, state["opt_state"]),
            "step": state["step"] + 1,
            "bad_steps": jnp.where(ok, 0, state["bad_steps"] + 1),
            "skipped": state["skipped"] + jnp.where(ok, 0, 1),
        }
        metrics = {
            "loss": values["loss"],
            "grad_norm": norm,
            "learning_rate": rate,
            "count": values["count"],
            "bad_steps": new["bad_steps"],
            "skipped": new["skipped"],
            "finite": jnp.concatenate([jnp.isfinite(x).reshape(-1) for x in jax.tree.leaves(squares)]),
            "stop": jnp.max(stop),
        }
        return new, metrics

    def _evaluate(self, params: PyTree, batch: Batch) -> tuple[jax.Array, jax.Array]:
        def one(micro: Batch) -> tuple[jax.Array, jax.Array]:
            _, parts = self.model.loss(params, micro)
            return parts["loss_sum"] - parts["z_loss_sum"], parts["count"]

        sums, counts = jax.lax.map(one, batch)
        return jnp.sum(sums), jnp.sum(counts)

    # Compiled

    def compile_step(self, options: dict[str, Any] | None = None) -> jax.stages.Compiled:
        """(state, batch, stop) -> (state, metrics); the old state's memory is reused. options: XLA's, by name.

        stop: i32 [devices], see `stop_flags`; metrics["stop"] is its maximum, so that all processes of a run
        learn of a signal to one of them at the same step.
        """
        whole = sharding.replicated(self.mesh)
        state, batch, stop = self.state, self.batch, self._stop
        shards = jax.tree.map(lambda x: x.sharding, (state, batch, stop))
        step = jax.jit(self._step, donate_argnums=0, in_shardings=shards, out_shardings=(shards[0], whole))
        with jax.set_mesh(self.mesh):
            return step.lower(state, batch, stop).compile(options)

    def compile_evaluate(self) -> jax.stages.Compiled:
        """(params, batch) -> (sum of the losses in nats, number of unmasked targets), f32 scalars."""
        whole = sharding.replicated(self.mesh)
        params, batch = self.state["params"], self.batch
        shards = jax.tree.map(lambda x: x.sharding, (params, batch))
        evaluate = jax.jit(self._evaluate, in_shardings=shards, out_shardings=whole)
        with jax.set_mesh(self.mesh):
            return evaluate.lower(params, batch).compile()

    @property
    def _stop(self) -> jax.ShapeDtypeStruct:
        flags = NamedSharding(self.mesh, PartitionSpec(self.mesh.axis_names))
        return jax.ShapeDtypeStruct((self.mesh.size,), jnp.int32, sharding=flags)

    def stop_flags(self, signal: int) -> jax.Array:
        """The step's third argument: `signal` on each device of this process (0: go on)."""
        flags = self._stop
        values = np.full(flags.shape, signal, np.int32)
        return jax.make_array_from_callback(flags.shape, flags.sharding, lambda index: values[index])

    # For a person

    def inspect(self, params: PyTree) -> tuple[np.ndarray, np.ndarray]:
        """(whether finite, largest magnitude) of each parameter group, as in `groups`."""
        largest = np.concatenate(jax.tree.leaves(jax.device_get(self._largest(params))))
        return np.isfinite(largest), largest

    @functools.cached_property
    def _largest(self) -> Callable[[PyTree], PyTree]:
        def one(path: tuple[Any, ...], x: jax.Array) -> jax.Array:
            stacked = int(optimizer_lib.path_str(path).split(".")[0] == STACKED)
            return jnp.max(jnp.abs(x), axis=tuple(range(stacked, x.ndim))).reshape(-1)

        return jax.jit(lambda params: jax.tree_util.tree_map_with_path(one, params))

    def describe_numbers(self, got: dict[str, np.ndarray]) -> str:
        """What of a step's metrics is not finite, in words: the loss, the gradients, the deepest sublayer first."""
        wrong = self.backward_order(np.flatnonzero(~got["finite"]).tolist())
        parts = [] if np.isfinite(got["loss"]) else ["the loss"]
        if wrong:
            first, groups = self.describe_group(wrong[0]), len(got["finite"])
            others = f" and of {len(wrong) - 1} of the other {groups - 1} groups" if len(wrong) > 1 else ""
            if len(wrong) == groups:
                others = f" and of all {groups - 1} other groups"
            parts.append(f"the gradient of {first}{others}")
        return " and ".join(parts) or "the gradient norm"

    def describe_parameters(self, params: PyTree) -> str:
        """Which parameters are not finite, or where the largest are, in words."""
        finite, largest = self.inspect(params)
        if finite.all():
            at = int(np.argmax(largest))
            return f"all parameters are finite, the largest in {self.describe_group(at)} ({largest[at]:.3g})"
        bad = [self.describe_group(int(i)) for i in np.flatnonzero(~finite)]
        return f"the parameters of {bad[0]} are not finite" + (f", nor {len(bad) - 1} more" if len(bad) > 1 else "")

    def backward_order(self, groups: Sequence[int]) -> list[int]:
        """Entries of `groups`, the deepest sublayer first: where a fault that arose in the backward pass
        began."""
        depth = {(*prefix, n): i for i, (_, prefix, n) in enumerate(self.model.sublayers)}

        def key(index: int) -> int:
            path, repeat = self.groups[index]
            first, second = path.split(".")[:2]
            if first == "embed":  # its gradient has a part from every depth
                return -1
            return depth.get((first, second, repeat), len(depth))

        return sorted(groups, key=key, reverse=True)


def compile_step(cfg: Config, mesh: Mesh) -> jax.stages.Compiled:
    """The compiled training step of a config on a mesh, from shapes alone: no parameter is allocated."""
    return Programs(cfg, mesh).compile_step()

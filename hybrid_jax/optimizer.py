"""AdamW with the recipe's exact schedule, clipping and weight-decay set.

The schedule and the clipping coefficient are Megatron's, as used by the runs to match: linear warm-up in
absolute steps, cosine to a minimum, coefficient min(1, clip / (norm + 1e-6)). Decay is decoupled (AdamW): p
-= lr * (m / (sqrt(v) + eps) + decay * p). Which parameters decay is decided by name and by the rank of ONE
layer's parameter, never by the rank of the stacked array: parameters under "layers" carry one extra leading
axis (repeats of the pattern's period).

The schedule counts updates, not steps: an update that is skipped because it is not finite leaves the state,
and with it `count`, as it was, so the next one has the same learning rate.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import optax

if TYPE_CHECKING:
    from hybrid_jax.config import OptimizerConfig

PyTree = Any

STACKED = "layers"  # top-level key whose leaves are stacked over the repeats of the period
UNDECAYED_NAMES = ("A_log", "dt_bias", "D")


def leaf_paths(tree: PyTree) -> list[tuple[str, Any]]:
    """Leaves of a nested dict with their dotted paths ("layers.0.mixer.A_log"), in jax's flattening order."""
    flat, _ = jax.tree_util.tree_flatten_with_path(tree)
    return [(path_str(path), leaf) for path, leaf in flat]


def path_str(path: tuple[Any, ...]) -> str:
    """A jax key path as a dotted string."""
    return jax.tree_util.keystr(path, simple=True, separator=".")


def is_decayed(path: str, rank: int) -> bool:
    """Whether weight decay applies to the parameter `path`, whose (stacked) array has `rank` axes."""
    parts = path.split(".")
    rank -= parts[0] == STACKED
    if rank <= 1 or parts[-1] in UNDECAYED_NAMES:
        return False
    return not any(part == "bias" or part.endswith("_bias") or "norm" in part for part in parts)


def decay_mask(params: PyTree) -> PyTree:
    """Tree of Python bools: True where weight decay applies. Takes arrays or ShapeDtypeStructs."""
    return jax.tree_util.tree_map_with_path(lambda path, x: is_decayed(path_str(path), len(x.shape)), params)


def decay_sets(params: PyTree) -> tuple[list[str], list[str]]:
    """(decayed, undecayed) parameter paths."""
    paths = [(path, is_decayed(path, len(x.shape))) for path, x in leaf_paths(params)]
    return [p for p, decayed in paths if decayed], [p for p, decayed in paths if not decayed]


def learning_rate(cfg: OptimizerConfig, train_steps: int, count: jax.Array | int) -> jax.Array:
    """Learning rate (f32 scalar) of the update number `count`, counted from 0: the very first update has 0.

    warm-up: lr * k / warmup; then min + 0.5 * (1 + cos(pi * p)) * (lr - min) with p = (k - warmup) / (decay -
    warmup); `min` from `decay` on. decay_steps = 0 means `train_steps`. Without warm-up the first update has
    the full rate.
    """
    k = jnp.asarray(count, jnp.float32)
    high, low = cfg.learning_rate, cfg.min_learning_rate
    warmup, end = cfg.warmup_steps, cfg.decay_steps or train_steps
    p = jnp.clip((k - warmup) / max(end - warmup, 1), 0.0, 1.0)
    cosine = low + 0.5 * (1.0 + jnp.cos(jnp.pi * p)) * (high - low)
    decayed = jnp.where(k >= end, low, cosine)
    return jnp.where(k < warmup, high * k / max(warmup, 1), decayed).astype(jnp.float32)


def sum_of_squares(grads: PyTree) -> PyTree:
    """Per-leaf sum of squares in f32: [] for a plain leaf, [repeats] for a leaf stacked under "layers"."""

    def one(path: tuple[Any, ...], x: jax.Array) -> jax.Array:
        stacked = path_str(path).split(".")[0] == STACKED
        return jnp.sum(jnp.square(x.astype(jnp.float32)), axis=tuple(range(int(stacked), x.ndim)))

    return jax.tree_util.tree_map_with_path(one, grads)


def norm_of(squares: PyTree) -> jax.Array:
    """Global L2 norm (f32 scalar) from `sum_of_squares`."""
    return jnp.sqrt(sum(jnp.sum(x) for x in jax.tree.leaves(squares)))


@dataclasses.dataclass(frozen=True)
class Optimizer:
    """AdamW as two pure functions over a plain-dict state {"count" i32, "mu", "nu"} (moments f32).

    A dict and not optax's own state, so that checkpoint paths do not depend on how a chain is put together.
    """

    cfg: OptimizerConfig
    train_steps: int

    def init(self, params: PyTree) -> dict[str, Any]:
        zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32), params)
        return {"count": jnp.zeros((), jnp.int32), "mu": zeros, "nu": jax.tree.map(jnp.zeros_like, zeros)}

    def apply(
        self, grads: PyTree, state: dict[str, Any], params: PyTree, norm: jax.Array
    ) -> tuple[PyTree, dict[str, Any], jax.Array]:
        """One update: (new params, new state, learning rate as applied). `norm` is the global norm of
        `grads`."""
        cfg = self.cfg
        lr = learning_rate(cfg, self.train_steps, state["count"])
        if cfg.clip_norm > 0:
            coefficient = jnp.minimum(1.0, cfg.clip_norm / (norm + 1e-6))
            grads = jax.tree.map(lambda g: g * coefficient, grads)
        adam = optax.scale_by_adam(b1=cfg.b1, b2=cfg.b2, eps=cfg.eps, mu_dtype=jnp.float32)
        updates, new = adam.update(grads, optax.ScaleByAdamState(**state), params)

        def step(p: jax.Array, u: jax.Array, decayed: bool) -> jax.Array:
            u = u + cfg.weight_decay * p if decayed else u
            return (p - lr * u).astype(p.dtype)

        params = jax.tree.map(step, params, updates, decay_mask(params))
        return params, {"count": new.count, "mu": new.mu, "nu": new.nu}, lr

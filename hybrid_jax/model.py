"""The language model: embedding, a stack of sublayers written as one string, final norm, head.

Shapes: B batch, T time, D model, V vocabulary.

Parameters are a nested dict of fp32 arrays. Sublayers of the pattern's shortest period are stacked along a
leading axis under "layers" and run by one lax.scan; what is left over stands unstacked under "tail".
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from hybrid_jax import pattern as pattern_lib
from hybrid_jax import sharding
from hybrid_jax.config import ModelConfig
from hybrid_jax.kernels import RESIDUAL, dispatch
from hybrid_jax.kernels.documents import number_documents
from hybrid_jax.kernels.precision import upcast
from hybrid_jax.layers.context import MIXER_IN, PRODUCT, Context, count_positions
from hybrid_jax.layers.gdn import GDN
from hybrid_jax.layers.gqa import GQA
from hybrid_jax.layers.kda import KDA
from hybrid_jax.layers.linear import Linear, matmul
from hybrid_jax.layers.mamba2 import Mamba2
from hybrid_jax.layers.mla import MLA
from hybrid_jax.layers.mlp import SwiGLU
from hybrid_jax.layers.norm import RMSNorm, rms_norm
from hybrid_jax.loss import linear_cross_entropy, log_probabilities

Params = dict[str, Any]

_MIXERS = {"*": (MLA, "mla"), "A": (GQA, "gqa"), "G": (GDN, "gdn"), "K": (KDA, "kda"), "S": (Mamba2, "mamba2")}


class Sublayer(nnx.Module):
    """x + child(norm(x)): `symbol` (one of `* A G K S -`) says what the child is; it is called mixer or mlp."""

    def __init__(self, cfg: ModelConfig, symbol: str, rngs: nnx.Rngs):
        std = cfg.initializer_range
        out_std = std * (2 * len(cfg.layout)) ** -0.5 if cfg.rescale_out_proj else std
        if symbol != "S" or cfg.mamba2.pre_norm:
            self.norm = RMSNorm(cfg.hidden_size, cfg.norm_eps)
        if symbol == "-":
            self.mlp = SwiGLU(cfg.hidden_size, cfg.intermediate_size, std=std, out_std=out_std, rngs=rngs)
        else:
            kind, section = _MIXERS[symbol]
            sizes = getattr(cfg, section)
            eps = cfg.norm_eps_of(sizes)
            self.mixer = kind(sizes, cfg.hidden_size, eps, std=std, out_std=out_std, rngs=rngs)

    def __call__(self, x: jax.Array, ctx: Context, state=None):
        # Said here too: a weight that lies by rows would otherwise have activations cut by columns.
        h = dispatch.constrain(self.norm(x), "B") if hasattr(self, "norm") else x
        if hasattr(self, "mlp"):
            y = self.mlp(h)
        else:
            y, state = self.mixer(h, ctx, state)
        return x + y, state


def _remat(fn, policy: str):
    """`fn` under the policy of config.model.remat. The backward pass recomputes nothing (none), all but matrix
    products (dots), all but what goes into the sequence operations and what they keep (names), or all (full).
    """
    if policy == "none":
        return fn
    policies = {
        "dots": jax.checkpoint_policies.save_only_these_names(PRODUCT),
        "names": jax.checkpoint_policies.save_only_these_names(MIXER_IN, RESIDUAL),
        "full": jax.checkpoint_policies.nothing_saveable,
    }
    return jax.checkpoint(fn, policy=policies[policy], prevent_cse=False)  # _on_its_own does


def _on_its_own(fn):
    """`fn` (weights, x, ctx) -> x, whose backward pass XLA neither merges with the forward pass nor puts off.

    A turn of a scan is a computation of its own anyway. Outside of one, XLA finds what a derivative rule computes again
    in the forward pass, and keeps it; and gradients of weights, for which nothing waits, it computes at the end, and
    keeps what they are made of.
    """

    @jax.custom_vjp
    def apart(weights, x, ctx):
        return fn(weights, x, ctx)

    def forward(weights, x, ctx):
        return jax.vjp(lambda weights, x: fn(weights, x, ctx), weights, x)

    def backward(derivative, gradient):
        derivative, gradient = jax.lax.optimization_barrier((derivative, gradient))
        return *jax.lax.optimization_barrier(derivative(gradient)), None

    apart.defvjp(forward, backward)
    return apart


@functools.lru_cache(maxsize=16)
def _abstract(cfg: ModelConfig, x64: bool) -> Params:
    """Model.abstract_params, which takes a second to trace."""
    return jax.eval_shape(Model(cfg).init, jax.random.key(0))


@dataclasses.dataclass(frozen=True)
class Model:
    """A hybrid language model; hashable and without arrays, so that it can be static under jit.

    cfg: sizes and pattern. backend, attention: what runs the mixers and softmax attention (config.kernels).
    compute_dtype: of activations and matrix products, "bfloat16" or "float32".
    table: how weights lie on the mesh.
    """

    cfg: ModelConfig
    backend: str = "auto"
    compute_dtype: str = "bfloat16"
    attention: str = "auto"
    table: sharding.Table = sharding.TABLE

    @functools.cached_property
    def _parts(self) -> tuple[str, int, str]:
        """(period, repeats, tail) of the layout; what does not repeat is all tail."""
        layout = self.cfg.layout
        unit, repeats, tail = pattern_lib.period(layout)
        return (unit, repeats, tail) if self.cfg.scan_layers and repeats > 1 else ("", 0, layout)

    @functools.cached_property
    def _definitions(self) -> dict[str, tuple]:
        """(graph definition, tree structure) of each symbol's sublayer."""
        found = {}
        for symbol in sorted(set(self.cfg.layout)):
            module = nnx.eval_shape(lambda s=symbol: Sublayer(self.cfg, s, nnx.Rngs(0)))
            for path, layer in nnx.iter_graph(module):
                if isinstance(layer, Linear):
                    layer.spec = sharding.spec_of(".".join(map(str, (*path, "weight"))), 2, self.table)
            graph, state = nnx.split(module)
            found[symbol] = (graph, jax.tree.structure(state))
        return found

    # Parameters

    def init(self, key: jax.Array) -> Params:
        """Parameters drawn from `key` (a jax.random.key): normal with initializer_range, see each layer."""
        cfg = self.cfg
        unit, repeats, tail = self._parts
        stack_key, embed_key, head_key = jax.random.split(key, 3)

        def sublayer(symbol: str, key: jax.Array) -> Params:
            module = Sublayer(cfg, symbol, nnx.Rngs(params=key))
            return nnx.to_pure_dict(nnx.state(module, nnx.Param))

        def draw(key: jax.Array) -> jax.Array:
            return cfg.initializer_range * jax.random.normal(key, (cfg.vocab_size, cfg.hidden_size))

        params: Params = {"embed": {"weight": draw(embed_key)}}
        # One key a sublayer, by its place in the stack: scanning or unrolling draws the same values.
        keys = jax.random.split(stack_key, len(cfg.layout))
        scanned = len(unit) * repeats
        if repeats:
            params["layers"] = {
                str(i): jax.vmap(functools.partial(sublayer, s))(keys[i : scanned : len(unit)])
                for i, s in enumerate(unit)
            }
        if tail:
            params["tail"] = {str(i): sublayer(s, keys[scanned + i]) for i, s in enumerate(tail)}
        params["norm"] = {"weight": jnp.ones((cfg.hidden_size,))}
        if not cfg.tie_word_embeddings:
            params["lm_head"] = {"weight": draw(head_key)}
        return params

    def abstract_params(self) -> Params:
        """The tree of `init` as jax.ShapeDtypeStruct; allocates nothing."""
        return jax.tree.map(lambda x: x, _abstract(self.cfg, jax.config.read("jax_enable_x64")))

    @property
    def sublayers(self) -> list[tuple[str, tuple[str, str], int]]:
        """(symbol, path of its parameters, index along the stacked axis or -1 in the tail), first to last."""
        unit, repeats, tail = self._parts
        stacked = [(s, ("layers", str(i)), n) for n in range(repeats) for i, s in enumerate(unit)]
        return stacked + [(s, ("tail", str(i)), -1) for i, s in enumerate(tail)]

    # Forward

    def _stack(self, params: Params, x: jax.Array, ctx: Context, states: Params | None = None):
        """The sublayers in order. states as from init_state, without "length"; returns x and new states."""
        unit, repeats, tail = self._parts

        def apply(symbol: str, weights: Params, x, ctx: Context, state):
            graph, structure = self._definitions[symbol]
            module = nnx.merge(graph, jax.tree.unflatten(structure, jax.tree.leaves(weights)))
            with jax.named_scope(pattern_lib.NAMES[symbol].lower()):
                x, state = module(x, ctx, state)
                return dispatch.constrain(x, "B"), state

        def train(symbol: str, weights: Params, x, ctx: Context):
            return apply(symbol, weights, x, ctx, None)[0]

        def through(symbols: str, weights: Params, x, state, again: int, in_scan: bool):
            """`again`: of so many of them, from the first, parts are computed again for the backward pass."""
            new = {}
            for i, symbol in enumerate(symbols):
                if state is None:
                    policy = self.cfg.remat if i < again else "none"
                    sublayer = _remat(functools.partial(train, symbol), policy)
                    x = (sublayer if in_scan else _on_its_own(sublayer))(weights[str(i)], x, ctx)
                else:
                    x, new[str(i)] = apply(symbol, weights[str(i)], x, ctx, state[str(i)])
            return x, (new if state is not None else None)

        def scan(x, stacked, again: bool):
            with jax.named_scope("layers"):
                return jax.lax.scan(lambda x, xs: through(unit, xs[0], x, xs[1], again * len(unit), True), x, stacked)

        again = 0 if states is not None else self.cfg.recomputed_sublayers
        new_states: Params = {}
        if repeats:
            stacked = params["layers"], None if states is None else states["layers"]
            cut = min(again // len(unit), repeats)
            if 0 < cut < repeats:  # a scan keeps the same of each of its turns, so there are two
                x, _ = scan(x, jax.tree.map(lambda a: a[:cut], stacked), True)
                x, _ = scan(x, jax.tree.map(lambda a: a[cut:], stacked), False)
            else:
                x, new_states["layers"] = scan(x, stacked, cut > 0)
        if tail:
            state = None if states is None else states["tail"]
            left = again - len(unit) * repeats
            x, new_states["tail"] = through(tail, params["tail"], x, state, left, False)
        return x, new_states

    def _gathered(self, params: Params, name: str) -> jax.Array:
        path = f"{name}.weight"
        return dispatch.gather(params[name]["weight"], sharding.spec_of(path, 2, self.table), self.compute_dtype)

    def _embed(self, params: Params, tokens: jax.Array) -> jax.Array:
        table = self._gathered(params, "embed")
        axis = dispatch.tensor_axis(table.shape[0])
        if axis is None:
            return dispatch.constrain(dispatch.looked_up(table[tokens].astype(self.compute_dtype)), "B")

        def rows(table, tokens):  # of the ids that lie here
            at = tokens - jax.lax.axis_index(axis) * table.shape[0]
            here = (at >= 0) & (at < table.shape[0])
            x = jnp.where(here[..., None], table[jnp.where(here, at, 0)], 0)
            return (jax.lax.psum(x.astype(self.compute_dtype), axis),)

        return dispatch.over_devices(rows, ("H", "B"), ("B",))(table, tokens)[0]

    def _head(self, params: Params) -> jax.Array:
        return self._gathered(params, "embed" if self.cfg.tie_word_embeddings else "lm_head")

    def hidden(self, params: Params, tokens: jax.Array, segment_ids=None, positions=None) -> jax.Array:
        """The final norm's output [B, T, D] in compute_dtype for tokens [B, T] i32 in [0, V).

        segment_ids [B, T]: a change of id starts a document, at which convolutions, recurrences, attention and
        (unless positions [B, T] are given) positions restart. None: the row is one document.
        """
        if segment_ids is not None:
            segment_ids = number_documents(segment_ids)
        if positions is None:
            positions = count_positions(jnp.zeros_like(tokens) if segment_ids is None else segment_ids)
        ctx = Context(positions, segment_ids, backend=self.backend, attention=self.attention)
        x, _ = self._stack(params, self._embed(params, tokens), ctx)
        return rms_norm(x, params["norm"]["weight"], self.cfg.norm_eps)

    def logits(self, params: Params, tokens: jax.Array, segment_ids=None, positions=None) -> jax.Array:
        """[B, T, V] fp32. For short inputs: training goes through `loss`, which never holds this array."""
        x = self.hidden(params, tokens, segment_ids, positions)
        return upcast(matmul(x, self._head(params).T))

    def loss(self, params: Params, batch: dict[str, jax.Array], total_count=None):
        """Mean next-token cross entropy (nats) and its parts.

        batch: tokens, targets (-1 = masked), segment_ids, positions, each [B, T] i32. The sum over unmasked
        targets is divided by total_count, the number of them in the global batch (None: in this batch), so that
        the gradients of micro batches add up to those of one large batch whatever each one's count.
        Returns (loss, {"loss_sum", "z_loss_sum", "count"}), fp32 scalars; the loss includes the z-loss.
        """
        x = self.hidden(params, batch["tokens"], batch["segment_ids"], batch["positions"])
        targets = batch["targets"]
        count = jnp.sum(targets >= 0).astype(jnp.float32)
        with jax.named_scope("loss"):
            nll, z = linear_cross_entropy(
                x, self._head(params), targets, z_loss=self.cfg.z_loss, chunk=self.cfg.loss_chunk_tokens
            )
        total = count if total_count is None else total_count
        return nll / jnp.maximum(total, 1.0), {"loss_sum": nll, "z_loss_sum": z, "count": count}

    def log_probabilities(self, params: Params, tokens: jax.Array, targets: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Of candidates for what follows each token: (log-probability [B, T, K] fp32, likeliest id [B, T] i32).

        tokens [B, T] i32, each row one document; targets [B, T, K] i32, -1 where nothing is asked, which costs no
        logits and gives 0 and -1.
        """
        return log_probabilities(self.hidden(params, tokens), self._head(params), targets)

    # Decoding

    def for_decoding(self, params: Params) -> tuple["Model", Params]:
        """The same model with every sublayer's parameters apart and its matrices in compute_dtype, and these.

        What it computes is the same to the last bit; a step that reads every weight for few tokens reads no more than
        that, where stacked ones would be cut out, and fp32 ones converted, each time.
        """
        apart = dataclasses.replace(self, cfg=dataclasses.replace(self.cfg, scan_layers=False))

        def convert(path, p: jax.Array, rank: int) -> jax.Array:
            is_matrix = path[-1].key == "weight" and rank == 2 and not path[-2].key.endswith("conv1d")
            return p.astype(self.compute_dtype) if is_matrix else p

        def rearrange(params: Params) -> Params:
            def at(index: int, path, p: jax.Array) -> jax.Array:
                return convert(path, p, p.ndim) if index < 0 else convert(path, p, p.ndim - 1)[index]

            new: Params = {k: v for k, v in params.items() if k not in ("layers", "tail")}
            new = jax.tree_util.tree_map_with_path(functools.partial(at, -1), new)
            return new | {
                "tail": {
                    str(i): jax.tree_util.tree_map_with_path(functools.partial(at, n), params[group][child])
                    for i, (_, (group, child), n) in enumerate(self.sublayers)
                }
            }

        return apart, jax.jit(rearrange)(params)

    def init_state(self, batch: int, max_length: int) -> Params:
        """Empty states for `batch` sequences of up to max_length tokens: constant in it for recurrent mixers."""
        cfg = self.cfg
        unit, repeats, tail = self._parts

        def one(symbol: str) -> Params:
            if symbol == "-":
                return {}
            kind, section = _MIXERS[symbol]
            sizes = getattr(cfg, section)
            make = lambda: kind(sizes, cfg.hidden_size, 0.0, std=0.0, out_std=0.0, rngs=nnx.Rngs(0))  # noqa: E731
            mixer: Any = nnx.eval_shape(make)
            return mixer.init_state(batch, max_length, jnp.dtype(self.compute_dtype))

        states: Params = {"length": jnp.zeros(batch, jnp.int32)}
        if repeats:
            stack = lambda a: jnp.broadcast_to(a, (repeats, *a.shape))  # noqa: E731
            states["layers"] = {str(i): jax.tree.map(stack, one(s)) for i, s in enumerate(unit)}
        if tail:
            states["tail"] = {str(i): one(s) for i, s in enumerate(tail)}
        return states

    def step(self, params: Params, tokens: jax.Array, states: Params, count=None) -> tuple[jax.Array, Params]:
        """Takes the next tokens [B, T] of one document a row; T > 1 fills the states from a prompt.

        count [B] i32 in [0, T]: the tokens of each row (None: all), the others are padding behind them. They change no
        state, and a row without a token keeps what it has. Returns the logits [B, V] fp32 of each row's last token
        (of nothing, where there is none) and the new states.
        """
        B, T = tokens.shape
        length = states["length"]
        t = jnp.broadcast_to(jnp.arange(T, dtype=jnp.int32), tokens.shape)
        positions = length[:, None] + (t if count is None else jnp.where(t < count[:, None], t, 0))
        ctx = Context(positions, count=count, backend=self.backend, attention=self.attention)
        inner = {k: v for k, v in states.items() if k != "length"}
        x, new = self._stack(params, self._embed(params, tokens), ctx, inner)
        last = x[:, -1] if count is None else x[jnp.arange(B), jnp.maximum(count - 1, 0)]
        last = rms_norm(last, params["norm"]["weight"], self.cfg.norm_eps)
        logits = upcast(matmul(last, self._head(params).T))
        return logits, {**new, "length": length + (T if count is None else count)}

"""Every parameter of a model by name, with its shape and how a mesh cuts it, by formula.

What `Model.init` makes and `sharding.TABLE` cuts, said again as plain data for what must not import jax (the tests
compare both). D width, F MLP width, V vocabulary, W conv taps. No jax here.
"""

import math
from collections.abc import Mapping
from typing import NamedTuple

from hybrid_jax.config import GDNConfig, KDAConfig, ModelConfig

Cuts = tuple[tuple[str, ...], ...]  # mesh axes that cut each axis of an array, from the left

WHOLE: Cuts = ()
COLUMNS: Cuts = (("fsdp",), ("tensor",))
ROWS: Cuts = (("tensor",), ("fsdp",))
INPUTS: Cuts = (("fsdp", "tensor"),)  # whole on each device of "tensor" where it is used
HEADS: Cuts = (("tensor",),)


class Weight(NamedTuple):
    """One array of one sublayer: its path below the sublayer, its shape, and how it is cut."""

    name: str
    shape: tuple[int, ...]
    cuts: Cuts = WHOLE

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def is_matrix(self) -> bool:
        """Whether activations are multiplied with it, each entry once a token."""
        return "_proj" in self.name and self.name.endswith(".weight")

    def held(self, mesh: Mapping[str, int]) -> int:
        """Entries that a device of `mesh`, {axis: devices}, holds; an axis that does not divide cuts nothing."""
        size = self.size
        for length, axes in zip(self.shape, self.cuts, strict=False):
            ways = 1
            for axis in axes:
                if length % (ways * mesh[axis]) == 0:
                    ways *= mesh[axis]
            size //= ways
        return size

    def used(self, mesh: Mapping[str, int]) -> int:
        """Entries that a device has while it multiplies with them: whole over "fsdp"."""
        return self.size if self.cuts == INPUTS else self.held({**mesh, "fsdp": 1})


def cut_by_fsdp(model: ModelConfig, fsdp: int, tensor: int = 1) -> tuple[float, list[str]]:
    """(share of what mesh.fsdp is to cut that it does cut, names of the weights that stay whole because no axis of
    theirs divides)."""
    mesh = {"data": 1, "fsdp": fsdp, "tensor": tensor}
    counts = {s: model.layout.count(s) for s in set(model.layout)}
    found = [(1, w) for w in around(model)] + [(n, w) for s, n in sorted(counts.items()) for w in sublayer(model, s)]
    meant = [
        (n * w.size, w.name, w.held(mesh) < w.held({**mesh, "fsdp": 1})) for n, w in found if "fsdp" in sum(w.cuts, ())
    ]
    cut = sum(size for size, _, is_cut in meant if is_cut)
    return cut / sum(size for size, _, _ in meant), list(dict.fromkeys(name for _, name, is_cut in meant if not is_cut))


def around(model: ModelConfig) -> list[Weight]:
    """Embedding, final norm and, unless it is tied, head."""
    table = (model.vocab_size, model.hidden_size)
    head = [] if model.tie_word_embeddings else [Weight("lm_head.weight", table, ROWS)]
    return [Weight("embed.weight", table, ROWS), Weight("norm.weight", (model.hidden_size,)), *head]


def sublayer(model: ModelConfig, symbol: str) -> list[Weight]:
    """Those of one sublayer of the layout, its pre-norm included."""
    D = model.hidden_size
    norm = [] if symbol == "S" and not model.mamba2.pre_norm else [Weight("norm.weight", (D,))]
    if symbol == "-":
        F = model.intermediate_size
        found = [_columns("gate", D, F), _columns("up", D, F), _rows("down", F, D)]
        return norm + [w._replace(name=f"mlp.{w.name}") for w in found]
    if symbol == "*":
        found = _mla(model)
    elif symbol == "A":
        found = _gqa(model)
    elif symbol == "S":
        found = _mamba2(model)
    else:
        found = _delta(model, model.gdn if symbol == "G" else model.kda)
    return norm + [w._replace(name=f"mixer.{w.name}") for w in found]


def _columns(name: str, n_in: int, n_out: int) -> Weight:
    return Weight(f"{name}_proj.weight", (n_in, n_out), COLUMNS)


def _rows(name: str, n_in: int, n_out: int) -> Weight:
    return Weight(f"{name}_proj.weight", (n_in, n_out), ROWS)


def _inputs(name: str, n_in: int, n_out: int) -> Weight:
    return Weight(f"{name}.weight", (n_in, n_out), INPUTS)


def _mla(model: ModelConfig) -> list[Weight]:
    mla, D, H = model.mla, model.hidden_size, model.mla.num_heads
    query = H * (mla.qk_nope_head_dim + mla.qk_rope_head_dim)
    if mla.q_lora_rank:
        found = [
            _inputs("q_a_proj", D, mla.q_lora_rank),
            Weight("q_a_layernorm.weight", (mla.q_lora_rank,)),
            _columns("q_b", mla.q_lora_rank, query),
        ]
    else:
        found = [_columns("q", D, query)]
    return [
        *found,
        _inputs("kv_a_proj_with_mqa", D, mla.kv_lora_rank + mla.qk_rope_head_dim),
        Weight("kv_a_layernorm.weight", (mla.kv_lora_rank,)),
        _columns("kv_b", mla.kv_lora_rank, H * (mla.qk_nope_head_dim + mla.v_head_dim)),
        _rows("o", H * mla.v_head_dim, D),
    ]


def _gqa(model: ModelConfig) -> list[Weight]:
    gqa, D, K = model.gqa, model.hidden_size, model.gqa.head_dim
    query, key = gqa.num_heads * K, gqa.num_kv_heads * K
    widths = {"q": query * (2 if gqa.output_gate else 1), "k": key, "v": key}
    found = [_columns(name, D, width) for name, width in widths.items()]
    if gqa.bias:
        found += [Weight(f"{name}_proj.bias", (width,), HEADS) for name, width in widths.items()]
    if gqa.qk_norm:
        found += [Weight(f"{name}_norm.weight", (K,)) for name in "qk"]
    return [*found, _rows("o", query, D)]


def _delta(model: ModelConfig, section: GDNConfig | KDAConfig) -> list[Weight]:
    """Gated DeltaNet and Kimi Delta Attention."""
    D, HV, V = model.hidden_size, section.num_v_heads, section.v_head_dim
    keys, values = section.num_heads * section.head_dim, HV * V
    widths = {"q": keys, "k": keys, "v": values}
    found = [_columns(name, D, width) for name, width in widths.items()]
    found.append(_columns("b", D, HV))
    if section.use_short_conv:
        found += [Weight(f"{n}_conv1d.weight", (width, section.conv_size), HEADS) for n, width in widths.items()]
    found += [Weight("o_norm.weight", (V,)), _rows("o", values, D), Weight("A_log", (HV,), HEADS)]
    if isinstance(section, KDAConfig):  # decays and gate of rank V
        decays = HV * section.head_dim
        found += [_inputs("f_a_proj", D, V), _columns("f_b", V, decays), Weight("dt_bias", (decays,), HEADS)]
        found += [_inputs("g_a_proj", D, V), _columns("g_b", V, values)]
        return found + ([Weight("g_b_proj.bias", (values,), HEADS)] if section.gate_bias else [])
    found += [_columns("a", D, HV), Weight("dt_bias", (HV,), HEADS)]
    return found + ([_columns("g", D, values)] if section.use_gate else [])


def _mamba2(model: ModelConfig) -> list[Weight]:
    mamba2, D = model.mamba2, model.hidden_size
    inner = D * mamba2.expand
    heads, convolved = inner // mamba2.head_dim, inner + 2 * mamba2.n_groups * mamba2.state_size
    return [
        _inputs("in_proj", D, inner + convolved + heads),
        Weight("conv1d.weight", (convolved, mamba2.conv_size)),
        Weight("conv1d.bias", (convolved,)),
        *(Weight(name, (heads,), HEADS) for name in ("A_log", "dt_bias", "D")),
        Weight("norm.weight", (inner,)),
        _rows("out", inner, D),
    ]

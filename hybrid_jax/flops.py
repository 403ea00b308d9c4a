"""Parameters and floating-point operations of a model, sublayer by sublayer, by formula.

FLOPs per token count what the mathematics needs: 2 a multiply-add, every weight matrix once (the head too,
the embedding lookup not), causal attention at (T + 1) / 2 keys a query, the recurrences at their one-token
cost (delta rule: decay-free 6 K V a head, for S'k, the outer product and S'q; Mamba2: 4 P N, for the outer
product and S C). Backward is twice forward. Not counted: norms, gates, convolutions, rotary, the extra work
of chunked forms and of rematerialisation, so MFU is not flattered by them. AMD Primus prints figures 1.2 to
2.4 times as high for these models (it counts every sublayer as attention plus MLP, or every mixer as Mamba2):
compare tokens per second with it.

D width, F MLP width, T sequence length, H heads, HV value heads, K key dims, V value dims, W conv taps. No
jax here.
"""

import dataclasses

from hybrid_jax import weights
from hybrid_jax.config import ModelConfig
from hybrid_jax.pattern import NAMES


@dataclasses.dataclass(frozen=True)
class Cost:
    """Of one sublayer: parameters, and forward FLOPs per token."""

    parameters: int
    flops: float


def sublayer(model: ModelConfig, symbol: str, sequence_length: int) -> Cost:
    """The cost of one sublayer, its pre-norm included."""
    found = weights.sublayer(model, symbol)
    products = 2.0 * sum(w.size for w in found if w.is_matrix)
    return Cost(sum(w.size for w in found), products + mixing(model, symbol, sequence_length))


def mixing(model: ModelConfig, symbol: str, sequence_length: int) -> float:
    """Forward FLOPs per token of what a sublayer does beside its matrices: attention, or a recurrence."""
    if symbol == "-":
        return 0.0
    if symbol == "*":
        mla = model.mla
        return _attention(mla.num_heads, mla.qk_nope_head_dim + mla.qk_rope_head_dim, mla.v_head_dim, sequence_length)
    if symbol == "A":
        return _attention(model.gqa.num_heads, model.gqa.head_dim, model.gqa.head_dim, sequence_length)
    if symbol == "S":
        return 4.0 * model.hidden_size * model.mamba2.expand * model.mamba2.state_size
    section = model.gdn if symbol == "G" else model.kda
    return 6.0 * section.num_v_heads * section.head_dim * section.v_head_dim


def breakdown(model: ModelConfig, sequence_length: int) -> list[tuple[str, int, Cost]]:
    """(part, how many, cost of all of them): embedding, each kind of sublayer in its order of appearance,
    final norm, head.

    The parts' parameters and FLOPs add up to the model's. A tied head has FLOPs but no parameters.
    """
    layout, table = model.layout, model.vocab_size * model.hidden_size
    rows = [("embedding", 1, Cost(table, 0.0))]
    for symbol in dict.fromkeys(layout):
        count, one = layout.count(symbol), sublayer(model, symbol, sequence_length)
        rows.append((NAMES[symbol], count, Cost(count * one.parameters, count * one.flops)))
    rows.append(("final norm", 1, Cost(model.hidden_size, 0.0)))
    tied = model.tie_word_embeddings
    rows.append(("head (tied)" if tied else "head", 1, Cost(0 if tied else table, 2.0 * table)))
    return rows


def parameter_count(model: ModelConfig) -> int:
    """All parameters."""
    return sum(cost.parameters for _, _, cost in breakdown(model, 1))


def non_embedding_count(model: ModelConfig) -> int:
    """Parameters without the embedding and the head."""
    return sum(cost.parameters for part, _, cost in breakdown(model, 1) if part not in ("embedding", "head"))


def flops_per_token(model: ModelConfig, sequence_length: int) -> float:
    """Forward and backward FLOPs per token, averaged over a row (one document) of `sequence_length`."""
    return 3.0 * sum(cost.flops for _, _, cost in breakdown(model, sequence_length))


def _attention(heads: int, key_dim: int, value_dim: int, sequence_length: int) -> float:
    return 2.0 * heads * (key_dim + value_dim) * (sequence_length + 1) / 2

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

from hybrid_jax.config import GDNConfig, KDAConfig, ModelConfig
from hybrid_jax.pattern import NAMES


@dataclasses.dataclass(frozen=True)
class Cost:
    """Of one sublayer: parameters, and forward FLOPs per token."""

    parameters: int
    flops: float


def sublayer(model: ModelConfig, symbol: str, sequence_length: int) -> Cost:
    """The cost of one sublayer, its pre-norm included."""
    if symbol == "-":
        cost = _dense(3 * model.hidden_size * model.intermediate_size)
    elif symbol == "*":
        cost = _mla(model, sequence_length)
    elif symbol == "A":
        cost = _gqa(model, sequence_length)
    elif symbol == "S":
        cost = _mamba2(model)
    else:
        cost = _delta(model, model.gdn if symbol == "G" else model.kda)
    pre_norm = 0 if symbol == "S" and not model.mamba2.pre_norm else model.hidden_size
    return Cost(cost.parameters + pre_norm, cost.flops)


def breakdown(model: ModelConfig, sequence_length: int) -> list[tuple[str, int, Cost]]:
    """(part, how many, cost of all of them): embedding, each kind of sublayer in its order of appearance,
    final norm, head.

    The parts' parameters and FLOPs add up to the model's. A tied head has FLOPs but no parameters.
    """
    layout, weights = model.layout, model.vocab_size * model.hidden_size
    rows = [("embedding", 1, Cost(weights, 0.0))]
    for symbol in dict.fromkeys(layout):
        count, one = layout.count(symbol), sublayer(model, symbol, sequence_length)
        rows.append((NAMES[symbol], count, Cost(count * one.parameters, count * one.flops)))
    rows.append(("final norm", 1, Cost(model.hidden_size, 0.0)))
    tied = model.tie_word_embeddings
    rows.append(("head (tied)" if tied else "head", 1, Cost(0 if tied else weights, 2.0 * weights)))
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


def _dense(weights: int, other_parameters: int = 0, other_flops: float = 0.0) -> Cost:
    """Matrices of `weights` entries in all, each used once a token, and what comes on top."""
    return Cost(weights + other_parameters, 2.0 * weights + other_flops)


def _attention_flops(heads: int, key_dim: int, value_dim: int, sequence_length: int) -> float:
    return 2.0 * heads * (key_dim + value_dim) * (sequence_length + 1) / 2


def _mla(model: ModelConfig, sequence_length: int) -> Cost:
    mla, width = model.mla, model.hidden_size
    key_dim = mla.qk_nope_head_dim + mla.qk_rope_head_dim
    if mla.q_lora_rank:
        query = mla.q_lora_rank * (width + mla.num_heads * key_dim)
    else:
        query = width * mla.num_heads * key_dim
    down = width * (mla.kv_lora_rank + mla.qk_rope_head_dim)
    up = mla.kv_lora_rank * mla.num_heads * (mla.qk_nope_head_dim + mla.v_head_dim)
    out = mla.num_heads * mla.v_head_dim * width
    latent_norms = mla.q_lora_rank + mla.kv_lora_rank
    attention = _attention_flops(mla.num_heads, key_dim, mla.v_head_dim, sequence_length)
    return _dense(query + down + up + out, latent_norms, attention)


def _gqa(model: ModelConfig, sequence_length: int) -> Cost:
    gqa, width = model.gqa, model.hidden_size
    query = gqa.num_heads * gqa.head_dim
    projected = query * (2 if gqa.output_gate else 1) + 2 * gqa.num_kv_heads * gqa.head_dim
    other = (projected if gqa.bias else 0) + (2 * gqa.head_dim if gqa.qk_norm else 0)
    attention = _attention_flops(gqa.num_heads, gqa.head_dim, gqa.head_dim, sequence_length)
    return _dense(width * (projected + query), other, attention)


def _delta(model: ModelConfig, section: GDNConfig | KDAConfig) -> Cost:
    """Gated DeltaNet and Kimi Delta Attention."""
    width, heads, value_dim = model.hidden_size, section.num_v_heads, section.v_head_dim
    keys, values = section.num_heads * section.head_dim, heads * value_dim
    weights = width * (2 * keys + 2 * values + heads)  # q, k, v, out, beta
    other = (
        value_dim + heads + (section.conv_size * (2 * keys + values) if section.use_short_conv else 0)
    )  # norm, A_log
    if isinstance(section, KDAConfig):
        decay = value_dim * (width + heads * section.head_dim)  # two matrices of rank value_dim, as the gate's
        weights += decay + value_dim * (width + values)
        other += heads * section.head_dim + (values if section.gate_bias else 0)  # dt_bias, gate bias
    else:
        weights += width * heads + (width * values if section.use_gate else 0)
        other += heads  # dt_bias
    return _dense(weights, other, 6.0 * heads * section.head_dim * value_dim)


def _mamba2(model: ModelConfig) -> Cost:
    mamba2, width = model.mamba2, model.hidden_size
    inner = width * mamba2.expand
    heads, convolved = inner // mamba2.head_dim, inner + 2 * mamba2.n_groups * mamba2.state_size
    weights = width * (inner + convolved + heads) + inner * width
    other = convolved * (mamba2.conv_size + 1) + 3 * heads + inner  # conv and bias; A_log, dt_bias, D; norm
    return _dense(weights, other, 4.0 * inner * mamba2.state_size)

"""What each kind of sublayer keeps for its backward pass, in bytes, under each policy of config.model.remat.

The formulas follow the derivative rules of layers/ and kernels/: a product keeps its input, a checkpointed norm, gate
or convolution its inputs in their own type, an operation the residuals of its own rule (inputs, outputs, and states
between chunks or blocks). Some tensors stand twice, as the rules before and after a reshape keep each their own.
tests/test_residuals.py compares them with what jax lists.

D width, F MLP width, H heads, K key dims, V value dims, N state dims, c bytes of the compute dtype. No jax here.
"""

from typing import NamedTuple

from hybrid_jax.config import GDNConfig, KDAConfig, ModelConfig
from hybrid_jax.kernels import support
from hybrid_jax.kernels.cuts import CHUNK, block_sizes, blocks_of, chunk_of, triton_chunk

FP32 = INT32 = 4
FEW_ROWS = 128  # up to which layers.linear.together multiplies one by one

# Policies that keep a tensor.
PLAIN = ("none",)
PRODUCT = ("dots",)
NAMED = ("names",)
OPERATION = ("none", "names")  # what goes into an operation, or comes out of it
ALWAYS = ("none", "dots", "names", "full")


class Part(NamedTuple):
    """What one device computes at once, and how.

    rows of `length` tokens; compute: bytes of the compute dtype; tensor: devices that share heads and columns; joined:
    whether projections of one input are one product (layers.linear.together); arch: of the tile tables, "" where Triton
    kernels do not run; backend: config.kernels.backend.
    """

    rows: int
    length: int
    compute: int
    tensor: int = 1
    joined: bool = True
    arch: str = ""
    backend: str = "auto"

    @property
    def tokens(self) -> int:
        return self.rows * self.length

    @property
    def joins(self) -> bool:
        return self.joined and self.tokens > FEW_ROWS

    def runs_triton(self, op: str, K: int, V: int) -> bool:
        """Whether the delta rule `op` runs in Triton kernels."""
        return bool(self.arch) and self.backend in ("auto", "triton") and not support.unfit_heads(op, K, V)


class _List:
    """Collects tensors of one sublayer."""

    def __init__(self, part: Part, policy: str):
        self.part, self.policy = part, policy
        self.found: dict[str, int] = {}

    def bytes(self, name: str, size: int, under: tuple[str, ...]) -> None:
        if size and self.policy in under:
            assert name not in self.found, name
            self.found[name] = size

    def tokens(self, name: str, width: int, under: tuple[str, ...], size: int = 0) -> None:
        """`width` numbers a token, of `size` bytes (0: those of the compute dtype)."""
        self.bytes(name, self.part.tokens * width * (size or self.part.compute), under)


def kept(model: ModelConfig, symbol: str, policy: str, part: Part) -> dict[str, int]:
    """{tensor: bytes} that one sublayer of the layout keeps on a device between forward and backward pass, its input
    included; parameters and the batch, which are there anyway, are not."""
    found = _List(part, policy)
    found.tokens("input", model.hidden_size, ALWAYS)
    if symbol != "S" or model.mamba2.pre_norm:
        found.tokens("normed input", model.hidden_size, PLAIN)
    if symbol == "-":
        width = model.intermediate_size // part.tensor
        found.tokens("gate", width, PLAIN + PRODUCT)
        found.tokens("up", width, PLAIN + PRODUCT)
        found.tokens("gated", width, PLAIN)
    elif symbol == "*":
        _mla(model, part, found)
    elif symbol == "A":
        _gqa(model, part, found)
    elif symbol == "S":
        _mamba2(model, part, found)
    else:
        _delta(model, model.gdn if symbol == "G" else model.kda, part, found)
    return found.found


def _joined(model: ModelConfig, part: Part, found: _List, width: int) -> None:
    """Projections of one input, `width` columns together."""
    found.tokens("projections", width, PRODUCT)
    if part.joins:
        found.bytes("joined weights", FP32 * model.hidden_size * width, PLAIN)


def _rotary(found: _List, channels: int) -> None:
    """cos and sin of queries and keys, of each half of the rotated channels."""
    found.tokens("cos and sin", 2 * channels, PLAIN, FP32)


def _attention(part: Part, found: _List, heads: int, kv_heads: int, key_dim: int, value_dim: int) -> None:
    queries, values = heads * key_dim, kv_heads * (key_dim + value_dim)
    padded = part.rows * -(-part.length // (block := max(block_sizes(part.length)))) * block
    found.tokens("q, k and v", queries + values, NAMED)
    found.bytes("q, k and v, padded", padded * (queries + values) * part.compute, PLAIN)
    found.bytes("output", padded * heads * value_dim * part.compute, OPERATION)
    found.bytes("log sums", padded * heads * FP32, OPERATION)
    found.bytes("documents", padded * INT32, PLAIN)


def _mla(model: ModelConfig, part: Part, found: _List) -> None:
    mla, heads = model.mla, model.mla.num_heads // part.tensor
    key_dim, latent = mla.qk_nope_head_dim + mla.qk_rope_head_dim, mla.kv_lora_rank
    query = heads * key_dim
    _joined(model, part, found, (mla.q_lora_rank or query) + latent + mla.qk_rope_head_dim)
    if mla.q_lora_rank:
        found.tokens("query latent", mla.q_lora_rank, PLAIN)
        found.tokens("normed query latent", mla.q_lora_rank, PLAIN)
        found.tokens("queries", query, PRODUCT)
    found.tokens("latent", latent, PLAIN)
    found.tokens("normed latent", latent, PLAIN)
    found.tokens("keys and values", heads * (mla.qk_nope_head_dim + mla.v_head_dim), PRODUCT)
    if mla.rope.style != "none":
        _rotary(found, int(mla.qk_rope_head_dim * mla.rope.rotary_fraction))
    _attention(part, found, heads, heads, key_dim, mla.v_head_dim)
    found.tokens("output, for its projection", heads * mla.v_head_dim, PLAIN)


def _gqa(model: ModelConfig, part: Part, found: _List) -> None:
    gqa, K = model.gqa, model.gqa.head_dim
    heads, kv_heads = gqa.num_heads // part.tensor, gqa.num_kv_heads // part.tensor
    found.tokens("projected q", heads * K * (2 if gqa.output_gate else 1), PRODUCT)
    found.tokens("projected k", kv_heads * K, PRODUCT)
    found.tokens("projected v", kv_heads * K, PRODUCT)
    if gqa.qk_norm:
        found.tokens("q and k before their norms", (heads + kv_heads) * K, PLAIN)
    if gqa.rope.style != "none":
        _rotary(found, int(K * gqa.rope.rotary_fraction))
    _attention(part, found, heads, kv_heads, K, K)
    if gqa.output_gate:
        found.tokens("gate and gated", 3 * heads * K, PLAIN, FP32)
    found.tokens("output, for its projection", heads * K, PLAIN)


def _convolved(found: _List, part: Part, width: int, taps: int) -> None:
    found.tokens("before the convolution", width, PLAIN)
    found.bytes("before the row", part.rows * (taps - 1) * width * part.compute, PLAIN)
    found.bytes("documents of the convolution", part.rows * (taps - 1 + part.length) * INT32, PLAIN)


def _delta(model: ModelConfig, section: GDNConfig | KDAConfig, part: Part, found: _List) -> None:
    """Gated DeltaNet and Kimi Delta Attention."""
    H, HV = section.num_heads // part.tensor, section.num_v_heads // part.tensor
    K, V = section.head_dim, section.v_head_dim
    convolved = 2 * H * K + HV * V
    if isinstance(section, KDAConfig):
        op, is_kda, has_gate, bounded = "kda", True, True, section.lower_bound != 0.0
    else:
        op, is_kda, has_gate, bounded = "gdn", False, section.use_gate, False
    triton = part.runs_triton(op, K, V)

    _joined(model, part, found, convolved + HV + (2 * V if is_kda else HV + HV * V * has_gate))
    if section.use_short_conv:
        _convolved(found, part, convolved, section.conv_size)
        if part.joined:
            found.bytes("joined taps", convolved * section.conv_size * FP32, PLAIN)
    else:
        found.tokens("before silu, and for its derivative", 3 * convolved, PLAIN)
    found.tokens("q, k and v", convolved, OPERATION)
    found.tokens("beta", HV, PLAIN, FP32)
    found.tokens("beta's derivative", HV, PLAIN, FP32)
    if is_kda:
        found.tokens("latents of decay and gate", 2 * V, PLAIN)
        found.tokens("decay and gate", HV * (K + V), PRODUCT)
    gates = HV * K if is_kda else HV
    if is_kda and triton:
        found.tokens("raw decays", gates, PLAIN)
        found.bytes("dt_bias", gates * FP32, PLAIN)
    else:
        found.tokens("decays and their derivatives", (3 if bounded else 4) * gates, PLAIN, FP32)
        found.bytes("rates", 2 * HV * FP32, PLAIN)

    states = part.rows * HV * K * V
    if triton:
        chunk = triton_chunk(op, part.arch, K, part.compute, part.length)
        padded = part.length
        if is_kda:
            chunks = part.rows * -(-part.length // chunk) * HV
            found.tokens("new values", HV * V, OPERATION)
            parts = 1 if part.compute == FP32 else 2  # of the inverse
            found.bytes("pairs", chunks * chunk * chunk * (parts + 1) * part.compute, OPERATION)
            found.bytes("norms", 2 * chunks * chunk * FP32, OPERATION)
            found.bytes("sums of gates", chunks * -(-chunk // 16) * FP32, OPERATION)
        found.bytes("states", -(-part.length // chunk) * states * part.compute, OPERATION)
        found.tokens("documents", 1, PLAIN, INT32)
    else:
        cut = blocks_of(part.length, chunk_of(part.length, CHUNK))
        padded = cut.blocks * cut.tokens
        found.bytes("states", cut.blocks * states * FP32, OPERATION)
        found.bytes("state before the row", states * FP32, PLAIN)
    found.bytes("output", part.rows * padded * HV * V * part.compute, NAMED)
    found.tokens("output, for its norm", HV * V, PLAIN)
    if has_gate:
        found.tokens("gate", HV * V, PLAIN)
    found.tokens("output, for its projection", HV * V, PLAIN)


def _mamba2(model: ModelConfig, part: Part, found: _List) -> None:
    mamba2 = model.mamba2
    inner = model.hidden_size * mamba2.expand // part.tensor
    heads = inner // mamba2.head_dim
    convolved = inner + 2 * mamba2.n_groups // part.tensor * mamba2.state_size
    found.tokens("projections", inner + convolved + heads, PRODUCT)
    _convolved(found, part, convolved, mamba2.conv_size)
    cut = blocks_of(part.length, min(mamba2.chunk_size, part.length))
    padded = part.rows * cut.blocks * cut.tokens
    found.tokens("x, B and C", convolved, NAMED)
    found.bytes("x, B and C, padded", padded * convolved * part.compute, PLAIN)
    found.tokens("dt's derivatives", 2 * heads, PLAIN, FP32)
    found.bytes("dt, padded", padded * heads * FP32, PLAIN)
    found.bytes("rates", 2 * heads * FP32, PLAIN)
    states = part.rows * inner * mamba2.state_size * FP32
    found.bytes("states", cut.blocks * states, OPERATION)
    found.bytes("state before the row", states, PLAIN)
    found.bytes("documents", padded * INT32, PLAIN)
    found.bytes("output", padded * inner * part.compute, NAMED)
    found.tokens("output, for its norm", inner, PLAIN)
    found.tokens("gate", inner, PLAIN)
    found.tokens("output, for its projection", inner, PLAIN)

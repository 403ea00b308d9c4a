"""The sublayers of a hybrid model: attention (MLA, GQA), linear-recurrent mixers (GDN, KDA, Mamba2), SwiGLU.

Each takes x [B, T, D], what this forward pass shares (Pass) and its state from earlier tokens (a dict of tensors, None
for none), and returns its output and new state. Norms, gates, softmax and states are fp32, rounded once.

Shapes: B batch, T time, S time with what the cache holds, D model, H heads, K key channels, V value channels.
"""

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .configuration_hybrid import HybridConfig
from .recurrences_hybrid import delta_rule, short_conv, ssd, upcast

State = dict[str, Tensor] | None


class Pass(NamedTuple):
    """counts [B]: tokens of each row, the rest behind them being padding (None: all T).

    rope: cos and sin [B, T, R/2] for MLA's and GQA's heads. mask [B, 1, T, S] bool: what attention sees (None: causal,
    or all for one token). keep_state: whether states are wanted.
    """

    counts: Tensor | None
    mask: Tensor | None
    rope_mla: tuple[Tensor, Tensor] | None
    rope_gqa: tuple[Tensor, Tensor] | None
    keep_state: bool

    def erase(self, x: Tensor) -> Tensor:
        """x [B, T, ...] with zeros at padding."""
        if self.counts is None:
            return x
        padding = torch.arange(x.shape[1], device=x.device) >= self.counts[:, None]
        return x.masked_fill(padding.reshape(*padding.shape, *(1,) * (x.ndim - 2)), 0)


class HybridRMSNorm(nn.Module):
    def __init__(self, size: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor, *, groups: int = 1, gate: Tensor | None = None) -> Tensor:
        """x [..., D] normalised in `groups` equal parts of D, times weight, times `gate` (fp32), rounded to x.dtype."""
        h = upcast(x).unflatten(-1, (groups, -1))
        h = (h * torch.rsqrt(h.square().mean(-1, keepdim=True) + self.eps)).flatten(-2) * upcast(self.weight)
        return (h if gate is None else h * gate).to(x.dtype)


class HybridShortConv(nn.Module):
    """A depthwise causal convolution's parameters: weight [D, 1, W] and, with `bias`, bias [D]."""

    def __init__(self, channels: int, taps: int, bias: bool = False):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(channels, 1, taps))
        self.bias = nn.Parameter(torch.empty(channels)) if bias else None


class HybridLinear(nn.Linear):
    """A projection. A new model draws it from U(-bound, bound) where a `bound` is given, else normally, and the `last`
    one of a sublayer smaller if the config says so."""

    last: bool
    bound: float

    def __init__(self, n_in: int, n_out: int, *, bias: bool = False, last: bool = False, bound: float = 0.0):
        super().__init__(n_in, n_out, bias=bias)
        self.last, self.bound = last, bound


def frequencies(rope, channels: int) -> tuple[list[float], float]:
    """Angle per position of each of the R/2 pairs, and the factor on cos and sin.

    theta^(-2i/R); with a yarn_factor f above 1, pairs of fewer than yarn_beta_slow turns in yarn_original_max_position
    tokens turn f times slower, those of more than yarn_beta_fast turns as before, with a linear ramp between, and the
    factor is 0.1 ln f + 1 (YaRN, arXiv:2309.00071). With a llama3_factor above 1 the ramp is linear in the turns,
    between llama3_low_rotations and llama3_high_rotations of them, and the factor is 1 (Llama 3.1).
    """
    freq = [rope.theta ** (-2 * i / channels) for i in range(channels // 2)]
    if rope.llama3_factor > 1.0:
        low, high = rope.llama3_low_rotations, rope.llama3_high_rotations
        turns = [rope.llama3_original_max_position * f / (2 * math.pi) for f in freq]
        kept = [min(max((t - low) / (high - low), 0.0), 1.0) for t in turns]
        return [f * k + f / rope.llama3_factor * (1.0 - k) for f, k in zip(freq, kept, strict=True)], 1.0
    if rope.yarn_factor <= 1.0:
        return freq, 1.0

    def pair_with(turns: float) -> float:
        return channels * math.log(rope.yarn_original_max_position / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))

    low = max(math.floor(pair_with(rope.yarn_beta_fast)), 0)
    high = min(math.ceil(pair_with(rope.yarn_beta_slow)), channels - 1)
    slowed = [min(max((i - low) / max(high - low, 0.001), 0.0), 1.0) for i in range(channels // 2)]
    freq = [f * (1.0 - s) + f / rope.yarn_factor * s for f, s in zip(freq, slowed, strict=True)]
    return freq, 0.1 * math.log(rope.yarn_factor) + 1.0


def cos_sin(rope, head_dim: int, positions: Tensor) -> tuple[Tensor, Tensor] | None:
    """cos and sin of positions [B, T] times the pairs' frequencies, fp32 [B, T, R/2]; None where nothing turns."""
    channels = int(head_dim * rope.rotary_fraction)
    if rope.style == "none" or channels == 0:
        return None
    freq, factor = frequencies(rope, channels)
    # float64: an fp32 product of a large position and a frequency near 1 is off by up to 0.06 at a million tokens.
    device = "cpu" if positions.device.type == "mps" else positions.device
    angle = positions.to(device, torch.float64)[..., None] * torch.tensor(freq, dtype=torch.float64, device=device)
    cos, sin = ((f(angle) * factor).float().to(positions.device) for f in (torch.cos, torch.sin))
    return cos, sin


def rotate(x: Tensor, style: str, turn: tuple[Tensor, Tensor] | None) -> Tensor:
    """Turns the first R channels of x [B, T, H, channels] in fp32; interleaved pairs come out as [evens | odds]."""
    if turn is None:
        return x
    cos, sin = (t[:, :, None] for t in turn)
    turned, kept = x.split([2 * cos.shape[-1], x.shape[-1] - 2 * cos.shape[-1]], dim=-1)
    turned = upcast(turned)
    a, b = (turned[..., 0::2], turned[..., 1::2]) if style == "interleaved" else turned.chunk(2, dim=-1)
    return torch.cat([torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1).to(x.dtype), kept], dim=-1)


def attend(q: Tensor, k: Tensor, v: Tensor, scale: float, mask: Tensor | None) -> Tensor:
    """Causal softmax attention. q [B, T, H, K], k [B, S, G, K], v [B, S, G, V] -> [B, T, H, V]; H a multiple of G."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    if k.shape[1] != q.shape[1]:
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    causal = mask is None and q.shape[2] > 1
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal, scale=scale).transpose(1, 2)


def _held(state: State, name: str) -> Tensor | None:
    return None if state is None else state[name]


def _extended(state: State, **new: Tensor) -> dict[str, Tensor]:
    """Each of `new` [B, T, ...] behind what the state holds of it."""
    return new if state is None else {name: torch.cat([state[name], x], dim=1) for name, x in new.items()}


class HybridMLA(nn.Module):
    """Keys and values from one latent a token, one rotated key for all heads (arXiv:2405.04434).

    A query is [nope | rope]. The state holds the normalised latents [B, S, L] and rotated keys [B, S, R].
    """

    def __init__(self, config: HybridConfig):
        super().__init__()
        self.sizes = sizes = config.section("mla")
        width, eps = config.hidden_size, sizes.norm_eps
        self.head_dims = (sizes.qk_nope_head_dim, sizes.qk_rope_head_dim)
        q_width = sizes.num_heads * sum(self.head_dims)
        if sizes.q_lora_rank:
            self.q_a_proj = HybridLinear(width, sizes.q_lora_rank)
            self.q_a_layernorm = HybridRMSNorm(sizes.q_lora_rank, eps)
            self.q_b_proj = HybridLinear(sizes.q_lora_rank, q_width)
        else:
            self.q_proj = HybridLinear(width, q_width)
        self.kv_a_proj_with_mqa = HybridLinear(width, sizes.kv_lora_rank + sizes.qk_rope_head_dim)
        self.kv_a_layernorm = HybridRMSNorm(sizes.kv_lora_rank, eps)
        kv_width = sizes.num_heads * (sizes.qk_nope_head_dim + sizes.v_head_dim)
        self.kv_b_proj = HybridLinear(sizes.kv_lora_rank, kv_width)
        self.o_proj = HybridLinear(sizes.num_heads * sizes.v_head_dim, width, last=True)

    def forward(self, x: Tensor, this: Pass, state: State):
        sizes = self.sizes
        H, (N, R), V = sizes.num_heads, self.head_dims, sizes.v_head_dim
        q = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x))) if sizes.q_lora_rank else self.q_proj(x)
        q_nope, q_rope = q.unflatten(-1, (H, N + R)).split([N, R], dim=-1)
        latent, k_rope = self.kv_a_proj_with_mqa(x).split([sizes.kv_lora_rank, R], dim=-1)
        q_rope = rotate(q_rope, sizes.rope.style, this.rope_mla)
        k_rope = rotate(k_rope[:, :, None], sizes.rope.style, this.rope_mla)[:, :, 0]
        held = _extended(state, latent=self.kv_a_layernorm(latent), k_rope=k_rope)
        latent, k_rope = held["latent"], held["k_rope"]
        scale = (N + R) ** -0.5
        if x.shape[1] == 1 and state is not None:
            # One query: the latents themselves are keys and values, and kv_b_proj acts on query and output instead.
            to_k, to_v = self.kv_b_proj.weight.unflatten(0, (H, N + V)).split([N, V], dim=1)
            q = torch.cat([torch.einsum("bthn,hnl->bthl", q_nope, to_k), q_rope], dim=-1)
            k = torch.cat([latent, k_rope], dim=-1)[:, :, None]
            o = attend(q, k, latent[:, :, None], scale, this.mask)
            o = torch.einsum("bthl,hvl->bthv", o, to_v)
        else:
            k_nope, v = self.kv_b_proj(latent).unflatten(-1, (H, N + V)).split([N, V], dim=-1)
            k = torch.cat([k_nope, k_rope[:, :, None].expand(-1, -1, H, -1)], dim=-1)
            o = attend(torch.cat([q_nope, q_rope], dim=-1), k, v, scale, this.mask)
        return self.o_proj(o.flatten(-2)), held


class HybridGQA(nn.Module):
    """Grouped-query attention (arXiv:2305.13245); with output_gate, q_proj gives [query | gate] a head.

    The state holds keys and values [B, S, G, K].
    """

    def __init__(self, config: HybridConfig):
        super().__init__()
        self.sizes = sizes = config.section("gqa")
        width, K = config.hidden_size, sizes.head_dim
        self.q_proj = HybridLinear(width, sizes.num_heads * K * (2 if sizes.output_gate else 1), bias=sizes.bias)
        self.k_proj = HybridLinear(width, sizes.num_kv_heads * K, bias=sizes.bias)
        self.v_proj = HybridLinear(width, sizes.num_kv_heads * K, bias=sizes.bias)
        if sizes.qk_norm:
            self.q_norm = HybridRMSNorm(K, sizes.norm_eps)
            self.k_norm = HybridRMSNorm(K, sizes.norm_eps)
        self.o_proj = HybridLinear(sizes.num_heads * K, width, last=True)

    def forward(self, x: Tensor, this: Pass, state: State):
        sizes = self.sizes
        K = sizes.head_dim
        q, gate = self.q_proj(x).unflatten(-1, (sizes.num_heads, -1)).tensor_split([K], dim=-1)
        k, v = (proj(x).unflatten(-1, (sizes.num_kv_heads, K)) for proj in (self.k_proj, self.v_proj))
        if sizes.qk_norm:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k = (rotate(z, sizes.rope.style, this.rope_gqa) for z in (q, k))
        held = _extended(state, k=k, v=v)
        o = attend(q, held["k"], held["v"], K**-0.5, this.mask)
        if sizes.output_gate:
            o = (upcast(o) * torch.sigmoid(upcast(gate))).to(o.dtype)
        return self.o_proj(o.flatten(-2)), held


class _Delta(nn.Module):
    """What GDN and KDA share: q, k, v = silu(conv(W x)), beta, output norm and projection.

    The state holds S [B, HV, K, V] fp32 and the last W-1 inputs of the convolution [B, W-1, q | k | v channels].
    """

    def __init__(self, config: HybridConfig, section: str):
        super().__init__()
        self.sizes = sizes = config.section(section)
        width = config.hidden_size
        self.value_dim = round(sizes.head_dim * sizes.expand_v)
        self.widths = [sizes.num_heads * sizes.head_dim] * 2 + [sizes.num_v_heads * self.value_dim]
        self.q_proj, self.k_proj, self.v_proj = (HybridLinear(width, w) for w in self.widths)
        self.b_proj = HybridLinear(width, sizes.num_v_heads)
        if sizes.use_short_conv:
            convolutions = (HybridShortConv(w, sizes.conv_size) for w in self.widths)
            self.q_conv1d, self.k_conv1d, self.v_conv1d = convolutions
        self.A_log = nn.Parameter(torch.empty(sizes.num_v_heads))
        self.o_norm = HybridRMSNorm(self.value_dim, sizes.norm_eps)
        self.o_proj = HybridLinear(self.widths[2], width, last=True)

    def decays(self, x: Tensor) -> Tensor:
        """Log decays [B, T, HV, 1 or K] fp32."""
        raise NotImplementedError

    def output_gate(self, x: Tensor) -> Tensor | None:
        """[B, T, HV, V] fp32, or None for no gate."""
        raise NotImplementedError

    def forward(self, x: Tensor, this: Pass, state: State):
        sizes = self.sizes
        qkv = torch.cat([self.q_proj(x), self.k_proj(x), self.v_proj(x)], dim=-1)
        held = {}
        if sizes.use_short_conv:
            taps = torch.cat([conv.weight for conv in (self.q_conv1d, self.k_conv1d, self.v_conv1d)])
            qkv, held["conv"] = short_conv(qkv, taps, None, _held(state, "conv"), this.counts)
        else:
            qkv = F.silu(qkv)
        q, k, v = qkv.split(self.widths, dim=-1)
        q, k = (z.unflatten(-1, (sizes.num_heads, sizes.head_dim)) for z in (q, k))
        v = v.unflatten(-1, (sizes.num_v_heads, self.value_dim))
        beta = torch.sigmoid(upcast(self.b_proj(x))) * (2.0 if sizes.allow_neg_eigval else 1.0)
        g, beta = this.erase(self.decays(x)), this.erase(beta)
        o, held["ssm"] = delta_rule(q, k, v, g, beta, _held(state, "ssm"))
        return self.o_proj(self.o_norm(o, gate=self.output_gate(x)).flatten(-2)), held


class HybridGDN(_Delta):
    """Gated DeltaNet (arXiv:2412.06464): one decay a value head, -exp(A_log) softplus(a + dt_bias)."""

    def __init__(self, config: HybridConfig):
        super().__init__(config, "gdn")
        self.a_proj = HybridLinear(config.hidden_size, self.sizes.num_v_heads)
        self.dt_bias = nn.Parameter(torch.empty(self.sizes.num_v_heads))
        if self.sizes.use_gate:
            self.g_proj = HybridLinear(config.hidden_size, self.widths[2])

    def decays(self, x: Tensor) -> Tensor:
        rate = torch.exp(upcast(self.A_log))
        return (-rate * F.softplus(upcast(self.a_proj(x)) + upcast(self.dt_bias)))[..., None]

    def output_gate(self, x: Tensor) -> Tensor | None:
        return F.silu(upcast(self.g_proj(x))).unflatten(-1, (-1, self.value_dim)) if self.sizes.use_gate else None


class HybridKDA(_Delta):
    """Kimi Delta Attention (arXiv:2510.26692): one decay a key channel, of f = W_fb W_fa x:

    -exp(A_log) softplus(f + dt_bias), or with a lower_bound: lower_bound sigmoid(exp(A_log) (f + dt_bias)).
    """

    def __init__(self, config: HybridConfig):
        super().__init__(config, "kda")
        width, rank, decays = config.hidden_size, self.value_dim, self.sizes.num_v_heads * self.sizes.head_dim
        self.f_a_proj = HybridLinear(width, rank)
        self.f_b_proj = HybridLinear(rank, decays, bound=rank**-0.5)
        self.g_a_proj = HybridLinear(width, rank)
        self.g_b_proj = HybridLinear(rank, self.widths[2], bias=self.sizes.gate_bias, bound=rank**-0.5)
        self.dt_bias = nn.Parameter(torch.empty(decays))

    def decays(self, x: Tensor) -> Tensor:
        f = upcast(self.f_b_proj(self.f_a_proj(x))) + upcast(self.dt_bias)
        f = f.unflatten(-1, (self.sizes.num_v_heads, self.sizes.head_dim))
        rate = torch.exp(upcast(self.A_log))[:, None]
        if self.sizes.lower_bound:
            return self.sizes.lower_bound * torch.sigmoid(rate * f)
        return -rate * F.softplus(f)

    def output_gate(self, x: Tensor) -> Tensor | None:
        return torch.sigmoid(upcast(self.g_b_proj(self.g_a_proj(x)))).unflatten(-1, (-1, self.value_dim))


class HybridMamba2(nn.Module):
    """Mamba-2 (arXiv:2405.21060): in_proj gives [z | x | B | C | dt]; the gate comes before the (grouped) norm.

    The state holds h [B, H, P, N] fp32 and the last W-1 inputs of the convolution [B, W-1, x | B | C channels].
    """

    def __init__(self, config: HybridConfig):
        super().__init__()
        self.sizes = sizes = config.section("mamba2")
        self.inner = sizes.expand * config.hidden_size
        self.heads = self.inner // sizes.head_dim
        self.shared = sizes.n_groups * sizes.state_size
        conv_width = self.inner + 2 * self.shared
        self.in_proj = HybridLinear(config.hidden_size, self.inner + conv_width + self.heads)
        self.conv1d = HybridShortConv(conv_width, sizes.conv_size, bias=True)
        self.dt_bias = nn.Parameter(torch.empty(self.heads))
        self.A_log = nn.Parameter(torch.empty(self.heads))
        self.D = nn.Parameter(torch.ones(self.heads))
        self.norm = HybridRMSNorm(self.inner, sizes.norm_eps)
        self.out_proj = HybridLinear(self.inner, config.hidden_size, last=True)

    def forward(self, x: Tensor, this: Pass, state: State):
        sizes, held = self.sizes, {}
        z, xbc, dt = self.in_proj(x).split([self.inner, self.inner + 2 * self.shared, self.heads], dim=-1)
        conv = self.conv1d
        xbc, held["conv"] = short_conv(xbc, conv.weight, conv.bias, _held(state, "conv"), this.counts)
        u, B, C = xbc.split([self.inner, self.shared, self.shared], dim=-1)
        B, C = (s.unflatten(-1, (sizes.n_groups, sizes.state_size)) for s in (B, C))
        dt = this.erase(F.softplus(upcast(dt) + upcast(self.dt_bias)))
        u = u.unflatten(-1, (self.heads, sizes.head_dim))
        y, held["ssm"] = ssd(u, dt, -torch.exp(upcast(self.A_log)), B, C, upcast(self.D), _held(state, "ssm"))
        y = self.norm(upcast(y.flatten(-2)) * F.silu(upcast(z)), groups=sizes.n_groups)
        return self.out_proj(y.to(x.dtype)), held


class HybridSwiGLU(nn.Module):
    def __init__(self, config: HybridConfig):
        super().__init__()
        self.gate_proj = HybridLinear(config.hidden_size, config.intermediate_size)
        self.up_proj = HybridLinear(config.hidden_size, config.intermediate_size)
        self.down_proj = HybridLinear(config.intermediate_size, config.hidden_size, last=True)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_proj(x), self.up_proj(x)
        return self.down_proj((F.silu(upcast(gate)) * upcast(up)).to(x.dtype))


MIXERS = {"*": HybridMLA, "A": HybridGQA, "G": HybridGDN, "K": HybridKDA, "S": HybridMamba2}

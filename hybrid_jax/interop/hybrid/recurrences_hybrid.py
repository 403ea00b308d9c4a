"""The sequence operations of a hybrid model in plain PyTorch: short convolution, gated delta rule, SSD.

Rows are cut into chunks: matrix products inside a chunk, a short loop over chunks. A decay between two tokens is exp of
the sum of the gates (<= 0) between them, summed directly and masked before exp: never a difference of long sums, in
which gradients of fast decays would be lost, and never a positive exponent. States, gates and sums are fp32 (float64
for float64).

On a GPU, in bf16 or fp16, the delta rules run in flash-linear-attention's kernels where that package can be imported.

Padding stands after a row's tokens: callers give it gates, betas and time steps of 0, which leave the state alone.

Shapes: B batch, T time, H q/k heads, R value heads per q/k head, HV = H R, K key channels, V value channels, G groups,
P head channels, N state channels, W taps, n chunks, C tokens of a chunk.
"""

import functools
import importlib
import warnings

import torch
import torch.nn.functional as F
from torch import Tensor

CHUNK = 64


def upcast(x: Tensor) -> Tensor:
    """x in float32, or in float64 if it is that."""
    return x if x.dtype == torch.float64 else x.float()


def l2_normalize(x: Tensor) -> Tensor:
    """x / sqrt(sum x^2 + 1e-6) over the last axis, in fp32."""
    x = upcast(x)
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)


def short_conv(x: Tensor, weight: Tensor, bias: Tensor | None, before: Tensor | None, counts: Tensor | None):
    """silu(bias + sum_j weight[:, j] x[t - (W-1) + j]) and the last W-1 inputs of each row.

    x [B, T, D], weight [D, 1, W], bias [D]; before [B, W-1, D]: the inputs that came earlier, oldest first (None:
    zeros). counts [B]: tokens of each row (None: all T). Products and sums in fp32, results in x.dtype.
    """
    taps, T = weight.shape[-1], x.shape[1]
    if before is None:
        before = x.new_zeros(x.shape[0], taps - 1, x.shape[2])
    padded = torch.cat([before, x], dim=1)
    weight = upcast(weight[:, 0])
    y = upcast(x) * weight[:, -1]
    for j in range(taps - 1):
        y = y + upcast(padded[:, j : j + T]) * weight[:, j]
    if bias is not None:
        y = y + bias
    if counts is None:
        after = padded[:, T:]
    else:
        index = counts[:, None] + torch.arange(taps - 1, device=x.device)
        after = padded.gather(1, index[..., None].expand(-1, -1, x.shape[2]))
    return F.silu(y).to(x.dtype), after


def _exact(x: Tensor):
    """Keeps a surrounding torch.autocast from rounding fp32 products."""
    return torch.autocast(x.device.type, enabled=False)


def _chunk_size(length: int) -> int:
    return next(size for size in (1, 16, 32, CHUNK) if size >= min(length, CHUNK))


def _cut(x: Tensor, size: int, heads: tuple[int, int]) -> Tensor:
    """[B, T, H R, ...] -> [B, H, R, n, C, ...], zeros behind the row's end."""
    B, T = x.shape[:2]
    x = F.pad(x, (0, 0) * (x.ndim - 2) + (0, -T % size))
    x = x.reshape(B, -1, size, *heads, *x.shape[3:])
    return x.permute(0, 3, 4, 1, 2, *range(5, x.ndim))


def _join(x: Tensor, length: int) -> Tensor:
    """[B, H, R, n, C, V] -> [B, T, H R, V]."""
    B, H, R, n, C, V = x.shape
    return x.permute(0, 3, 4, 1, 2, 5).reshape(B, n * C, H * R, V)[:, :length]


def _through(g: Tensor) -> Tensor:
    """Gates [..., C, K] summed from the chunk's start through each token."""
    return g.cumsum(-2)


def _after(g: Tensor) -> Tensor:
    """Gates [..., C, K] summed from behind each token to the chunk's end."""
    return F.pad(g[..., 1:, :], (0, 0, 0, 1)).flip(-2).cumsum(-2).flip(-2)


def _pair_decays(g: Tensor) -> Tensor:
    """Gates [..., C] -> exp(g_{j+1} + ... + g_i) [..., C, C] for j <= i, 0 elsewhere."""
    lower = torch.ones(g.shape[-1], g.shape[-1], dtype=torch.bool, device=g.device).tril()
    between = torch.where(lower.tril(-1), g[..., :, None], 0).cumsum(-2)
    return torch.exp(between.masked_fill(~lower, -torch.inf))


def _scalar_products(q: Tensor, k: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
    """One gate a head, g [..., C, 1]: q_i.k_j decay_ij for j <= i, and k_i.k_j decay_ij for j < i, [..., C, C]."""
    decay = _pair_decays(g[..., 0])
    return (q @ k.mT) * decay, ((k @ k.mT) * decay).tril(-1)


def _channel_products(q: Tensor, k: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
    """One gate a key channel, g [..., C, K]: the same, with the decays inside the sums over channels.

    The pairs j < i are covered by squares: for b = 1, 2, 4, ... of each run of 2b tokens the rows are its right half
    and the columns its left half, so that the decay is exp(from the middle to i) exp(from j to the middle), two
    exponents <= 0 for gates of any size.
    """
    C = g.shape[-2]
    rows = torch.stack([q.expand_as(g), k.expand_as(g)])  # [2, ..., C, K]
    done = g.new_zeros(2, *g.shape[:-1], 1, 1)  # [2, ..., runs, b, b]: the products of each run of b tokens
    for b in (1 << level for level in range(C.bit_length() - 1)):
        halves = (C // (2 * b), 2, b)
        g_left, g_right = g.unflatten(-2, halves).unbind(-3)
        columns = k.expand_as(g).unflatten(-2, halves).select(-3, 0) * torch.exp(_after(g_left))
        square = (rows.unflatten(-2, halves).select(-3, 1) * torch.exp(_through(g_right))) @ columns.mT
        left, right = done.unflatten(-3, (-1, 2)).unbind(-3)
        top = torch.cat([left, torch.zeros_like(left)], dim=-1)
        done = torch.cat([top, torch.cat([square, right], dim=-1)], dim=-2)
    qk, kk = done.squeeze(-3)
    return qk + torch.diag_embed((q * k).sum(-1)).expand_as(qk), kk


def _delta_chunks(q, k, v, g, beta, scale: float, state: Tensor):
    """See delta_rule. With A_ij = beta_i k_i.k_j decay_ij (j < i), T = (I + A)^-1, gamma the decay since its start:

    V' = T beta V - T beta gamma K S
    O = scale (gamma Q S + (QK^T * decay) V')
    S <- gamma_C S + (decay to the end * K)^T V'
    """
    T, H, dtype = q.shape[1], q.shape[2], v.dtype
    size, heads = _chunk_size(T), (H, v.shape[2] // H)
    q, k = (_cut(l2_normalize(x), size, (H, 1)) for x in (q, k))
    v, g, beta = (_cut(upcast(x), size, heads) for x in (v, g, beta[..., None]))
    qk, kk = (_scalar_products if g.shape[-1] == 1 else _channel_products)(q, k, g)
    through = torch.exp(_through(g))
    right = torch.cat([beta * through * k, beta * v], dim=-1)
    # Forward substitution: a series for the inverse would overflow where keys are alike.
    solved = torch.linalg.solve_triangular(beta * kk, right, upper=False, unitriangular=True)
    w, u = solved.split([k.shape[-1], v.shape[-1]], dim=-1)
    to_end = torch.exp(_after(g)) * k
    state = state.unflatten(1, heads)
    entered, added = [], []
    for i in range(u.shape[3]):
        entered.append(state)
        added.append(u[:, :, :, i] - w[:, :, :, i] @ state)
        state = through[:, :, :, i, -1, :, None] * state + to_end[:, :, :, i].mT @ added[-1]
    o = scale * ((through * q) @ torch.stack(entered, dim=3) + qk @ torch.stack(added, dim=3))
    return _join(o, T).to(dtype), state.flatten(1, 2)


def delta_rule(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor | None):
    """S <- exp(g_t) S;  S <- S + beta_t k_t (v_t - k_t^T S)^T;  o_t = K^-0.5 q_t^T S  (arXiv:2412.06464, 2510.26692).

    q, k [B, T, H, K] raw (divided by sqrt(sum x^2 + 1e-6) here), v [B, T, HV, V]; log decays g [B, T, HV, 1] or
    [B, T, HV, K] and beta [B, T, HV], fp32; state [B, HV, K, V] fp32 or None for zeros. Value head i uses q/k head
    i // R. Returns o [B, T, HV, V] in v.dtype and the last state.
    """
    scale = q.shape[-1] ** -0.5
    kernel = _fla_kernel("gdn" if g.shape[-1] == 1 else "kda") if q.shape[1] > 1 and _suits_fla(q) else None
    if kernel is not None:
        R = v.shape[2] // q.shape[2]
        if R > 1:  # not every version of the package groups heads
            q, k = q.repeat_interleave(R, dim=2), k.repeat_interleave(R, dim=2)
        return kernel(
            *(x.contiguous() for x in (q, k, v)),
            g=(g[..., 0] if g.shape[-1] == 1 else g).contiguous(),
            beta=beta.contiguous(),
            scale=scale,
            initial_state=state,
            output_final_state=True,
            use_qk_l2norm_in_kernel=True,
        )
    if state is None:
        state = g.new_zeros(v.shape[0], v.shape[2], q.shape[3], v.shape[3])
    with _exact(q):
        return _delta_chunks(q, k, v, g, beta, scale, state)


def _suits_fla(q: Tensor) -> bool:
    """Its chunk kernels refuse fp32 and more than 256 key channels."""
    return q.is_cuda and q.dtype in (torch.bfloat16, torch.float16) and q.shape[-1] <= 256


@functools.cache
def _fla_kernel(name: str):
    """flash-linear-attention's chunk kernel of "gdn" or "kda"; None where it cannot be imported."""
    module, function = {
        "gdn": ("fla.ops.gated_delta_rule", "chunk_gated_delta_rule"),
        "kda": ("fla.ops.kda", "chunk_kda"),
    }[name]
    try:
        return getattr(importlib.import_module(module), function)
    except ModuleNotFoundError as error:
        if error.name == "fla":
            return None
        reason: Exception = error
    except Exception as error:  # of the package, of Triton or of a driver: whatever it is, plain PyTorch still runs
        reason = error
    warnings.warn(f"flash-linear-attention is installed but not used: {module}: {reason}", stacklevel=2)
    return None


def ssd(x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor, state: Tensor | None):
    """h <- exp(dt_t A) h + dt_t x_t B_t^T;  y_t = h C_t + D x_t  (Mamba-2, arXiv:2405.21060).

    x [B, T, H, P], dt [B, T, H] and A, D [H] fp32, B, C [B, T, G, N] (each of G equal runs of heads has its own), state
    [B, H, P, N] fp32 or None for zeros. Returns y like x and the last state.
    """
    if state is None:
        state = dt.new_zeros(*x.shape[:1], *x.shape[2:], B.shape[3])
    with _exact(x):
        return _ssd_chunks(x, dt, A, B, C, D, state)


def _ssd_chunks(x, dt, A, B, C, D, state: Tensor):
    """See ssd."""
    T, G = x.shape[1], B.shape[2]
    size, heads = _chunk_size(T), (G, x.shape[2] // G)
    B, C = (_cut(upcast(z), size, (G, 1)) for z in (B, C))
    written, g = (_cut(z, size, heads) for z in (dt[..., None] * upcast(x), (dt * A)[..., None]))
    through = torch.exp(_through(g))
    to_end = torch.exp(_after(g)) * written
    state = state.unflatten(1, heads)
    entered = []
    for i in range(g.shape[3]):
        entered.append(state)
        state = through[:, :, :, i, -1, :, None] * state + to_end[:, :, :, i].mT @ B[:, :, :, i]
    y = ((C @ B.mT) * _pair_decays(g[..., 0])) @ written + through * (C @ torch.stack(entered, dim=3).mT)
    return (_join(y, T) + D[:, None] * upcast(x)).to(x.dtype), state.flatten(1, 2)

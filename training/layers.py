"""The layers of `glm5_next` for training, on flat batches [T, D] of B rows of L tokens.

Parameter names are those of the published checkpoint, relative to a layer, with ``.weight`` left
out; experts are stacked. Weights are fp32 and are rounded to the activations' dtype where used.
The elementwise parts are plain functions, so that a GPU can compile them once for every length.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from training.kernels import attend, kda, sinkhorn
from training.shape import Shape


@dataclass(frozen=True, slots=True)
class Rows:
    """How a flat batch is cut. ``places``: [T] index of a token in its row. ``probes``: [B, R]
    positions at which the index is taught, None for no teaching. ``sparse``: whether attention
    sees the selected tokens only."""

    batch: int
    length: int
    places: Tensor
    probes: Tensor | None = None
    sparse: bool = False

    def split(self, x: Tensor, heads: int) -> Tensor:
        """[T, H * K] -> [B, H, L, K]"""
        return x.view(self.batch, self.length, heads, -1).transpose(1, 2)

    def join(self, x: Tensor) -> Tensor:
        """[B, H, L, K] -> [T, H * K]"""
        return x.transpose(1, 2).reshape(self.batch * self.length, -1)


def matmul(x: Tensor, weight: Tensor) -> Tensor:
    return F.linear(x, weight.to(x.dtype))


def rms(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = x.float()
    unit = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (unit * weight).to(x.dtype)


def collapse(
    streams: Tensor, z: Tensor, base: Tensor, scale: Tensor, norm: Tensor, eps: float, hc_eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Streams [T, n, D] and their projection z [T, 2n + n n] -> the sublayer's normed input
    [T, D], the write weights [T, n] and the mixing logits [T, n, n]."""
    n = streams.shape[1]
    wide = streams.float()
    z = z.float() * torch.rsqrt(wide.square().mean((1, 2)) + eps)[:, None]
    pre = torch.sigmoid(z[:, :n] * scale[0] + base[:n]) + hc_eps
    post = 2 * torch.sigmoid(z[:, n : 2 * n] * scale[1] + base[n : 2 * n])
    mix = (z[:, 2 * n :] * scale[2] + base[2 * n :]).view(-1, n, n)
    u = (pre[:, :, None] * wide).sum(1).to(streams.dtype)
    return rms(u, norm, eps), post, mix


def expand(streams: Tensor, y: Tensor, post: Tensor, mix: Tensor) -> Tensor:
    """New streams: post_j y + sum_i mix[i, j] X_i."""
    mixed = (mix[:, :, :, None] * streams.float()[:, :, None, :]).sum(1)
    return (mixed + post[:, :, None] * y.float()[:, None, :]).to(streams.dtype)


def convolve(r: Tensor, weight: Tensor, places: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Causal depthwise convolution and SiLU: [T, 3 W] -> q, k and v [T, W] each."""
    taps = weight.shape[1]
    total = r.float() * weight[:, taps - 1]
    for back in range(1, taps):
        moved = F.pad(r, (0, 0, back, 0))[:-back].float()
        moved = torch.where(places[:, None] >= back, moved, 0.0)
        total = total + moved * weight[:, taps - 1 - back]
    q, k, v = F.silu(total).to(r.dtype).chunk(3, dim=1)
    return q.contiguous(), k.contiguous(), v.contiguous()


def gated_norm(o: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    """[T, H, K] twice -> [T, H * K]: norm first, then the sigmoid gate, in fp32."""
    wide = o.float()
    unit = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (unit * weight * torch.sigmoid(gate.float())).to(o.dtype).flatten(1)


def swiglu(gate: Tensor, up: Tensor, limit: float) -> Tensor:
    return F.silu(gate.clamp(max=limit)) * up.clamp(-limit, limit)


def weighted_swiglu(both: Tensor, weights: Tensor, limit: float) -> Tensor:
    """[T, 2 E M] and [T, E] -> [T, E M]: every expert's activation times its weight."""
    gate, up = both.view(both.shape[0], 2, weights.shape[1], -1).unbind(1)
    return (swiglu(gate, up, limit) * weights[:, :, None].to(both.dtype)).flatten(1)


def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compiled where gradients are kept; as it is elsewhere, where torch 2.11 was seen to compile
    these functions to wrong results."""
    fused = torch.compile(function, dynamic=False)

    def either(*arguments: Any) -> Any:
        return fused(*arguments) if torch.is_grad_enabled() else function(*arguments)

    return either


class Compiled:
    """The functions above, compiled once for all layers, or as they are."""

    def __init__(self) -> None:
        self.collapse, self.expand = collapse, expand
        self.convolve, self.gated_norm = convolve, gated_norm
        self.weighted_swiglu, self.rms = weighted_swiglu, rms

    def compile(self) -> None:
        torch._dynamo.config.cache_size_limit = 64
        for name in ("collapse", "expand", "convolve", "gated_norm", "weighted_swiglu", "rms"):
            setattr(self, name, _compiled(globals()[name]))


fast = Compiled()


def matrix(rows: int, columns: int, gain: float = 1.0) -> nn.Parameter:
    return nn.Parameter(torch.randn(rows, columns) * (gain / math.sqrt(columns)))


def ones(size: int) -> nn.Parameter:
    return nn.Parameter(torch.ones(size))


class Hyper(nn.Module):
    """Starts as a plain residual: reads the mean of the streams, writes to all, mixes little.

    The streams' write weights differ a little, or the streams would stay equal for ever.
    """

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        n = shape.streams
        self.shape = shape
        self.fn = nn.Parameter(torch.randn((2 + n) * n, n * shape.hidden) * 0.003)
        base = torch.cat(
            [
                torch.full((n,), -math.log(n - 1.0)) + 0.1 * torch.randn(n),
                0.2 * torch.randn(n),
                (4.0 * torch.eye(n)).flatten() + 0.1 * torch.randn(n * n),
            ]
        )
        self.base = nn.Parameter(base)
        self.scale = ones(3)

    def read(self, streams: Tensor, norm: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        c = self.shape
        z = matmul(streams.flatten(1), self.fn)
        x, post, mix = fast.collapse(streams, z, self.base, self.scale, norm, c.eps, c.hc_eps)
        return x, post, sinkhorn(mix, c.sinkhorn, c.hc_eps)


class Kda(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        heads, size, hidden = shape.kda_heads, shape.kda_size, shape.hidden
        width = heads * size
        self.q_proj, self.k_proj, self.v_proj = (matrix(width, hidden) for _ in range(3))
        self.conv = nn.Parameter(torch.randn(3 * width, shape.conv) / math.sqrt(shape.conv))
        self.f_a_proj, self.f_b_proj = matrix(size, hidden), matrix(width, size, 0.5)
        self.g_a_proj, self.g_b_proj = matrix(size, hidden), matrix(width, size)
        self.b_proj = matrix(heads, hidden)
        # Channels remember 8 to 8,192 tokens, spread evenly on a log scale over each head.
        memory = 8.0 * 1024.0 ** torch.rand(heads, size)
        self.A_log = nn.Parameter(torch.zeros(heads))
        self.dt_bias = nn.Parameter(torch.logit(1 / (-shape.gate_bound * memory)).flatten())
        self.o_norm = ones(size)
        self.o_proj = matrix(hidden, width, 0.5)

    def forward(self, x: Tensor, rows: Rows) -> Tensor:
        c = self.shape
        heads, size = c.kda_heads, c.kda_size
        names = ("q_proj", "k_proj", "v_proj", "f_a_proj", "g_a_proj", "b_proj")
        weights: list[Tensor] = [self.get_parameter(name) for name in names]
        pad = -sum(len(weight) for weight in weights) % 8
        fused = F.pad(torch.cat(weights), (0, 0, 0, pad))
        sizes = [3 * heads * size, size, size, heads, pad]
        r, f, g, b, _ = torch.split(matmul(x, fused), sizes, dim=1)
        q, k, v = fast.convolve(r, self.conv, rows.places)
        gate = matmul(f, self.f_b_proj)
        cut = (rows.batch, rows.length, heads, size)
        q, k, v, gate = (part.view(cut) for part in (q, k, v, gate))
        b = b.reshape(cut[:3])
        o = kda(q, k, v, gate, b, self.A_log, self.dt_bias, c.gate_bound)
        out_gate = matmul(g, self.g_b_proj).view(-1, heads, size)
        normed = fast.gated_norm(o.reshape(-1, heads, size), out_gate, self.o_norm, c.eps)
        return matmul(normed, self.o_proj)


class Index(nn.Module):
    """Chooses the pools of tokens that attention sees. Learns from `teach` alone."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        size = shape.index_size
        self.wq_b = matrix(shape.index_heads * size, shape.q_rank)
        self.wk = matrix(size, shape.hidden)
        self.k_norm = ones(size)
        self.k_norm_bias = nn.Parameter(torch.zeros(size))
        self.weights_proj = matrix(shape.index_heads, shape.hidden)
        self.index_kpool_compress_gate = matrix(size, shape.hidden, 0.3)
        self.index_kpool_compress_ape = nn.Parameter(torch.zeros(shape.pool, size))

    def pools(self, x: Tensor, rows: Rows) -> Tensor:
        """[T, D] -> [B, P, K], one key for each complete pool."""
        c = self.shape
        keys = matmul(x, self.wk).float()
        keys = F.layer_norm(keys, (c.index_size,), self.k_norm, self.k_norm_bias, 1e-6)
        gates = matmul(x, self.index_kpool_compress_gate).float()
        count = rows.length // c.pool
        cut = (rows.batch, count, c.pool, c.index_size)

        def complete(values: Tensor) -> Tensor:
            whole = values.view(rows.batch, rows.length, c.index_size)
            return whole[:, : count * c.pool].reshape(cut)

        shares = torch.softmax(complete(gates) + self.index_kpool_compress_ape, dim=2)
        return (shares * complete(keys)).sum(2)

    def scores(self, x: Tensor, qr: Tensor, pools: Tensor) -> Tensor:
        """Rows [B, R, D] and [B, R, Q] against [B, P, K] -> [B, R, P] fp32."""
        c = self.shape
        batch, count = x.shape[:2]
        q = matmul(qr, self.wq_b).view(batch, count * c.index_heads, c.index_size)
        dots = torch.bmm(q, pools.to(q.dtype).transpose(1, 2)) * c.index_size**-0.5
        dots = F.relu(dots).view(batch * count, c.index_heads, -1)
        heads = matmul(x, self.weights_proj).view(batch * count, 1, c.index_heads)
        # One small product a row: the sum over heads without a [R, H, P] tensor in fp32.
        total = torch.bmm(heads * c.index_heads**-0.5, dots)
        return total.view(batch, count, -1).float()

    @torch.no_grad()
    def select(self, x: Tensor, qr: Tensor, rows: Rows, block: int = 1024) -> Tensor:
        """[T, D], [T, Q] -> [B, L, L] bool: the tokens that each token sees."""
        c = self.shape
        batch, length = rows.batch, rows.length
        pools = self.pools(x, rows)
        count = pools.shape[1]
        keep = min(c.index_topk // c.pool, count)
        x, qr = x.view(batch, length, -1), qr.view(batch, length, -1)
        seen = torch.zeros(batch, length, length, dtype=torch.bool, device=x.device)
        ends = torch.arange(count, device=x.device) * c.pool + c.pool - 1
        tokens = torch.arange(length, device=x.device)
        for start in range(0, length, block):
            stop = min(start + block, length)
            place = tokens[start:stop]
            candidate = ends <= place[:, None]  # [R, P]
            scores = self.scores(x[:, start:stop], qr[:, start:stop], pools)
            scores = scores.masked_fill(~candidate, float("-inf"))
            chosen = scores.topk(keep, dim=-1).indices
            picked = torch.zeros_like(scores, dtype=torch.bool).scatter_(-1, chosen, True)
            picked &= candidate
            wide = picked.repeat_interleave(c.pool, dim=-1)
            seen[:, start:stop, : wide.shape[-1]] = wide
            tail = (tokens >= (place[:, None] + 1) // c.pool * c.pool) & (tokens <= place[:, None])
            seen[:, start:stop] |= tail
        return seen

    def teach(self, x: Tensor, qr: Tensor, q: Tensor, k: Tensor, rows: Rows) -> Tensor:
        """KL of the index's distribution over pools against the layer's own dense attention.

        x, qr: [T, ...]; q, k: [B, H, L, K]; at ``rows.probes``. No gradient leaves the index.
        """
        c = self.shape
        assert rows.probes is not None
        probes = rows.probes
        x, qr = x.detach(), qr.detach()
        pools = self.pools(x, rows)
        batch = len(probes)
        count = pools.shape[1]

        def pick(values: Tensor) -> Tensor:
            wide = values.view(batch, rows.length, -1)
            return wide.gather(1, probes[:, :, None].expand(-1, -1, wide.shape[-1]))

        ends = torch.arange(count, device=x.device) * c.pool + c.pool - 1
        candidate = ends <= probes[:, :, None]
        with torch.no_grad():
            at = probes[:, None, :, None].expand(-1, c.heads, -1, c.qk_size)
            dots = q.gather(2, at) @ k.transpose(-1, -2) * c.qk_size**-0.5
            places = torch.arange(rows.length, device=x.device)
            hidden = places > probes[:, None, :, None]
            mass = torch.softmax(dots.float().masked_fill(hidden, float("-inf")), -1).mean(1)
            mass = mass[..., : count * c.pool]
            mass = mass.view(*mass.shape[:2], count, c.pool).sum(-1)
            mass = mass.masked_fill(~candidate, 0.0)
            mass = mass / mass.sum(-1, keepdim=True).clamp(min=1e-9)
        scores = self.scores(pick(x), pick(qr), pools).masked_fill(~candidate, -1e4)
        gap = mass * (mass.clamp(min=1e-9).log() - torch.log_softmax(scores, -1))
        total: Tensor = gap.sum(-1).mean()
        return total


class Mla(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        heads, hidden = shape.heads, shape.hidden
        self.q_a_proj, self.q_a_layernorm = matrix(shape.q_rank, hidden), ones(shape.q_rank)
        self.q_b_proj = matrix(heads * shape.qk_size, shape.q_rank)
        self.kv_a_proj_with_mqa = matrix(shape.kv_rank, hidden)
        self.kv_a_layernorm = ones(shape.kv_rank)
        self.kv_b_proj = matrix(heads * (shape.qk_size + shape.v_size), shape.kv_rank)
        self.o_proj = matrix(hidden, heads * shape.v_size, 0.5)
        self.indexer = Index(shape)

    def forward(self, x: Tensor, rows: Rows) -> tuple[Tensor, Tensor | None]:
        """[T, D] -> [T, D] and the index's loss, if it is taught."""
        c = self.shape
        qr = rms(matmul(x, self.q_a_proj), self.q_a_layernorm, c.eps)
        latent = rms(matmul(x, self.kv_a_proj_with_mqa), self.kv_a_layernorm, c.eps)
        q = rows.split(matmul(qr, self.q_b_proj), c.heads)
        kv = rows.split(matmul(latent, self.kv_b_proj), c.heads)
        k, v = torch.split(kv, [c.qk_size, c.v_size], dim=-1)
        mask = None
        if rows.sparse and rows.length > c.index_topk:
            mask = self.indexer.select(x, qr, rows)
        out = matmul(rows.join(attend(q, k, v, mask)), self.o_proj)
        if rows.probes is None:
            return out, None
        return out, self.indexer.teach(x, qr, q.detach(), k.detach(), rows)


class Mlp(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.limit = shape.swiglu_limit
        self.gate_proj = matrix(shape.intermediate, shape.hidden)
        self.up_proj = matrix(shape.intermediate, shape.hidden)
        self.down_proj = matrix(shape.hidden, shape.intermediate, 0.5)

    def forward(self, x: Tensor) -> Tensor:
        both = matmul(x, torch.cat([self.gate_proj, self.up_proj]))
        weights = torch.ones_like(x[:, :1])
        return matmul(fast.weighted_swiglu(both, weights, self.limit), self.down_proj)


class Moe(nn.Module):
    """Every expert is computed for every token and the unchosen weigh nothing: at this size that
    is cheaper than sorting, and it never waits for the device."""

    gate_bias: Tensor
    load: Tensor

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        experts, middle, hidden = shape.experts, shape.moe_intermediate, shape.hidden
        self.gate = matrix(experts, hidden)
        # The last expert is the shared one.
        self.gate_proj = matrix((experts + 1) * middle, hidden)
        self.up_proj = matrix((experts + 1) * middle, hidden)
        self.down_proj = matrix(hidden, (experts + 1) * middle, 1.0)
        self.register_buffer("gate_bias", torch.zeros(experts))
        self.register_buffer("load", torch.zeros(experts), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        c = self.shape
        scores = torch.sigmoid(F.linear(x.float(), self.gate))
        chosen = (scores.detach() + self.gate_bias).topk(c.experts_per_token, dim=-1).indices
        mask = torch.zeros_like(scores).scatter_(-1, chosen, 1.0)
        if self.training:
            self.load += mask.detach().sum(0)
        weights = scores * mask
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20) * c.routed_scaling
        weights = torch.cat([weights, torch.ones_like(weights[:, :1])], dim=1)
        both = matmul(x, torch.cat([self.gate_proj, self.up_proj]))
        return matmul(fast.weighted_swiglu(both, weights, c.swiglu_limit), self.down_proj)

    @torch.no_grad()
    def balance(self, rate: float) -> None:
        """Move the choice, not the weights, toward experts that were used too little."""
        self.gate_bias += rate * torch.sign(self.load.mean() - self.load)
        self.load.zero_()

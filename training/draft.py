"""The DFlash2 draft: proposes a block of tokens at once from the target's own features.

Knows the draft's arithmetic, over blocks that are all computed together. Source: DFlash2 as
published for GLM-5.3-Flash: context injection, a sliding window, grouped dynamic convolutions and
a candidate selector; embedding and head are the target's.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from training.layers import matmul, matrix, ones, rms
from training.shape import Shape


def rotate(x: Tensor, places: Tensor, theta: float) -> Tensor:
    """[..., H, K] at ``places`` [...]: rotary embedding, the halves of a head in pairs."""
    half = x.shape[-1] // 2
    steps = torch.arange(half, device=x.device, dtype=torch.float32) / half
    angles = places.float()[..., None] * theta**-steps
    cos, sin = angles.cos()[..., None, :], angles.sin()[..., None, :]
    one, two = x.float().chunk(2, dim=-1)
    return torch.cat([one * cos - two * sin, two * cos + one * sin], -1).to(x.dtype)


class DynamicConv(nn.Module):
    """Two causal convolutions inside a block, before and after a sublayer, whose kernels depend
    on the sublayer's input."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.groups = shape.hidden // shape.draft_conv_group
        base = torch.zeros(2, shape.draft_conv, shape.hidden)
        base[:, 0] = 1.0
        self.base_kernel = nn.Parameter(base)
        outputs = 2 * shape.draft_conv * self.groups
        self.kernel_projection = nn.Parameter(torch.randn(outputs, shape.hidden) * 0.005)

    def kernels(self, x: Tensor) -> Tensor:
        """[N, S, D] -> [N, S, side, tap, D]"""
        c = self.shape
        dynamic = matmul(x, self.kernel_projection)
        dynamic = dynamic.view(*x.shape[:2], 2, c.draft_conv, self.groups)
        wide = dynamic.repeat_interleave(c.draft_conv_group, dim=-1)
        return wide + self.base_kernel.to(x.dtype)

    @staticmethod
    def apply_side(x: Tensor, kernels: Tensor, side: int) -> Tensor:
        total = x * kernels[:, :, side, 0]
        for back in range(1, kernels.shape[3]):
            moved = F.pad(x, (0, 0, back, 0))[:, :-back]
            total = total + moved * kernels[:, :, side, back]
        return total


class DraftAttention(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        width, hidden = shape.draft_heads * shape.draft_size, shape.hidden
        self.q_proj, self.k_proj, self.v_proj = (matrix(width, hidden) for _ in range(3))
        self.o_proj = matrix(hidden, width, 0.5)
        self.q_norm, self.k_norm = ones(shape.draft_size), ones(shape.draft_size)

    def heads(self, x: Tensor) -> Tensor:
        return x.view(*x.shape[:-1], self.shape.draft_heads, self.shape.draft_size)

    def context(self, x: Tensor, places: Tensor) -> tuple[Tensor, Tensor]:
        """Context rows [..., D] at ``places`` [...] -> keys and values [..., H, K]."""
        c = self.shape
        k = rms(self.heads(matmul(x, self.k_proj)), self.k_norm, c.eps)
        return rotate(k, places, c.rope_theta), self.heads(matmul(x, self.v_proj))

    def forward(
        self, x: Tensor, places: Tensor, keys: Tensor, values: Tensor, mask: Tensor
    ) -> Tensor:
        """Blocks [N, S, D] at ``places`` [N, S]; context [N, W, H, K]; mask [N, S, W + S]."""
        c = self.shape
        q = rms(self.heads(matmul(x, self.q_proj)), self.q_norm, c.eps)
        q = rotate(q, places, c.rope_theta)
        own_keys, own_values = self.context(x, places)
        k = torch.cat([keys, own_keys], dim=1).transpose(1, 2)
        v = torch.cat([values, own_values], dim=1).transpose(1, 2)
        scores = q.transpose(1, 2) @ k.transpose(-1, -2) * c.draft_size**-0.5
        scores = scores.float().masked_fill(~mask[:, None], float("-inf"))
        out = torch.softmax(scores, -1).to(v.dtype) @ v
        return matmul(out.transpose(1, 2).flatten(2), self.o_proj)


class DraftLayer(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.eps = shape.eps
        hidden, middle = shape.hidden, shape.draft_intermediate
        self.input_layernorm, self.post_attention_layernorm = ones(hidden), ones(hidden)
        self.self_attn = DraftAttention(shape)
        self.attention_conv, self.mlp_conv = DynamicConv(shape), DynamicConv(shape)
        self.gate_proj, self.up_proj = matrix(middle, hidden), matrix(middle, hidden)
        self.down_proj = matrix(hidden, middle, 0.5)

    def forward(
        self, x: Tensor, places: Tensor, keys: Tensor, values: Tensor, mask: Tensor
    ) -> Tensor:
        a = rms(x, self.input_layernorm, self.eps)
        kernels = self.attention_conv.kernels(a)
        a = DynamicConv.apply_side(a, kernels, 0)
        a = self.self_attn(a, places, keys, values, mask)
        x = x + DynamicConv.apply_side(a, kernels, 1)
        a = rms(x, self.post_attention_layernorm, self.eps)
        kernels = self.mlp_conv.kernels(a)
        a = DynamicConv.apply_side(a, kernels, 0)
        a = matmul(F.silu(matmul(a, self.gate_proj)) * matmul(a, self.up_proj), self.down_proj)
        return x + DynamicConv.apply_side(a, kernels, 1)


class Draft(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        hidden = shape.hidden
        self.fc = matrix(hidden, hidden * len(shape.draft_taps))
        self.hidden_norm, self.norm = ones(hidden), ones(hidden)
        self.layers = nn.ModuleList(DraftLayer(shape) for _ in range(shape.draft_layers))
        rank = shape.selector_rank
        self.predecessor_codebook = nn.Parameter(torch.randn(shape.vocab, rank) * 0.1)
        self.successor_codebook = nn.Parameter(torch.randn(shape.vocab, rank) * 0.1)
        self.hidden_projection = matrix(rank, hidden, 1.0)

    def forward(self, features: Tensor, embedded: Tensor, rows: Tensor, anchors: Tensor) -> Tensor:
        """Blocks at ``anchors`` [N] of the batch's ``rows`` [N].

        features: [B, L, taps * D] of the target; embedded: [N, S, D], the anchor's embedding and
        the mask's. Returns H [N, S, D]; row i speaks of the token at anchor + i.
        """
        c = self.shape
        window, block = c.draft_window, embedded.shape[1]
        device = features.device
        context = rms(matmul(features, self.fc), self.hidden_norm, c.eps)
        before = torch.arange(-window, 0, device=device)
        at = anchors[:, None] + before  # [N, W]
        places = anchors[:, None] + torch.arange(block, device=device)
        near = places[:, :, None] - at[:, None] < window
        seen = torch.cat([near & (at >= 0)[:, None], torch.ones_like(near[:, :, :block])], dim=-1)
        at = at.clamp(min=0)
        all_places = torch.arange(features.shape[1], device=device).expand(features.shape[:2])
        x = embedded
        for layer in self.layers:
            assert isinstance(layer, DraftLayer)
            keys, values = layer.self_attn.context(context, all_places)
            picked = (keys[rows[:, None], at], values[rows[:, None], at])
            x = layer(x, places, *picked, seen)
        return rms(x, self.norm, c.eps)

    def edges(self, hidden: Tensor, previous: Tensor, candidates: Tensor) -> Tensor:
        """Selector: H [..., D], the token before [...], candidates [..., C] -> [..., C] fp32, to be
        added to the candidates' logits."""
        phi = matmul(hidden, self.hidden_projection).float()
        before = F.embedding(previous, self.predecessor_codebook) * phi
        return (F.embedding(candidates, self.successor_codebook) * before[..., None, :]).sum(-1)

    @torch.no_grad()
    def propose(self, hidden: Tensor, logits: Tensor, anchor: Tensor) -> Tensor:
        """Greedy walk over the candidates.

        H and logits [N, S, ...], anchor ids [N] -> [N, S - 1]
        """
        unary, candidates = logits.float().topk(self.shape.selector_topk, dim=-1)
        chosen, previous = [], anchor
        for row in range(1, hidden.shape[1]):
            score = unary[:, row] + self.edges(hidden[:, row], previous, candidates[:, row])
            previous = candidates[:, row].gather(1, score.argmax(-1, keepdim=True))[:, 0]
            chosen.append(previous)
        return torch.stack(chosen, dim=1)


def draft_loss(
    draft: Draft, hidden: Tensor, logits: Tensor, labels: Tensor, previous: Tensor, counts: Tensor
) -> Tensor:
    """H, logits [N, K, ...] of the masked rows; the target's tokens there and before them [N, K];
    ``counts`` [N, K]: 1 where a row is worth learning, else 0.

    The earlier a row, the more it counts: nothing after a wrong token is accepted.
    """
    block = labels.shape[1]
    weights = torch.exp(-torch.arange(block, device=hidden.device) / 4.0)
    wide = logits.float()
    plain = F.cross_entropy(wide.flatten(0, 1), labels.flatten(), reduction="none")
    unary, candidates = wide.topk(draft.shape.selector_topk, dim=-1)
    score = unary.detach() + draft.edges(hidden, previous, candidates)
    found = candidates == labels[..., None]
    chosen = -(torch.log_softmax(score, -1) * found).sum(-1)
    total = plain.view_as(labels) + chosen
    return (total * weights * counts).sum() / (weights * counts).sum().clamp(min=1.0)

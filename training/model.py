"""The target for training: `glm5_next` with its MTP layer, over flat batches.

Source: transformers' ``Glm5NextForConditionalGeneration``, which a test compares with; the MTP
layer is that of the published checkpoint, which transformers leaves out.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from training.layers import Hyper, Kda, Mla, Mlp, Moe, Rows, fast, matmul, matrix, ones, rms
from training.shape import Shape


class Layer(nn.Module):
    def __init__(self, shape: Shape, number: int) -> None:
        super().__init__()
        self.hc_attn, self.hc_ffn = Hyper(shape), Hyper(shape)
        self.input_layernorm, self.post_attention_layernorm = (
            ones(shape.hidden),
            ones(shape.hidden),
        )
        self.self_attn = Mla(shape) if shape.is_mla(number) else Kda(shape)
        self.mlp = Mlp(shape) if number < shape.dense_layers else Moe(shape)

    def forward(self, streams: Tensor, rows: Rows) -> tuple[Tensor, Tensor | None]:
        x, post, mix = self.hc_attn.read(streams, self.input_layernorm)
        taught = None
        if isinstance(self.self_attn, Mla):
            y, taught = self.self_attn(x, rows)
        else:
            y = self.self_attn(x, rows)
        streams = fast.expand(streams, y, post, mix)
        x, post, mix = self.hc_ffn.read(streams, self.post_attention_layernorm)
        return fast.expand(streams, self.mlp(x), post, mix), taught


class Mtp(nn.Module):
    """Predicts the token after next from a token and the hidden row before it."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        hidden = shape.hidden
        self.enorm, self.hnorm, self.norm = ones(hidden), ones(hidden), ones(hidden)
        self.eh_proj = matrix(hidden, 2 * hidden)
        self.input_layernorm, self.post_attention_layernorm = ones(hidden), ones(hidden)
        self.self_attn = Mla(shape)
        self.mlp = Moe(shape)

    def forward(self, embedded: Tensor, hidden: Tensor, rows: Rows) -> tuple[Tensor, Tensor | None]:
        """Embedding of token p + 1 and (post-norm) hidden row p, [T, D] each -> the hidden row
        whose logits are of token p + 2, and the index's loss."""
        eps = self.shape.eps
        both = torch.cat([rms(embedded, self.enorm, eps), rms(hidden, self.hnorm, eps)], dim=-1)
        x = matmul(both, self.eh_proj)
        y, taught = self.self_attn(rms(x, self.input_layernorm, eps), rows)
        x = x + y
        x = x + self.mlp(rms(x, self.post_attention_layernorm, eps))
        return rms(x, self.norm, eps), taught


class Target(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.embed_tokens = nn.Parameter(torch.randn(shape.vocab, shape.hidden) * 0.5)
        self.layers = nn.ModuleList(Layer(shape, number) for number in range(shape.layers))
        self.norm = ones(shape.hidden)
        # Begins along the embedding, so that what attention brings from elsewhere is copied.
        self.lm_head = nn.Parameter(self.embed_tokens.detach() * (0.6 / math.sqrt(shape.hidden)))
        self.mtp = Mtp(shape)

    def embed(self, ids: Tensor, dtype: torch.dtype) -> Tensor:
        return F.embedding(ids, self.embed_tokens).to(dtype)

    def forward(
        self, ids: Tensor, rows: Rows, dtype: torch.dtype, taps: tuple[int, ...] = ()
    ) -> tuple[Tensor, Tensor, list[Tensor]]:
        """ids [T] -> hidden rows after the final norm [T, D], the index's loss (0-d), and the
        streams' mean after each layer of ``taps``, [T, D] each."""
        c = self.shape
        streams = self.embed(ids, dtype)[:, None].expand(-1, c.streams, -1).contiguous()
        lessons = torch.zeros((), device=ids.device)
        features = []
        for number, layer in enumerate(self.layers):
            streams, taught = layer(streams, rows)
            if taught is not None:
                lessons = lessons + taught
            if number in taps:
                features.append(streams.mean(1))
        return rms(streams.mean(1), self.norm, c.eps), lessons, features

    def logits(self, hidden: Tensor) -> Tensor:
        """[T, D] -> [T, V] in hidden's dtype."""
        return matmul(hidden, self.lm_head)

    def balance(self, rate: float) -> None:
        for module in self.modules():
            if isinstance(module, Moe):
                module.balance(rate)

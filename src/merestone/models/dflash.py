"""DFlash and DFlash2 drafts: a block of masks, computed at once over the target's own features.

Knows the draft's weights, its arithmetic and where its context rows lie. Must not know requests or
what becomes of a proposal. Source: the published drafts and the reference package ``dflash``; a
block always has its full size, since all of its rows see one another.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from merestone.layers.mlp import DenseMlp
from merestone.layers.rows import Places
from merestone.layers.state import Field, StateViews
from merestone.layers.weights import Source, Weights
from merestone.models.dflash_config import DFlashConfig, SelectorConfig
from merestone.ops.attention import TILE, attend
from merestone.ops.elementwise import rms_norm
from merestone.ops.gemm import linear
from merestone.ops.index import choose
from merestone.ops.rotary import Rotary, rotate

GROUP = "window"


@dataclass(frozen=True, slots=True)
class Blocks:
    """Where blocks stand: at ``positions`` [S] and after. ``context`` [S, W] are places of rows
    before them, ascending from row ``base`` [S]; of each, the first ``counts`` [S] are meant. The
    block's own rows join those, which fills up whole tiles of keys: [S, W] with W of them."""

    positions: Tensor
    base: Tensor
    counts: Tensor
    context: Places


class _DynamicConv:
    """Causal convolutions inside a block, before and after a sublayer, whose kernels depend on the
    sublayer's input. Nothing before the block is seen."""

    def __init__(
        self, config: DFlashConfig, selector: SelectorConfig, prefix: str, weights: Weights
    ) -> None:
        hidden, taps = config.hidden_size, selector.conv_kernel
        self._cut = (2, taps, hidden // selector.conv_group, 1)
        self._base = weights.take(f"{prefix}base_kernel", (2, taps, hidden)).float()
        self._base = self._base.view(2, taps, -1, selector.conv_group)
        self._dynamic = weights.take(
            f"{prefix}kernel_projection.weight", (2 * taps * self._cut[2], hidden)
        )

    def kernels(self, x: Tensor) -> Tensor:
        """[S, R, D] -> [S, R, side, tap, groups, channels of one] fp32."""
        dynamic = linear(x.flatten(0, 1), self._dynamic)
        return dynamic.float().view(*x.shape[:2], *self._cut) + self._base

    @staticmethod
    def convolve(x: Tensor, kernels: Tensor, side: int) -> Tensor:
        """[S, R, D] -> the same; fp32 inside, rounded once."""
        values = x.float().view(*x.shape[:2], *kernels.shape[4:])
        total = kernels[:, :, side, 0] * values
        for back in range(1, kernels.shape[3]):
            total[:, back:] += kernels[:, back:, side, back] * values[:, :-back]
        return total.view(x.shape).to(x.dtype)


class _Layer:
    """One decoder layer of the draft; ``layer`` is its number among the fields."""

    def __init__(self, config: DFlashConfig, i: int, layer: int, weights: Weights) -> None:
        c, prefix, hidden = config, f"layers.{i}.", config.hidden_size
        self._config = c
        self.layer = layer
        self._window = c.windows[i]
        self._widths = [c.num_heads * c.head_dim, 2 * c.num_kv_heads * c.head_dim]
        own, theirs = self._widths[0], self._widths[1] // 2
        names = tuple(f"{prefix}self_attn.{part}_proj.weight" for part in "qkv")
        self._inputs = weights.stack(names, (own, theirs, theirs), hidden)
        self._context = self._inputs[own:]
        self._q_norm = weights.take(f"{prefix}self_attn.q_norm.weight", (c.head_dim,))
        self._k_norm = weights.take(f"{prefix}self_attn.k_norm.weight", (c.head_dim,))
        self._out = weights.take(f"{prefix}self_attn.o_proj.weight", (hidden, own))
        self._norm = weights.take(f"{prefix}input_layernorm.weight", (hidden,))
        self._mlp_norm = weights.take(f"{prefix}post_attention_layernorm.weight", (hidden,))
        self._mlp = DenseMlp(hidden, c.intermediate_size, None, f"{prefix}mlp.", weights)
        self._conv = self._mlp_conv = None
        if c.selector is not None:
            self._conv = _DynamicConv(c, c.selector, f"{prefix}attention_conv.", weights)
            self._mlp_conv = _DynamicConv(c, c.selector, f"{prefix}mlp_conv.", weights)

    def fields(self) -> tuple[Field, ...]:
        shape = (self._config.num_kv_heads, self._config.head_dim)
        dtype = self._out.dtype
        return tuple(Field(self.layer, name, GROUP, shape, dtype) for name in ("k", "v"))

    def keep(
        self, context: Tensor, angles: tuple[Tensor, Tensor], at: Places, state: StateViews
    ) -> None:
        """Store keys and values of context rows [N, D]."""
        keys, values = self._keys(linear(context, self._context), angles)
        at.write(state.rows(self.layer, "k"), keys)
        at.write(state.rows(self.layer, "v"), values)

    def forward(
        self, x: Tensor, angles: tuple[Tensor, Tensor], blocks: Blocks, state: StateViews
    ) -> Tensor:
        """Blocks [S, R, D], their angles [S R, ...] -> [S, R, D]."""
        a = rms_norm(x, self._norm, self._config.rms_eps)
        if self._conv is None:
            x = x + self._attention(a, angles, blocks, state)
        else:
            kernels = self._conv.kernels(a)
            a = self._attention(self._conv.convolve(a, kernels, 0), angles, blocks, state)
            x = x + self._conv.convolve(a, kernels, 1)
        a = rms_norm(x, self._mlp_norm, self._config.rms_eps)
        if self._mlp_conv is None:
            return x + self._feed(a)
        kernels = self._mlp_conv.kernels(a)
        return x + self._mlp_conv.convolve(
            self._feed(self._mlp_conv.convolve(a, kernels, 0)), kernels, 1
        )

    def _feed(self, x: Tensor) -> Tensor:
        return self._mlp.forward(x.flatten(0, 1)).view(x.shape)

    def _keys(self, projected: Tensor, angles: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """[N, 2 H K] -> keys and values, [N, H, K] each."""
        c = self._config
        keys, values = projected.view(-1, 2, c.num_kv_heads, c.head_dim).unbind(1)
        return rotate(rms_norm(keys, self._k_norm, c.rms_eps), angles), values

    def _attention(
        self, x: Tensor, angles: tuple[Tensor, Tensor], blocks: Blocks, state: StateViews
    ) -> Tensor:
        c, (count, size, _) = self._config, x.shape
        heads, dim = c.num_kv_heads, c.head_dim
        q, kv = torch.split(linear(x.flatten(0, 1), self._inputs), self._widths, 1)
        q = q.view(-1, c.num_heads, dim)
        q = rotate(rms_norm(q, self._q_norm, c.rms_eps), angles).float()
        # Queries that share keys: [S H, R (heads of one), K].
        q = q.view(count, size, heads, -1, dim).transpose(1, 2).reshape(count * heads, -1, dim)
        keys, values = (
            self._seen(own.view(count, size, heads, dim), name, blocks, state)
            for name, own in zip("kv", self._keys(kv, angles), strict=True)
        )
        seen, first = (
            rows.repeat_interleave(c.num_heads // heads, 1).repeat_interleave(heads, 0)
            for rows in self._visible(blocks, size)
        )
        out = attend(q, keys, seen, dim**-0.5, values, first)
        out = out.view(count, heads, size, -1, dim).transpose(1, 2).reshape(count * size, -1)
        return linear(out.to(x.dtype), self._out).view(x.shape)

    def _seen(self, own: Tensor, name: str, blocks: Blocks, state: StateViews) -> Tensor:
        """The context's rows of a field and, behind them, the block's own [S, R, H, K]: [S H, W, K]
        fp32. What nobody meant is zero, whatever lies there."""
        count, size, heads, dim = own.shape
        rows = blocks.context.read(state.rows(self.layer, name)).float()  # [S, W, H, K]
        slots = torch.arange(rows.shape[1])
        rows.masked_fill_((slots >= blocks.counts[:, None])[:, :, None, None], 0.0)
        at = blocks.counts[:, None] + torch.arange(size)
        rows[torch.arange(count)[:, None], at] = own.float()
        return rows.transpose(1, 2).reshape(count * heads, -1, dim)

    def _visible(self, blocks: Blocks, size: int) -> tuple[Tensor, Tensor]:
        """[S, R] each: keys [first, seen) of every row of a block."""
        seen = (blocks.counts + size)[:, None].expand(-1, size)
        if self._window is None:
            return seen, torch.zeros_like(seen)
        rows = blocks.positions[:, None] + torch.arange(size)
        return seen, (rows - self._window + 1 - blocks.base[:, None]).clamp_(min=0)


class Selector:
    """DFlash2's choice among the best candidates of each row, given the token before it."""

    def __init__(self, config: DFlashConfig, selector: SelectorConfig, weights: Weights) -> None:
        shape, prefix = (config.vocab_size, selector.selector_rank), "candidate_selector."
        self._count = selector.selector_topk
        self._before = weights.take(f"{prefix}predecessor_codebook", shape)
        self._after = weights.take(f"{prefix}successor_codebook", shape)
        self._project = weights.take(
            f"{prefix}hidden_projection.weight", (selector.selector_rank, config.hidden_size)
        )

    def candidates(self, logits: Tensor) -> Tensor:
        """[M, V] -> the ids of each row's best, [M, C], ascending."""
        everything = torch.full((logits.shape[0],), logits.shape[1])
        # Logits that are no numbers choose nothing; any id will do for a draft.
        return choose(logits, everything, self._count).clamp_(min=0)

    def project(self, hidden: Tensor) -> Tensor:
        """[M, D] -> [M, rank] fp32."""
        return linear(hidden, self._project).float()

    def edges(self, projected: Tensor, before: Tensor, candidates: Tensor) -> Tensor:
        """What the token before it adds to each candidate: [S, rank], [S], [S, C] -> [S, C]."""
        left = self._before[before].float() * projected
        return (self._after[candidates].float() * left[:, None]).sum(-1)


class DFlash:
    """A draft model. ``layer``: the number of its first layer among the state's fields.

    Args:
        weights: by published name ("layers.0.self_attn.q_proj.weight"), or what makes them; every
            one is used, converted to ``dtype``.

    Raises:
        WeightError: a weight is missing, misshapen or left over.
    """

    def __init__(
        self,
        config: DFlashConfig,
        weights: Mapping[str, Tensor] | Source,
        dtype: torch.dtype,
        layer: int,
    ) -> None:
        reader = Weights(weights, dtype)
        hidden = config.hidden_size
        self.config = config
        self._mix = reader.take("fc.weight", (hidden, len(config.taps) * hidden))
        self._context_norm = reader.take("hidden_norm.weight", (hidden,))
        self._layers = [_Layer(config, i, layer + i, reader) for i in range(config.num_layers)]
        self._norm = reader.take("norm.weight", (hidden,))
        self.selector = (
            Selector(config, config.selector, reader) if config.selector is not None else None
        )
        reader.finish()
        self._rotary = Rotary(config.rope_theta, config.head_dim)

    def fields(self) -> tuple[Field, ...]:
        """Keys and values of context rows, in pages of :data:`GROUP`."""
        return tuple(field for layer in self._layers for field in layer.fields())

    def keep(self, features: Tensor, positions: Tensor, at: Places, state: StateViews) -> None:
        """Store context rows: features [N, taps * D] of the target's rows ``positions`` [N]."""
        if not features.shape[0]:
            return
        context = rms_norm(linear(features, self._mix), self._context_norm, self.config.rms_eps)
        angles = self._rotary.at(positions)
        for layer in self._layers:
            layer.keep(context, angles, at, state)

    def blocks(self, positions: Tensor, tables: list[Tensor], page: int) -> Blocks:
        """Where the blocks at ``positions`` [S] find their context; ``tables``: their pages."""
        reach = self.config.context
        base = torch.zeros_like(positions)
        if reach is not None:
            base = (positions - reach).clamp_(min=0)
        counts = positions - base
        width = -(-(int(counts.max()) + self.config.block) // TILE) * TILE
        # Past a sequence's context: its last row, whose values nobody sees.
        rows = torch.minimum(base[:, None] + torch.arange(width), positions[:, None] - 1)
        frames = torch.stack([table[at // page] for table, at in zip(tables, rows, strict=True)])
        assert int(frames.min()) >= 0, "a row of a draft's context has no page"
        return Blocks(positions, base, counts, Places(frames, rows % page))

    def forward(self, embedded: Tensor, blocks: Blocks, state: StateViews) -> Tensor:
        """Blocks of embeddings [S, R, D] (the newest token's, then masks') -> the hidden rows
        [S, R, D]; row r > 0 speaks of the token at its own position."""
        size = embedded.shape[1]
        at = blocks.positions[:, None] + torch.arange(size)
        angles = self._rotary.at(at.flatten())
        x = embedded * self.config.embedding_scale
        for layer in self._layers:
            x = layer.forward(x, angles, blocks, state)
        return rms_norm(x, self._norm, self.config.rms_eps)

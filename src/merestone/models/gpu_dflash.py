"""DFlash and DFlash2 drafts on a GPU: the CPU draft's weights over tables of fixed sizes.

Knows the draft's arithmetic and where its context rows lie. Must not know requests, nor how the
tables come to the device. The definition is :mod:`merestone.models.dflash`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from merestone.layers.gpu.mlp import GpuMlp
from merestone.layers.gpu.step import DeviceState
from merestone.layers.state import Field
from merestone.models.dflash import DFlash, Selector, _DynamicConv, _Layer
from merestone.ops.triton.block import Context, attend_block, convolve
from merestone.ops.triton.follow import Noise, Odds, add_noise, among, follow
from merestone.ops.triton.gemm import linear
from merestone.ops.triton.index import choose
from merestone.ops.triton.judge import best
from merestone.ops.triton.norms import add_rms_norm, rms_norm
from merestone.ops.triton.pages import write_rows
from merestone.ops.triton.rotary import norm_rotate


@dataclass(frozen=True, slots=True)
class Kept:
    """Rows that are kept, int32 tables: ``sequence`` and ``position`` [N]; their sequences' pages
    ``tables`` [S, n], and ``floor`` [S], below whose position nothing is kept."""

    sequence: Tensor
    position: Tensor
    tables: Tensor
    floor: Tensor


@dataclass(frozen=True, slots=True)
class Stands:
    """Blocks that stand at ``positions`` [S], with their ``tables`` [S, n] of pages, int32;
    ``rows`` [S R] are the positions of their rows, ``longest`` bounds positions."""

    positions: Tensor
    tables: Tensor
    rows: Tensor
    longest: int


class _GpuConv:
    """Convolutions before and after a sublayer: the weights of ``conv`` on ``device``."""

    def __init__(self, conv: _DynamicConv, size: int, device: str) -> None:
        self._base = conv._base.flatten(2).to(device).contiguous()
        self._dynamic = conv._dynamic.to(device)
        self._size = size

    def kernels(self, x: Tensor) -> Tensor:
        """[N, D] -> what is added to the kernels of each row."""
        return linear(x, self._dynamic)

    def convolve(self, x: Tensor, kernels: Tensor, side: int) -> Tensor:
        """[N, D] -> the same."""
        return convolve(x, kernels, self._base, side, self._size)


class _GpuLayer:
    """One decoder layer of the draft; the weights of ``layer`` on ``device``."""

    def __init__(self, layer: _Layer, tables: tuple[Tensor, Tensor], device: str) -> None:
        c = self._config = layer._config
        self.layer, self._window = layer.layer, layer._window
        self._rotary = tables
        self._widths = [layer._widths[0], layer._widths[1] // 2, layer._widths[1] // 2]
        self._inputs = layer._inputs.to(device)
        self._context = self._inputs[self._widths[0] :]
        self._q_norm = layer._q_norm.to(device)
        self._k_norm = layer._k_norm.to(device)
        self._out = layer._out.to(device)
        self._norm = layer._norm.to(device)
        self._mlp_norm = layer._mlp_norm.to(device)
        self._mlp = GpuMlp(layer._mlp, device)
        self._conv = _GpuConv(layer._conv, c.block, device) if layer._conv else None
        self._mlp_conv = _GpuConv(layer._mlp_conv, c.block, device) if layer._mlp_conv else None

    def keep(self, context: Tensor, kept: Kept, state: DeviceState) -> None:
        """Store keys and values of context rows [N, D]."""
        keys, values = torch.split(linear(context, self._context), self._widths[1:], 1)
        for name, rows in (("k", self._keys(keys, kept.position)), ("v", values)):
            pages = state.rows(self.layer, name).flatten(2)
            write_rows(rows, pages, kept.tables, kept.sequence, kept.position, kept.floor)

    def forward(self, x: Tensor, stands: Stands, state: DeviceState) -> Tensor:
        """Rows of blocks [S R, D] -> the same."""
        eps = self._config.rms_eps
        a = rms_norm(x, self._norm, eps)
        if self._conv is None or self._mlp_conv is None:
            x, a = add_rms_norm(x, self._attention(a, stands, state), self._mlp_norm, eps)
            return x + self._mlp.forward(a)
        conv, kernels = self._conv, self._conv.kernels(a)
        a = self._attention(conv.convolve(a, kernels, 0), stands, state)
        x, a = add_rms_norm(x, conv.convolve(a, kernels, 1), self._mlp_norm, eps)
        conv, kernels = self._mlp_conv, self._mlp_conv.kernels(a)
        a = self._mlp.forward(conv.convolve(a, kernels, 0))
        return x + conv.convolve(a, kernels, 1)

    def _keys(self, keys: Tensor, positions: Tensor) -> Tensor:
        return norm_rotate(keys, self._k_norm, self._config.rms_eps, self._rotary, positions)

    def _attention(self, x: Tensor, stands: Stands, state: DeviceState) -> Tensor:
        c = self._config
        q, keys, values = torch.split(linear(x, self._inputs), self._widths, 1)
        q = norm_rotate(q, self._q_norm, c.rms_eps, self._rotary, stands.rows)
        context = Context(
            stands.positions, c.block, state.rows(self.layer, "k"), state.rows(self.layer, "v"),
            stands.tables, c.context, self._window, stands.longest,
        )  # fmt: skip
        out = attend_block(
            q.view(-1, c.num_heads, c.head_dim), self._keys(keys, stands.rows), values, context,
            c.head_dim**-0.5, split=c.context is not None,
        )  # fmt: skip
        return linear(out.flatten(1), self._out)


class _GpuSelector:
    """DFlash2's choice; the weights of ``selector`` on ``device``."""

    def __init__(self, selector: Selector, device: str) -> None:
        self.count = selector._count
        self._books = selector._before.to(device), selector._after.to(device)
        self._project = selector._project.to(device)

    def choose(
        self,
        hidden: Tensor,
        logits: Tensor,
        newest: Tensor,
        noise: Noise,
        out: Tensor,
        odds: Odds | None,
    ) -> None:
        """Ids into ``out`` [S, depth], of rows [S depth, ...]."""
        every = torch.full_like(out, logits.shape[1]).flatten()
        candidates = choose(logits, every, self.count)
        projected = linear(hidden, self._project)
        follow(logits, candidates, projected, self._books, newest, noise, out, odds)


class GpuDFlash:
    """``draft``'s weights on ``device``.

    Raises:
        ValueError: sizes that its kernels do not have.
    """

    def __init__(self, draft: DFlash, device: str) -> None:
        c = self.config = draft.config
        if c.head_dim < 16 or c.head_dim & (c.head_dim - 1):
            raise ValueError(f"--draft: head_dim {c.head_dim} is no power of two from 16 on")
        self._fields = draft.fields()
        self._mix = draft._mix.to(device)
        self._context_norm = draft._context_norm.to(device)
        rotary = draft._rotary
        tables = rotary._coarse.to(device), rotary._fine.to(device)
        self._layers = [_GpuLayer(layer, tables, device) for layer in draft._layers]
        self._norm = draft._norm.to(device)
        self._selector = _GpuSelector(draft.selector, device) if draft.selector else None

    def fields(self) -> tuple[Field, ...]:
        return self._fields

    @property
    def among(self) -> int | None:
        """Candidates that its selector leaves a draft; None without one."""
        return self._selector.count if self._selector else None

    def keep(self, features: Tensor, kept: Kept, state: DeviceState) -> None:
        """Store context rows: features [N, taps * D] of the target's rows."""
        context = rms_norm(linear(features, self._mix), self._context_norm, self.config.rms_eps)
        for layer in self._layers:
            layer.keep(context, kept, state)

    def forward(self, embedded: Tensor, stands: Stands, state: DeviceState) -> Tensor:
        """Blocks of embeddings [S R, D] (the newest token's, then masks') -> hidden rows, as the
        CPU draft gives them."""
        scale = self.config.embedding_scale
        x = embedded if scale == 1.0 else embedded * scale
        for layer in self._layers:
            x = layer.forward(x, stands, state)
        return rms_norm(x, self._norm, self.config.rms_eps)

    def choose(
        self,
        hidden: Tensor,
        logits: Tensor,
        newest: Tensor,
        noise: Noise,
        out: Tensor,
        odds: Odds | None = None,
    ) -> None:
        """Ids into ``out`` [S, depth] int32, from the rows [S depth, ...] after the newest ones;
        into ``odds``, of as many rows, what they are drawn from."""
        depth = out.shape[1]
        if self.config.logit_scale != 1.0:
            logits = logits * self.config.logit_scale
        if self._selector is not None:
            self._selector.choose(hidden, logits, newest, noise, out, odds)
            return
        if odds is not None:
            among(logits, noise, depth, 1, out, odds)
            return
        add_noise(logits, noise, depth)
        ids = torch.empty(2, logits.shape[0], dtype=torch.int32, device=logits.device)
        best(logits, ids[0], ids[1])
        # Where logits are no numbers the best is none: then any id will do for a draft.
        out.copy_(ids[0].clamp(max=logits.shape[1] - 1).view(-1, depth))

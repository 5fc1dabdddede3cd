"""The Kimi delta attention layer: projections, short convolution, gates, chunks, output gate.

Knows its weights' roles and its state: the anchor (recurrent state, convolution tail) and the raw
rows since it. Must not know who owns pages, nor checkpoint names (those come as a prefix).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from merestone.layers.rows import ChunkRows, chunk_rows
from merestone.layers.state import Batch, Field, StateViews
from merestone.layers.weights import Weights
from merestone.ops.elementwise import l2_norm, rms, sigmoid, silu, softplus
from merestone.ops.gemm import linear
from merestone.ops.kda import kda_chunks
from merestone.parallel.products import summed_linear

_L2_EPS = 1e-6


@dataclass(frozen=True, slots=True)
class KdaShape:
    """``gate_lower_bound`` None: the softplus form of the decay (Kimi Linear). ``rate_shape``: that
    of ``A_log``, one value a head, as the family stores it."""

    hidden: int
    heads: int
    dim: int
    kernel: int
    gate_lower_bound: float | None
    rate_shape: tuple[int, ...]
    rms_eps: float

    @property
    def width(self) -> int:
        return self.heads * self.dim


class KdaLayer:
    """One layer; ``prefix`` is its weights' name up to and with the last dot.

    Ranks share the heads: projections, convolution, gates and state of a head are on one rank,
    and the last product sums over the ranks. ``shape`` then counts this rank's heads.
    """

    def __init__(self, shape: KdaShape, layer: int, prefix: str, weights: Weights) -> None:
        self.world = weights.world
        own = self.world.heads(shape.heads, "KDA")
        self.shape = replace(shape, heads=own)
        self.layer = layer
        width, dim, hidden = shape.width, shape.dim, shape.hidden
        # One product for everything that reads the layer's input.
        inputs = ("q_proj", "k_proj", "v_proj", "b_proj", "f_a_proj", "g_a_proj")
        self._splits = [3 * own * dim, own, dim, dim]
        self._inputs = weights.stack(
            tuple(f"{prefix}{name}.weight" for name in inputs),
            (width, width, width, shape.heads, dim, dim),
            hidden,
            split=(True, True, True, True, False, False),
        )
        self._decay = weights.take(f"{prefix}f_b_proj.weight", (width, dim), split=0)
        self._gate = weights.take(f"{prefix}g_b_proj.weight", (width, dim), split=0)
        self._out = weights.take(f"{prefix}o_proj.weight", (hidden, width), split=1)
        convs = [
            weights.fp32(f"{prefix}{n}_conv1d.weight", (width, 1, shape.kernel), split=0)
            for n in "qkv"
        ]
        self._conv = torch.cat(convs)[:, 0].t().contiguous()  # [kernel, 3 width]
        self._bias = weights.fp32(f"{prefix}dt_bias", (width,), split=0).view(own, 1, dim)
        by_head = shape.rate_shape.index(shape.heads)
        rate = weights.fp32(f"{prefix}A_log", shape.rate_shape, split=by_head)
        self._rate = rate.exp().view(-1, 1, 1)
        self._norm = weights.fp32(f"{prefix}o_norm.weight", (dim,))

    def fields(self) -> tuple[Field, ...]:
        s, dtype = self.shape, self._out.dtype
        return (
            Field(self.layer, "r", "open", (3 * s.width,), dtype),
            Field(self.layer, "gate", "open", (s.width,), dtype),
            Field(self.layer, "beta", "open", (s.heads,), dtype),
            Field(self.layer, "state", "anchor", (s.heads, s.dim, s.dim), torch.float32),
            Field(self.layer, "conv", "anchor", (s.kernel - 1, 3 * s.width), dtype),
        )

    def forward(self, x: Tensor, batch: Batch, state: StateViews) -> Tensor:
        """[N, hidden] -> [N, hidden], model dtype; writes open rows and ordered anchors."""
        s = self.shape
        rows = chunk_rows(batch, state, s.kernel - 1)
        chunks, anchors = rows.chunks, rows.anchors
        r, beta, decay, gate = torch.split(linear(x, self._inputs), self._splits, 1)
        new = {"r": r, "gate": linear(decay, self._decay), "beta": beta}
        tables = {name: self._table(name, value, rows, state) for name, value in new.items()}
        q, k, v = self._convolve(tables["r"][chunks.packed])
        g = self._log_decay(self._by_head(tables["gate"][chunks.inner], s.dim))
        beta = sigmoid(tables["beta"][chunks.inner].float().transpose(1, 2))
        initial = x.new_zeros((len(chunks.counts), s.heads, s.dim, s.dim), dtype=torch.float32)
        if anchors.sources is not None:
            initial[anchors.starts] = state.read_anchor(self.layer, "state", anchors.sources)
        out, states = kda_chunks(
            q, k, v, g, beta, initial, chunks.counts, anchors.advances, s.gate_lower_bound
        )
        if anchors.targets is not None:
            state.write_anchor(self.layer, "state", anchors.targets, states[anchors.ends])
            state.write_anchor(self.layer, "conv", anchors.targets, tables["r"][anchors.tails])
        out = out.transpose(1, 2).reshape(-1, s.heads, s.dim)[chunks.unpack]
        gates = sigmoid(linear(gate, self._gate).float().view(-1, s.heads, s.dim))
        out = (rms(out, s.rms_eps) * self._norm).mul_(gates)
        return summed_linear(out.to(x.dtype).view(-1, s.width), self._out, self.world)

    def _table(self, name: str, new: Tensor, rows: ChunkRows, state: StateViews) -> Tensor:
        """The table of one open field, after writing its new rows to their pages."""
        view = state.rows(self.layer, name)
        old = rows.reads.read(view)
        rows.writes.write(view, new[rows.kept])
        lead = None
        anchors = rows.anchors
        if name == "r" and anchors.sources is not None:
            lead = new.new_zeros(len(anchors.advances), self.shape.kernel - 1, new.shape[1])
            lead[anchors.starts] = state.read_anchor(self.layer, "conv", anchors.sources)
        return rows.table(lead, old, new)

    def _convolve(self, r: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Raw rows [NC, kernel - 1 + C, 3 width] -> q, k, v [NC, H, C, dim] fp32.

        Rounded once after the SiLU, as transformers does; q and k are then normalised.
        """
        s = self.shape
        size = r.shape[1] - s.kernel + 1
        r = r.float()
        total = r[:, :size] * self._conv[0]
        for tap in range(1, s.kernel):
            total += r[:, tap : tap + size] * self._conv[tap]
        mixed = self._by_head(silu(total).to(self._out.dtype), s.dim).float()
        q, k, v = torch.split(mixed, s.heads, 1)
        scale = s.dim**-0.5
        return l2_norm(q, _L2_EPS).mul_(scale), l2_norm(k, _L2_EPS), v

    def _log_decay(self, f: Tensor) -> Tensor:
        """Raw gate [NC, H, C, dim] -> log decay, fp32, per head and key channel."""
        z = f.float().add_(self._bias)
        if self.shape.gate_lower_bound is None:
            return softplus(z).mul_(-self._rate)
        return sigmoid(z.mul_(self._rate)).mul_(self.shape.gate_lower_bound)

    def _by_head(self, x: Tensor, dim: int) -> Tensor:
        """[NC, C, H dim] -> [NC, H, C, dim], contiguous."""
        return x.view(*x.shape[:2], -1, dim).transpose(1, 2).contiguous()

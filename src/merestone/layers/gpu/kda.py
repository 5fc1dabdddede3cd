"""The Kimi delta attention layer on a GPU: one recurrence kernel for prefill, decode and drafts.

Knows its CPU counterpart, whose weights and fields it has. Must not know who owns pages. Old rows
of the open chunk come from caches of the slot; after a restore these are made again from the raw
rows in the open pages, without any projection.
"""

from __future__ import annotations

import torch
from torch import Tensor

from merestone.layers.gpu.ranks import summed_linear
from merestone.layers.gpu.step import DeviceState, Rebuild, SlotField, Step
from merestone.layers.kda import KdaLayer
from merestone.layers.state import Field
from merestone.ops.triton.gemm import linear
from merestone.ops.triton.kda import OpenRows, Pass, kda, open_rows_shapes
from merestone.ops.triton.kda_inputs import Raw, kda_inputs
from merestone.ops.triton.norms import gated_rms_norm
from merestone.ops.triton.pages import read_rows, write_tail
from merestone.ops.triton.rows import Sequences

_L2_EPS = 1e-6
# Rows of the joint projection come in whole vectors, or a product could not read its parts.
_VECTOR = 16


class GpuKda:
    """One layer; the weights of ``layer`` on ``device``. ``chunk`` is C."""

    def __init__(self, layer: KdaLayer, device: str, chunk: int) -> None:
        s = self.shape = layer.shape
        self.layer = layer.layer
        self._world = layer.world
        self._chunk = chunk
        self._fields = layer.fields()
        both, strength, decay, gate = torch.split(layer._inputs.to(device), layer._splits)
        # Strengths last: there are few of them, and parts must start on the vector grid.
        spare = -strength.shape[0] % _VECTOR
        self._inputs = torch.cat([both, decay, gate, strength, both.new_zeros(spare, s.hidden)])
        self._splits = [3 * s.width, 2 * s.dim, s.heads, spare]
        # Of decays and output gates: both are products of as many columns.
        self._gates = torch.stack([layer._decay, layer._gate]).to(device)
        self._out = layer._out.to(device)
        self._conv = layer._conv.to(device)
        self._bias = layer._bias.to(device).flatten()
        self._rate = layer._rate.to(device).flatten()
        self._norm = layer._norm.to(device)

    def fields(self) -> tuple[Field, ...]:
        return self._fields

    def slot_fields(self) -> tuple[SlotField, ...]:
        s = self.shape
        shapes = open_rows_shapes(s.heads, s.dim, s.dim, self._chunk, self._out.dtype)
        return tuple(SlotField(self.layer, name, *rest) for name, rest in shapes.items())

    def forward(self, x: Tensor, step: Step, state: DeviceState) -> Tensor:
        """[N, hidden] -> [N, hidden]; writes open rows, caches and ordered anchors."""
        s = self.shape
        r, low, strength, _ = torch.split(linear(x, self._inputs), self._splits, 1)
        decay, gates = linear(low.view(-1, 2, s.dim).transpose(0, 1), self._gates)
        rows = step.row_sequence, step.row_position
        inputs = self._prepare(
            Raw(r, decay, strength), rows, step.sequences, state, floor=step.floor
        )
        out = self._recur(inputs, step.passes, state)
        tail = state.cells(self.layer, "conv")
        pages = state.rows(self.layer, "r")
        write_tail(r, pages, tail, step.sequences, step.advance, step.advance_frames)
        out = gated_rms_norm(out.view(-1, s.dim), self._norm, gates.view(-1, s.dim), s.rms_eps)
        return summed_linear(out.view(-1, s.width), self._out, self._world)

    def rebuild(self, old: Rebuild, state: DeviceState) -> None:
        """Make the caches of sequences' old rows again."""
        rows = old.row_sequence, old.row_position
        pages = self._pages(state)
        gate, strength = (
            read_rows(kept, old.found.open_pages, *rows) for kept in (pages.gate, pages.beta)
        )
        none = pages.r.new_empty(0, pages.r.shape[2])
        inputs = self._prepare(Raw(none, gate, strength), rows, old.found, state)
        self._recur(inputs, ((old.sequences, old.again),), state)

    def _pages(self, state: DeviceState) -> Raw:
        return Raw(**{name: state.rows(self.layer, name) for name in ("r", "gate", "beta")})

    def _prepare(
        self,
        raw: Raw,
        rows: tuple[Tensor, Tensor],
        sequences: Sequences,
        state: DeviceState,
        floor: Tensor | None = None,
    ) -> tuple[Tensor, ...]:
        """The recurrence's q, k, v, g, beta; with a ``floor`` raw rows are kept from there on."""
        return kda_inputs(
            raw, self._pages(state), state.cells(self.layer, "conv"), self._conv, self._bias,
            self._rate, *rows, sequences, eps=_L2_EPS, lowest=self.shape.gate_lower_bound,
            floor=floor,
        )  # fmt: skip

    def _recur(
        self,
        inputs: tuple[Tensor, ...],
        passes: tuple[tuple[Sequences, Pass], ...],
        state: DeviceState,
    ) -> Tensor:
        """Outputs [N, H, dim]."""
        s = self.shape
        q, k, v, g, beta = inputs
        out = torch.empty_like(q)
        anchors = state.cells(self.layer, "state")
        cache = OpenRows(**{f.name: state.slot_field(f.layer, f.name) for f in self.slot_fields()})
        for sequences, one in passes:
            kda(
                q, k, v, g, beta, anchors, cache, sequences, one,
                chunk=self._chunk, lowest=s.gate_lower_bound, out=out, few=len(passes) == 1,
            )  # fmt: skip
        return out

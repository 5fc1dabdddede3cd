"""The arena: one tensor of frames, and typed views into it.

Knows where each field lies. Must not know which frame belongs to whom.
"""

from __future__ import annotations

import torch
from torch import Tensor

from merestone.core.orders import CopyRows
from merestone.device.layout import Layout
from merestone.layers.state import Field
from merestone.parallel.tokens import Shards

POISON = 0xFF
"""Fill byte of a poisoned arena: a NaN in every float format."""


class Arena:
    """[num_frames, frame_bytes] bytes; implements ``layers.state.StateViews``.

    ``hidden_dtype``: that of stored hidden rows. ``poison`` fills the memory with NaN, so that a
    read of what nobody wrote shows. ``rank``: which rows of groups that ranks share are here.
    """

    def __init__(
        self,
        layout: Layout,
        fields: tuple[Field, ...],
        frames: int,
        *,
        hidden_dtype: torch.dtype,
        device: str = "cpu",
        poison: bool = False,
        rank: int = 0,
    ) -> None:
        self.layout = layout
        self.fields = {(field.layer, field.name): field for field in fields}
        self.memory = torch.empty(frames, layout.frame_bytes, dtype=torch.uint8, device=device)
        if poison:
            self.memory.fill_(POISON)
        self.groups = {group.name: group for group in layout.groups}
        self._shards = {
            group.name: Shards(group, rank if group.shard > 1 else 0) for group in layout.groups
        }
        self._flat = {
            dtype: self.memory.view(-1).view(dtype)
            for dtype in {field.dtype for field in fields} | {hidden_dtype}
        }
        self._views = {key: self._page_view(f) for key, f in self.fields.items() if self._paged(f)}
        self._cells = {
            key: [(run, self._cell_view(field, run.offset, run.last - run.first)) for run in runs]
            for key, runs in layout.cells.items()
            for field in [self.fields[key]]
        }
        width = layout.hidden_bytes // hidden_dtype.itemsize
        self.hidden = self._strided(hidden_dtype, 0, (layout.hidden_rows, width))

    @staticmethod
    def _paged(field: Field) -> bool:
        return field.home != "anchor"

    def _strided(self, dtype: torch.dtype, offset: int, shape: tuple[int, ...]) -> Tensor:
        """[num_frames, *shape] at ``offset`` bytes of every frame."""
        strides, step = [], 1
        for extent in reversed(shape):
            strides.append(step)
            step *= extent
        frame = self.layout.frame_bytes // dtype.itemsize
        size = (self.memory.shape[0], *shape)
        stride = (frame, *reversed(strides))
        return self._flat[dtype].as_strided(size, stride, offset // dtype.itemsize)

    def _page_view(self, field: Field) -> Tensor:
        rows = self.groups[field.home].page // field.every
        offset = self.layout.offsets[field.layer, field.name]
        return self._strided(field.dtype, offset, (rows, *field.shape))

    def _cell_view(self, field: Field, offset: int, cells: int) -> Tensor:
        return self._strided(field.dtype, offset, (cells, *field.shape[1:]))

    # -- StateViews -----------------------------------------------------------------------------

    def page(self, group: str) -> int:
        return self.groups[group].page

    def shards(self, group: str) -> Shards:
        return self._shards[group]

    def rows(self, layer: int, name: str) -> Tensor:
        return self._views[layer, name]

    def read_anchor(self, layer: int, name: str, frames: Tensor) -> Tensor:
        parts = [view[frames[:, run.frame]] for run, view in self._cells[layer, name]]
        return parts[0] if len(parts) == 1 else torch.cat(parts, 1)

    def write_anchor(self, layer: int, name: str, frames: Tensor, value: Tensor) -> None:
        for run, view in self._cells[layer, name]:
            view[frames[:, run.frame]] = value[:, run.first : run.last]

    # -- orders ---------------------------------------------------------------------------------

    def copy_rows(self, order: CopyRows) -> None:
        """Copy the rank's part of the first ``order.rows`` tokens of a page."""
        shards = self._shards[order.group]
        count = shards.spec.local_count(order.rows, shards.rank)
        for key, view in self._views.items():
            field = self.fields[key]
            if field.home == order.group:
                rows = count // field.every
                view[order.target, :rows] = view[order.source, :rows]

    def anchor_finite(self, frames: Tensor) -> bool:
        """Whether every value of one anchor ([frames of it]) is a finite number."""
        return all(
            bool(torch.isfinite(view[frames[run.frame]]).all())
            for cells in self._cells.values()
            for run, view in cells
        )

"""A rank's memory on a GPU: the arena, and for each slot page tables, hidden rows and caches.

Knows where everything lies. Must not know which frame belongs to whom. The last frame and the last
slot are those of padding: nobody else ever uses them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext

import numpy as np
import torch
from torch import Tensor

from merestone.device.arena import Arena
from merestone.device.layout import Layout
from merestone.layers.gpu.step import SlotField
from merestone.layers.state import Field
from merestone.ops.triton.copy import Copier, Region
from merestone.ops.triton.rows import Cells


def current(device: str) -> AbstractContextManager[object]:
    """Inside, ``device`` is this thread's: kernels are launched where a thread stands."""
    return nullcontext() if device == "cpu" else torch.cuda.device(device)


def sent(values: np.ndarray, device: str) -> Tensor:
    """``values`` on ``device``, by a copy that waits for nothing that runs there."""
    given = torch.from_numpy(values)
    host = torch.empty(given.shape, dtype=given.dtype, pin_memory=device != "cpu")
    return host.copy_(given).to(device, non_blocking=True)


def sent_both(first: Sequence[int], second: Sequence[int], device: str) -> tuple[Tensor, Tensor]:
    """Two lists [n] of int32 on ``device``, by one copy. Both begin on the grid of 16 bytes: for a
    tensor that begins elsewhere another kernel would be compiled, when it is first met."""
    count = len(first)
    both = np.zeros((2, -(-count // 4) * 4), np.int32)
    both[:, :count] = first, second
    one, other = sent(both, device)
    return one[:count], other[:count]


def peak(call: Callable[[], object]) -> int:
    """Bytes that ``call`` takes at most on the current device, beside what there is."""
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_reserved()
    call()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_reserved() - before


RING = 128
"""Hidden rows that a slot keeps: those since its anchor, up to two chunks."""


class GpuState:
    """``frames`` frames and ``slots`` slots (and one more of each, for padding); implements
    ``layers.gpu.step.DeviceState``.

    ``longest``: tokens that a page table covers. ``hidden``: size of a hidden row. ``rank``: as
    :class:`merestone.device.arena.Arena` takes it.
    """

    def __init__(
        self,
        layout: Layout,
        fields: tuple[Field, ...],
        slot_fields: tuple[SlotField, ...],
        *,
        frames: int,
        slots: int,
        longest: int,
        hidden: int,
        hidden_dtype: torch.dtype,
        device: str,
        poison: bool = False,
        rank: int = 0,
    ) -> None:
        self.layout = layout
        self.device = device
        self.padding_frame, self.padding_slot = frames, slots
        self.arena = Arena(
            layout, fields, frames + 1, hidden_dtype=hidden_dtype, device=device, poison=poison,
            rank=rank,
        )  # fmt: skip
        self.ring = torch.zeros(slots + 1, RING, hidden, dtype=hidden_dtype, device=device)
        self._slot_fields = {
            (f.layer, f.name): torch.zeros(slots + 1, *f.shape, dtype=f.dtype, device=device)
            for f in slot_fields
        }
        self._cells = {key: self._cells_of(key) for key in layout.cells}
        self._tables(slots, longest)
        self.copier = Copier(
            self.arena.memory,
            self.ring.view(torch.uint8).view(slots + 1, RING, layout.hidden_bytes),
            {group.name: (group, self._regions(group.name)) for group in layout.groups},
            padding=(frames, slots),
            rank=rank,
        )

    def _tables(self, slots: int, longest: int) -> None:
        """Page tables of all groups in one memory, so that one launch changes any of them."""
        self.entries = {g.name: -(-longest // g.span) + 1 for g in self.layout.groups}
        self.first_entry: dict[str, int] = {}
        size = 0
        for name, entries in self.entries.items():
            self.first_entry[name] = size
            size += (slots + 1) * entries
        # What is not bound leads to the frame of padding, never out of the arena.
        shape = (size,)
        self.table_memory = torch.full(
            shape, self.padding_frame, dtype=torch.int32, device=self.device
        )
        self.tables = {
            name: self.table_memory[first : first + (slots + 1) * self.entries[name]].view(
                slots + 1, -1
            )
            for name, first in self.first_entry.items()
        }

    def _regions(self, group: str) -> list[Region]:
        fields = self.arena.fields
        return [
            Region(self.layout.offsets[key], field.bytes, field.every)
            for key, field in fields.items()
            if field.home == group
        ]

    def _cells_of(self, key: tuple[int, str]) -> Cells:
        field = self.arena.fields[key]
        size = field.bytes // field.shape[0]
        places = [
            (run.frame, (run.offset + i * size) // field.dtype.itemsize)
            for run in self.layout.cells[key]
            for i in range(run.last - run.first)
        ]
        memory = self.arena.memory.view(field.dtype)
        return Cells(memory, torch.tensor(places, dtype=torch.int64).to(self.device))

    def states(self) -> tuple[Cells, int]:
        """The cells of every layer's recurrent state, and the elements of one."""
        keys = [key for key in self.layout.cells if key[1] == "state"]
        field = self.arena.fields[keys[0]]
        places = torch.cat([self._cells[key].places for key in keys])
        return Cells(self._cells[keys[0]].memory, places), field.shape[1] * field.shape[2]

    def forget(self, slot: int) -> None:
        """Zero the slot's caches."""
        for field in self._slot_fields.values():
            field[slot].zero_()

    # -- DeviceState ----------------------------------------------------------------------------

    def rows(self, layer: int, name: str) -> Tensor:
        return self.arena.rows(layer, name)

    def cells(self, layer: int, name: str) -> Cells:
        return self._cells[layer, name]

    def slot_field(self, layer: int, name: str) -> Tensor:
        return self._slot_fields[layer, name]

# mypy: disable-error-code="no-untyped-def, untyped-decorator"
"""Copy orders in one launch: rows of part-filled pages, and hidden rows to and from slots.

Knows bytes of frames and slots. Must not know who owns them, nor the order of launches. A copy is
exact by nature; what can go wrong is an address, so every address is formed in 64 bits from table
entries that are never specialised, and padding orders have a frame and a slot of their own.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from merestone.core.geometry import GroupSpec
from merestone.core.orders import CopyRows, LoadHidden, Order, SaveHidden, check_disjoint
from merestone.ops.triton.launch import aligned

UNIT = 16
"""Bytes of one vector access; frames, fields and hidden rows start at multiples of it."""
_SAVE, _LOAD, _FIRST_GROUP = 0, 1, 2
# kind, source, its row, target, its row, tokens
_COLUMNS = 6
_TILE = 512
# Programs that share one region of one order.
_SPLITS = 8


@triton.jit
def _move(source, target, size, TILE: tl.constexpr, SPLITS: tl.constexpr):
    """``size`` bytes between int32 pointers on the unit grid, tiles dealt over the third axis."""
    units = (size // 16).to(tl.int32)
    word = tl.arange(0, 4)[None, :]
    for start in range(tl.program_id(2) * TILE, units, SPLITS * TILE):
        unit = start + tl.arange(0, TILE)[:, None]
        # The mask is the same for the four words of a unit, so an access stays one vector.
        inside = unit < units
        at = unit.to(tl.int64) * 4 + word
        tl.store(target + at, tl.load(source + at, mask=inside), mask=inside)
    if tl.program_id(2) == 0:
        rest = tl.arange(0, 16)
        inside = rest < size % 16
        at = (size // 16) * 16 + rest
        from_byte = source.to(tl.pointer_type(tl.uint8)) + at
        to_byte = target.to(tl.pointer_type(tl.uint8)) + at
        tl.store(to_byte, tl.load(from_byte, mask=inside), mask=inside)


@triton.jit(do_not_specialize=["frame_units", "slot_units"])
def _copy(
    arena,
    slots,
    orders,
    kinds,
    regions,
    frame_units,
    slot_units,
    COLUMNS: tl.constexpr,
    TILE: tl.constexpr,
    SPLITS: tl.constexpr,
):
    """Grid: (orders, most regions of a kind, SPLITS). All tables int64, all sizes in bytes."""
    order = orders + tl.program_id(0) * COLUMNS
    kind = tl.load(order)
    region = tl.load(kinds + kind * 2) + tl.program_id(1)
    if region < tl.load(kinds + kind * 2 + 1):
        offset = tl.load(regions + region * 3)
        width = tl.load(regions + region * 3 + 1)
        size = tl.load(order + 5) // tl.load(regions + region * 3 + 2) * width
        # Divided before they are scaled, so that the compiler sees multiples of four words.
        source_row = (offset + tl.load(order + 2) * width) // 16
        target_row = (offset + tl.load(order + 4) * width) // 16
        source, target = tl.load(order + 1), tl.load(order + 3)
        if kind == 0:
            _move(
                slots + (source * slot_units + source_row) * 4,
                arena + (target * frame_units + target_row) * 4,
                size,
                TILE,
                SPLITS,
            )
        elif kind == 1:
            _move(
                arena + (source * frame_units + source_row) * 4,
                slots + (target * slot_units + target_row) * 4,
                size,
                TILE,
                SPLITS,
            )
        else:
            _move(
                arena + (source * frame_units + source_row) * 4,
                arena + (target * frame_units + target_row) * 4,
                size,
                TILE,
                SPLITS,
            )


@dataclass(frozen=True, slots=True)
class Region:
    """Where one field lies in a page: bytes from the frame's start, bytes of a row, and the tokens
    that share a row (a row that is not complete is not copied)."""

    offset: int
    row_bytes: int
    every: int = 1


class Copier:
    """Executes copy orders over ``arena`` [frames, frame_bytes] and ``slots`` [slots, rows,
    hidden_bytes], both uint8.

    A slot keeps its last hidden rows in a ring: that of position p in row p % rows. ``groups``:
    the regions of each group's page, by name. ``padding``: the frame and the slot that padding
    orders name; nobody else uses them.
    """

    def __init__(
        self,
        arena: Tensor,
        slots: Tensor,
        groups: Mapping[str, tuple[GroupSpec, Sequence[Region]]],
        *,
        padding: tuple[int, int],
        rank: int = 0,
    ) -> None:
        assert arena.dtype == slots.dtype == torch.uint8
        assert arena.is_contiguous()
        assert slots.is_contiguous()
        aligned(arena, slots)
        self._arena, self._slots = arena, slots
        self._rows, hidden_bytes = slots.shape[1:]
        self._padding = padding
        self._rank = rank
        self._groups = {name: (i, spec) for i, (name, (spec, _)) in enumerate(groups.items())}
        assert arena.shape[1] % UNIT == hidden_bytes % UNIT == 0, (arena.shape, slots.shape)
        each: list[Sequence[Region]] = [[Region(0, hidden_bytes)]] * _FIRST_GROUP
        each += [regions for _, regions in groups.values()]
        table: list[tuple[int, int, int]] = []
        ends: list[tuple[int, int]] = []
        for regions in each:
            assert all(region.offset % UNIT == 0 for region in regions), regions
            ends.append((len(table), len(table) + len(regions)))
            table += [(region.offset, region.row_bytes, region.every) for region in regions]
        self._regions = torch.tensor(table, dtype=torch.int64).to(arena.device)
        self._kinds = torch.tensor(ends, dtype=torch.int64).to(arena.device)
        self._most = max(len(regions) for regions in each)

    def encode(self, orders: tuple[Order, ...], capacity: int) -> Tensor:
        """The orders of one launch as a table, [capacity, 6] int64 on the CPU, padded."""
        check_disjoint(orders)
        assert len(orders) <= capacity, (len(orders), capacity)
        frame, slot = self._padding
        rows = [self._encode(order) for order in orders]
        rows += [(_SAVE, slot, 0, frame, 0, 0)] * (capacity - len(orders))
        return torch.tensor(rows, dtype=torch.int64).reshape(capacity, _COLUMNS)

    def _encode(self, order: Order) -> tuple[int, int, int, int, int, int]:
        match order:
            case CopyRows(group=group, source=source, target=target, rows=rows):
                index, spec = self._groups[group]
                count = spec.local_count(rows, self._rank)
                return _FIRST_GROUP + index, source, 0, target, 0, count
            case SaveHidden(slot=slot, at=at, frame=frame, row=row):
                return _SAVE, slot, (at - 1) % self._rows, frame, row, 1
            case LoadHidden(slot=slot, at=at, frame=frame, row=row):
                return _LOAD, frame, row, slot, (at - 1) % self._rows, 1

    def run(self, table: Tensor) -> None:
        """Launch the orders of ``table`` [n, 6] int64, on the arena's device; allocates nothing."""
        assert table.dtype == torch.int64
        assert table.device == self._arena.device
        assert table.shape[1] == _COLUMNS
        assert table.is_contiguous()
        if table.shape[0] == 0:
            return
        _copy[(table.shape[0], self._most, _SPLITS)](
            self._arena.view(torch.int32),
            self._slots.view(torch.int32),
            table,
            self._kinds,
            self._regions,
            self._arena.shape[1] // UNIT,
            self._slots[0].numel() // UNIT,
            COLUMNS=_COLUMNS,
            TILE=_TILE,
            SPLITS=_SPLITS,
            num_warps=4,
        )


def copy_naive(
    arena: Tensor,
    slots: Tensor,
    groups: Mapping[str, tuple[GroupSpec, Sequence[Region]]],
    orders: tuple[Order, ...],
    rank: int = 0,
) -> None:
    """The definition: byte ranges, one after another."""
    width = slots.shape[2]
    for order in orders:
        if isinstance(order, CopyRows):
            spec, regions = groups[order.group]
            count = spec.local_count(order.rows, rank)
            for region in regions:
                end = region.offset + count // region.every * region.row_bytes
                arena[order.target, region.offset : end] = arena[order.source, region.offset : end]
        else:
            stored = arena[order.frame, order.row * width : (order.row + 1) * width]
            live = slots[order.slot, (order.at - 1) % slots.shape[1]]
            into, outof = (stored, live) if isinstance(order, SaveHidden) else (live, stored)
            into.copy_(outof)

# mypy: disable-error-code="no-untyped-def, untyped-decorator"
"""Rows into pages, rings and anchors, and out of pages: what a step keeps and what it finds.

Knows positions and tables. Must not know requests. Nothing is computed here, so the only thing that
can go wrong is an address: all are formed in 64 bits from entries that are never specialised.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from merestone.ops.triton.launch import aligned, blocks, power_of_two
from merestone.ops.triton.rows import Cells, Sequences

_BLOCK = 1024
_ENTRIES = 128


def _block(width: int) -> int:
    return min(_BLOCK, power_of_two(width))


@triton.jit(do_not_specialize=["entries"])
def _write_rows(
    new, pages, table, row_sequence, row_position, floor, entries, new_row, page_frame,
    PAGE: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, FLOORED: tl.constexpr,
):  # fmt: skip
    """Grid: (rows, blocks of columns)."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    sequence = tl.load(row_sequence + row).to(tl.int64)
    position = tl.load(row_position + row)
    lowest = 0
    if FLOORED:
        lowest = tl.load(floor + sequence)
    if position >= lowest:
        frame = tl.load(table + sequence * entries + position // PAGE).to(tl.int64)
        to = pages + frame * page_frame + (position % PAGE) * WIDTH + column
        value = tl.load(new + row * new_row + column, mask=column < WIDTH)
        tl.store(to, value, mask=column < WIDTH)


def write_rows(
    new: Tensor,
    pages: Tensor,
    table: Tensor,
    row_sequence: Tensor,
    row_position: Tensor,
    floor: Tensor | None = None,
) -> None:
    """Store rows [N, W] in the pages of their sequences.

    pages [frames, page, W], a view into the arena; table [S, n] int32, frames of each sequence's
    pages. ``floor`` [S] int32: rows of lower positions are not kept.
    """
    width = new.shape[1]
    assert pages.shape[2] == pages.stride(1) == width, (new.shape, pages.shape)
    assert new.dtype == pages.dtype
    assert table.is_contiguous()
    aligned(new, pages)
    if new.shape[0]:
        _write_rows[(new.shape[0], blocks(width, _block(width)))](
            new, pages, table, row_sequence, row_position, row_sequence if floor is None else floor,
            table.shape[1], new.stride(0), pages.stride(0),
            PAGE=pages.shape[1], WIDTH=width, BLOCK=_block(width), FLOORED=floor is not None,
            num_warps=4,
        )  # fmt: skip


@triton.jit(do_not_specialize=["entries"])
def _read_rows(
    pages, table, row_sequence, row_position, out, entries, page_frame,
    PAGE: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Grid: (rows, blocks of columns)."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    sequence = tl.load(row_sequence + row).to(tl.int64)
    position = tl.load(row_position + row)
    frame = tl.load(table + sequence * entries + position // PAGE).to(tl.int64)
    at = pages + frame * page_frame + (position % PAGE) * WIDTH + column
    tl.store(out + row * WIDTH + column, tl.load(at, mask=column < WIDTH), mask=column < WIDTH)


def read_rows(pages: Tensor, table: Tensor, row_sequence: Tensor, row_position: Tensor) -> Tensor:
    """Rows from the pages of their sequences, [R, W], as :func:`write_rows` left them."""
    rows, width = row_position.shape[0], pages.shape[2]
    assert pages.stride(1) == width
    assert table.is_contiguous()
    out = torch.empty(rows, width, dtype=pages.dtype, device=pages.device)
    aligned(pages, out)
    if rows:
        _read_rows[(rows, blocks(width, _block(width)))](
            pages, table, row_sequence, row_position, out, table.shape[1], pages.stride(0),
            PAGE=pages.shape[1], WIDTH=width, BLOCK=_block(width), num_warps=4,
        )  # fmt: skip
    return out


@triton.jit
def _write_ring(
    new, ring, row_sequence, row_position, slot, floor, new_row,
    ROWS: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Grid: (rows, blocks of columns)."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    sequence = tl.load(row_sequence + row).to(tl.int64)
    position = tl.load(row_position + row)
    if position >= tl.load(floor + sequence) - 1:
        place = tl.load(slot + sequence).to(tl.int64) * ROWS + position % ROWS
        value = tl.load(new + row * new_row + column, mask=column < WIDTH)
        tl.store(ring + place * WIDTH + column, value, mask=column < WIDTH)


def write_ring(
    new: Tensor,
    ring: Tensor,
    row_sequence: Tensor,
    row_position: Tensor,
    slot: Tensor,
    floor: Tensor,
) -> None:
    """Store hidden rows [N, W], from that of position ``floor - 1`` on, in their slots' rings.

    ring [slots, rows, W]: the row of position p is row p % rows. slot, floor [S] int32.
    """
    width = new.shape[1]
    assert ring.shape[2] == width
    assert ring.is_contiguous()
    assert new.dtype == ring.dtype
    aligned(new, ring)
    if new.shape[0]:
        _write_ring[(new.shape[0], blocks(width, _block(width)))](
            new, ring, row_sequence, row_position, slot, floor, new.stride(0),
            ROWS=ring.shape[1], WIDTH=width, BLOCK=_block(width), num_warps=4,
        )  # fmt: skip


@triton.jit(do_not_specialize=["entries"])
def _write_tail(
    new, pages, memory, places, first, row, open_pages, advance, advance_frames,
    entries, new_row, page_frame, memory_frame,
    ANCHOR_FRAMES: tl.constexpr, PAGE: tl.constexpr, TAIL: tl.constexpr, WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Grid: (sequences, rows of the tail, blocks of columns)."""
    sequence, cell = tl.program_id(0).to(tl.int64), tl.program_id(1)
    column = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    inside = column < WIDTH
    place = places + cell * 2
    target = tl.load(advance_frames + sequence * ANCHOR_FRAMES + tl.load(place)).to(tl.int64)
    if target >= 0:
        at = tl.load(advance + sequence) - TAIL + cell
        start = tl.load(first + sequence)
        if at >= start:
            source = new + (tl.load(row + sequence) + at - start).to(tl.int64) * new_row
        else:
            frame = tl.load(open_pages + sequence * entries + at // PAGE).to(tl.int64)
            source = pages + frame * page_frame + (at % PAGE) * WIDTH
        to = memory + target * memory_frame + tl.load(place + 1)
        tl.store(to + column, tl.load(source + column, mask=inside), mask=inside)


def write_tail(
    new: Tensor,
    pages: Tensor,
    tail: Cells,
    sequences: Sequences,
    advance: Tensor,
    advance_frames: Tensor,
) -> None:
    """Store the raw rows before each new anchor in its cells.

    new [N, W] the step's raw rows, pages [frames, page, W] those of the open pages; ``advance`` [S]
    and ``advance_frames`` [S, n] (-1: no anchor moves) int32. Runs after whatever reads the old
    anchor, which may lie in the same frames.
    """
    width = new.shape[1]
    assert pages.shape[2] == pages.stride(1) == width
    assert new.dtype == pages.dtype == tail.memory.dtype
    aligned(new, pages, tail.memory)
    count, cells = advance.shape[0], tail.places.shape[0]
    if count and new.shape[0]:
        _write_tail[(count, cells, blocks(width, _block(width)))](
            new, pages, tail.memory, tail.places, sequences.first, sequences.row,
            sequences.open_pages, advance, advance_frames, sequences.open_pages.shape[1],
            new.stride(0), pages.stride(0), tail.memory.stride(0),
            ANCHOR_FRAMES=advance_frames.shape[1], PAGE=pages.shape[1], TAIL=cells, WIDTH=width,
            BLOCK=_block(width), num_warps=4,
        )  # fmt: skip


@triton.jit(do_not_specialize=["count"])
def _set_entries(table, at, values, count, BLOCK: tl.constexpr):
    """Grid: (blocks of entries)."""
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = index < count
    where = tl.load(at + index, mask=inside, other=0).to(tl.int64)
    tl.store(table + where, tl.load(values + index, mask=inside), mask=inside)


@triton.jit(do_not_specialize=["count", "vocabulary"])
def _feed(tokens, at, drawn, source, count, vocabulary, BLOCK: tl.constexpr):
    """Grid: (blocks of ids)."""
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = index < count
    where = tl.load(at + index, mask=inside, other=0).to(tl.int64)
    token = tl.load(drawn + tl.load(source + index, mask=inside, other=0).to(tl.int64), mask=inside)
    # Of a row that is not finite it may be no id at all; nobody reads what is computed from it.
    token = tl.where((token >= 0) & (token < vocabulary), token, 0)
    tl.store(tokens + where, token, mask=inside)


def feed(tokens: Tensor, at: Tensor, drawn: Tensor, source: Tensor, vocabulary: int) -> None:
    """tokens[at] = drawn[source], all int32; 0 instead of what is no id below ``vocabulary``."""
    assert tokens.is_contiguous()
    assert drawn.is_contiguous()
    assert tokens.dtype == at.dtype == drawn.dtype == source.dtype == torch.int32
    aligned(tokens, at, drawn, source)
    if at.shape[0]:
        _feed[(blocks(at.shape[0], _ENTRIES),)](
            tokens, at, drawn, source, at.shape[0], vocabulary, BLOCK=_ENTRIES, num_warps=1
        )


def set_entries(table: Tensor, at: Tensor, values: Tensor) -> None:
    """table[at] = values, all int32; ``at`` [n] are flat and distinct."""
    assert table.is_contiguous()
    assert table.dtype == at.dtype == values.dtype == torch.int32
    aligned(table, at, values)
    if at.shape[0]:
        _set_entries[(blocks(at.shape[0], _ENTRIES),)](
            table, at, values, at.shape[0], BLOCK=_ENTRIES, num_warps=1
        )

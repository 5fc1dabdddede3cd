# mypy: disable-error-code="no-untyped-def, untyped-decorator"
"""Entries (a token's choices of experts) in the order of experts: a stable sort by counting.

Knows ids of experts, and how many rows of a product an expert's tile holds. Must not know rows. All
of it is integer arithmetic, so nothing depends on which other tokens chose the same expert.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from merestone.ops.triton.gemm import Tile
from merestone.ops.triton.launch import blocks, power_of_two

# Entries that one program counts; blocks of them and experts that one program adds up.
_ENTRIES, _PARTS, _GROUP = 64, 256, 16
# Entries that one program sorts: two sizes.
_LEAST, _FEW = 128, 512
# By the mean number of rows of an expert. Tiles change no bits (see gemm.py).
NARROW = 16
"""Rows of the smallest tile."""
_BF16 = ((16, Tile(NARROW, 128, 128, 4, 4)), (64, Tile(64, 128, 64, 4, 4)))
_BF16_MANY = Tile(128, 128, 64, 8, 4)
_FP32 = Tile(16, 64, 32, 4, 3)


@triton.jit(do_not_specialize=["count"])
def _count(ids, counts, count, PADDED: tl.constexpr, ENTRIES: tl.constexpr):
    """Grid: (blocks of entries). How often each expert occurs: counts [blocks, PADDED]."""
    at = tl.program_id(0) * ENTRIES + tl.arange(0, ENTRIES)
    chosen = tl.load(ids + at, mask=at < count, other=-1)
    expert = tl.arange(0, PADDED)
    same = (chosen[:, None] == expert[None, :]).to(tl.int32)
    tl.store(counts + tl.program_id(0) * PADDED + expert, tl.sum(same, 0))


@triton.jit(do_not_specialize=["parts"])
def _offsets(counts, totals, parts, PADDED: tl.constexpr, GROUP: tl.constexpr, BLOCK: tl.constexpr):
    """Grid: (PADDED / GROUP). Turns an expert's counts into its number in earlier blocks."""
    expert = tl.program_id(0) * GROUP + tl.arange(0, GROUP)
    total = tl.zeros((GROUP,), tl.int32)
    for start in range(0, parts, BLOCK):
        part = start + tl.arange(0, BLOCK)[:, None]
        at = counts + part * PADDED + expert[None, :]
        here = tl.load(at, mask=part < parts, other=0)
        tl.store(at, total[None, :] + tl.cumsum(here, 0) - here, mask=part < parts)
        total += tl.sum(here, 0)
    tl.store(totals + expert, total)


@triton.jit
def _ends(totals, starts, ends, tile_ends, PADDED: tl.constexpr, ROWS: tl.constexpr):
    """Grid: (1). Where experts start and end, in entries, and end in tiles of ROWS."""
    expert = tl.arange(0, PADDED)
    total = tl.load(totals + expert)
    end = tl.cumsum(total, 0)
    tl.store(starts + expert, end - total)
    tl.store(ends + expert, end)
    tl.store(tile_ends + expert, tl.cumsum((total + ROWS - 1) // ROWS, 0))


@triton.jit(do_not_specialize=["count"])
def _place(ids, offsets, starts, order, count, PADDED: tl.constexpr, ENTRIES: tl.constexpr):
    """Grid: (blocks of entries). order[place] = entry, stable within each expert."""
    at = tl.program_id(0) * ENTRIES + tl.arange(0, ENTRIES)
    chosen = tl.load(ids + at, mask=at < count, other=-1)
    same = (chosen[:, None] == tl.arange(0, PADDED)[None, :]).to(tl.int32)
    rank = tl.sum((tl.cumsum(same, 0) - same) * same, 1)
    first = tl.load(offsets + tl.program_id(0) * PADDED + chosen, mask=at < count, other=0)
    first += tl.load(starts + chosen, mask=at < count, other=0)
    tl.store(order + first + rank, at, mask=at < count)


@triton.jit(do_not_specialize=["count"])
def _sort_few(
    ids,
    order,
    ends,
    tile_ends,
    count,
    PADDED: tl.constexpr,
    ENTRIES: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Grid: (1). All of it at once: numbers that hold expert and entry, sorted."""
    at = tl.arange(0, ENTRIES)
    expert = tl.load(ids + at, mask=at < count, other=PADDED)
    tl.store(order + at, tl.sort(expert * ENTRIES + at) % ENTRIES, mask=at < count)
    total = tl.histogram(expert, PADDED, mask=at < count)
    place = tl.arange(0, PADDED)
    tl.store(ends + place, tl.cumsum(total, 0))
    tl.store(tile_ends + place, tl.cumsum((total + ROWS - 1) // ROWS, 0))


@triton.jit
def tile_of(
    tile, order, ends, tile_ends, ROWS: tl.constexpr, PADDED: tl.constexpr, SINGLE: tl.constexpr
):  # fmt: skip
    """Of a tile of :class:`Sorted`: whether it exists, its expert, its first place, and where its
    expert ends. SINGLE: of one row."""
    if SINGLE:
        return True, tl.load(order + tile), tile, tile + 1
    else:
        expert = tl.arange(0, PADDED)
        last_tiles = tl.load(tile_ends + expert)
        exists = tile < tl.max(last_tiles, 0)
        mine = tl.sum((last_tiles <= tile).to(tl.int32), 0)
        before = tl.max(tl.where(expert == mine - 1, last_tiles, 0), 0)
        first = tl.load(ends + mine - 1, mask=exists & (mine > 0), other=0)
        end = tl.load(ends + mine, mask=exists, other=0)
        return exists, mine, first + (tile - before) * ROWS, end


@dataclass(frozen=True, slots=True)
class Sorted:
    """Entries (row * k + choice) by expert: ``order`` [n], and where experts end, in entries
    (``ends``) and in tiles of ``tile.rows`` (``tile_ends``), padded; all int32. Of one row nothing
    is sorted: an entry is a tile, and ``order`` holds its expert."""

    order: Tensor
    ends: Tensor | None
    tile_ends: Tensor | None
    tile: Tile
    most_tiles: int


def sort_by_expert(ids: Tensor, experts: int, dtype: torch.dtype) -> Sorted:
    """Stable order of the entries of ids [T, k] int32 by expert, for products in ``dtype``; see
    :class:`Sorted` for one row."""
    assert ids.dtype == torch.int32
    assert ids.is_contiguous()
    count, padded = ids.numel(), power_of_two(experts)
    mean = count // experts
    tile = _FP32
    if dtype == torch.bfloat16:
        tile = next((tile for most, tile in _BF16 if mean <= most), _BF16_MANY)
    if ids.shape[0] == 1:
        return Sorted(ids[0], None, None, tile, count)
    parts = blocks(count, _ENTRIES)
    offsets = torch.empty(parts, padded, dtype=torch.int32, device=ids.device)
    order = torch.empty(count, dtype=torch.int32, device=ids.device)
    totals, starts, ends, tile_ends = torch.empty(4, padded, dtype=torch.int32, device=ids.device)
    if 0 < count <= _FEW:
        _sort_few[(1,)](
            ids, order, ends, tile_ends, count,
            PADDED=padded, ENTRIES=_LEAST if count <= _LEAST else _FEW, ROWS=tile.rows, num_warps=4,
        )  # fmt: skip
    elif count:
        group = min(_GROUP, padded)
        each = {"PADDED": padded, "num_warps": 8}
        _count[(parts,)](ids, offsets, count, ENTRIES=_ENTRIES, **each)
        _offsets[(padded // group,)](offsets, totals, parts, GROUP=group, BLOCK=_PARTS, **each)
        _ends[(1,)](totals, starts, ends, tile_ends, ROWS=tile.rows, **each)
        _place[(parts,)](ids, offsets, starts, order, count, ENTRIES=_ENTRIES, **each)
    # Every expert has at most one tile that is not full, and no more tiles than entries.
    most = min(count, count // tile.rows + experts)
    return Sorted(order, ends, tile_ends, tile, most)

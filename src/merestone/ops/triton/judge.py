# mypy: disable-error-code="no-untyped-def, untyped-decorator"
"""Judging rows: the best id of each, and whether all its values are finite numbers.

Knows rows and cells of anchors. Must not know requests. Maxima and the lowest of equal ids are
exact in any order.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from merestone.ops.triton.launch import aligned, blocks, power_of_two
from merestone.ops.triton.rows import Cells

_BLOCK = 2048


@triton.jit
def _infinite(x):
    """1 where x is NaN or infinite, else 0."""
    wide = x.to(tl.float32)
    return tl.where((wide == wide) & (tl.abs(wide) != float("inf")), 0, 1)


@triton.jit
def _best_parts(x, values, ids, bad, WIDTH, parts, BLOCK: tl.constexpr):
    """Grid: (rows, blocks of columns)."""
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    column = part * BLOCK + tl.arange(0, BLOCK)
    inside = column < WIDTH
    value = tl.load(x + row * WIDTH + column, mask=inside, other=float("-inf")).to(tl.float32)
    best = tl.max(value, 0)
    first = tl.min(tl.where(value == best, column, WIDTH), 0)
    at = row * parts + part
    tl.store(values + at, best)
    tl.store(ids + at, first)
    tl.store(bad + at, tl.max(tl.where(inside, _infinite(value), 0), 0))


@triton.jit
def _best(values, ids, bad, out, out_bad, parts, PADDED: tl.constexpr):
    """Grid: (rows)."""
    row = tl.program_id(0).to(tl.int64)
    part = tl.arange(0, PADDED)
    at = row * parts + part
    inside = part < parts
    value = tl.load(values + at, mask=inside, other=float("-inf"))
    first = tl.load(ids + at, mask=inside, other=2147483647)
    chosen = tl.min(tl.where(value == tl.max(value, 0), first, 2147483647), 0)
    tl.store(out + row, chosen)
    tl.store(out_bad + row, tl.max(tl.load(bad + at, mask=inside, other=0), 0))


def best(x: Tensor, out: Tensor, bad: Tensor) -> None:
    """The greatest of each row of x [M, V] into ``out`` [M] int32, ties to the lowest id, and into
    ``bad`` [M] int32 1 if the row has a value that is not finite (``out`` then says nothing)."""
    rows, width = x.shape
    assert x.is_contiguous()
    parts = blocks(width, _BLOCK)
    values = torch.empty(rows, parts, dtype=torch.float32, device=x.device)
    ids, flags = torch.empty(2, rows, parts, dtype=torch.int32, device=x.device)
    aligned(x)
    if rows:
        _best_parts[(rows, parts)](x, values, ids, flags, width, parts, BLOCK=_BLOCK, num_warps=4)
        _best[(rows,)](values, ids, flags, out, bad, parts, PADDED=power_of_two(parts), num_warps=4)


@triton.jit
def _bad_rows(x, rows, out, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """Grid: (rows)."""
    row = tl.load(rows + tl.program_id(0)).to(tl.int64)
    found = 0
    for start in range(0, WIDTH, BLOCK):
        column = start + tl.arange(0, BLOCK)
        value = tl.load(x + row * WIDTH + column, mask=column < WIDTH, other=0.0)
        found = tl.maximum(found, tl.max(_infinite(value), 0))
    tl.store(out + tl.program_id(0), found)


def bad_rows(x: Tensor, rows: Tensor, out: Tensor) -> None:
    """Which of the ``rows`` [n] int32 of x [R, W] hold a value that is not finite: out [n] int32,
    1 or 0."""
    assert x.is_contiguous()
    if rows.shape[0]:
        width = x.shape[1]
        _bad_rows[(rows.shape[0],)](
            x, rows, out, WIDTH=width, BLOCK=min(_BLOCK, power_of_two(width)), num_warps=4
        )


@triton.jit
def _bad_anchors(
    memory, places, frames, out, memory_frame,
    FRAMES: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Grid: (anchors, cells). ``out`` starts at zero."""
    anchor, cell = tl.program_id(0), places + tl.program_id(1) * 2
    frame = tl.load(frames + anchor * FRAMES + tl.load(cell)).to(tl.int64)
    at = memory + frame * memory_frame + tl.load(cell + 1)
    found = 0
    for start in range(0, SIZE, BLOCK):
        value = tl.load(at + start + tl.arange(0, BLOCK))
        found = tl.maximum(found, tl.max(_infinite(value), 0))
    if found > 0:
        tl.store(out + anchor, 1)


def bad_anchors(states: Cells, size: int, frames: Tensor, out: Tensor) -> None:
    """Which anchors, of ``frames`` [n, frames of one] int32, hold a state that is not finite.

    states: the cells of all layers' states, of ``size`` elements (a power of two) each. out [n]
    int32 becomes 1 or 0.
    """
    assert frames.is_contiguous()
    assert size & (size - 1) == 0, size
    out.zero_()
    if frames.shape[0]:
        _bad_anchors[(frames.shape[0], states.places.shape[0])](
            states.memory, states.places, frames, out, states.memory.stride(0),
            FRAMES=frames.shape[1], SIZE=size, BLOCK=min(size, _BLOCK), num_warps=4,
        )  # fmt: skip

# mypy: disable-error-code="no-untyped-def, untyped-decorator"
"""What the rows of a fixed-size block do with one another: attention without order over a window
of pages and the block itself, and convolutions inside the block.

Knows blocks, pages and positions. Must not know drafts. The keys of a block at position p are the
rows [p - reach, p) of its pages and then its own: in tiles of TILE and spans of SPAN, anchored at
the first of them, so that a block's bits depend on its position and its rows alone. Spans are
merged in order, by a second kernel or as they come: the same sums. Definitions:
:meth:`merestone.models.dflash._Layer.forward` and ``_DynamicConv.convolve``.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from merestone.ops.triton.launch import aligned, blocks, power_of_two

TILE = 64
"""Keys of a tile, a constant of the numerics."""
SPAN = 512
"""Keys of a span, a constant of the numerics."""
_COLUMNS = 256


@triton.jit
def _rest(highest, higher):
    """What sums up to ``highest`` are multiplied by, where the maximum is ``higher``."""
    return tl.exp(highest - tl.where(higher == float("-inf"), 0.0, higher))


@triton.jit
def _span(
    query, keys, values, key_pages, value_pages, table, base, count, lowest, span, scale,
    page_frame, key_row, value_row, head,
    HEADS: tl.constexpr, SIZE: tl.constexpr, DIM: tl.constexpr, PAGE: tl.constexpr,
    ROWS: tl.constexpr, TILE: tl.constexpr, SPAN: tl.constexpr,
):  # fmt: skip
    """Maximum [ROWS], sum of weights [ROWS] and weighted values [ROWS, DIM] of one span."""
    column = tl.arange(0, DIM)
    seen = count + SIZE
    highest = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    mixed = tl.zeros((ROWS, DIM), tl.float32)
    for start in range(span * SPAN, tl.minimum((span + 1) * SPAN, seen), TILE):
        key = start + tl.arange(0, TILE)
        old, own = key < count, (key >= count) & (key < seen)
        place = base + key
        frame = tl.load(table + place // PAGE, mask=old, other=0).to(tl.int64)
        at = frame * page_frame + (place % PAGE) * (HEADS * DIM) + head * DIM
        # What nobody meant is zero, as a key and as a value, whatever lies there.
        kept = tl.load(key_pages + at[None, :] + column[:, None], mask=old[None, :], other=0.0)
        mine = (key - count).to(tl.int64)
        new = keys + (mine * key_row)[None, :] + column[:, None]
        new = tl.load(new, mask=own[None, :], other=0.0)
        scores = tl.dot(query, tl.where(old[None, :], kept, new), input_precision="ieee") * scale
        visible = (key < seen)[None, :] & (key[None, :] >= lowest[:, None])
        scores = tl.where(visible, scores, float("-inf"))
        higher = tl.maximum(highest, tl.max(scores, 1))
        weights = _rest(scores, higher[:, None])
        fade = _rest(highest, higher)
        kept = tl.load(value_pages + at[:, None] + column[None, :], mask=old[:, None], other=0.0)
        new = values + (mine * value_row)[:, None] + column[None, :]
        new = tl.load(new, mask=own[:, None], other=0.0)
        value = tl.where(old[:, None], kept, new)
        total = total * fade + tl.sum(weights, 1)
        mixed = mixed * fade[:, None]
        mixed += tl.dot(weights.to(value.dtype), value, input_precision="ieee")
        highest = higher
    return highest, total, mixed


@triton.jit
def _bounds(positions, sequence, r, REACH: tl.constexpr, WINDOW: tl.constexpr):
    """The position of a block's first key, how many come before the block, and the first key that
    each of its rows ``r`` sees."""
    position = tl.load(positions + sequence)
    base = tl.zeros((), tl.int32)
    if REACH >= 0:
        base = tl.maximum(position - REACH, 0)
    lowest = r * 0
    if WINDOW > 0:
        lowest = tl.maximum(position + r - WINDOW + 1 - base, 0)
    return base, position - base, lowest


@triton.jit(do_not_specialize=["entries", "spans"])
def _attend(
    q, keys, values, key_pages, value_pages, tables, positions, parts, stats, out, scale,
    page_frame, key_row, value_row, entries, spans,
    HEADS: tl.constexpr, GROUP: tl.constexpr, SIZE: tl.constexpr, DIM: tl.constexpr,
    PAGE: tl.constexpr, ROWS: tl.constexpr, REACH: tl.constexpr, WINDOW: tl.constexpr,
    TILE: tl.constexpr, SPAN: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    """Grid: (blocks x heads of keys, spans if SPLIT else 1). A program's rows are those of the
    block, for each head that shares the keys: parts [.., spans, ROWS, DIM], stats [.., 2, ROWS]."""
    both, span = tl.program_id(0), tl.program_id(1)
    sequence, head = (both // HEADS).to(tl.int64), both % HEADS
    local, column = tl.arange(0, ROWS), tl.arange(0, DIM)
    r = tl.minimum(local // GROUP, SIZE - 1)
    base, count, lowest = _bounds(positions, sequence, r, REACH, WINDOW)
    row = (sequence * SIZE + r) * (HEADS * GROUP) + head * GROUP + local % GROUP
    to = (row * DIM)[:, None] + column[None, :]
    query = tl.load(q + to)
    keys += sequence * SIZE * key_row + head * DIM
    values += sequence * SIZE * value_row + head * DIM
    table = tables + sequence * entries
    if SPLIT:
        if span * SPAN < count + SIZE:
            highest, total, mixed = _span(
                query, keys, values, key_pages, value_pages, table, base, count, lowest, span,
                scale, page_frame, key_row, value_row, head,
                HEADS, SIZE, DIM, PAGE, ROWS, TILE, SPAN,
            )  # fmt: skip
            place = both.to(tl.int64) * spans + span
            at = ((place * ROWS + local) * DIM)[:, None] + column[None, :]
            tl.store(parts + at, mixed)
            tl.store(stats + place * 2 * ROWS + local, highest)
            tl.store(stats + (place * 2 + 1) * ROWS + local, total)
    else:
        highest = tl.full((ROWS,), float("-inf"), tl.float32)
        total = tl.zeros((ROWS,), tl.float32)
        mixed = tl.zeros((ROWS, DIM), tl.float32)
        for each in range(tl.cdiv(count + SIZE, SPAN)):
            span_highest, span_total, span_mixed = _span(
                query, keys, values, key_pages, value_pages, table, base, count, lowest, each,
                scale, page_frame, key_row, value_row, head,
                HEADS, SIZE, DIM, PAGE, ROWS, TILE, SPAN,
            )  # fmt: skip
            higher = tl.maximum(highest, span_highest)
            fade, join = _rest(highest, higher), _rest(span_highest, higher)
            total = total * fade + span_total * join
            mixed = mixed * fade[:, None] + span_mixed * join[:, None]
            highest = higher
            # A loop inside another: its buffers are filled anew.
            tl.debug_barrier()
        inside = (local < SIZE * GROUP)[:, None]
        tl.store(out + to, (mixed / total[:, None]).to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["spans"])
def _merge(
    parts, stats, positions, out, spans,
    HEADS: tl.constexpr, GROUP: tl.constexpr, SIZE: tl.constexpr, DIM: tl.constexpr,
    ROWS: tl.constexpr, REACH: tl.constexpr, SPAN: tl.constexpr,
):  # fmt: skip
    """Grid: (blocks x heads of keys). Merges the spans in order."""
    both = tl.program_id(0).to(tl.int64)
    sequence, head = both // HEADS, both % HEADS
    local, column = tl.arange(0, ROWS), tl.arange(0, DIM)
    r = tl.minimum(local // GROUP, SIZE - 1)
    _, count, _ = _bounds(positions, sequence, r, REACH, 0)
    highest = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    mixed = tl.zeros((ROWS, DIM), tl.float32)
    for span in range(tl.cdiv(count + SIZE, SPAN)):
        place = both * spans + span
        span_highest = tl.load(stats + place * 2 * ROWS + local)
        span_total = tl.load(stats + (place * 2 + 1) * ROWS + local)
        span_mixed = tl.load(parts + ((place * ROWS + local) * DIM)[:, None] + column[None, :])
        higher = tl.maximum(highest, span_highest)
        fade, join = _rest(highest, higher), _rest(span_highest, higher)
        total = total * fade + span_total * join
        mixed = mixed * fade[:, None] + span_mixed * join[:, None]
        highest = higher
    row = (sequence * SIZE + r) * (HEADS * GROUP) + head * GROUP + local % GROUP
    to = (row * DIM)[:, None] + column[None, :]
    inside = (local < SIZE * GROUP)[:, None]
    tl.store(out + to, (mixed / total[:, None]).to(out.dtype.element_ty), mask=inside)


@dataclass(frozen=True, slots=True)
class Context:
    """What lies before blocks, which stand at ``positions`` [S] int32 and are of ``size`` rows:
    ``pages`` [frames, page, H, dim] of keys and of values, views into the arena of the same
    strides, and ``tables`` [S, n] int32, the frames of each sequence's pages.

    ``reach``: so many rows before a block are keys (None: all). ``window``: from what distance on a
    key is out of a row's sight (None: never). ``longest``: an upper bound of positions.
    """

    positions: Tensor
    size: int
    keys: Tensor
    values: Tensor
    tables: Tensor
    reach: int | None
    window: int | None
    longest: int


def attend_block(
    q: Tensor, keys: Tensor, values: Tensor, context: Context, scale: float, *, split: bool
) -> Tensor:
    """softmax(scale q keys^T) values of every row of a block, over its context and itself.

    q [S R, heads, dim], dense; keys and values [S R, H dim], the block's own, rows at any distance;
    all in the pages' dtype -> [S R, heads, dim]. ``split``: a program for every span.
    """
    c = context
    rows, heads, dim = q.shape
    page, shared = c.keys.shape[1], c.keys.shape[2]
    count = rows // c.size
    assert rows == count * c.size == keys.shape[0] == values.shape[0], (rows, c.size)
    assert keys.shape[1] == values.shape[1] == shared * dim, (keys.shape, shared, dim)
    assert c.keys.stride() == c.values.stride()
    assert c.keys.stride(1) == shared * dim
    assert q.dtype == keys.dtype == values.dtype == c.keys.dtype == c.values.dtype
    assert dim & (dim - 1) == 0, dim
    assert dim >= 16, dim
    assert c.positions.dtype == c.tables.dtype == torch.int32
    assert q.is_contiguous()
    assert c.tables.is_contiguous()
    group = heads // shared
    padded = max(power_of_two(c.size * group), 16)
    reach = -1 if c.reach is None else c.reach
    spans = blocks((c.longest if c.reach is None else min(c.reach, c.longest)) + c.size, SPAN)
    out = torch.empty_like(q)
    aligned(q, keys, values, c.keys, c.values)
    if rows == 0:
        return out
    room = count * shared * spans if split else 1
    parts = torch.empty(room, padded, dim, dtype=torch.float32, device=q.device)
    stats = torch.empty(room, 2, padded, dtype=torch.float32, device=q.device)
    _attend[(count * shared, spans if split else 1)](
        q, keys, values, c.keys, c.values, c.tables, c.positions, parts, stats, out, scale,
        c.keys.stride(0), keys.stride(0), values.stride(0), c.tables.shape[1], spans,
        HEADS=shared, GROUP=group, SIZE=c.size, DIM=dim, PAGE=page, ROWS=padded, REACH=reach,
        WINDOW=c.window or 0, TILE=TILE, SPAN=SPAN, SPLIT=split,
        num_warps=4, num_stages=2, enable_fp_fusion=False,
    )  # fmt: skip
    if split:
        _merge[(count * shared,)](
            parts, stats, c.positions, out, spans,
            HEADS=shared, GROUP=group, SIZE=c.size, DIM=dim, ROWS=padded, REACH=reach, SPAN=SPAN,
            num_warps=4, enable_fp_fusion=False,
        )  # fmt: skip
    return out


@triton.jit
def _convolve(
    x, dynamic, base, out, dynamic_row,
    SIDE: tl.constexpr, TAPS: tl.constexpr, SIZE: tl.constexpr, WIDTH: tl.constexpr,
    GROUP: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Grid: (rows, blocks of columns)."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < WIDTH
    total = tl.zeros((COLUMNS,), tl.float32)
    for back in tl.static_range(TAPS):
        tap = SIDE * TAPS + back
        kernel = tl.load(base + tap * WIDTH + column, mask=inside, other=0.0)
        more = dynamic + row * dynamic_row + tap * (WIDTH // GROUP) + column // GROUP
        kernel += tl.load(more, mask=inside, other=0.0).to(tl.float32)
        seen = inside & (row % SIZE >= back)
        value = tl.load(x + (row - back) * WIDTH + column, mask=seen, other=0.0)
        total += kernel * value.to(tl.float32)
    tl.store(out + row * WIDTH + column, total.to(out.dtype.element_ty), mask=inside)


def convolve(x: Tensor, dynamic: Tensor, base: Tensor, side: int, size: int) -> Tensor:
    """Causal convolutions inside each block of ``size`` rows: x [S R, D] -> the same.

    A channel's kernel is that of ``base`` [2, taps, D] fp32, newest tap first, on ``side``, plus
    its row's and its group's of ``dynamic`` [S R, 2 taps groups]; fp32 inside, rounded once.
    """
    rows, width = x.shape
    taps = base.shape[1]
    groups = dynamic.shape[1] // (2 * taps)
    assert base.shape == (2, taps, width), base.shape
    assert dynamic.shape == (rows, 2 * taps * groups), dynamic.shape
    assert rows % size == width % groups == 0, (x.shape, size, groups)
    assert x.is_contiguous()
    assert base.is_contiguous()
    assert base.dtype == torch.float32
    out = torch.empty_like(x)
    aligned(x, dynamic, base, out)
    if rows:
        columns = min(_COLUMNS, power_of_two(width))
        _convolve[(rows, blocks(width, columns))](
            x, dynamic, base, out, dynamic.stride(0),
            SIDE=side, TAPS=taps, SIZE=size, WIDTH=width, GROUP=width // groups, COLUMNS=columns,
            num_warps=4, enable_fp_fusion=False,
        )  # fmt: skip
    return out

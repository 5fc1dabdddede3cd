# mypy: disable-error-code="no-untyped-def, untyped-decorator"
"""Absorbed latent attention over pages: weights by tiles of keys, then mixtures of spans, in order.

Knows rows, pages and how many keys a row sees. Must not know requests. Keys are visited in tiles
of TILE, anchored at token 0 (or at the first of a row's selected positions, ascending). A first
kernel gives each tile its weights, exp(score - maximum of the tile), rounded to the keys' dtype,
and the maxima. SPAN keys make a span: a second kernel brings their weights to the span's maximum
and sums weighted keys from zero. Spans are merged in order, by a third kernel for few rows, which
have a program for every span, and as they come for many: the same sums.

Only maxima and tensor-core products cross a row's elements: neither depends on how many rows share
a tile. So the sum of a row's weights is a product with ones. What is mixed are a key's first WIDTH
elements; more of them only score.

The weights pass through memory, two bytes a row, head and key, a bounded number of rows at a time.
That is what lets both products have the tiles of ordinary ones: a latent of 512 columns leaves no
room for a second accumulator beside the mixture, nor for other rows to hide behind.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from merestone.ops.triton.launch import aligned, blocks

TILE = 128
"""Keys of a tile, a constant of the numerics."""
SPAN = 512
"""Keys of a span, a constant of the numerics."""
NARROW, WIDE = 32, 64
"""Rows of an item, for few rows and for many."""
MOST_WEIGHTS = 1 << 29
"""Weights that exist at once: a GiB in bf16."""
_STEP = 64
_DEPTH = 64
# Columns that a program mixes.
_COLUMNS = 128


@triton.jit
def _rows(items, item, seen, HEADS: tl.constexpr, ROWS: tl.constexpr):
    """An item's sequence, its flat rows [ROWS] (row * HEADS + head; past its end the last again),
    which of them exist, what they see and the most of it."""
    sequence = tl.load(items + item * 3).to(tl.int64)
    first, count = tl.load(items + item * 3 + 1), tl.load(items + item * 3 + 2)
    valid = tl.arange(0, ROWS) < count
    row = first + tl.minimum(tl.arange(0, ROWS), tl.maximum(count - 1, 0)).to(tl.int64)
    sees = tl.load(seen + row // HEADS, mask=valid, other=0)
    return sequence, row, valid, sees, tl.max(sees, 0)


@triton.jit
def _keys_at(
    pages, table, chosen, start, last, page_frame,
    PAGE: tl.constexpr, DIM: tl.constexpr, KEYS: tl.constexpr, SELECTED: tl.constexpr,
):  # fmt: skip
    """Where KEYS keys from ``start`` on lie: a pointer, and offsets [KEYS]. Past the last key comes
    the last again: rows above a boundary may hold anything, and zero times that."""
    index = tl.minimum(start + tl.arange(0, KEYS), last - 1)
    if PAGE % KEYS == 0 and not SELECTED:
        # All in one page: the offsets hardly change from tile to tile.
        frame = tl.load(table + start // PAGE).to(tl.int64)
        source = pages + frame * page_frame + (start % PAGE) * DIM
        return source, (index - start) * DIM
    else:
        position = index
        if SELECTED:
            position = tl.maximum(tl.load(chosen + index), 0)
        frame = tl.load(table + position // PAGE).to(tl.int64)
        return pages, frame * page_frame + (position % PAGE) * DIM


@triton.jit(do_not_specialize=["table_entries", "spans", "from_item"])
def _weigh(
    q, pages, tables, items, seen, selection, weights, peaks, scale, page_frame, table_entries,
    spans, from_item,
    CHOICES: tl.constexpr, HEADS: tl.constexpr, PAGE: tl.constexpr, DIM: tl.constexpr,
    ROWS: tl.constexpr, TILE: tl.constexpr, SPAN: tl.constexpr, DEPTH: tl.constexpr,
    SELECTED: tl.constexpr,
):  # fmt: skip
    """Grid: (tiles, items). weights [items, ROWS, length], peaks [items, ROWS, length / TILE]; the
    length is ``spans`` times SPAN, so that the compiler knows rows to begin on the vector grid."""
    length = spans * SPAN
    tile, item = tl.program_id(0), tl.program_id(1)
    sequence, row, _, sees, last = _rows(items, item + from_item, seen, HEADS, ROWS)
    start = tile * TILE
    if start < last:
        chosen = selection
        if SELECTED:
            chosen += tl.min(row, 0) // HEADS * CHOICES
        source, at_key = _keys_at(
            pages, tables + sequence * table_entries, chosen, start, last, page_frame,
            PAGE, DIM, TILE, SELECTED,
        )  # fmt: skip
        depth = tl.arange(0, DEPTH)
        at_row = (row * DIM)[:, None] + depth[None, :]
        at_key = at_key[None, :] + depth[:, None]
        scores = tl.zeros((ROWS, TILE), tl.float32)
        for k in range(0, DIM, DEPTH):
            some, keys = tl.load(q + k + at_row), tl.load(source + k + at_key)
            scores = tl.dot(some, keys, scores, input_precision="ieee")
        visible = (start + tl.arange(0, TILE))[None, :] < sees[:, None]
        scores = tl.where(visible, scores * scale, float("-inf"))
        peak = tl.max(scores, 1)
        # A row that sees none of the tile: any finite reference will do.
        reference = tl.where(peak == float("-inf"), 0.0, peak)
        weight = tl.exp(scores - reference[:, None])
        place = item.to(tl.int64) * ROWS + tl.arange(0, ROWS)
        to = (place * length)[:, None] + start + tl.arange(0, TILE)[None, :]
        tl.store(weights + to, weight.to(weights.dtype.element_ty))
        tl.store(peaks + place * (length // TILE) + tile, peak)


@triton.jit
def _span(
    weights, peaks, pages, table, chosen, span, last, length, page_frame, left,
    PAGE: tl.constexpr, DIM: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    TILE: tl.constexpr, SPAN: tl.constexpr, STEP: tl.constexpr, SELECTED: tl.constexpr,
):  # fmt: skip
    """One span of an item, columns from ``left`` on: maximum [ROWS, 1], sum of weights [ROWS, 1],
    weighted keys [ROWS, COLUMNS]. ``weights`` and ``peaks`` point at the item."""
    local, column = tl.arange(0, ROWS), left + tl.arange(0, COLUMNS)[None, :]
    tile = span * (SPAN // TILE) + tl.arange(0, SPAN // TILE)[None, :]
    at_peak = peaks + (local * (length // TILE))[:, None]
    highest = tl.load(at_peak + tile, mask=tile * TILE < last, other=float("-inf"))
    highest = tl.max(highest, 1)[:, None]
    reference = tl.where(highest == float("-inf"), 0.0, highest)
    dtype = weights.dtype.element_ty
    ones = tl.full((STEP, 16), 1.0, dtype)
    total = tl.zeros((ROWS, 16), tl.float32)
    mixed = tl.zeros((ROWS, COLUMNS), tl.float32)
    at_weight = (local.to(tl.int64) * length)[:, None] + tl.arange(0, STEP)[None, :]
    for start in range(span * SPAN, tl.minimum((span + 1) * SPAN, last), STEP):
        source, at_key = _keys_at(
            pages, table, chosen, start, last, page_frame, PAGE, DIM, STEP, SELECTED
        )
        some = tl.load(weights + start + at_weight)
        keys = tl.load(source + at_key[:, None] + column)
        share = tl.exp(tl.load(at_peak + start // TILE) - reference)
        some = (some.to(tl.float32) * share).to(dtype)
        total = tl.dot(some, ones, total, input_precision="ieee")
        mixed = tl.dot(some, keys, mixed, input_precision="ieee")
    return highest, tl.max(total, 1)[:, None], mixed


@triton.jit
def _shares(highest, span_highest):
    """The maximum of both, and by what each side's sums are to be multiplied."""
    higher = tl.maximum(highest, span_highest)
    reference = tl.where(higher == float("-inf"), 0.0, higher)
    return higher, tl.exp(highest - reference), tl.exp(span_highest - reference)


@triton.jit
def _divisor(total, damaged):
    """What the mixed keys are divided by: a row without keys is zero. No choice could be made from
    damaged keys: such a row must not look as if it had."""
    return tl.where(damaged, float("nan"), tl.where(total == 0.0, 1.0, total))


@triton.jit
def _log_sum(highest, total, damaged):
    """The log-sum-exp of a row's scores, -inf without keys."""
    return tl.where(total == 0.0, float("-inf"), highest + tl.log(_divisor(total, damaged)))


@triton.jit(do_not_specialize=["table_entries", "spans", "from_item"])
def _mix(
    pages, tables, items, seen, selection, weights, peaks, parts, stats, out, lse, page_frame,
    table_entries, spans, from_item,
    CHOICES: tl.constexpr, HEADS: tl.constexpr, PAGE: tl.constexpr, DIM: tl.constexpr,
    WIDTH: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, TILE: tl.constexpr,
    SPAN: tl.constexpr, STEP: tl.constexpr, SELECTED: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    """Grid: (blocks of columns, items, spans if SPLIT else 1). SPLIT stores each span's results,
    parts [flat rows, spans, WIDTH] and stats [.., 2]; else spans are merged as they come."""
    length = spans * SPAN
    left, item, span = tl.program_id(0) * COLUMNS, tl.program_id(1), tl.program_id(2)
    sequence, row, valid, _, last = _rows(items, item + from_item, seen, HEADS, ROWS)
    row, valid = row[:, None], valid[:, None]
    chosen = selection
    damaged = False
    if SELECTED:
        chosen += tl.min(row) // HEADS * CHOICES
        damaged = (last > 0) & (tl.load(chosen) < 0)  # without keys, there may be anything
    table = tables + sequence * table_entries
    weights += item.to(tl.int64) * ROWS * length
    peaks += item.to(tl.int64) * ROWS * (length // TILE)
    column = left + tl.arange(0, COLUMNS)[None, :]
    if SPLIT:
        if span * SPAN < last:
            highest, total, mixed = _span(
                weights, peaks, pages, table, chosen, span, last, length, page_frame, left,
                PAGE, DIM, ROWS, COLUMNS, TILE, SPAN, STEP, SELECTED,
            )  # fmt: skip
            at = row * spans + span
            tl.store(parts + at * WIDTH + column, mixed, mask=valid)
            tl.store(stats + at * 2, highest, mask=valid & (left == 0))
            tl.store(stats + at * 2 + 1, total, mask=valid & (left == 0))
    else:
        highest = tl.full((ROWS, 1), float("-inf"), tl.float32)
        total = tl.zeros((ROWS, 1), tl.float32)
        mixed = tl.zeros((ROWS, COLUMNS), tl.float32)
        for span in range(tl.cdiv(last, SPAN)):
            span_highest, span_total, span_mixed = _span(
                weights, peaks, pages, table, chosen, span, last, length, page_frame, left,
                PAGE, DIM, ROWS, COLUMNS, TILE, SPAN, STEP, SELECTED,
            )  # fmt: skip
            highest, fade, join = _shares(highest, span_highest)
            total = total * fade + span_total * join
            mixed = mixed * fade + span_mixed * join
            # A pipelined loop inside another: its buffers are filled anew.
            tl.debug_barrier()
        result = mixed / _divisor(total, damaged)
        tl.store(out + row * WIDTH + column, result.to(out.dtype.element_ty), mask=valid)
        tl.store(lse + row, _log_sum(highest, total, damaged), mask=valid & (left == 0))


@triton.jit(do_not_specialize=["spans"])
def _merge(
    parts, stats, seen, selection, out, lse, spans,
    CHOICES: tl.constexpr, HEADS: tl.constexpr, WIDTH: tl.constexpr, SPAN: tl.constexpr,
    SELECTED: tl.constexpr,
):  # fmt: skip
    """Grid: (flat rows). Merges a row's spans in order."""
    row = tl.program_id(0).to(tl.int64)
    sees = tl.load(seen + row // HEADS)
    column = tl.arange(0, WIDTH)
    highest = tl.full((), float("-inf"), tl.float32)
    total = tl.zeros((), tl.float32)
    mixed = tl.zeros((WIDTH,), tl.float32)
    for span in range(tl.cdiv(sees, SPAN)):
        at = row * spans + span
        highest, fade, join = _shares(highest, tl.load(stats + at * 2))
        total = total * fade + tl.load(stats + at * 2 + 1) * join
        mixed = mixed * fade + tl.load(parts + at * WIDTH + column) * join
    damaged = False
    if SELECTED:
        damaged = (sees > 0) & (tl.load(selection + row // HEADS * CHOICES) < 0)
    result = mixed / _divisor(total, damaged)
    tl.store(out + row * WIDTH + column, result.to(out.dtype.element_ty))
    tl.store(lse + row, _log_sum(highest, total, damaged))


@dataclass(frozen=True, slots=True)
class Keys:
    """Latents in pages: ``pages`` [frames, page, L], a view into the arena, and ``tables`` [S, n]
    int32, the frames of each sequence's pages."""

    pages: Tensor
    tables: Tensor


def items(parts: Sequence[tuple[int, int, int]], heads: int, rows: int) -> Tensor:
    """What one program computes: [n, 3] int32 of (sequence, first flat row, how many, at most
    ``rows``). ``parts``: (sequence, first row, rows) of each; a flat row is row * heads + head.
    With a selection every item must lie in one row: give each row as a part of its own."""
    found = []
    for sequence, first, count in parts:
        end = (first + count) * heads
        for at in range(first * heads, end, rows):
            found.append((sequence, at, min(rows, end - at)))
    return torch.tensor(found, dtype=torch.int32).reshape(-1, 3)


def outputs(
    q: Tensor,
    keys: Keys,
    tables: tuple[Tensor, ...],
    width: int | None,
    out_dtype: torch.dtype | None,
) -> tuple[Tensor, Tensor]:
    """Room for what `attend` gives, with its defaults, after asserting what the kernels take for
    granted; ``tables`` besides the keys' own."""
    _, page, dim = keys.pages.shape
    width = width or 1 << dim.bit_length() - 1
    assert q.is_contiguous()
    assert q.shape[2] == dim == keys.pages.stride(1), (q.shape, keys.pages.shape)
    assert q.dtype == keys.pages.dtype, (q.dtype, keys.pages.dtype)
    assert page & (page - 1) == width & (width - 1) == 0, (page, width)
    assert dim % 16 == 0, dim
    for table in (keys.tables, *tables):
        assert table.dtype == torch.int32
        assert table.is_contiguous()
    aligned(q, keys.pages)
    rows, heads, _ = q.shape
    out = torch.empty(rows, heads, width, dtype=out_dtype or q.dtype, device=q.device)
    return out, torch.empty(rows, heads, dtype=torch.float32, device=q.device)


def attend(
    q: Tensor,
    keys: Keys,
    work: Tensor,
    seen: Tensor,
    scale: float,
    *,
    longest: int,
    split: bool,
    height: int | None = None,
    width: int | None = None,
    selection: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """softmax(scale q keys^T) values over the first ``seen`` keys of each row, where a key's value
    is its first ``width`` elements (by default all, or the largest power of two of them).

    Args:
        q: [N, H, L] in the keys' dtype, dense. seen: [N] int32 (0: none, the result is zero).
        work: :func:`items` of ``height`` rows (16, 32 or 64; by default NARROW if ``split``, else
            WIDE), on the device.
        longest: an upper bound of ``seen``.
        split: a program for every span (few rows), or one for all of an item's (many). Neither this
            nor the height changes bits.
        selection: [N, choices] int32, ascending positions; ``seen`` then counts its entries. A row
            whose first entry is negative (see `choose`) is NaN.

    Returns:
        [N, H, width] in ``out_dtype`` (q's by default), and the log-sum-exps [N, H] fp32.
    """
    rows, heads, dim = q.shape
    height = height or (NARROW if split else WIDE)
    given = (work, seen) if selection is None else (work, seen, selection)
    out, lse = outputs(q, keys, given, width, out_dtype)
    width = out.shape[2]
    if rows == 0:
        return out, lse
    spans = max(blocks(longest, SPAN), 1)
    length = spans * SPAN
    parts, stats = out, lse
    if split:
        parts = torch.empty(rows * heads, spans, width, dtype=torch.float32, device=q.device)
        stats = torch.empty(rows * heads, spans, 2, dtype=torch.float32, device=q.device)
    each = max(MOST_WEIGHTS // (height * length), 1)
    count = min(each, work.shape[0])
    weights = torch.empty(count, height, length, dtype=q.dtype, device=q.device)
    peaks = torch.empty(count, height, length // TILE, dtype=torch.float32, device=q.device)
    picks = {
        "CHOICES": 0 if selection is None else selection.shape[1],
        "SELECTED": selection is not None, "HEADS": heads, "enable_fp_fusion": False,
    }  # fmt: skip
    common = {
        **picks, "PAGE": keys.pages.shape[1], "DIM": dim, "ROWS": height, "TILE": TILE,
        "SPAN": SPAN,
    }  # fmt: skip
    tables = (keys.pages, keys.tables, work, seen, seen if selection is None else selection)
    sizes = keys.pages.stride(0), keys.tables.shape[1], spans
    columns = min(_COLUMNS, width)
    for first in range(0, work.shape[0], each):
        some = min(each, work.shape[0] - first)
        _weigh[(length // TILE, some)](
            q, *tables, weights, peaks, float(scale), *sizes, first,
            DEPTH=min(_DEPTH, dim & -dim), num_warps=4, num_stages=4, **common,
        )  # fmt: skip
        _mix[(width // columns, some, spans if split else 1)](
            *tables, weights, peaks, parts, stats, out, lse, *sizes, first,
            WIDTH=width, COLUMNS=columns, STEP=min(_STEP, TILE), SPLIT=split,
            num_warps=4, num_stages=5, **common,
        )  # fmt: skip
    if split:
        _merge[(rows * heads,)](
            parts, stats, seen, tables[-1], out, lse, spans,
            WIDTH=width, SPAN=SPAN, num_warps=4, **picks,
        )  # fmt: skip
    return out, lse


def attend_naive(
    q: Tensor, keys: Tensor, seen: int, scale: float, width: int | None = None
) -> Tensor:
    """The definition for one row: q [H, L], keys [S, L] -> [H, width] fp32."""
    wide = keys[:seen].float()
    return (q.float() @ wide.T * scale).softmax(-1) @ wide[:, :width]

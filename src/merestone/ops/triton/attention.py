# mypy: disable-error-code="no-untyped-def, untyped-decorator"
"""Absorbed latent attention over pages: key tiles at fixed places, spans merged in order.

Knows rows, pages and how many keys a row sees. Must not know requests. Keys are visited in tiles
of TILE, anchored at token 0 (or at the first of a row's selected positions, ascending); SPAN keys
make a span, summed from zero with a running maximum; spans are merged in order. Decode gives each
span a program and merges in a second kernel, prefill merges as it goes: the same sums. Masked keys
have weight zero, tiles past a row's last key change nothing.

Inside a span only maxima and tensor-core products cross a row's elements: both do not depend on
how many rows share a tile. So the sum of a row's weights is a product with ones. Weights are
rounded to the keys' dtype, in the sum as in the mixture.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from merestone.ops.triton.launch import aligned, blocks

TILE = 64
"""Keys of a tile, a constant of the numerics."""
SPAN = 512
"""Keys of a span, a constant of the numerics."""
_NARROW, _WIDE = 16, 64
# Programs of the merging kernel: one a multiprocessor of the largest chips of the generation.
_PROGRAMS = 132


@triton.jit
def _span(
    query,
    seen,
    last,
    pages,
    table,
    selection,
    scale,
    span,
    page_frame,
    PAGE: tl.constexpr,
    DIM: tl.constexpr,
    TILE: tl.constexpr,
    SPAN: tl.constexpr,
    SELECTED: tl.constexpr,
):
    """One span for query [ROWS, DIM] of rows that see ``seen`` [ROWS] keys, ``last`` the most of
    them: maximum [ROWS, 1], sum of weights [ROWS, 1], weighted keys [ROWS, DIM]."""
    ROWS: tl.constexpr = query.shape[0]
    column = tl.arange(0, DIM)[None, :]
    highest = tl.full((ROWS, 1), float("-inf"), tl.float32)
    total = tl.zeros((ROWS, 16), tl.float32)
    mixed = tl.zeros((ROWS, DIM), tl.float32)
    ones = tl.full((TILE, 16), 1.0, query.dtype)
    for start in range(span * SPAN, tl.minimum((span + 1) * SPAN, last), TILE):
        index = start + tl.arange(0, TILE)
        inside = index < last
        position = index
        if SELECTED:
            position = tl.maximum(tl.load(selection + index, mask=inside, other=0), 0)
        frame = tl.load(table + position // PAGE, mask=inside, other=0).to(tl.int64)
        at = frame * page_frame + (position % PAGE) * DIM
        # Rows above a boundary may hold anything: masked keys are zeros, not only unweighted.
        keys = tl.load(pages + at[:, None] + column, mask=inside[:, None], other=0.0)
        scores = tl.dot(query, tl.trans(keys), input_precision="ieee") * scale
        scores = tl.where(index[None, :] < seen[:, None], scores, float("-inf"))
        higher = tl.maximum(highest, tl.max(scores, 1)[:, None])
        # A row that has seen nothing yet: any finite reference will do.
        reference = tl.where(higher == float("-inf"), 0.0, higher)
        fade = tl.exp(highest - reference)
        weights = tl.exp(scores - reference).to(keys.dtype)
        total = tl.dot(weights, ones, total * fade, input_precision="ieee")
        mixed = tl.dot(weights, keys, mixed * fade, input_precision="ieee")
        highest = higher
    return highest, tl.max(total, 1)[:, None], mixed


@triton.jit
def _merged(highest, total, mixed, span_highest, span_total, span_mixed):
    """The next span's results added to those so far."""
    higher = tl.maximum(highest, span_highest)
    reference = tl.where(higher == float("-inf"), 0.0, higher)
    fade, join = tl.exp(highest - reference), tl.exp(span_highest - reference)
    return higher, total * fade + span_total * join, mixed * fade + span_mixed * join


@triton.jit
def _store(out, lse, row, valid, damaged, highest, total, mixed, DIM: tl.constexpr):
    """Normalise; a row without keys is zero, its log-sum-exp -inf. All [ROWS, 1] or [ROWS, DIM]."""
    some = tl.where(total == 0.0, 1.0, total)
    # No choice could be made from damaged keys: the row must not look as if it had.
    some = tl.where(damaged, float("nan"), some)
    at = row * DIM + tl.arange(0, DIM)[None, :]
    tl.store(out + at, (mixed / some).to(out.dtype.element_ty), mask=valid)
    log_sum = tl.where(total == 0.0, float("-inf"), highest + tl.log(some))
    tl.store(lse + row, log_sum, mask=valid)


@triton.jit
def _load_rows(q, seen, items, item, HEADS: tl.constexpr, ROWS: tl.constexpr, DIM: tl.constexpr):
    """An item's sequence, flat rows [ROWS] (row * HEADS + head), which of them exist, their
    queries and what they see."""
    sequence = tl.load(items + item * 3).to(tl.int64)
    first, count = tl.load(items + item * 3 + 1), tl.load(items + item * 3 + 2)
    valid = tl.arange(0, ROWS) < count
    row = first + tl.arange(0, ROWS).to(tl.int64)
    sees = tl.load(seen + row // HEADS, mask=valid, other=0)
    at = row[:, None] * DIM + tl.arange(0, DIM)[None, :]
    query = tl.load(q + at, mask=valid[:, None], other=0.0)
    return sequence, row, valid, query, sees


@triton.jit(do_not_specialize=["table_entries", "spans"])
def _split(
    q,
    pages,
    tables,
    items,
    seen,
    selection,
    parts,
    stats,
    scale,
    page_frame,
    table_entries,
    spans,
    WIDTH: tl.constexpr,
    HEADS: tl.constexpr,
    PAGE: tl.constexpr,
    DIM: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
    SPAN: tl.constexpr,
    SELECTED: tl.constexpr,
):
    """Grid: (items, spans). Stores each span's results: parts [rows, spans, DIM], stats [.., 2]."""
    span = tl.program_id(1)
    sequence, row, valid, query, sees = _load_rows(
        q, seen, items, tl.program_id(0), HEADS, ROWS, DIM
    )
    last = tl.max(sees, 0)
    if span * SPAN < last:
        chosen = selection
        if SELECTED:
            chosen += tl.min(row, 0) // HEADS * WIDTH
        table = tables + sequence * table_entries
        highest, total, mixed = _span(
            query, sees, last, pages, table, chosen, scale, span, page_frame,
            PAGE, DIM, TILE, SPAN, SELECTED,
        )  # fmt: skip
        at = row[:, None] * spans + span
        tl.store(stats + at * 2, highest, mask=valid[:, None])
        tl.store(stats + at * 2 + 1, total, mask=valid[:, None])
        column = tl.arange(0, DIM)[None, :]
        tl.store(parts + at * DIM + column, mixed, mask=valid[:, None])


@triton.jit(do_not_specialize=["spans"])
def _merge(
    parts,
    stats,
    seen,
    selection,
    out,
    lse,
    spans,
    WIDTH: tl.constexpr,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    SPAN: tl.constexpr,
    SELECTED: tl.constexpr,
):
    """Grid: (rows x heads). Merges a row's spans in order."""
    row = tl.program_id(0).to(tl.int64) + tl.zeros((1, 1), tl.int64)
    sees = tl.load(seen + tl.program_id(0) // HEADS)
    column = tl.arange(0, DIM)[None, :]
    highest = tl.full((1, 1), float("-inf"), tl.float32)
    total = tl.zeros((1, 1), tl.float32)
    mixed = tl.zeros((1, DIM), tl.float32)
    for span in range(tl.cdiv(sees, SPAN)):
        at = row * spans + span
        highest, total, mixed = _merged(
            highest, total, mixed, tl.load(stats + at * 2), tl.load(stats + at * 2 + 1),
            tl.load(parts + at * DIM + column),
        )  # fmt: skip
    damaged = False
    if SELECTED:
        damaged = tl.load(selection + row // HEADS * WIDTH) < 0
    _store(out, lse, row, row >= 0, damaged, highest, total, mixed, DIM)


@triton.jit(do_not_specialize=["count", "table_entries"])
def _whole(
    q,
    pages,
    tables,
    items,
    seen,
    selection,
    sums,
    out,
    lse,
    scale,
    count,
    page_frame,
    table_entries,
    WIDTH: tl.constexpr,
    HEADS: tl.constexpr,
    PAGE: tl.constexpr,
    DIM: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
    SPAN: tl.constexpr,
    SELECTED: tl.constexpr,
    PROGRAMS: tl.constexpr,
):
    """Grid: (PROGRAMS). Each takes every PROGRAMS-th item and merges its spans as it goes, in
    ``sums`` [PROGRAMS, ROWS, DIM]: two such accumulators would not fit the registers."""
    column = tl.arange(0, DIM)[None, :]
    local = tl.arange(0, ROWS)[:, None]
    so_far = sums + (tl.program_id(0) * ROWS + local) * DIM + column
    for item in range(tl.program_id(0), count, PROGRAMS):
        sequence, row, valid, query, sees = _load_rows(q, seen, items, item, HEADS, ROWS, DIM)
        last = tl.max(sees, 0)
        chosen = selection
        if SELECTED:
            chosen += tl.min(row, 0) // HEADS * WIDTH
        table = tables + sequence * table_entries
        highest = tl.full((ROWS, 1), float("-inf"), tl.float32)
        total = tl.zeros((ROWS, 1), tl.float32)
        tl.store(so_far, tl.zeros((ROWS, DIM), tl.float32))
        for span in range(tl.cdiv(last, SPAN)):
            span_highest, span_total, span_mixed = _span(
                query, sees, last, pages, table, chosen, scale, span, page_frame,
                PAGE, DIM, TILE, SPAN, SELECTED,
            )  # fmt: skip
            # Other threads may read what these wrote, if the compiler's layouts differ.
            tl.debug_barrier()
            highest, total, mixed = _merged(
                highest, total, tl.load(so_far), span_highest, span_total, span_mixed
            )
            tl.debug_barrier()
            tl.store(so_far, mixed)
        tl.debug_barrier()
        mixed = tl.load(so_far)
        damaged = False
        if SELECTED:
            damaged = tl.load(chosen) < 0
        _store(out, lse, row[:, None], valid[:, None], damaged, highest, total, mixed, DIM)
        tl.debug_barrier()


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


def _check(q: Tensor, keys: Keys, tables: tuple[Tensor, ...]) -> None:
    _, page, dim = keys.pages.shape
    assert q.is_contiguous()
    assert q.shape[2] == dim == keys.pages.stride(1), (q.shape, keys.pages.shape)
    assert q.dtype == keys.pages.dtype, (q.dtype, keys.pages.dtype)
    assert dim & (dim - 1) == page & (page - 1) == 0, (dim, page)
    for table in (keys.tables, *tables):
        assert table.dtype == torch.int32
        assert table.is_contiguous()
    aligned(q, keys.pages)


def attend(
    q: Tensor,
    keys: Keys,
    work: Tensor,
    seen: Tensor,
    scale: float,
    *,
    longest: int,
    split: bool,
    selection: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """softmax(scale q keys^T) keys over the first ``seen`` keys of each row.

    Args:
        q: [N, H, L] in the keys' dtype, dense. seen: [N] int32 (0: none, the result is zero).
        work: :func:`items` of 16 rows if ``split``, else of 64, on the device.
        longest: an upper bound of ``seen``.
        split: a program for every span (few rows), or one for all of an item's (many). Changes
            no bits.
        selection: [N, width] int32, ascending positions; ``seen`` then counts its entries. A row
            whose first entry is negative (see `choose`) is NaN.

    Returns:
        [N, H, L] in ``out_dtype`` (q's by default), and the log-sum-exps [N, H] fp32.
    """
    rows, heads, dim = q.shape
    _check(q, keys, (work, seen) if selection is None else (work, seen, selection))
    out = torch.empty(q.shape, dtype=out_dtype or q.dtype, device=q.device)
    lse = torch.empty(rows, heads, dtype=torch.float32, device=q.device)
    if rows == 0:
        return out, lse
    common = {
        "WIDTH": 0 if selection is None else selection.shape[1], "SELECTED": selection is not None,
        "HEADS": heads, "PAGE": keys.pages.shape[1], "DIM": dim, "TILE": TILE, "SPAN": SPAN,
        "enable_fp_fusion": False,
    }  # fmt: skip
    inputs = (q, keys.pages, keys.tables, work, seen, seen if selection is None else selection)
    strides = keys.pages.stride(0), keys.tables.shape[1]
    if not split:
        programs = min(_PROGRAMS, work.shape[0])
        sums = torch.empty(programs, _WIDE, dim, dtype=torch.float32, device=q.device)
        _whole[(programs,)](
            *inputs, sums, out, lse, float(scale), work.shape[0], *strides,
            ROWS=_WIDE, PROGRAMS=_PROGRAMS, num_warps=8, num_stages=2, **common,
        )  # fmt: skip
        return out, lse
    spans = max(blocks(longest, SPAN), 1)
    parts = torch.empty(rows * heads, spans, dim, dtype=torch.float32, device=q.device)
    stats = torch.empty(rows * heads, spans, 2, dtype=torch.float32, device=q.device)
    _split[(work.shape[0], spans)](
        *inputs, parts, stats, float(scale), *strides, spans,
        ROWS=_NARROW, num_warps=4, num_stages=2, **common,
    )  # fmt: skip
    _merge[(rows * heads,)](
        parts, stats, *inputs[4:], out, lse, spans,
        WIDTH=common["WIDTH"], HEADS=heads, DIM=dim, SPAN=SPAN, SELECTED=selection is not None,
        num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip
    return out, lse


def attend_naive(q: Tensor, keys: Tensor, seen: int, scale: float) -> Tensor:
    """The definition for one row: q [H, L], keys [S, L] -> [H, L] fp32."""
    wide = keys[:seen].float()
    return (q.float() @ wide.T * scale).softmax(-1) @ wide

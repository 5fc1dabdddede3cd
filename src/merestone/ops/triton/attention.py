# mypy: disable-error-code="no-untyped-def, untyped-decorator"
"""Absorbed latent attention over pages: key tiles at fixed places, spans merged in order.

Knows rows, pages and how many keys a row sees. Must not know requests. Keys are visited in tiles
of TILE, anchored at token 0 (or at the first of a row's selected positions, ascending); SPAN keys
make a span, summed from zero with a running maximum; spans are merged in order. Decode gives each
span a program and merges in a second kernel, prefill merges as it goes: the same sums. Masked keys
have weight zero, tiles past a row's last key change nothing. What is mixed are a key's first WIDTH
elements; more of them (a part that only scores) come in a second, narrower piece.

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
SPAN = 1024
"""Keys of a span, a constant of the numerics: short, for programs enough to decode one sequence;
long, for few merges in prefill."""
_NARROW, _WIDE = 16, 64
_WARPS = {16: 4, 32: 4, 64: 8}
# Programs of the merging kernel: one a multiprocessor of the largest chips of the generation.
_PROGRAMS = 132


@triton.jit
def _span(
    query,
    more,
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
    WIDTH: tl.constexpr,
    TILE: tl.constexpr,
    SPAN: tl.constexpr,
    SELECTED: tl.constexpr,
):
    """One span for query [ROWS, WIDTH] (and ``more`` [ROWS, DIM - WIDTH] of it) of rows that see
    ``seen`` [ROWS] keys, ``last`` the most of them: maximum [ROWS, 1], sum of weights [ROWS, 1],
    weighted keys [ROWS, WIDTH]."""
    ROWS: tl.constexpr = query.shape[0]
    column = tl.arange(0, WIDTH)[None, :]
    highest = tl.full((ROWS, 1), float("-inf"), tl.float32)
    total = tl.zeros((ROWS, 16), tl.float32)
    mixed = tl.zeros((ROWS, WIDTH), tl.float32)
    ones = tl.full((TILE, 16), 1.0, query.dtype)
    for start in range(span * SPAN, tl.minimum((span + 1) * SPAN, last), TILE):
        index = start + tl.arange(0, TILE)
        inside = index < last
        if PAGE % TILE == 0 and not SELECTED:
            # A tile lies in one page: the rest of an address does not change from tile to tile.
            frame = tl.load(table + start // PAGE).to(tl.int64)
            source = pages + frame * page_frame + (start % PAGE) * DIM
            at = (tl.arange(0, TILE) * DIM)[:, None]
        else:
            position = index
            if SELECTED:
                position = tl.maximum(tl.load(selection + index, mask=inside, other=0), 0)
            frame = tl.load(table + position // PAGE, mask=inside, other=0).to(tl.int64)
            source = pages
            at = (frame * page_frame + (position % PAGE) * DIM)[:, None]
        # Rows above a boundary may hold anything: masked keys are zeros, not only unweighted.
        keys = tl.load(source + at + column, mask=inside[:, None], other=0.0)
        scores = tl.dot(query, tl.trans(keys), input_precision="ieee")
        if DIM > WIDTH:
            at += WIDTH + tl.arange(0, DIM - WIDTH)[None, :]
            rest = tl.load(source + at, mask=inside[:, None], other=0.0)
            scores = tl.dot(more, tl.trans(rest), scores, input_precision="ieee")
        scores = tl.where(index[None, :] < seen[:, None], scores * scale, float("-inf"))
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


@triton.jit
def _load_rows(
    q, seen, items, item, HEADS: tl.constexpr, ROWS: tl.constexpr, DIM: tl.constexpr,
    WIDTH: tl.constexpr,
):  # fmt: skip
    """An item's sequence, flat rows [ROWS] (row * HEADS + head), which of them exist, their
    queries in two pieces and what they see."""
    sequence = tl.load(items + item * 3).to(tl.int64)
    first, count = tl.load(items + item * 3 + 1), tl.load(items + item * 3 + 2)
    valid = tl.arange(0, ROWS) < count
    row = first + tl.arange(0, ROWS).to(tl.int64)
    sees = tl.load(seen + row // HEADS, mask=valid, other=0)
    at = row[:, None] * DIM + tl.arange(0, WIDTH)[None, :]
    query = tl.load(q + at, mask=valid[:, None], other=0.0)
    more = query
    if DIM > WIDTH:
        at = row[:, None] * DIM + WIDTH + tl.arange(0, DIM - WIDTH)[None, :]
        more = tl.load(q + at, mask=valid[:, None], other=0.0)
    return sequence, row, valid, query, more, sees


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
    CHOICES: tl.constexpr,
    HEADS: tl.constexpr,
    PAGE: tl.constexpr,
    DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
    SPAN: tl.constexpr,
    SELECTED: tl.constexpr,
):
    """Grid: (items, spans). Stores a span's results: parts [rows, spans, WIDTH], stats [.., 2]."""
    span = tl.program_id(1)
    sequence, row, valid, query, more, sees = _load_rows(
        q, seen, items, tl.program_id(0), HEADS, ROWS, DIM, WIDTH
    )
    last = tl.max(sees, 0)
    if span * SPAN < last:
        chosen = selection
        if SELECTED:
            chosen += tl.min(row, 0) // HEADS * CHOICES
        table = tables + sequence * table_entries
        highest, total, mixed = _span(
            query, more, sees, last, pages, table, chosen, scale, span, page_frame,
            PAGE, DIM, WIDTH, TILE, SPAN, SELECTED,
        )  # fmt: skip
        at = row[:, None] * spans + span
        tl.store(stats + at * 2, highest, mask=valid[:, None])
        tl.store(stats + at * 2 + 1, total, mask=valid[:, None])
        column = tl.arange(0, WIDTH)[None, :]
        tl.store(parts + at * WIDTH + column, mixed, mask=valid[:, None])


@triton.jit(do_not_specialize=["spans"])
def _merge(
    parts,
    stats,
    seen,
    selection,
    out,
    lse,
    spans,
    CHOICES: tl.constexpr,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    SPAN: tl.constexpr,
    SELECTED: tl.constexpr,
):
    """Grid: (rows x heads). Merges a row's spans in order."""
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
        damaged = tl.load(selection + row // HEADS * CHOICES) < 0
    result = mixed / _divisor(total, damaged)
    tl.store(out + row * WIDTH + column, result.to(out.dtype.element_ty))
    tl.store(lse + row, _log_sum(highest, total, damaged))


@triton.jit
def _join(so_far, mixed, fade, join, keep, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """``so_far`` [ROWS, WIDTH] * fade (if there is one to ``keep``) + mixed * join, in memory."""
    at = so_far + tl.arange(0, ROWS)[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    before = tl.load(at, mask=keep, other=0.0)
    tl.store(at, before * fade + mixed * join)


@triton.jit
def _halves(x):
    """Even and odd columns of x [ROWS, n]: neighbours lie in one thread, so nothing moves."""
    ROWS: tl.constexpr = x.shape[0]
    WIDTH: tl.constexpr = x.shape[1]
    return tl.split(tl.reshape(x, (ROWS, WIDTH // 2, 2)))


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
    CHOICES: tl.constexpr,
    HEADS: tl.constexpr,
    PAGE: tl.constexpr,
    DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
    SPAN: tl.constexpr,
    SELECTED: tl.constexpr,
    PROGRAMS: tl.constexpr,
):
    """Grid: (PROGRAMS). Each takes every PROGRAMS-th item and merges its spans as it goes, in
    ``sums`` [PROGRAMS, 4, ROWS, WIDTH / 4], a quarter of the columns after another: two
    accumulators would not fit the registers."""
    PART: tl.constexpr = WIDTH // 4
    so_far = sums + tl.program_id(0) * ROWS * WIDTH
    local, column = tl.arange(0, ROWS)[:, None], tl.arange(0, PART)[None, :]
    for turn in range(tl.program_id(0), count, PROGRAMS):
        # The longest first.
        sequence, row, valid, query, more, sees = _load_rows(
            q, seen, items, count - 1 - turn, HEADS, ROWS, DIM, WIDTH
        )
        last = tl.max(sees, 0)
        chosen = selection
        if SELECTED:
            chosen += tl.min(row, 0) // HEADS * CHOICES
        table = tables + sequence * table_entries
        highest = tl.full((ROWS, 1), float("-inf"), tl.float32)
        total = tl.zeros((ROWS, 1), tl.float32)
        for span in range(tl.cdiv(last, SPAN)):
            span_highest, span_total, mixed = _span(
                query, more, sees, last, pages, table, chosen, scale, span, page_frame,
                PAGE, DIM, WIDTH, TILE, SPAN, SELECTED,
            )  # fmt: skip
            highest, fade, join = _shares(highest, span_highest)
            total = total * fade + span_total * join
            even, odd = _halves(mixed)
            one, two = _halves(even)
            three, four = _halves(odd)
            # An element is always the same thread's.
            _join(so_far, one, fade, join, span > 0, ROWS, PART)
            _join(so_far + ROWS * PART, two, fade, join, span > 0, ROWS, PART)
            _join(so_far + 2 * ROWS * PART, three, fade, join, span > 0, ROWS, PART)
            _join(so_far + 3 * ROWS * PART, four, fade, join, span > 0, ROWS, PART)
        tl.debug_barrier()
        damaged = False
        if SELECTED:
            damaged = tl.load(chosen) < 0
        divisor = _divisor(total, damaged)
        for part in range(4):
            # Columns 0, 4, ...; then 2, 6, ...; then the odd ones.
            first = part // 2 + part % 2 * 2
            at = so_far + part * ROWS * PART + local * PART + column
            result = tl.load(at, mask=last > 0, other=0.0) / divisor
            to = out + row[:, None] * WIDTH + first + column * 4
            tl.store(to, result.to(out.dtype.element_ty), mask=valid[:, None])
        tl.store(lse + row[:, None], _log_sum(highest, total, damaged), mask=valid[:, None])
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


def _check(q: Tensor, keys: Keys, width: int, tables: tuple[Tensor, ...]) -> None:
    _, page, dim = keys.pages.shape
    assert q.is_contiguous()
    assert q.shape[2] == dim == keys.pages.stride(1), (q.shape, keys.pages.shape)
    assert q.dtype == keys.pages.dtype, (q.dtype, keys.pages.dtype)
    for size in (page, width, dim - width or 1):
        assert size & (size - 1) == 0, (page, width, dim)
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
    height: int | None = None,
    width: int | None = None,
    selection: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """softmax(scale q keys^T) values over the first ``seen`` keys of each row, where a key's value
    is its first ``width`` elements (by default all, or the largest power of two of them).

    Args:
        q: [N, H, L] in the keys' dtype, dense. seen: [N] int32 (0: none, the result is zero).
        work: :func:`items` of ``height`` rows (16, 32 or 64; by default 16 if ``split``, else 64),
            on the device.
        longest: an upper bound of ``seen``.
        split: a program for every span (few rows), or one for all of an item's (many). Neither this
            nor the height changes bits.
        selection: [N, choices] int32, ascending positions; ``seen`` then counts its entries. A row
            whose first entry is negative (see `choose`) is NaN.

    Returns:
        [N, H, width] in ``out_dtype`` (q's by default), and the log-sum-exps [N, H] fp32.
    """
    rows, heads, dim = q.shape
    width = width or 1 << dim.bit_length() - 1
    height = height or (_NARROW if split else _WIDE)
    _check(q, keys, width, (work, seen) if selection is None else (work, seen, selection))
    out = torch.empty(rows, heads, width, dtype=out_dtype or q.dtype, device=q.device)
    lse = torch.empty(rows, heads, dtype=torch.float32, device=q.device)
    if rows == 0:
        return out, lse
    picks = {
        "CHOICES": 0 if selection is None else selection.shape[1],
        "SELECTED": selection is not None, "HEADS": heads, "WIDTH": width, "SPAN": SPAN,
    }  # fmt: skip
    common = {
        **picks, "PAGE": keys.pages.shape[1], "DIM": dim, "TILE": TILE, "ROWS": height,
        "num_warps": _WARPS[height], "num_stages": 2, "enable_fp_fusion": False,
    }  # fmt: skip
    inputs = (q, keys.pages, keys.tables, work, seen, seen if selection is None else selection)
    strides = keys.pages.stride(0), keys.tables.shape[1]
    if not split:
        programs = min(_PROGRAMS, work.shape[0])
        sums = torch.empty(programs, height, width, dtype=torch.float32, device=q.device)
        _whole[(programs,)](
            *inputs, sums, out, lse, float(scale), work.shape[0], *strides,
            PROGRAMS=_PROGRAMS, **common,
        )  # fmt: skip
        return out, lse
    spans = max(blocks(longest, SPAN), 1)
    parts = torch.empty(rows * heads, spans, width, dtype=torch.float32, device=q.device)
    stats = torch.empty(rows * heads, spans, 2, dtype=torch.float32, device=q.device)
    _split[(work.shape[0], spans)](*inputs, parts, stats, float(scale), *strides, spans, **common)
    _merge[(rows * heads,)](
        parts, stats, *inputs[4:], out, lse, spans, **picks, num_warps=4, enable_fp_fusion=False
    )
    return out, lse


def attend_naive(
    q: Tensor, keys: Tensor, seen: int, scale: float, width: int | None = None
) -> Tensor:
    """The definition for one row: q [H, L], keys [S, L] -> [H, width] fp32."""
    wide = keys[:seen].float()
    return (q.float() @ wide.T * scale).softmax(-1) @ wide[:, :width]

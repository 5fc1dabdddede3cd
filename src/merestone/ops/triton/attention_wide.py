# mypy: disable-error-code="no-untyped-def, untyped-decorator"
"""Latent attention for many rows: the sums of `attention`, shaped as two ordinary products.

Knows what `attention` knows, and that tiles of keys lie in whole pages. Must not know requests. A
first kernel takes a span of keys at a time: weights by tiles, brought to the span's maximum when
all of its tiles are known, so that the second is a plain product of weights and keys whose operands
come by the copy engine, with a merge after every span. Every rounding and every order of a sum is
the other kernels': the bits are equal.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from merestone.ops.triton import attention
from merestone.ops.triton.attention import Keys, _divisor, _log_sum, _rows, _shares
from merestone.ops.triton.launch import aligned, blocks


@dataclass(frozen=True, slots=True)
class Weighing:
    """How weights are computed: depth of a step, warps, stages, items that share a pass over spans
    (for the L2 cache), and whether a span's weights wait for its maximum in registers."""

    depth: int
    warps: int
    stages: int
    band: int
    held: bool


@dataclass(frozen=True, slots=True)
class Mixing:
    """How keys are mixed: columns of a program, keys of a step, warps, stages."""

    columns: int
    step: int
    warps: int
    stages: int


ROWS = 128
"""Rows of an item."""
_WEIGHING = Weighing(depth=64, warps=4, stages=3, band=16, held=False)
_MIXING = Mixing(columns=128, step=64, warps=8, stages=7)
_MOST_WEIGHTS = 1 << 29


@triton.jit
def _tile_weights(
    q, pages, top, frame, at, scale, start, sees, least,
    DIM: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr, DEPTH: tl.constexpr,
    DTYPE: tl.constexpr,
):  # fmt: skip
    """Weights [ROWS, TILE] of one tile and its maxima [ROWS]."""
    scores = tl.zeros((ROWS, TILE), tl.float32)
    for k in range(0, DIM, DEPTH):
        keys = pages.load([frame, at, k]).reshape(TILE, DEPTH)
        scores = tl.dot(q.load([top, k]), keys.T, scores, input_precision="ieee")
    scores *= scale
    if start + TILE > least:
        visible = (start + tl.arange(0, TILE))[None, :] < sees[:, None]
        scores = tl.where(visible, scores, float("-inf"))
    peak = tl.max(scores, 1)
    reference = tl.where(peak == float("-inf"), 0.0, peak)
    return tl.exp(scores - reference[:, None]).to(DTYPE), peak


@triton.jit(do_not_specialize=["table_entries", "spans", "from_item", "count"])
def _weigh_spans(
    q, pages, to, tables, items, seen, weights, peaks, highests, totals, scale, table_entries, spans,
    from_item, count,
    HEADS: tl.constexpr, PAGE: tl.constexpr, DIM: tl.constexpr, ROWS: tl.constexpr,
    TILE: tl.constexpr, SPAN: tl.constexpr, DEPTH: tl.constexpr, BAND: tl.constexpr,
    HELD: tl.constexpr,
):  # fmt: skip
    """Grid: (spans x ``count`` items). weights [count, ROWS, length], as they enter the mixture;
    peaks [count, tiles, ROWS]; highests and totals [count, spans, ROWS]."""
    length = spans * SPAN
    band = tl.program_id(0) // (BAND * spans)
    inside = tl.program_id(0) % (BAND * spans)
    height = tl.minimum(count - band * BAND, BAND)
    # The last items see most: they come first.
    item, span = count - 1 - band * BAND - inside % height, inside // height
    sequence, row, valid, sees, last = _rows(items, item + from_item, seen, HEADS, ROWS)
    if span * SPAN < last:
        least = tl.min(tl.where(valid, sees, last), 0)
        top = tl.load(items + (item + from_item) * 3 + 1)
        table = tables + sequence * table_entries
        dtype: tl.constexpr = weights.dtype.element_ty
        ones = tl.full((TILE, 16), 1.0, dtype)
        total = tl.zeros((ROWS, 16), tl.float32)
        highest = tl.full((ROWS,), float("-inf"), tl.float32)
        local, place = tl.arange(0, ROWS), item.to(tl.int64)
        at_weight = (local * length)[:, None] + tl.arange(0, TILE)[None, :]
        weights += place * ROWS * length + span * SPAN
        at_peak = peaks + (place * (length // TILE) + span * (SPAN // TILE)) * ROWS + local
        if HELD:
            held, tops = (), ()
            for t in tl.static_range(SPAN // TILE):
                start = span * SPAN + t * TILE
                whole = tl.minimum(start, (last - 1) // TILE * TILE)
                frame = tl.load(table + whole // PAGE)
                weight, peak = _tile_weights(
                    q, pages, top, frame, whole % PAGE, scale, start, sees, least,
                    DIM, ROWS, TILE, DEPTH, dtype,
                )  # fmt: skip
                held, tops = held + (weight,), tops + (peak,)
                highest = tl.maximum(highest, peak)
            reference = tl.where(highest == float("-inf"), 0.0, highest)
            for t in tl.static_range(SPAN // TILE):
                share = tl.exp(tops[t] - reference)[:, None]
                some = (held[t].to(tl.float32) * share).to(dtype)
                total = tl.dot(some, ones, total, input_precision="ieee")
                to.store([item * ROWS, span * SPAN + t * TILE], some)
        else:
            tiles = tl.cdiv(tl.minimum(last - span * SPAN, SPAN), TILE)
            for t in range(tiles):
                start = span * SPAN + t * TILE
                frame = tl.load(table + start // PAGE)
                weight, peak = _tile_weights(
                    q, pages, top, frame, start % PAGE, scale, start, sees, least,
                    DIM, ROWS, TILE, DEPTH, dtype,
                )  # fmt: skip
                highest = tl.maximum(highest, peak)
                tl.store(at_peak + t * ROWS, peak)
                tl.store(weights + t * TILE + at_weight, weight)
                # A pipelined loop inside another; and what other threads stored is read below.
                tl.debug_barrier()
            reference = tl.where(highest == float("-inf"), 0.0, highest)
            for t in tl.range(tiles, num_stages=1):
                share = tl.exp(tl.load(at_peak + t * ROWS) - reference)[:, None]
                some = tl.load(weights + t * TILE + at_weight)
                some = (some.to(tl.float32) * share).to(dtype)
                total = tl.dot(some, ones, total, input_precision="ieee")
                tl.store(weights + t * TILE + at_weight, some)
        at = (place * spans + span) * ROWS + local
        tl.store(highests + at, highest)
        tl.store(totals + at, tl.max(total, 1))


@triton.jit
def _joined(highest, total, mixed, span_highest, span_total, span_mixed):
    """The merge of one more span."""
    higher, fade, join = _shares(highest, span_highest)
    total = total * fade + span_total * join
    return higher, total, mixed * fade[:, None] + span_mixed * join[:, None]


@triton.jit(do_not_specialize=["table_entries", "spans", "from_item", "count"])
def _mix_spans(
    weights, pages, tables, items, seen, highests, totals, out, lse, table_entries, spans,
    from_item, count,
    HEADS: tl.constexpr, PAGE: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, SPAN: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """Grid: (blocks of columns, ``count`` items)."""
    left, item = tl.program_id(0) * COLUMNS, count - 1 - tl.program_id(1)
    sequence, row, valid, _, last = _rows(items, item + from_item, seen, HEADS, ROWS)
    table = tables + sequence * table_entries
    at = item.to(tl.int64) * spans * ROWS + tl.arange(0, ROWS)
    highests += at
    totals += at
    highest = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    mixed = tl.zeros((ROWS, COLUMNS), tl.float32)
    span_mixed = tl.zeros((ROWS, COLUMNS), tl.float32)
    steps: tl.constexpr = SPAN // STEP
    for step in range(last // STEP):
        start = step * STEP
        frame = tl.load(table + start // PAGE)
        some = weights.load([item * ROWS, start])
        keys = pages.load([frame, start % PAGE, left]).reshape(STEP, COLUMNS)
        span_mixed = tl.dot(some, keys, span_mixed, input_precision="ieee")
        if step % steps == steps - 1:
            # Requested before they are needed: the loads above leave time for it.
            span_highest = tl.load(highests + step // steps * ROWS)
            span_total = tl.load(totals + step // steps * ROWS)
            highest, total, mixed = _joined(
                highest, total, mixed, span_highest, span_total, span_mixed
            )
            span_mixed = tl.zeros((ROWS, COLUMNS), tl.float32)
    if last % SPAN != 0:
        if last % STEP != 0:
            start = last // STEP * STEP
            frame = tl.load(table + start // PAGE)
            some = weights.load([item * ROWS, start])
            keys = pages.load([frame, start % PAGE, left]).reshape(STEP, COLUMNS)
            # Rows above a boundary may hold anything, and zero times that.
            inside = (start + tl.arange(0, STEP))[:, None] < last
            keys = tl.where(inside, keys, 0.0)
            span_mixed = tl.dot(some, keys, span_mixed, input_precision="ieee")
        span_highest = tl.load(highests + last // SPAN * ROWS)
        span_total = tl.load(totals + last // SPAN * ROWS)
        highest, total, mixed = _joined(highest, total, mixed, span_highest, span_total, span_mixed)
    column = left + tl.arange(0, COLUMNS)[None, :]
    result = mixed / _divisor(total, False)[:, None]
    to = out + (row * WIDTH)[:, None] + column
    tl.store(to, result.to(out.dtype.element_ty), mask=valid[:, None])
    tl.store(lse + row, _log_sum(highest, total, False), mask=valid & (left == 0))


def attend_wide(
    q: Tensor,
    keys: Keys,
    work: Tensor,
    seen: Tensor,
    scale: float,
    *,
    longest: int,
    width: int | None = None,
    out_dtype: torch.dtype | None = None,
    weighing: Weighing = _WEIGHING,
    mixing: Mixing = _MIXING,
) -> tuple[Tensor, Tensor]:
    """`attention.attend` without a selection, ``work`` being items of ROWS rows: the same bits."""
    (rows, heads, dim), (_, page, _) = q.shape, keys.pages.shape
    tile, span = attention.TILE, attention.SPAN
    width = width or 1 << dim.bit_length() - 1
    out = torch.empty(rows, heads, width, dtype=out_dtype or q.dtype, device=q.device)
    lse = torch.empty(rows, heads, dtype=torch.float32, device=q.device)
    if rows == 0:
        return out, lse
    assert page % tile == 0, (page, tile)
    aligned(q, keys.pages)
    spans = max(blocks(longest, span), 1)
    most = min(max(_MOST_WEIGHTS // (ROWS * spans * span), 1), work.shape[0])
    weights = torch.empty(most * ROWS, spans * span, dtype=q.dtype, device=q.device)
    peaks = torch.empty(most, spans * span // tile, ROWS, dtype=torch.float32, device=q.device)
    highests = torch.empty(most, spans, ROWS, dtype=torch.float32, device=q.device)
    totals = torch.empty_like(highests)
    depth, step = min(weighing.depth, dim & -dim), min(mixing.step, tile)
    columns = min(mixing.columns, width)
    tables = keys.tables, work, seen
    queries = TensorDescriptor.from_tensor(q.view(rows * heads, dim), [ROWS, depth])
    scored = TensorDescriptor.from_tensor(keys.pages, [1, tile, depth])
    mixed = TensorDescriptor.from_tensor(keys.pages, [1, step, columns])
    stored = TensorDescriptor.from_tensor(weights, [ROWS, tile])
    loaded = TensorDescriptor.from_tensor(weights, [ROWS, step])
    common = {
        "HEADS": heads, "PAGE": page, "ROWS": ROWS, "SPAN": span, "enable_fp_fusion": False,
    }  # fmt: skip
    for first in range(0, work.shape[0], most):
        count = min(most, work.shape[0] - first)
        sizes = keys.tables.shape[1], spans, first, count
        _weigh_spans[(spans * count,)](
            queries, scored, stored, *tables, weights, peaks, highests, totals, float(scale),
            *sizes, DIM=dim, TILE=tile, DEPTH=depth, BAND=weighing.band, HELD=weighing.held,
            num_warps=weighing.warps, num_stages=weighing.stages, **common,
        )  # fmt: skip
        _mix_spans[(width // columns, count)](
            loaded, mixed, *tables, highests, totals, out, lse, *sizes,
            WIDTH=width, COLUMNS=columns, STEP=step,
            num_warps=mixing.warps, num_stages=mixing.stages, **common,
        )  # fmt: skip
    return out, lse

# mypy: disable-error-code="no-untyped-def, untyped-decorator, assignment"
"""Latent attention of many rows: the sums of `attention`, shaped as two ordinary products.

Knows what `attention` knows, and that tiles of keys lie in whole pages. Must not know requests. A
first kernel takes a span of keys at a time: the weights of its tiles wait in registers until the
span's maximum is known, and are brought to it before they are stored. So the second is a plain
product of weights and keys, with a merge after every span. Operands come by the copy engine. Every
rounding and every order of a sum is the other kernels': the bits are equal.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from merestone.ops.triton import attention
from merestone.ops.triton.attention import Keys, _divisor, _log_sum, _rows, _shares
from merestone.ops.triton.launch import blocks

ROWS = 128
"""Rows of an item."""
_DEPTH, _STEP, _COLUMNS = 64, 64, 128
# Items that share a pass over the spans: their queries and a span's keys stay in the L2 cache.
_BAND = 16


@triton.jit
def _tile_weights(
    q, pages, top, frame, at, scale, start, sees, least,
    DIM: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr, DEPTH: tl.constexpr,
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
    return tl.exp(scores - reference[:, None]).to(q.dtype), peak


@triton.jit(do_not_specialize=["table_entries", "spans", "from_item", "count"])
def _weigh_spans(
    q, pages, weights, tables, items, seen, highests, totals, scale, table_entries, spans,
    from_item, count,
    HEADS: tl.constexpr, PAGE: tl.constexpr, DIM: tl.constexpr, ROWS: tl.constexpr,
    TILE: tl.constexpr, SPAN: tl.constexpr, DEPTH: tl.constexpr, BAND: tl.constexpr,
):  # fmt: skip
    """Grid: (spans x ``count`` items). weights [count, ROWS, length], as they enter the mixture;
    highests and totals [count, spans, ROWS]."""
    band = tl.program_id(0) // (BAND * spans)
    inside = tl.program_id(0) % (BAND * spans)
    height = tl.minimum(count - band * BAND, BAND)
    # The last items see most: they come first.
    item, span = count - 1 - band * BAND - inside % height, inside // height
    sequence, _, valid, sees, last = _rows(items, item + from_item, seen, HEADS, ROWS)
    if span * SPAN < last:
        least = tl.min(tl.where(valid, sees, last), 0)
        top = tl.load(items + (item + from_item) * 3 + 1)
        table = tables + sequence * table_entries
        highest = tl.full((ROWS,), float("-inf"), tl.float32)
        held, peaks = (), ()
        for t in tl.static_range(SPAN // TILE):
            start = span * SPAN + t * TILE
            # Of a tile past the last key nothing is seen: any that is there will do.
            there = tl.minimum(start, (last - 1) // TILE * TILE)
            weight, peak = _tile_weights(
                q, pages, top, tl.load(table + there // PAGE), there % PAGE, scale, start, sees,
                least, DIM, ROWS, TILE, DEPTH,
            )  # fmt: skip
            held += (weight,)
            peaks += (peak,)
            highest = tl.maximum(highest, peak)
        reference = tl.where(highest == float("-inf"), 0.0, highest)
        ones = tl.full((TILE, 16), 1.0, q.dtype)
        total = tl.zeros((ROWS, 16), tl.float32)
        for t in tl.static_range(SPAN // TILE):
            share = tl.exp(peaks[t] - reference)[:, None]
            some = (held[t].to(tl.float32) * share).to(q.dtype)
            total = tl.dot(some, ones, total, input_precision="ieee")
            weights.store([item * ROWS, span * SPAN + t * TILE], some)
        at = (item.to(tl.int64) * spans + span) * ROWS + tl.arange(0, ROWS)
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


def fits(pages: Tensor) -> bool:
    """Whether keys in ``pages`` [frames, page, L] may be read so: whole tiles a page, of two-byte
    elements (others' tiles would not fit beside each other in shared memory)."""
    return pages.shape[1] % attention.TILE == 0 and pages.dtype.itemsize == 2


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
) -> tuple[Tensor, Tensor]:
    """`attention.attend` without a selection, ``work`` being items of ROWS rows: the same bits."""
    (rows, heads, dim), (_, page, _) = q.shape, keys.pages.shape
    tile, span = attention.TILE, attention.SPAN
    assert page % tile == 0, (page, tile)
    out, lse = attention.outputs(q, keys, (work, seen), width, out_dtype)
    width = out.shape[2]
    if rows == 0:
        return out, lse
    spans = max(blocks(longest, span), 1)
    most = min(max(attention.MOST_WEIGHTS // (ROWS * spans * span), 1), work.shape[0])
    weights = torch.empty(most * ROWS, spans * span, dtype=q.dtype, device=q.device)
    highests = torch.empty(most, spans, ROWS, dtype=torch.float32, device=q.device)
    totals = torch.empty_like(highests)
    depth, step, columns = min(_DEPTH, dim & -dim), min(_STEP, tile), min(_COLUMNS, width)
    # What the copy engine reads and writes, each in boxes of a fixed shape.
    queries = TensorDescriptor.from_tensor(q.view(rows * heads, dim), [ROWS, depth])
    scored = TensorDescriptor.from_tensor(keys.pages, [1, tile, depth])
    stored = TensorDescriptor.from_tensor(weights, [ROWS, tile])
    loaded = TensorDescriptor.from_tensor(weights, [ROWS, step])
    mixed = TensorDescriptor.from_tensor(keys.pages, [1, step, columns])
    tables = keys.tables, work, seen
    common = {
        "HEADS": heads, "PAGE": page, "ROWS": ROWS, "SPAN": span, "enable_fp_fusion": False,
    }  # fmt: skip
    for first in range(0, work.shape[0], most):
        count = min(most, work.shape[0] - first)
        sizes = keys.tables.shape[1], spans, first, count
        _weigh_spans[(spans * count,)](
            queries, scored, stored, *tables, highests, totals, float(scale), *sizes,
            DIM=dim, TILE=tile, DEPTH=depth, BAND=_BAND,
            num_warps=8, num_stages=4, **common,
        )  # fmt: skip
        _mix_spans[(width // columns, count)](
            loaded, mixed, *tables, highests, totals, out, lse, *sizes,
            WIDTH=width, COLUMNS=columns, STEP=step, num_warps=8, num_stages=11, **common,
        )  # fmt: skip
    return out, lse

# mypy: disable-error-code="no-untyped-def, untyped-decorator"
"""Mixture of experts: the router's choice, a stable sort by counting, grouped products.

Knows rows and experts. Must not know layers. Sorting is integer arithmetic; an expert's product is
the ordinary one, one segment of K; a token's results are added in the router's order, best first,
in fp32. So nothing depends on which other tokens chose the same expert. Definitions:
`merestone.ops.moe` and `merestone.ops.naive`.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from merestone.ops.triton.elementwise import sigmoid
from merestone.ops.triton.gemm import Tile, segment_products, segment_sum
from merestone.ops.triton.launch import aligned, blocks, power_of_two
from merestone.ops.triton.norms import swiglu

# Entries that one program counts; blocks of them and experts that one program adds up.
_ENTRIES, _PARTS, _GROUP = 64, 256, 16
_BLOCK = 1024
# By the mean number of rows of an expert. Tiles change no bits (see gemm.py).
_BF16 = ((16, Tile(16, 128, 128, 4, 4)), (64, Tile(64, 128, 64, 4, 4)))
_BF16_MANY = Tile(128, 128, 64, 8, 4)
_FP32 = Tile(16, 64, 32, 4, 3)


@triton.jit(do_not_specialize=["rows"])
def _route(
    logits,
    bias,
    ids,
    weights,
    scaling,
    rows,
    SEGMENTS: tl.constexpr,
    EXPERTS: tl.constexpr,
    PADDED: tl.constexpr,
    K: tl.constexpr,
    SLOTS: tl.constexpr,
    NORMALISE: tl.constexpr,
):
    """Grid: (rows). The K best experts, one after another; ties go to the lowest. logits:
    [SEGMENTS, rows, EXPERTS], to be added in order."""
    row = tl.program_id(0).to(tl.int64)
    expert = tl.arange(0, PADDED)
    inside = expert < EXPERTS
    logits += row * EXPERTS + expert
    logit = tl.load(logits, mask=inside, other=0.0)
    for segment in tl.static_range(1, SEGMENTS):
        logit += tl.load(logits + segment * (rows.to(tl.int64) * EXPERTS), mask=inside, other=0.0)
    score = sigmoid(logit)
    left = score + tl.load(bias + expert, mask=inside, other=0.0)
    # Whatever the logits, NaN included, K different experts are chosen.
    left = tl.where(left == left, left, -3.0e38)
    left = tl.where(inside, left, float("-inf"))
    slot = tl.arange(0, SLOTS)
    picks = tl.zeros((SLOTS,), tl.int32)
    values = tl.zeros((SLOTS,), tl.float32)
    total = tl.zeros((), tl.float32)
    for k in tl.static_range(K):
        best = tl.min(tl.where(left == tl.max(left, 0), expert, PADDED), 0)
        # One term and zeros: exact in any order.
        value = tl.sum(tl.where(expert == best, score, 0.0), 0)
        total += value
        picks = tl.where(slot == k, best, picks)
        values = tl.where(slot == k, value, values)
        left = tl.where(expert == best, float("-inf"), left)
    if NORMALISE:
        values = values / (total + 1e-20)
    tl.store(ids + row * K + slot, picks, mask=slot < K)
    tl.store(weights + row * K + slot, values * scaling, mask=slot < K)


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


@triton.jit
def _product(
    x,
    w,
    out,
    order,
    ends,
    tile_ends,
    N,
    K,
    x_row,
    w_expert,
    w_row,
    PER_ROW: tl.constexpr,
    GATHER: tl.constexpr,
    PADDED: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    EVEN: tl.constexpr,
):
    """Grid: (tiles at most, tiles of columns). GATHER: reads tokens' rows, writes sorted ones; else
    reads sorted rows and writes them to their entries."""
    tile = tl.program_id(0)
    expert = tl.arange(0, PADDED)
    last_tiles = tl.load(tile_ends + expert)
    mine = tl.sum((last_tiles <= tile).to(tl.int32), 0)
    if tile < tl.max(last_tiles, 0):
        before = tl.max(tl.where(expert == mine - 1, last_tiles, 0), 0)
        first = tl.load(ends + mine - 1, mask=mine > 0, other=0)
        end = tl.load(ends + mine)
        place = first + (tile - before) * ROWS + tl.arange(0, ROWS)
        inside = place < end
        # Places past the end repeat the last one: they are computed and not stored.
        place = tl.minimum(place, end - 1)
        entry = tl.load(order + place)
        left = tl.program_id(1) * COLUMNS
        column = tl.arange(0, COLUMNS)
        source = entry // PER_ROW if GATHER else place
        target = place if GATHER else entry
        w += mine.to(tl.int64) * w_expert + left.to(tl.int64) * w_row
        w_at = tl.minimum(column, N - 1 - left) * w_row
        total = segment_sum(x, w, source * x_row, w_at, 0, K, ROWS, COLUMNS, DEPTH, EVEN)
        to = out + target.to(tl.int64)[:, None] * N + left + column[None, :]
        stored = inside[:, None] & (column < N - left)[None, :]
        tl.store(to, total.to(out.dtype.element_ty), mask=stored)


@triton.jit
def _combine(results, weights, out, WIDTH, K: tl.constexpr, BLOCK: tl.constexpr):
    """Grid: (rows, blocks of columns). The weighted sum, best expert first."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < WIDTH
    total = tl.zeros((BLOCK,), tl.float32)
    for k in tl.static_range(K):
        one = tl.load(results + (row * K + k) * WIDTH + column, mask=inside, other=0.0)
        total += one.to(tl.float32) * tl.load(weights + row * K + k)
    tl.store(out + row * WIDTH + column, total, mask=inside)


@dataclass(frozen=True, slots=True)
class Sorted:
    """Entries (row * k + choice) by expert: ``order`` [n], and where experts end, in entries
    (``ends``) and in tiles of ``tile.rows`` (``tile_ends``), padded; all int32."""

    order: Tensor
    ends: Tensor
    tile_ends: Tensor
    tile: Tile
    most_tiles: int


def route(
    x: Tensor, gate: Tensor, bias: Tensor, k: int, normalise: bool, scaling: float
) -> tuple[Tensor, Tensor]:
    """Sigmoid scores; the bias counts in the choice only; ties go to the lowest expert.

    x [T, D], gate [E, D] and bias [E] fp32 -> ids [T, k] int32, best first, weights [T, k] fp32.
    """
    rows, experts = x.shape[0], gate.shape[0]
    logits = segment_products(x, gate)
    aligned(logits, bias)
    ids = torch.empty(rows, k, dtype=torch.int32, device=x.device)
    weights = torch.empty(rows, k, dtype=torch.float32, device=x.device)
    if rows:
        _route[(rows,)](
            logits, bias, ids, weights, float(scaling), rows,
            SEGMENTS=logits.shape[0], EXPERTS=experts, PADDED=power_of_two(experts), K=k,
            SLOTS=power_of_two(k),
            NORMALISE=normalise,
            num_warps=4, enable_fp_fusion=False,
        )  # fmt: skip
    return ids, weights


def sort_by_expert(ids: Tensor, experts: int, dtype: torch.dtype) -> Sorted:
    """Stable order of the entries of ids [T, k] int32 by expert, for products in ``dtype``."""
    assert ids.dtype == torch.int32
    assert ids.is_contiguous()
    count, padded = ids.numel(), power_of_two(experts)
    mean = count // experts
    tile = _FP32
    if dtype == torch.bfloat16:
        tile = next((tile for most, tile in _BF16 if mean <= most), _BF16_MANY)
    parts = blocks(count, _ENTRIES)
    offsets = torch.empty(parts, padded, dtype=torch.int32, device=ids.device)
    order = torch.empty(count, dtype=torch.int32, device=ids.device)
    totals, starts, ends, tile_ends = torch.empty(4, padded, dtype=torch.int32, device=ids.device)
    if count:
        group = min(_GROUP, padded)
        each = {"PADDED": padded, "num_warps": 8}
        _count[(parts,)](ids, offsets, count, ENTRIES=_ENTRIES, **each)
        _offsets[(padded // group,)](offsets, totals, parts, GROUP=group, BLOCK=_PARTS, **each)
        _ends[(1,)](totals, starts, ends, tile_ends, ROWS=tile.rows, **each)
        _place[(parts,)](ids, offsets, starts, order, count, ENTRIES=_ENTRIES, **each)
    # Every expert has at most one tile that is not full, and no more tiles than entries.
    most = min(count, count // tile.rows + experts)
    return Sorted(order, ends, tile_ends, tile, most)


def grouped_linear(
    x: Tensor,
    weight: Tensor,
    entries: Sorted,
    per_row: int,
    *,
    gather: bool,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """Each entry's row times the transpose of its expert's weight [E, N, K], in ``out_dtype`` (the
    weight's by default).

    ``gather``: x [T, K] are tokens, the result [n, N] is sorted by expert. Else x [n, K] is sorted
    and the result's row is its entry (token * per_row + choice).
    """
    count, n, k = entries.order.shape[0], weight.shape[1], weight.shape[2]
    assert x.dtype == weight.dtype
    assert x.stride(0) % 8 == weight.stride(1) % 8 == 0, "a row starts off the vector grid"
    # Rows are addressed by 32 bits (see segment_sum).
    assert x.shape[0] * x.stride(0) < 1 << 31, x.shape
    out = torch.empty(count, n, dtype=out_dtype or weight.dtype, device=x.device)
    aligned(x, weight, out)
    if count:
        tile = entries.tile
        _product[(entries.most_tiles, blocks(n, tile.columns))](
            x, weight, out, entries.order, entries.ends, entries.tile_ends,
            n, k, x.stride(0), weight.stride(0), weight.stride(1),
            PER_ROW=per_row, GATHER=gather, PADDED=entries.ends.shape[0],
            ROWS=tile.rows, COLUMNS=tile.columns, DEPTH=tile.depth, EVEN=k % tile.depth == 0,
            num_warps=tile.warps, num_stages=tile.stages, enable_fp_fusion=False,
        )  # fmt: skip
    return out


def experts(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    gate_up: Tensor,
    down: Tensor,
    limit: float | None,
    partial: bool = False,
) -> Tensor:
    """The weighted sum of each token's experts, [T, D] fp32.

    x [T, D], ids [T, k] int32, weights [T, k] fp32, gate_up [E, 2 I, D] (gate rows first), down
    [E, D, I]. ``partial``: these are parts of the inner width, so each expert's result is left in
    fp32, to be summed.
    """
    rows, k = ids.shape
    entries = sort_by_expert(ids, down.shape[0], down.dtype)
    both = grouped_linear(x, gate_up, entries, k, gather=True)
    wide = torch.float32 if partial else None
    results = grouped_linear(swiglu(both, limit), down, entries, k, gather=False, out_dtype=wide)
    width = down.shape[1]
    out = torch.empty(rows, width, dtype=torch.float32, device=x.device)
    if rows:
        _combine[(rows, blocks(width, _BLOCK))](
            results, weights, out, width, K=k, BLOCK=_BLOCK, num_warps=4, enable_fp_fusion=False
        )
    return out

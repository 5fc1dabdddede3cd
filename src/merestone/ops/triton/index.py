# mypy: disable-error-code="no-untyped-def, untyped-decorator"
"""The sparse index: pooled keys, their scores, and the choice of the best pools.

Knows pools, pages and rows. Must not know requests. A pool's key and a row's score of a pool are
sums of fixed shapes; the choice is exact arithmetic on integers (a radix selection over the scores'
bits), so it cannot depend on anything but the scores. Ties go to the lowest pool. Definitions:
`merestone.ops.index` and `merestone.ops.naive`.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from merestone.ops.triton.launch import aligned, blocks, power_of_two
from merestone.ops.triton.rows import Sequences

_POOLS = 64
"""Pools of one scoring tile."""
_BLOCK = 1024


@triton.jit(do_not_specialize=["page_entries", "full_entries"])
def _pool(
    new_keys,
    new_gates,
    key_pages,
    gate_pages,
    positions,
    out,
    pool_sequence,
    pool_number,
    pool_own,
    first,
    row,
    open_pages,
    full_pages,
    page_entries,
    full_entries,
    key_row,
    gate_row,
    key_frame,
    out_frame,
    PAGE: tl.constexpr,
    FULL_PAGE: tl.constexpr,
    SIZE: tl.constexpr,
    DIM: tl.constexpr,
):
    """Grid: (pools). A pool's members lie in open pages or among the step's rows."""
    sequence = tl.load(pool_sequence + tl.program_id(0)).to(tl.int64)
    number = tl.load(pool_number + tl.program_id(0))
    start = tl.load(first + sequence)
    column = tl.arange(0, DIM)
    member = tl.arange(0, SIZE)
    # Padding, or another rank's: its "members" are nowhere, and nothing is stored.
    own = tl.load(pool_own + tl.program_id(0))
    exists = own >= 0
    at = number * SIZE + member
    fresh = exists & (at >= start)
    stale = exists & (at < start)
    new_at = (tl.load(row + sequence) + at - start).to(tl.int64)[:, None]
    entry = open_pages + sequence * page_entries + at // PAGE
    frame = tl.load(entry, mask=stale, other=0).to(tl.int64)
    old_at = frame * key_frame + (at % PAGE) * DIM
    here, there = fresh[:, None], stale[:, None]
    old_at = old_at[:, None] + column
    new_key = tl.load(new_keys + new_at * key_row + column, mask=here, other=0.0)
    new_gate = tl.load(new_gates + new_at * gate_row + column, mask=here, other=0.0)
    key = tl.where(here, new_key, tl.load(key_pages + old_at, mask=there, other=0.0))
    gate = tl.where(here, new_gate, tl.load(gate_pages + old_at, mask=there, other=0.0))
    place = tl.load(positions + member[:, None] * DIM + column)
    logits = gate.to(tl.float32) + place
    weights = tl.exp(logits - tl.max(logits, 0)[None, :])
    mixed = tl.sum(weights * key.to(tl.float32), 0) / tl.sum(weights, 0)
    pool_page = FULL_PAGE // SIZE
    target = full_pages + sequence * full_entries + own // pool_page
    to = tl.load(target, mask=exists, other=0).to(tl.int64) * out_frame + own % pool_page * DIM
    tl.store(out + to + column, mixed.to(out.dtype.element_ty), mask=exists & (column < DIM))


@triton.jit(do_not_specialize=["entries", "width"])
def _score(
    q,
    weights,
    pools,
    tables,
    row_sequence,
    complete,
    out,
    scale,
    entries,
    width,
    weights_row,
    pool_frame,
    PAGE: tl.constexpr,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    POOLS: tl.constexpr,
):
    """Grid: (rows, tiles of pools)."""
    row = tl.program_id(0).to(tl.int64)
    index = tl.program_id(1) * POOLS + tl.arange(0, POOLS)
    last = tl.load(complete + row)
    if tl.program_id(1) * POOLS < last:
        head, column = tl.arange(0, HEADS), tl.arange(0, DIM)
        inside = index < last
        table = tables + tl.load(row_sequence + row).to(tl.int64) * entries
        frame = tl.load(table + index // PAGE, mask=inside, other=0).to(tl.int64)
        at = frame * pool_frame + (index % PAGE) * DIM
        keys = tl.load(pools + at[:, None] + column[None, :], mask=inside[:, None], other=0.0)
        query = tl.load(q + (row * HEADS + head[None, :]) * DIM + column[:, None])
        share = tl.load(weights + row * weights_row + head).to(tl.float32)
        products = tl.dot(keys, query, input_precision="ieee") * scale
        scores = tl.sum(tl.maximum(products, 0.0) * share[None, :], 1)
        tl.store(out + row * width + index, scores, mask=inside)


@triton.jit
def _ordered(scores):
    """Scores as integers of their order, NaN lowest, both zeros equal: int64, 0 .. 2^32 - 1."""
    lowest = float("-inf")
    scores = tl.where(scores == scores, scores, lowest)
    scores = tl.where(scores == 0.0, 0.0, scores)
    bits = scores.to(tl.int32, bitcast=True)
    signed = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    return signed.to(tl.int64) + 2147483648


@triton.jit(do_not_specialize=["width"])
def _choose(
    scores,
    complete,
    out,
    width,
    K: tl.constexpr,
    BLOCK: tl.constexpr,
    BINS: tl.constexpr,
):
    """Grid: (rows). The K best of a row's first ``complete`` scores, ascending; all if fewer.

    Four passes fix the K-th largest value a byte at a time; a last one writes what is above it,
    and of its equals the first. A row with a NaN gets -1: its keys are damaged.
    """
    row = tl.program_id(0).to(tl.int64)
    last = tl.load(complete + row)
    scores += row * width
    byte = tl.arange(0, BINS)
    threshold = tl.zeros((), tl.int64)
    wanted = tl.full((), K, tl.int32)
    unknown = tl.zeros((), tl.int32)
    for step in tl.static_range(4):
        shift = 24 - 8 * step
        counts = tl.zeros((BINS,), tl.int32)
        for start in range(0, last, BLOCK):
            at = start + tl.arange(0, BLOCK)
            score = tl.load(scores + at, mask=at < last, other=0.0)
            unknown += tl.sum((score != score).to(tl.int32), 0)
            value = _ordered(score)
            alike = (at < last) & ((value >> (shift + 8)) == (threshold >> (shift + 8)))
            digit = ((value >> shift) & 255).to(tl.int32)
            counts += tl.histogram(digit, BINS, mask=alike)
        above = tl.sum(counts, 0) - tl.cumsum(counts, 0)
        # The one byte with fewer than the wanted number above it and at least that many in all.
        here = (above < wanted) & (above + counts >= wanted)
        threshold += tl.sum(tl.where(here, byte, 0), 0).to(tl.int64) << shift
        wanted -= tl.sum(tl.where(here, above, 0), 0)
    done = tl.zeros((), tl.int32)
    for start in range(0, last, BLOCK):
        at = start + tl.arange(0, BLOCK)
        value = _ordered(tl.load(scores + at, mask=at < last, other=0.0))
        equal = ((at < last) & (value == threshold)).to(tl.int32)
        taken = (at < last) & (value > threshold)
        taken |= (equal > 0) & (tl.cumsum(equal, 0) <= wanted)
        wanted -= tl.minimum(tl.sum(equal, 0), wanted)
        place = done + tl.cumsum(taken.to(tl.int32), 0) - 1
        tl.store(out + row * K + place, tl.where(unknown > 0, -1, at), mask=taken)
        done += tl.sum(taken.to(tl.int32), 0)


@triton.jit
def _members(
    best,
    seen,
    out,
    counts,
    WIDTH: tl.constexpr,
    K: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Grid: (rows, blocks of the selection). Tokens of the pools, then of the open one."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    sees = tl.load(seen + row)
    pooled = tl.minimum(sees // SIZE, K) * SIZE
    pool = tl.load(best + row * K + at // SIZE, mask=at < pooled, other=0)
    inside = pool * SIZE + at % SIZE
    token = tl.where(at < pooled, inside, sees // SIZE * SIZE + at - pooled)
    count = pooled + sees % SIZE
    tl.store(out + row * WIDTH + at, tl.where(at < count, token, 0), mask=at < WIDTH)
    if tl.program_id(1) == 0:
        tl.store(counts + row, count)


def write_pools(
    keys: Tensor,
    gates: Tensor,
    key_pages: Tensor,
    gate_pages: Tensor,
    positions: Tensor,
    pool_pages: Tensor,
    full_pages: Tensor,
    pool_sequence: Tensor,
    pool_number: Tensor,
    sequences: Sequences,
    pool_own: Tensor | None = None,
) -> None:
    """Write the keys of the pools that a step completes: n of them, by sequence and number (-1:
    none, padding). ``pool_own`` [n]: their numbers in the pages, where those hold only some (-1:
    not that one).

    Args:
        keys, gates: [N, D] the step's raw rows, each of its stride. key_pages, gate_pages:
            [frames, page, D], those of the open pages.
        positions: [P, D] fp32, added to the gates of a pool's P members.
        pool_pages: [frames, page / P, D], written. full_pages: [S, n] int32.
    """
    size, dim = positions.shape
    count = pool_number.shape[0]
    assert keys.shape == gates.shape
    assert key_pages.stride() == gate_pages.stride()
    assert key_pages.stride(1) == pool_pages.stride(1) == dim
    assert size & (size - 1) == dim & (dim - 1) == 0, (size, dim)
    assert full_pages.dtype == pool_sequence.dtype == pool_number.dtype == torch.int32
    assert full_pages.is_contiguous()
    aligned(keys, gates, key_pages, gate_pages, positions, pool_pages)
    if count == 0:
        return
    _pool[(count,)](
        keys, gates, key_pages, gate_pages, positions, pool_pages, pool_sequence, pool_number,
        pool_number if pool_own is None else pool_own, sequences.first, sequences.row,
        sequences.open_pages, full_pages, sequences.open_pages.shape[1], full_pages.shape[1],
        keys.stride(0), gates.stride(0), key_pages.stride(0), pool_pages.stride(0),
        PAGE=key_pages.shape[1], FULL_PAGE=pool_pages.shape[1] * size, SIZE=size, DIM=dim,
        num_warps=1, enable_fp_fusion=False,
    )  # fmt: skip


def pool_scores(
    q: Tensor,
    weights: Tensor,
    pool_pages: Tensor,
    tables: Tensor,
    row_sequence: Tensor,
    complete: Tensor,
    *,
    longest: int,
) -> Tensor:
    """sum_h weights_h relu(q_h . pool / sqrt(D)) of each row's complete pools: [R, longest] fp32.

    q [R, H, D] in the pools' dtype, weights [R, H], pool_pages [frames, page, D], tables [S, n]
    int32, row_sequence and complete [R] int32. Entries from ``complete`` on are undefined.
    """
    rows, heads, dim = q.shape
    assert q.is_contiguous()
    assert q.dtype == pool_pages.dtype
    assert weights.stride(1) == 1
    assert pool_pages.stride(1) == dim
    assert heads & (heads - 1) == dim & (dim - 1) == 0, (heads, dim)
    assert row_sequence.dtype == complete.dtype == tables.dtype == torch.int32
    out = torch.empty(rows, longest, dtype=torch.float32, device=q.device)
    aligned(q, weights, pool_pages, out)
    if rows and longest:
        _score[(rows, blocks(longest, _POOLS))](
            q, weights, pool_pages, tables, row_sequence, complete, out, dim**-0.5,
            tables.shape[1], longest, weights.stride(0), pool_pages.stride(0),
            PAGE=pool_pages.shape[1], HEADS=heads, DIM=dim, POOLS=_POOLS,
            num_warps=4, enable_fp_fusion=False,
        )  # fmt: skip
    return out


def choose(scores: Tensor, complete: Tensor, k: int) -> Tensor:
    """The ``k`` best of each row's first ``complete`` scores, ascending: [R, P], [R] -> [R, k].

    ``complete`` int32; of a row with fewer than ``k`` all are taken and the rest is undefined. Ties
    go to the lowest pool; a row with a score that is not a number gets -1. int32.
    """
    rows, width = scores.shape
    assert scores.is_contiguous()
    assert scores.dtype == torch.float32
    assert complete.dtype == torch.int32
    out = torch.empty(rows, k, dtype=torch.int32, device=scores.device)
    if rows:
        _choose[(rows,)](scores, complete, out, width, K=k, BLOCK=_BLOCK, BINS=256, num_warps=8)
    return out


def members(best: Tensor, seen: Tensor, size: int, width: int) -> tuple[Tensor, Tensor]:
    """Tokens of the chosen pools, then those of the open one: [R, width] int32, and how many [R].

    best [R, k] int32, ascending; seen [R] int32, tokens that a row sees (a row with at most k
    complete pools sees them all, in order). The rest is 0.
    """
    rows, k = best.shape
    assert best.is_contiguous()
    assert best.dtype == seen.dtype == torch.int32
    assert width >= k * size + size - 1, (width, k, size)
    out = torch.empty(rows, width, dtype=torch.int32, device=best.device)
    counts = torch.empty(rows, dtype=torch.int32, device=best.device)
    if rows:
        block = min(_BLOCK, power_of_two(width))
        _members[(rows, blocks(width, block))](
            best, seen, out, counts, WIDTH=width, K=k, SIZE=size, BLOCK=block, num_warps=4
        )
    return out, counts

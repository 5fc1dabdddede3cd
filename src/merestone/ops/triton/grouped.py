# mypy: disable-error-code="no-untyped-def, untyped-decorator"
"""Mixture of experts: the router's choice, and products grouped by expert.

Knows rows and experts. Must not know layers. An expert's product is the ordinary one, one segment
of K; a token's results are added in the router's order, best first, in fp32. So nothing depends on
which other tokens chose the same expert. Definitions: `merestone.ops.moe` and
`merestone.ops.naive`.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from merestone.ops.triton.by_expert import NARROW, Sorted, sort_by_expert, tile_of
from merestone.ops.triton.elementwise import gated, sigmoid
from merestone.ops.triton.gemm import segment_products, segment_sum
from merestone.ops.triton.launch import aligned, blocks, power_of_two
from merestone.ops.triton.norms import load_rows, shape_of, sum_and_norm, swiglu

_BLOCK = 1024


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
    SHARED: tl.constexpr,
    SLOTS: tl.constexpr,
    NORMALISE: tl.constexpr,
):
    """Grid: (rows). The K best experts, one after another; ties go to the lowest. logits:
    [SEGMENTS, rows, EXPERTS], to be added in order. SHARED (0 or 1): expert EXPERTS comes last."""
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
    picks = tl.where(slot < K, picks, EXPERTS)
    values = tl.where(slot < K, values * scaling, 1.0)
    at = row * (K + SHARED) + slot
    tl.store(ids + at, picks, mask=slot < K + SHARED)
    tl.store(weights + at, values, mask=slot < K + SHARED)


@triton.jit
def _gated_sum(
    x,
    w,
    x_at,
    w_at,
    up,
    K,
    limit,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    EVEN: tl.constexpr,
    LIMITED: tl.constexpr,
):
    """silu(gate) * up of the products of two halves of a weight, ``up`` elements apart: the sums of
    `segment_sum`, each rounded as if it had been stored, [ROWS, COLUMNS] fp32."""
    gate_sum = tl.zeros((ROWS, COLUMNS), tl.float32)
    up_sum = tl.zeros((ROWS, COLUMNS), tl.float32)
    at = tl.arange(0, DEPTH)
    x_at = x_at[:, None] + at[None, :]
    w_at = w_at[None, :] + at[:, None]
    for k in range(0, K, DEPTH):
        if EVEN:
            left = tl.load(x + k + x_at)
            gates, ups = tl.load(w + k + w_at), tl.load(w + up + k + w_at)
        else:
            inside = at[:, None] < K - k
            left = tl.load(x + k + x_at, mask=at[None, :] < K - k, other=0.0)
            gates = tl.load(w + k + w_at, mask=inside, other=0.0)
            ups = tl.load(w + up + k + w_at, mask=inside, other=0.0)
        gate_sum = tl.dot(left, gates, gate_sum, input_precision="tf32x3")
        up_sum = tl.dot(left, ups, up_sum, input_precision="tf32x3")
    dtype = w.dtype.element_ty
    gate, raised = gate_sum.to(dtype).to(tl.float32), up_sum.to(dtype).to(tl.float32)
    return gated(gate, raised, limit, LIMITED)


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
    limit,
    PER_ROW: tl.constexpr,
    GATHER: tl.constexpr,
    GATED: tl.constexpr,
    LIMITED: tl.constexpr,
    SINGLE: tl.constexpr,
    PADDED: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    EVEN: tl.constexpr,
):
    """Grid: (tiles at most, tiles of columns). GATHER: reads tokens' rows, writes sorted ones; else
    reads sorted rows and writes them to their entries. GATED: the weight has 2 N rows, gates first,
    and what is written is gated. SINGLE: entries are those of one row, not sorted."""
    tile = tl.program_id(0)
    exists, mine, first, end = tile_of(tile, order, ends, tile_ends, ROWS, PADDED, SINGLE)
    if exists:
        place = first + tl.arange(0, ROWS)
        inside = place < end
        # Places past the end repeat the last one: they are computed and not stored.
        place = tl.minimum(place, end - 1)
        entry = place if SINGLE else tl.load(order + place)
        left = tl.program_id(1) * COLUMNS
        column = tl.arange(0, COLUMNS)
        source = entry // PER_ROW if GATHER else place
        target = place if GATHER else entry
        w += mine.to(tl.int64) * w_expert + left.to(tl.int64) * w_row
        w_at = tl.minimum(column, N - 1 - left) * w_row
        if GATED:
            total = _gated_sum(
                x, w, source * x_row, w_at, N * w_row, K, limit,
                ROWS, COLUMNS, DEPTH, EVEN, LIMITED,
            )  # fmt: skip
        else:
            total = segment_sum(x, w, source * x_row, w_at, 0, K, ROWS, COLUMNS, DEPTH, EVEN)
        to = out + target.to(tl.int64)[:, None] * N + left + column[None, :]
        stored = inside[:, None] & (column < N - left)[None, :]
        tl.store(to, total.to(out.dtype.element_ty), mask=stored)


@triton.jit
def _weighted(
    results, weights, more, row, column, inside, WIDTH, K: tl.constexpr, MORE: tl.constexpr
):  # fmt: skip
    """The weighted sum of a row's results, best expert first, then what is MORE: fp32, at
    ``column``, of ``inside``'s shape."""
    total = tl.zeros(inside.shape, tl.float32)
    for k in tl.static_range(K):
        one = tl.load(results + (row * K + k) * WIDTH + column, mask=inside, other=0.0)
        total += one.to(tl.float32) * tl.load(weights + row * K + k)
    if MORE:
        total += tl.load(more + row * WIDTH + column, mask=inside, other=0.0).to(tl.float32)
    return total


@triton.jit
def _combine(
    results, weights, more, out, WIDTH, K: tl.constexpr, MORE: tl.constexpr, BLOCK: tl.constexpr
):
    """Grid: (rows, blocks of columns)."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < WIDTH
    total = _weighted(results, weights, more, row, column, inside, WIDTH, K, MORE)
    tl.store(out + row * WIDTH + column, total.to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["M"])
def _combine_norm(
    results, weights, more, x, norm, total, out, M, eps,
    WIDTH: tl.constexpr, K: tl.constexpr, MORE: tl.constexpr, ROWS: tl.constexpr,
    PADDED: tl.constexpr,
):  # fmt: skip
    """Grid: (blocks of ROWS rows). What `_combine` stores, added to x, and the norm of that."""
    left, row, column, inside = load_rows(x, WIDTH, M, WIDTH, ROWS, PADDED)
    dtype = x.dtype.element_ty
    # Rows past the end repeat the last one: they are computed and not stored.
    known = tl.minimum(row, M - 1)
    mixed = _weighted(results, weights, more, known, column, inside, WIDTH, K, MORE)
    at = row * WIDTH + column
    right = mixed.to(dtype).to(tl.float32)
    added, normed = sum_and_norm(left, right, norm, column, eps, WIDTH, dtype)
    tl.store(total + at, added, mask=inside)
    tl.store(out + at, normed, mask=inside)


def route(
    x: Tensor,
    gate: Tensor,
    bias: Tensor,
    k: int,
    normalise: bool,
    scaling: float,
    *,
    shared: bool = False,
) -> tuple[Tensor, Tensor]:
    """Sigmoid scores; the bias counts in the choice only; ties go to the lowest expert.

    x [T, D], gate [E, D] and bias [E] fp32 -> ids [T, k] int32, best first, weights [T, k] fp32.
    With ``shared`` every token has one more entry, the last: expert E, of weight 1.
    """
    rows, experts = x.shape[0], gate.shape[0]
    logits = segment_products(x, gate)
    aligned(logits, bias)
    entries = k + shared
    ids = torch.empty(rows, entries, dtype=torch.int32, device=x.device)
    weights = torch.empty(rows, entries, dtype=torch.float32, device=x.device)
    if rows:
        _route[(rows,)](
            logits, bias, ids, weights, float(scaling), rows,
            SEGMENTS=logits.shape[0], EXPERTS=experts, PADDED=power_of_two(experts), K=k,
            SHARED=int(shared), SLOTS=power_of_two(entries), NORMALISE=normalise,
            num_warps=4, enable_fp_fusion=False,
        )  # fmt: skip
    return ids, weights


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
    n = weight.shape[1]
    return _grouped(x, weight, entries, per_row, n, gather=gather, out_dtype=out_dtype)


def grouped_gated(
    x: Tensor, weight: Tensor, entries: Sorted, per_row: int, limit: float | None
) -> Tensor:
    """silu(gate) * up of each entry's products with its expert's weight [E, 2 I, K], gates first:
    x [T, K] -> [n, I], sorted by expert. With few rows an expert in the same launch: the same
    bits."""
    if entries.tile.rows == NARROW:
        half = weight.shape[1] // 2
        return _grouped(x, weight, entries, per_row, half, gather=True, gated=True, limit=limit)
    return swiglu(grouped_linear(x, weight, entries, per_row, gather=True), limit)


def _grouped(
    x: Tensor,
    weight: Tensor,
    entries: Sorted,
    per_row: int,
    n: int,
    *,
    gather: bool,
    gated: bool = False,
    limit: float | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    count, k = entries.order.shape[0], weight.shape[2]
    assert x.dtype == weight.dtype
    assert x.stride(0) % 8 == weight.stride(1) % 8 == 0, "a row starts off the vector grid"
    # Rows are addressed by 32 bits (see segment_sum).
    assert x.shape[0] * x.stride(0) < 1 << 31, x.shape
    out = torch.empty(count, n, dtype=out_dtype or weight.dtype, device=x.device)
    aligned(x, weight, out)
    if count:
        tile = entries.tile
        # Two sums share the room of one.
        columns = tile.columns // 2 if gated else tile.columns
        _product[(entries.most_tiles, blocks(n, columns))](
            x, weight, out, entries.order, entries.ends, entries.tile_ends,
            n, k, x.stride(0), weight.stride(0), weight.stride(1), float(limit or 0.0),
            PER_ROW=per_row, GATHER=gather, GATED=gated, LIMITED=limit is not None,
            SINGLE=entries.ends is None,
            PADDED=1 if entries.ends is None else entries.ends.shape[0],
            ROWS=tile.rows, COLUMNS=columns, DEPTH=tile.depth, EVEN=k % tile.depth == 0,
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
    *,
    more: Tensor | None = None,
    out_dtype: torch.dtype = torch.float32,
) -> Tensor:
    """The weighted sum of each token's experts, and ``more`` [T, D] added last: [T, D], summed in
    fp32 and rounded once.

    x [T, D], ids [T, k] int32, weights [T, k] fp32, gate_up [E, 2 I, D] (gate rows first), down
    [E, D, I]. ``partial``: these are parts of the inner width, so each expert's result is left in
    fp32, to be summed.
    """
    (rows, k), width = ids.shape, down.shape[1]
    results = _results(x, ids, gate_up, down, limit, torch.float32 if partial else None)
    out = torch.empty(rows, width, dtype=out_dtype, device=x.device)
    if rows:
        _combine[(rows, blocks(width, _BLOCK))](
            results, weights, _more(more, weights, down), out, width,
            K=k, MORE=more is not None, BLOCK=_BLOCK, num_warps=4, enable_fp_fusion=False,
        )  # fmt: skip
    return out


def experts_norm(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    gate_up: Tensor,
    down: Tensor,
    limit: float | None,
    residual: Tensor,
    norm: Tensor,
    eps: float,
    *,
    more: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """:func:`experts` in x's dtype, added to ``residual`` [T, D], and the RMS norm of the sum:
    the bits of `merestone.ops.triton.norms.add_rms_norm`, in one launch less."""
    (rows, k), width = ids.shape, down.shape[1]
    assert residual.shape == (rows, width)
    assert residual.is_contiguous()
    assert residual.dtype == x.dtype
    results = _results(x, ids, gate_up, down, limit, None)
    total, out = torch.empty_like(residual), torch.empty_like(residual)
    aligned(residual, norm, total, out)
    if rows:
        each, padded, warps = shape_of(width)
        _combine_norm[(blocks(rows, each),)](
            results, weights, _more(more, weights, down), residual, norm, total, out, rows,
            eps, WIDTH=width, K=k, MORE=more is not None, ROWS=each, PADDED=padded,
            num_warps=warps, enable_fp_fusion=False,
        )  # fmt: skip
    return total, out


def _more(more: Tensor | None, weights: Tensor, down: Tensor) -> Tensor:
    """What a kernel that adds ``more`` [T, D] gets for it: if there is none, anything."""
    if more is None:
        return weights
    assert more.shape == (weights.shape[0], down.shape[1])
    assert more.is_contiguous()
    return more


def _results(
    x: Tensor,
    ids: Tensor,
    gate_up: Tensor,
    down: Tensor,
    limit: float | None,
    out_dtype: torch.dtype | None,
) -> Tensor:
    """Of each token's choice its expert's result, [T k, D]."""
    entries = sort_by_expert(ids, down.shape[0], down.dtype)
    inner = grouped_gated(x, gate_up, entries, ids.shape[1], limit)
    return grouped_linear(inner, down, entries, ids.shape[1], gather=False, out_dtype=out_dtype)

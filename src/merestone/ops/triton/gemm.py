# mypy: disable-error-code="no-untyped-def, untyped-decorator"
"""Matrix products in which a row's bits do not depend on how many rows there are.

Knows shapes. Must not know layers. An output element is a sum over K in one order: K is cut into
fixed segments, each summed from zero block after block, and the segments' sums are added in order.
How many segments there are follows from the weight's shape alone. With few rows every segment has
a program of its own and a second kernel adds them up, with many one program does it all: the same
sums. Tiles follow the number of rows, which is safe because a tensor core adds to its accumulator
in the order of K whatever the tile: seen on an H200 for bf16 tiles of 16x128x128, 64x128x64 and
128x128x64; a test on the device compares all that the tables name.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from merestone.ops.triton.launch import aligned, blocks

DEPTH = 128
"""A segment is a multiple of this many columns of K, and so of every tile's depth."""
_WANTED_PROGRAMS = 128
_SHORTEST_SEGMENT = 512
_MOST_SEGMENTS = 32
_COLUMNS = 128
_COMBINED = 1024
# Tiles of rows that share a pass over the weight's tiles, for the L2 cache.
_BAND = 8


@dataclass(frozen=True, slots=True)
class Tile:
    """Rows and columns of the output, depth of K at a time, and how they are computed."""

    rows: int
    columns: int
    depth: int
    warps: int
    stages: int


# (most rows, tile), for one segment and for several (which need two accumulators).
_BF16 = (
    (16, Tile(16, 128, 128, 4, 4)),
    (32, Tile(32, 128, 128, 4, 3)),
    (64, Tile(64, 128, 64, 4, 4)),
    (512, Tile(128, 128, 64, 8, 4)),
)
_BF16_MANY = {False: Tile(128, 256, 64, 8, 3), True: Tile(128, 128, 64, 8, 4)}
_FP32 = ((16, Tile(16, 64, 32, 4, 3)), (64, Tile(32, 64, 32, 4, 3)))
_FP32_MANY = Tile(64, 64, 32, 4, 3)


def segments(n: int, k: int) -> int:
    """Segments of K for a weight [n, k]: enough programs for a chip at one row. Part of the bits'
    definition."""
    count = 1
    while (
        count < _MOST_SEGMENTS
        and blocks(n, _COLUMNS) * count < _WANTED_PROGRAMS
        and k % (2 * count * DEPTH) == 0
        and k // (2 * count) >= _SHORTEST_SEGMENT
    ):
        count *= 2
    return count


def tile_for(rows: int, dtype: torch.dtype, several: bool) -> Tile:
    """The tile for ``rows`` rows; ``several``: of a sum of several segments in one program."""
    table, many = (_FP32, _FP32_MANY) if dtype == torch.float32 else (_BF16, _BF16_MANY[several])
    return next((tile for most, tile in table if rows <= most), many)


@triton.jit
def segment_sum(
    x,
    w,
    x_at,
    w_at,
    first,
    last,
    K,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    EVEN: tl.constexpr,
):
    """The sum over columns [first, last) of K, from zero: [ROWS, COLUMNS] fp32.

    Rows begin at ``x + x_at`` [ROWS] and ``w + w_at`` [COLUMNS], where the offsets have 32 bits: 64
    of them for each element would take the registers of the sums. ``EVEN``: DEPTH divides K.
    """
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    at = tl.arange(0, DEPTH)
    x_at = x_at[:, None] + at[None, :]
    w_at = w_at[None, :] + at[:, None]
    for k in range(first, last, DEPTH):
        if EVEN:
            left = tl.load(x + k + x_at)
            right = tl.load(w + k + w_at)
        else:
            left = tl.load(x + k + x_at, mask=at[None, :] < K - k, other=0.0)
            right = tl.load(w + k + w_at, mask=at[:, None] < K - k, other=0.0)
        total = tl.dot(left.to(right.dtype), right, total, input_precision="ieee")
    return total


@triton.jit(do_not_specialize=["M", "x_batch", "w_batch", "out_batch", "out_segment"])
def _product(
    x,
    w,
    out,
    M,
    N,
    K,
    x_batch,
    x_row,
    w_batch,
    w_row,
    out_batch,
    out_segment,
    SEGMENTS: tl.constexpr,
    LENGTH: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    EVEN: tl.constexpr,
    BAND: tl.constexpr,
):
    """Grid: (tiles, batch, parts). A part sums SEGMENTS segments and stores its own."""
    tiles_down, tiles_across = tl.cdiv(M, ROWS), tl.cdiv(N, COLUMNS)
    band = tl.program_id(0) // (BAND * tiles_across)
    inside = tl.program_id(0) % (BAND * tiles_across)
    height = tl.minimum(tiles_down - band * BAND, BAND)
    top, left = (band * BAND + inside % height) * ROWS, (inside // height) * COLUMNS
    row, column = tl.arange(0, ROWS), tl.arange(0, COLUMNS)
    batch, part = tl.program_id(1).to(tl.int64), tl.program_id(2)
    # Strides of a batch come in sixteens: so the compiler knows, without a specialisation.
    x += batch * x_batch * 16 + top.to(tl.int64) * x_row
    w += batch * w_batch * 16 + left.to(tl.int64) * w_row
    # Rows and columns past the end repeat the last one: they are computed and not stored.
    x_at = tl.minimum(row, M - 1 - top) * x_row
    w_at = tl.minimum(column, N - 1 - left) * w_row
    begin = part * SEGMENTS * LENGTH
    end = tl.minimum(begin + LENGTH, K)
    total = segment_sum(x, w, x_at, w_at, begin, end, K, ROWS, COLUMNS, DEPTH, EVEN)
    for _ in range(1, SEGMENTS):
        begin += LENGTH
        total += segment_sum(x, w, x_at, w_at, begin, begin + LENGTH, K, ROWS, COLUMNS, DEPTH, EVEN)
    to = out + batch * out_batch + part.to(tl.int64) * out_segment
    to += top.to(tl.int64) * N + left + row[:, None] * N + column[None, :]
    inside = (row < M - top)[:, None] & (column < N - left)[None, :]
    tl.store(to, total.to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["count"])
def _combine(parts, out, count, SEGMENTS: tl.constexpr, BLOCK: tl.constexpr):
    """Grid: (blocks of elements). Adds the segments' sums in order and rounds once."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    total = tl.load(parts + at, mask=inside)
    for segment in range(1, SEGMENTS):
        total += tl.load(parts + segment * count.to(tl.int64) + at, mask=inside)
    tl.store(out + at, total.to(out.dtype.element_ty), mask=inside)


def linear(x: Tensor, weight: Tensor, *, out_dtype: torch.dtype | None = None) -> Tensor:
    """x [M, K] times the transpose of weight [N, K] -> [M, N], or a batch of such products.

    x [B, M, K] with weight [B, N, K] gives [B, M, N]. ``x`` is converted to the weight's dtype
    (bf16 or fp32); sums are fp32 and rounded once to ``out_dtype`` (the weight's by default). Row i
    of the result is a function of row i of ``x`` and of ``weight`` alone.
    """
    rows, (n, k) = x.shape[-2], weight.shape[-2:]
    count = segments(n, k)
    tile = tile_for(rows, weight.dtype, count > 1)
    batch = x.shape[0] if x.ndim == 3 else 1
    programs = batch * blocks(rows, tile.rows) * blocks(n, tile.columns)
    split = count > 1 and programs < _WANTED_PROGRAMS
    return product(x, weight, tile, count, split=split, out_dtype=out_dtype)


def product(
    x: Tensor,
    weight: Tensor,
    tile: Tile,
    count: int,
    *,
    split: bool,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """:func:`linear` by one tile and ``count`` segments; ``split``: a program for each segment.

    Neither the tile nor ``split`` changes the result's bits; ``count`` does.
    """
    out_dtype = out_dtype or weight.dtype
    batched = x.ndim == 3
    batch = x.shape[0] if batched else 1
    rows, k = x.shape[-2:]
    n = weight.shape[-2]
    assert weight.shape == ((batch, n, k) if batched else (n, k)), (x.shape, weight.shape)
    aligned(x, weight)
    assert x.stride(-2) % 8 == weight.stride(-2) % 8 == 0, "a row starts off the vector grid"
    assert count == 1 or k % (count * DEPTH) == 0, (k, count)
    out = torch.empty(*x.shape[:-1], n, dtype=out_dtype, device=x.device)
    if rows == 0:
        return out
    x_batch, w_batch = (x.stride(0), weight.stride(0)) if batched else (0, 0)
    assert x_batch % 16 == w_batch % 16 == 0, (x_batch, w_batch)
    into = out
    if split:
        into = torch.empty(count, out.numel(), dtype=torch.float32, device=x.device)
    grid = (blocks(rows, tile.rows) * blocks(n, tile.columns), batch, count if split else 1)
    _product[grid](
        x, weight, into, rows, n, k,
        x_batch // 16, x.stride(-2), w_batch // 16, weight.stride(-2), rows * n, out.numel(),
        SEGMENTS=1 if split else count, LENGTH=blocks(k, count),
        ROWS=tile.rows, COLUMNS=tile.columns, DEPTH=tile.depth, EVEN=k % tile.depth == 0,
        BAND=_BAND, num_warps=tile.warps, num_stages=tile.stages, enable_fp_fusion=False,
    )  # fmt: skip
    if split:
        _combine[(blocks(out.numel(), _COMBINED),)](
            into, out, out.numel(), SEGMENTS=count, BLOCK=_COMBINED,
            num_warps=4, enable_fp_fusion=False,
        )  # fmt: skip
    return out


def linear_naive(x: Tensor, weight: Tensor) -> Tensor:
    """The definition, up to the order of sums; fp32."""
    return x.float() @ weight.float().transpose(-1, -2)

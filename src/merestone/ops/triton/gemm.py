# mypy: disable-error-code="no-untyped-def, untyped-decorator"
"""Matrix products in which a row's bits do not depend on how many rows there are.

Knows shapes. Must not know layers. An output element is one sum over K in order. A tensor core adds
to its accumulator in the order of K whatever the tile, so the tile may follow the number of rows:
seen on an H200 for every tile below, from 16x16 to 128x256, of warp and of warpgroup instructions,
loaded by threads or by the copy engine; a test on the device compares them. Few rows go to narrow
tiles, enough of them to keep all of the memory busy; many rows to wide ones, dealt over the chip.

A weight of few rows and a long K would leave most of the chip idle. Its K is cut into fixed
segments, each summed from zero in a program of its own; a second kernel adds them in order. How
many there are follows from the weight's shape alone, so this, too, is the same for every row.

Weights in fp32 are multiplied as three products of TF32 pieces (relative errors near 1e-6).
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from merestone.ops.triton.launch import aligned, blocks

DEPTH = 128
"""A segment is a multiple of this many columns of K."""
_SHORT_WEIGHT = 512
_WANTED_SEGMENTS = 144
_SHORTEST_SEGMENT = 256
_COMBINED = 1024
# Tiles of rows that share a pass over the weight's tiles, for the L2 cache.
_BAND = 8
# Programs that take turns over wide tiles: one a multiprocessor.
_PROGRAMS = 132


@dataclass(frozen=True, slots=True)
class Tile:
    """Rows and columns of the output, depth of K at a time, and how they are computed."""

    rows: int
    columns: int
    depth: int
    warps: int
    stages: int


# (most rows, tile of a weight below _MANY_COLUMNS, tile of a longer one).
_MANY_COLUMNS = 8192
_BF16 = (
    (16, Tile(16, 32, 256, 2, 5), Tile(16, 64, 128, 4, 4)),
    (32, Tile(32, 32, 256, 4, 4), Tile(32, 64, 128, 4, 4)),
    (64, Tile(64, 32, 128, 4, 5), Tile(64, 128, 64, 4, 4)),
    (128, Tile(64, 64, 128, 4, 5), Tile(64, 128, 64, 4, 4)),
)
_BF16_MANY = Tile(128, 128, 64, 8, 4)
# Of a batch, whose K is short: little to load ahead.
_BATCH = ((16, Tile(16, 64, 128, 4, 2)), (64, Tile(64, 64, 64, 4, 3)))
# By the copy engine.
_WIDE, _WIDEST = Tile(128, 128, 64, 4, 4), Tile(128, 256, 64, 8, 3)
_WIDE_TILES = _WIDE, _WIDEST
# Warp instructions only: whether a warpgroup's agree with them for TF32 was not looked at. One
# depth, since the three products of a step are summed one after another.
_FP32 = ((16, Tile(16, 32, 64, 2, 3)),)
_FP32_MANY = Tile(32, 32, 64, 4, 3)


def segments(n: int, k: int) -> int:
    """Segments of K for a weight [n, k]. Part of the bits' definition."""
    if n > _SHORT_WEIGHT or k % DEPTH:
        return 1
    most = min(k // _SHORTEST_SEGMENT, _WANTED_SEGMENTS // blocks(n, 32))
    return max((count for count in range(1, most + 1) if k // DEPTH % count == 0), default=1)


def tile_for(rows: int, n: int, dtype: torch.dtype, batched: bool = False) -> Tile:
    """The tile for ``rows`` rows and a weight of ``n``, of those whose loads the threads do."""
    if dtype == torch.float32:
        return next((tile for most, tile in _FP32 if rows <= most), _FP32_MANY)
    if batched:
        return next((tile for most, tile in _BATCH if rows <= most), _BF16_MANY)
    few = next((tiles for most, *tiles in _BF16 if rows <= most), None)
    return _BF16_MANY if few is None else few[n >= _MANY_COLUMNS]


def wide_tile(rows: int, n: int) -> Tile:
    """The tile of the copy engine for ``rows`` rows and a weight of ``n``: by how long the chip
    works on them, the narrower one being somewhat slower for its size."""
    turns = (blocks(blocks(rows, t.rows) * blocks(n, t.columns), _PROGRAMS) for t in _WIDE_TILES)
    narrow, wide = turns
    return _WIDE if narrow * 1.1 <= wide * 2 else _WIDEST


@triton.jit
def segment_sum(
    x,
    w,
    x_at,
    w_at,
    first,
    last,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    EVEN: tl.constexpr,
):
    """The sum over columns [first, last) of K, from zero: [ROWS, COLUMNS] fp32.

    Rows begin at ``x + x_at`` [ROWS] and ``w + w_at`` [COLUMNS], where the offsets have 32 bits: 64
    of them for each element would take the registers of the sums. ``EVEN``: DEPTH divides the
    length.
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
            left = tl.load(x + k + x_at, mask=at[None, :] < last - k, other=0.0)
            right = tl.load(w + k + w_at, mask=at[:, None] < last - k, other=0.0)
        total = tl.dot(left.to(right.dtype), right, total, input_precision="tf32x3")
    return total


@triton.jit
def _place(tile, M, N, ROWS: tl.constexpr, COLUMNS: tl.constexpr, BAND: tl.constexpr):
    """First row and first column of a tile: BAND tiles down, then one across."""
    tiles_down, tiles_across = tl.cdiv(M, ROWS), tl.cdiv(N, COLUMNS)
    band = tile // (BAND * tiles_across)
    inside = tile % (BAND * tiles_across)
    height = tl.minimum(tiles_down - band * BAND, BAND)
    return (band * BAND + inside % height) * ROWS, (inside // height) * COLUMNS


@triton.jit(do_not_specialize=["M", "x_batch", "w_batch", "out_batch", "out_segment"])
def _product(
    x,
    w,
    out,
    M,
    N,
    K,
    length,
    x_batch,
    x_row,
    w_batch,
    w_row,
    out_batch,
    out_segment,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    EVEN: tl.constexpr,
    BAND: tl.constexpr,
):
    """Grid: (tiles, batch, segments of ``length``). Loads by threads."""
    top, left = _place(tl.program_id(0), M, N, ROWS, COLUMNS, BAND)
    row, column = tl.arange(0, ROWS), tl.arange(0, COLUMNS)
    batch, segment = tl.program_id(1).to(tl.int64), tl.program_id(2)
    # Strides of a batch come in sixteens: so the compiler knows, without a specialisation.
    x += batch * x_batch * 16 + top.to(tl.int64) * x_row
    w += batch * w_batch * 16 + left.to(tl.int64) * w_row
    # Rows and columns past the end repeat the last one: they are computed and not stored. (A mask
    # on the loads cost a third of the speed.)
    x_at = tl.minimum(row, M - 1 - top) * x_row
    w_at = tl.minimum(column, N - 1 - left) * w_row
    first = segment * length
    last = tl.minimum(first + length, K)
    total = segment_sum(x, w, x_at, w_at, first, last, ROWS, COLUMNS, DEPTH, EVEN)
    to = out + batch * out_batch + segment.to(tl.int64) * out_segment
    to += top.to(tl.int64) * N + left + row[:, None] * N + column[None, :]
    inside = (row < M - top)[:, None] & (column < N - left)[None, :]
    tl.store(to, total.to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["M"])
def _wide_product(
    x,
    w,
    out,
    M,
    N,
    K,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    BAND: tl.constexpr,
    PROGRAMS: tl.constexpr,
):
    """Grid: (PROGRAMS). The same sums; tiles by the copy engine, from and to descriptors."""
    count = tl.cdiv(M, ROWS) * tl.cdiv(N, COLUMNS)
    for tile in tl.range(tl.program_id(0), count, PROGRAMS, flatten=True):
        top, left = _place(tile, M, N, ROWS, COLUMNS, BAND)
        total = tl.zeros((ROWS, COLUMNS), tl.float32)
        for step in range(tl.cdiv(K, DEPTH)):
            rows = x.load([top, step * DEPTH])
            columns = w.load([left, step * DEPTH])
            total = tl.dot(rows, columns.T, total)
        # In halves, so that the stores take little of the memory that the loads fill.
        halves = tl.permute(tl.reshape(total, (ROWS, 2, COLUMNS // 2)), (0, 2, 1))
        one, other = tl.split(halves)
        out.store([top, left], one.to(out.dtype))
        out.store([top, left + COLUMNS // 2], other.to(out.dtype))


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
    out_dtype = out_dtype or weight.dtype
    count = segments(n, k)
    if (
        rows > _BF16[-1][0]
        and count == 1
        and x.ndim == 2
        and x.dtype == weight.dtype == torch.bfloat16
        and n * out_dtype.itemsize % 16 == 0
    ):
        return wide_product(x, weight, wide_tile(rows, n), out_dtype=out_dtype)
    tile = tile_for(rows, n, weight.dtype, batched=x.ndim == 3)
    return product(x, weight, tile, count, out_dtype=out_dtype)


def product(
    x: Tensor, weight: Tensor, tile: Tile, count: int, *, out_dtype: torch.dtype | None = None
) -> Tensor:
    """:func:`linear` by one tile and ``count`` segments. The tile does not change the result's
    bits; ``count`` does."""
    out_dtype = out_dtype or weight.dtype
    if count == 1:
        return _products(x, weight, tile, 1, out_dtype)[0]
    parts = _products(x, weight, tile, count, torch.float32)
    out = torch.empty(parts.shape[1:], dtype=out_dtype, device=x.device)
    if out.numel():
        _combine[(blocks(out.numel(), _COMBINED),)](
            parts, out, out.numel(), SEGMENTS=count, BLOCK=_COMBINED,
            num_warps=4, enable_fp_fusion=False,
        )  # fmt: skip
    return out


def segment_products(x: Tensor, weight: Tensor) -> Tensor:
    """The products of every segment of K, [segments, M, N] fp32: their sum in order, which a kernel
    may form as it reads them, is :func:`linear`'s."""
    n, k = weight.shape
    tile = tile_for(x.shape[0], n, weight.dtype)
    return _products(x, weight, tile, segments(n, k), torch.float32)


def _products(x: Tensor, weight: Tensor, tile: Tile, count: int, out_dtype: torch.dtype) -> Tensor:
    """[count, *batch, M, N]."""
    batched = x.ndim == 3
    batch = x.shape[0] if batched else 1
    rows, k = x.shape[-2:]
    n = weight.shape[-2]
    assert weight.shape == ((batch, n, k) if batched else (n, k)), (x.shape, weight.shape)
    aligned(x, weight)
    assert x.stride(-2) % 8 == weight.stride(-2) % 8 == 0, "a row starts off the vector grid"
    assert count == 1 or k % (count * DEPTH) == 0, (k, count)
    out = torch.empty(count, *x.shape[:-1], n, dtype=out_dtype, device=x.device)
    if rows == 0:
        return out
    x_batch, w_batch = (x.stride(0), weight.stride(0)) if batched else (0, 0)
    assert x_batch % 16 == w_batch % 16 == 0, (x_batch, w_batch)
    length = blocks(k, count)
    _product[(blocks(rows, tile.rows) * blocks(n, tile.columns), batch, count)](
        x, weight, out, rows, n, k, length,
        x_batch // 16, x.stride(-2), w_batch // 16, weight.stride(-2), rows * n, out[0].numel(),
        ROWS=tile.rows, COLUMNS=tile.columns, DEPTH=tile.depth, EVEN=length % tile.depth == 0,
        BAND=_BAND, num_warps=tile.warps, num_stages=tile.stages, enable_fp_fusion=False,
    )  # fmt: skip
    return out


def wide_product(
    x: Tensor, weight: Tensor, tile: Tile, *, out_dtype: torch.dtype | None = None
) -> Tensor:
    """:func:`linear` for many rows and one segment, in one dtype: the same bits."""
    (rows, k), n = x.shape, weight.shape[0]
    assert weight.shape == (n, k), (x.shape, weight.shape)
    assert x.dtype == weight.dtype
    aligned(x, weight)
    out = torch.empty(rows, n, dtype=out_dtype or weight.dtype, device=x.device)
    tiles = blocks(rows, tile.rows) * blocks(n, tile.columns)
    _wide_product[(min(tiles, _PROGRAMS),)](
        TensorDescriptor.from_tensor(x, [tile.rows, tile.depth]),
        TensorDescriptor.from_tensor(weight, [tile.columns, tile.depth]),
        TensorDescriptor.from_tensor(out, [tile.rows, tile.columns // 2]),
        rows, n, k,
        ROWS=tile.rows, COLUMNS=tile.columns, DEPTH=tile.depth, BAND=_BAND, PROGRAMS=_PROGRAMS,
        num_warps=tile.warps, num_stages=tile.stages, enable_fp_fusion=False,
    )  # fmt: skip
    return out


def linear_naive(x: Tensor, weight: Tensor) -> Tensor:
    """The definition, up to the order of sums; fp32."""
    return x.float() @ weight.float().transpose(-1, -2)

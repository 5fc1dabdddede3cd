# mypy: disable-error-code="no-untyped-def, untyped-decorator"
"""Hyper-connections: n residual streams into a sublayer and out of it.

Knows rows. Must not know layers. The coefficients' product is an ordinary one; everything after it
(statistics, gates, Sinkhorn's iterations, the weighted sum, the sublayer's norm) happens in one
program a row, in registers. fp32 inside; rounded where the definition, `merestone.ops.hyper`, does.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from merestone.ops.triton.elementwise import rms_scale, sigmoid
from merestone.ops.triton.gemm import segment_products
from merestone.ops.triton.launch import aligned, blocks, power_of_two

_BLOCK = 1024


@triton.jit
def _balanced(logits, eps, ITERATIONS: tl.constexpr):
    """Softmax of each row, then Sinkhorn's iterations: columns first, columns last. [N, N]."""
    comb = tl.exp(logits - tl.max(logits, 1)[:, None])
    comb = comb / tl.sum(comb, 1)[:, None] + eps
    comb = comb / (tl.sum(comb, 0)[None, :] + eps)
    for _ in range(ITERATIONS - 1):
        comb = comb / (tl.sum(comb, 1)[:, None] + eps)
        comb = comb / (tl.sum(comb, 0)[None, :] + eps)
    return comb


@triton.jit
def _at(z, at, step, SEGMENTS: tl.constexpr, PARTS: tl.constexpr):
    """Products ``at`` [n] of z: the segments' sums, all loaded at once, added as a tree."""
    segment = tl.arange(0, PARTS)[:, None]
    found = tl.load(z + segment * step + at[None, :], mask=segment < SEGMENTS, other=0.0)
    return tl.sum(found, 0)


@triton.jit(do_not_specialize=["rows"])
def _enter(
    streams,
    z,
    base,
    scale,
    weight,
    out,
    post,
    comb,
    eps,
    rms_eps,
    norm_eps,
    rows,
    SEGMENTS: tl.constexpr,
    PARTS: tl.constexpr,
    N: tl.constexpr,
    WIDTH: tl.constexpr,
    PADDED: tl.constexpr,
    ITERATIONS: tl.constexpr,
):
    """Grid: (rows). z: [SEGMENTS, rows, N (2 + N)]."""
    row = tl.program_id(0).to(tl.int64)
    stream, column = tl.arange(0, N), tl.arange(0, PADDED)
    square = tl.arange(0, N * N)
    at = (row * N + stream[:, None]) * WIDTH + column[None, :]
    x = tl.load(streams + at, mask=column[None, :] < WIDTH, other=0.0).to(tl.float32)
    norm = tl.sqrt(tl.sum(tl.sum(x * x, 1), 0) / (N * WIDTH) + rms_eps)
    z += row * (N * (2 + N))
    step = rows.to(tl.int64) * (N * (2 + N))
    entry = _at(z, stream, step, SEGMENTS, PARTS) / norm * tl.load(scale + stream) + tl.load(
        base + stream
    )
    pre = sigmoid(entry) + eps
    at = N + stream
    leave = _at(z, at, step, SEGMENTS, PARTS) / norm * tl.load(scale + at) + tl.load(base + at)
    leave = sigmoid(leave) * 2.0
    at = 2 * N + square
    logits = _at(z, at, step, SEGMENTS, PARTS) / norm * tl.load(scale + at) + tl.load(base + at)
    logits = tl.reshape(logits, (N, N))
    square = tl.reshape(square, (N, N))
    tl.store(post + row * N + stream, leave)
    tl.store(comb + row * N * N + square, _balanced(logits, eps, ITERATIONS))
    mixed = tl.sum(x * pre[:, None], 0)[None, :].to(out.dtype.element_ty).to(tl.float32)
    normal = (mixed * rms_scale(mixed, norm_eps, WIDTH)).to(out.dtype.element_ty)
    inside = column[None, :] < WIDTH
    factor = tl.load(weight + column[None, :], mask=inside, other=0.0).to(tl.float32)
    scaled = normal.to(tl.float32) * factor
    tl.store(out + row * WIDTH + column[None, :], scaled.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _leave(streams, y, post, comb, out, WIDTH, N: tl.constexpr, BLOCK: tl.constexpr):
    """Grid: (rows, blocks of columns). Streams are added in order."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    stream = tl.arange(0, N)
    inside = column < WIDTH
    value = tl.load(y + row * WIDTH + column, mask=inside, other=0.0).to(tl.float32)
    total = tl.load(post + row * N + stream)[:, None] * value[None, :]
    for i in tl.static_range(N):
        x = tl.load(streams + (row * N + i) * WIDTH + column, mask=inside, other=0.0)
        share = tl.load(comb + (row * N + i) * N + stream)
        total += share[:, None] * x.to(tl.float32)[None, :]
    at = (row * N + stream[:, None]) * WIDTH + column[None, :]
    tl.store(out + at, total.to(out.dtype.element_ty), mask=inside[None, :])


@triton.jit
def _mean(streams, out, WIDTH, N: tl.constexpr, BLOCK: tl.constexpr):
    """Grid: (rows, blocks of columns)."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < WIDTH
    total = tl.zeros((BLOCK,), tl.float32)
    for i in tl.static_range(N):
        x = tl.load(streams + (row * N + i) * WIDTH + column, mask=inside, other=0.0)
        total += x.to(tl.float32)
    tl.store(out + row * WIDTH + column, (total / N).to(out.dtype.element_ty), mask=inside)


def enter(
    streams: Tensor,
    fn: Tensor,
    base: Tensor,
    scale: Tensor,
    weight: Tensor,
    *,
    eps: float,
    rms_eps: float,
    norm_eps: float,
    iterations: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """The normalised input of a sublayer, and how its output goes back into the streams.

    Args:
        streams: [T, n, D], n a power of two. fn: [n (2 + n), n D], base and scale [n (2 + n)]
            (each of the three scales repeated over its part), fp32.
        weight: [D], that of the sublayer's RMS norm.

    Returns:
        [T, D] in the streams' dtype, post [T, n] and comb [T, n, n] fp32.
    """
    rows, n, width = streams.shape
    assert streams.is_contiguous()
    assert fn.dtype == base.dtype == scale.dtype == torch.float32
    assert n & (n - 1) == 0, n
    z = segment_products(streams.view(rows, n * width), fn)
    out = torch.empty(rows, width, dtype=streams.dtype, device=streams.device)
    post = torch.empty(rows, n, dtype=torch.float32, device=streams.device)
    comb = torch.empty(rows, n, n, dtype=torch.float32, device=streams.device)
    aligned(streams, weight, base, scale, out)
    if rows:
        padded = power_of_two(width)
        _enter[(rows,)](
            streams, z, base, scale, weight, out, post, comb,
            float(eps), float(rms_eps), float(norm_eps), rows,
            SEGMENTS=z.shape[0], PARTS=power_of_two(z.shape[0]), N=n, WIDTH=width, PADDED=padded,
            ITERATIONS=iterations, num_warps=min(max(n * padded // 1024, 1), 16),
            enable_fp_fusion=False,
        )  # fmt: skip
    return out, post, comb


def leave(streams: Tensor, y: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    """X'_j = post_j y + sum_i comb[i, j] X_i: streams [T, n, D], y [T, D] -> [T, n, D]."""
    rows, n, width = streams.shape
    assert streams.is_contiguous()
    assert y.is_contiguous()
    assert post.is_contiguous()
    assert comb.is_contiguous()
    out = torch.empty_like(streams)
    aligned(streams, y, out)
    if rows:
        block = min(_BLOCK, power_of_two(width))
        _leave[(rows, blocks(width, block))](
            streams, y, post, comb, out, width,
            N=n, BLOCK=block, num_warps=4, enable_fp_fusion=False,
        )  # fmt: skip
    return out


def mean(streams: Tensor) -> Tensor:
    """The mean of the streams: [T, n, D] -> [T, D] in their dtype."""
    rows, n, width = streams.shape
    assert streams.is_contiguous()
    out = torch.empty(rows, width, dtype=streams.dtype, device=streams.device)
    aligned(streams, out)
    if rows:
        block = min(_BLOCK, power_of_two(width))
        _mean[(rows, blocks(width, block))](
            streams, out, width, N=n, BLOCK=block, num_warps=4, enable_fp_fusion=False
        )
    return out

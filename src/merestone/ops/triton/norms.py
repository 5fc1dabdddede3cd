# mypy: disable-error-code="no-untyped-def, untyped-decorator"
"""Norms and gates over rows, fp32 inside.

A program takes a fixed number of rows, which follows from their width alone; a row is reduced
within the same threads in the same order whichever of them it is. CPU counterparts and definitions:
`merestone.ops.elementwise`.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from merestone.ops.triton.elementwise import gated, rms_scale, sigmoid, softplus
from merestone.ops.triton.launch import aligned, blocks, power_of_two

# Elements that a program holds at most, while a row fits; wider rows are alone.
_ELEMENTS = 2048
_BLOCK = 1024


def shape_of(width: int) -> tuple[int, int, int]:
    """(rows of a program, padded width, warps) for rows of ``width``."""
    padded = power_of_two(width)
    rows = max(_ELEMENTS // padded, 1)
    return rows, padded, min(max(rows * padded // 512, 1), 16)


@triton.jit
def load_rows(x, x_row, M, WIDTH: tl.constexpr, ROWS: tl.constexpr, PADDED: tl.constexpr):
    """This program's rows in fp32 [ROWS, PADDED], their numbers, columns, and what is inside."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, PADDED)[None, :]
    inside = (row < M) & (column < WIDTH)
    wide = tl.load(x + row * x_row + column, mask=inside, other=0.0).to(tl.float32)
    return wide, row, column, inside


@triton.jit
def scaled_norm(wide, weight, column, eps, WIDTH: tl.constexpr, dtype: tl.constexpr):
    """The RMS norm of rows ``wide`` [ROWS, PADDED] fp32, times ``weight`` at ``column``, in
    ``dtype``: rounded before the weight, as transformers does, and once after."""
    factor = tl.load(weight + column, mask=column < WIDTH, other=0.0).to(tl.float32)
    normal = (wide * rms_scale(wide, eps, WIDTH)).to(dtype)
    return (normal.to(tl.float32) * factor).to(dtype)


@triton.jit
def sum_and_norm(left, right, weight, column, eps, WIDTH: tl.constexpr, dtype: tl.constexpr):
    """left + right [ROWS, PADDED] fp32, rounded to ``dtype``, and the `scaled_norm` of that."""
    added = (left + right).to(dtype)
    return added, scaled_norm(added.to(tl.float32), weight, column, eps, WIDTH, dtype)


@triton.jit(do_not_specialize=["M"])
def _rms_norm(
    x,
    weight,
    gate,
    out,
    M,
    x_row,
    eps,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    PADDED: tl.constexpr,
    GATED: tl.constexpr,
):
    """Grid: (blocks of ROWS rows). Out is dense; with GATED so is the gate."""
    wide, row, column, inside = load_rows(x, x_row, M, WIDTH, ROWS, PADDED)
    at = row * WIDTH + column
    dtype = out.dtype.element_ty
    if GATED:
        factor = tl.load(weight + column, mask=column < WIDTH, other=0.0)
        gates = tl.load(gate + at, mask=inside, other=0.0).to(tl.float32)
        scaled = (wide * rms_scale(wide, eps, WIDTH) * factor * sigmoid(gates)).to(dtype)
    else:
        scaled = scaled_norm(wide, weight, column, eps, WIDTH, dtype)
    tl.store(out + at, scaled, mask=inside)


@triton.jit(do_not_specialize=["M"])
def _add_rms_norm(
    x,
    y,
    weight,
    total,
    out,
    M,
    eps,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    PADDED: tl.constexpr,
):
    """Grid: (blocks of ROWS rows). All dense."""
    left, row, column, inside = load_rows(x, WIDTH, M, WIDTH, ROWS, PADDED)
    right, _, _, _ = load_rows(y, WIDTH, M, WIDTH, ROWS, PADDED)
    added, normed = sum_and_norm(left, right, weight, column, eps, WIDTH, x.dtype.element_ty)
    at = row * WIDTH + column
    tl.store(total + at, added, mask=inside)
    tl.store(out + at, normed, mask=inside)


@triton.jit(do_not_specialize=["M"])
def _layer_norm(
    x,
    weight,
    bias,
    out,
    M,
    x_row,
    eps,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    PADDED: tl.constexpr,
):
    """Grid: (blocks of ROWS rows)."""
    wide, row, column, inside = load_rows(x, x_row, M, WIDTH, ROWS, PADDED)
    factor = tl.load(weight + column, mask=column < WIDTH, other=0.0).to(tl.float32)
    shift = tl.load(bias + column, mask=column < WIDTH, other=0.0).to(tl.float32)
    centred = tl.where(inside, wide - (tl.sum(wide, 1) / WIDTH)[:, None], 0.0)
    scaled = centred * rms_scale(centred, eps, WIDTH) * factor + shift
    tl.store(out + row * WIDTH + column, scaled.to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["M"])
def _l2_norm(
    x,
    out,
    M,
    x_row,
    eps,
    scale,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    PADDED: tl.constexpr,
):
    """Grid: (blocks of ROWS rows)."""
    wide, row, column, inside = load_rows(x, x_row, M, WIDTH, ROWS, PADDED)
    normal = wide / tl.sqrt(tl.sum(wide * wide, 1) + eps)[:, None]
    tl.store(out + row * WIDTH + column, (normal * scale).to(out.dtype.element_ty), mask=inside)


@triton.jit
def _swiglu(both, out, both_row, limit, WIDTH, BLOCK: tl.constexpr, LIMITED: tl.constexpr):
    """Grid: (rows, blocks of columns)."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < WIDTH
    left = tl.load(both + row * both_row + column, mask=inside, other=0.0).to(tl.float32)
    right = tl.load(both + row * both_row + WIDTH + column, mask=inside, other=0.0).to(tl.float32)
    result = gated(left, right, limit, LIMITED)
    tl.store(out + row * WIDTH + column, result.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _log_decay(
    gate,
    bias,
    rate,
    out,
    gate_row,
    lowest,
    DIM,
    WIDTH,
    BLOCK: tl.constexpr,
    BOUNDED: tl.constexpr,
):
    """Grid: (rows, blocks of columns)."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < WIDTH
    z = tl.load(gate + row * gate_row + column, mask=inside, other=0.0).to(tl.float32)
    z += tl.load(bias + column, mask=inside, other=0.0)
    speed = tl.load(rate + column // DIM, mask=inside, other=0.0)
    result = sigmoid(z * speed) * lowest if BOUNDED else softplus(z) * -speed
    tl.store(out + row * WIDTH + column, result, mask=inside)


def _rows(x: Tensor) -> Tensor:
    """[..., D] as [M, D] without a copy."""
    return x.view(-1, x.shape[-1])


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMS norm over the last dimension of x [M, D]; rounded to x's dtype before the weight."""
    return _launch_rms(x, weight, None, eps, x.dtype)


def add_rms_norm(x: Tensor, y: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """x + y, and the :func:`rms_norm` of that: x, y [M, D] dense, of one dtype, as are both
    results."""
    assert x.shape == y.shape, (x.shape, y.shape)
    assert x.dtype == y.dtype, (x.dtype, y.dtype)
    assert x.is_contiguous()
    assert y.is_contiguous()
    rows, padded, warps = shape_of(x.shape[1])
    total, out = torch.empty_like(x), torch.empty_like(x)
    aligned(x, y, weight, total, out)
    if x.shape[0]:
        _add_rms_norm[(blocks(x.shape[0], rows),)](
            x, y, weight, total, out, x.shape[0], eps,
            WIDTH=x.shape[1], ROWS=rows, PADDED=padded, num_warps=warps, enable_fp_fusion=False,
        )  # fmt: skip
    return total, out


def gated_rms_norm(x: Tensor, weight: Tensor, gate: Tensor, eps: float) -> Tensor:
    """rms(x) weight sigmoid(gate), rounded once to the gate's dtype.

    x [M, D] (fp32, or as the recurrence leaves it), weight [D] fp32, gate [M, D].
    """
    assert gate.is_contiguous()
    assert gate.shape == x.shape
    return _launch_rms(x, weight, gate, eps, gate.dtype)


def _launch_rms(
    x: Tensor, weight: Tensor, gate: Tensor | None, eps: float, dtype: torch.dtype
) -> Tensor:
    rows, padded, warps = shape_of(x.shape[1])
    out = torch.empty(x.shape, dtype=dtype, device=x.device)
    aligned(x, weight, out)
    if x.shape[0]:
        _rms_norm[(blocks(x.shape[0], rows),)](
            x,
            weight,
            gate,
            out,
            x.shape[0],
            x.stride(0),
            eps,
            WIDTH=x.shape[1],
            ROWS=rows,
            PADDED=padded,
            GATED=gate is not None,
            num_warps=warps,
            enable_fp_fusion=False,
        )
    return out


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """LayerNorm over the last dimension of x [M, D], rounded once to x's dtype."""
    rows, padded, warps = shape_of(x.shape[1])
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    aligned(x, weight, bias, out)
    if x.shape[0]:
        _layer_norm[(blocks(x.shape[0], rows),)](
            x,
            weight,
            bias,
            out,
            x.shape[0],
            x.stride(0),
            eps,
            WIDTH=x.shape[1],
            ROWS=rows,
            PADDED=padded,
            num_warps=warps,
            enable_fp_fusion=False,
        )
    return out


def l2_norm(x: Tensor, eps: float, scale: float = 1.0) -> Tensor:
    """scale x / sqrt(sum(x^2) + eps) over the last dimension of x [..., D], dense; fp32 out."""
    flat = _rows(x)
    rows, padded, warps = shape_of(flat.shape[1])
    out = torch.empty(x.shape, dtype=torch.float32, device=x.device)
    aligned(x, out)
    if flat.shape[0]:
        _l2_norm[(blocks(flat.shape[0], rows),)](
            flat,
            out,
            flat.shape[0],
            flat.stride(0),
            eps,
            float(scale),
            WIDTH=flat.shape[1],
            ROWS=rows,
            PADDED=padded,
            num_warps=warps,
            enable_fp_fusion=False,
        )
    return out


def swiglu(both: Tensor, limit: float | None) -> Tensor:
    """silu(gate) up of both [M, 2 I] (gate first) -> [M, I], fp32 inside, rounded once."""
    width = both.shape[1] // 2
    out = torch.empty(both.shape[0], width, dtype=both.dtype, device=both.device)
    aligned(both, out)
    if both.shape[0]:
        _swiglu[(both.shape[0], blocks(width, _BLOCK))](
            both,
            out,
            both.stride(0),
            0.0 if limit is None else float(limit),
            width,
            BLOCK=_BLOCK,
            LIMITED=limit is not None,
            num_warps=4,
            enable_fp_fusion=False,
        )
    return out


def log_decay(gate: Tensor, bias: Tensor, rate: Tensor, lowest: float | None) -> Tensor:
    """Raw gates [M, H D] to log decays, fp32 [M, H D].

    bias [H D] and rate [H] (its exponential taken already), fp32. With ``lowest``: lowest
    sigmoid(rate (gate + bias)), else -rate softplus(gate + bias).
    """
    width, heads = gate.shape[1], rate.shape[0]
    out = torch.empty(gate.shape, dtype=torch.float32, device=gate.device)
    aligned(gate, bias, rate, out)
    if gate.shape[0]:
        _log_decay[(gate.shape[0], blocks(width, _BLOCK))](
            gate,
            bias,
            rate,
            out,
            gate.stride(0),
            0.0 if lowest is None else float(lowest),
            width // heads,
            width,
            BLOCK=_BLOCK,
            BOUNDED=lowest is not None,
            num_warps=4,
            enable_fp_fusion=False,
        )
    return out

# mypy: disable-error-code="no-untyped-def, untyped-decorator"
"""RMS norm of each head and rotation by its row's position, in one pass.

Knows positions and halves of heads. Must not know what is rotated. Angles come from the two small
tables of :class:`merestone.ops.rotary.Rotary`, which is the definition together with `rotate`.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from merestone.ops.rotary import STRIDE
from merestone.ops.triton.launch import aligned


@triton.jit
def _norm_rotate(
    x, weight, coarse, fine, positions, out, x_row, eps,
    HEADS: tl.constexpr, HALF: tl.constexpr, STRIDE: tl.constexpr,
):  # fmt: skip
    """Grid: (rows, heads). The tables are [2, STRIDE, HALF]: cosines, then sines."""
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    i = tl.arange(0, HALF)
    at = x + row * x_row + head * 2 * HALF + i
    one, two = tl.load(at).to(tl.float32), tl.load(at + HALF).to(tl.float32)
    mean = (tl.sum(one * one, 0) + tl.sum(two * two, 0)) / (2 * HALF)
    scale = 1.0 / tl.sqrt(mean + eps)
    dtype = x.dtype.element_ty
    # Rounded before the weight and after it, as the norm by itself would be.
    one = (one * scale).to(dtype).to(tl.float32) * tl.load(weight + i).to(tl.float32)
    two = (two * scale).to(dtype).to(tl.float32) * tl.load(weight + HALF + i).to(tl.float32)
    one, two = one.to(dtype).to(tl.float32), two.to(dtype).to(tl.float32)
    position = tl.load(positions + row)
    coarse += position // STRIDE * HALF + i
    fine += position % STRIDE * HALF + i
    c, s = tl.load(coarse), tl.load(coarse + STRIDE * HALF)
    u, v = tl.load(fine), tl.load(fine + STRIDE * HALF)
    cos, sin = c * u - s * v, s * u + c * v
    out += (row * HEADS + head) * 2 * HALF + i
    tl.store(out, (one * cos - two * sin).to(dtype))
    tl.store(out + HALF, (two * cos + one * sin).to(dtype))


def norm_rotate(
    x: Tensor, weight: Tensor, eps: float, tables: tuple[Tensor, Tensor], positions: Tensor
) -> Tensor:
    """Heads [N, H dim] (dense but for their rows' distance) -> the same, normed and rotated.

    weight [dim], a power of two; ``tables``: the coarse and the fine one of a ``Rotary``, [2,
    STRIDE, dim / 2] fp32; positions [N] int32.
    """
    rows, dim = x.shape[0], weight.shape[0]
    heads = x.shape[1] // dim
    assert x.shape[1] == heads * dim, (x.shape, dim)
    assert dim & (dim - 1) == 0, dim
    assert positions.dtype == torch.int32
    for table in tables:
        assert table.shape == (2, STRIDE, dim // 2), table.shape
        assert table.is_contiguous()
    out = torch.empty(rows, heads * dim, dtype=x.dtype, device=x.device)
    aligned(x, weight, out, *tables)
    if rows:
        _norm_rotate[(rows, heads)](
            x, weight, *tables, positions, out, x.stride(0), eps,
            HEADS=heads, HALF=dim // 2, STRIDE=STRIDE, num_warps=1, enable_fp_fusion=False,
        )  # fmt: skip
    return out

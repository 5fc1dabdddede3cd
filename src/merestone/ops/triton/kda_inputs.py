# mypy: disable-error-code="no-untyped-def, untyped-decorator"
"""What the recurrence is given: normalised q and k, log decays, write strengths, in one launch.

Knows rows and heads. Must not know requests. A program takes some heads of one row, as many as
follow from the head's width; a head is reduced on its own.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from merestone.ops.triton.elementwise import sigmoid, softplus
from merestone.ops.triton.launch import aligned, blocks, power_of_two

_ELEMENTS = 2048


@triton.jit
def _unit(x, eps, scale):
    """scale x / |x| over the last axis of x [HEADS, DIM] fp32."""
    return x / tl.sqrt(tl.sum(x * x, 1) + eps)[:, None] * scale


@triton.jit
def _kda_inputs(
    mixed, gate, strength, bias, rate, q, k, g, beta,
    mixed_row, gate_row, strength_row, eps, scale, lowest, heads,
    DIM: tl.constexpr, HEADS: tl.constexpr, BOUNDED: tl.constexpr,
):  # fmt: skip
    """Grid: (rows, blocks of heads)."""
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    at = head[:, None] * DIM + tl.arange(0, DIM)[None, :]
    inside = head[:, None] < heads
    width = heads * DIM
    mixed += row * mixed_row
    query = tl.load(mixed + at, mask=inside, other=0.0).to(tl.float32)
    key = tl.load(mixed + width + at, mask=inside, other=0.0).to(tl.float32)
    to = row * width + at
    tl.store(q + to, _unit(query, eps, scale).to(q.dtype.element_ty), mask=inside)
    tl.store(k + to, _unit(key, eps, 1.0).to(k.dtype.element_ty), mask=inside)
    z = tl.load(gate + row * gate_row + at, mask=inside, other=0.0).to(tl.float32)
    z += tl.load(bias + at, mask=inside, other=0.0)
    speed = tl.load(rate + head, mask=head < heads, other=0.0)[:, None]
    decay = sigmoid(z * speed) * lowest if BOUNDED else softplus(z) * -speed
    tl.store(g + to, decay, mask=inside)
    raw = tl.load(strength + row * strength_row + head, mask=head < heads, other=0.0)
    tl.store(beta + row * heads + head, sigmoid(raw.to(tl.float32)), mask=head < heads)


def kda_inputs(
    mixed: Tensor,
    gate: Tensor,
    strength: Tensor,
    bias: Tensor,
    rate: Tensor,
    *,
    eps: float,
    lowest: float | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """q, k [N, H, K] in the inputs' dtype, log decays g [N, H, K] and strengths [N, H] fp32.

    Args:
        mixed: [N, 3 H K], the convolved rows of q, k and v. gate: [N, H K] raw gates. strength:
            [N, H] raw write strengths. Rows may be strided.
        bias: [H K], rate: [H], fp32 (the rate's exponential taken already).
        eps: of the norms; q is scaled by K ** -0.5 besides.
        lowest: g = lowest sigmoid(rate (gate + bias)), or None: -rate softplus(gate + bias).
    """
    rows, heads = strength.shape
    dim = bias.shape[0] // heads
    assert mixed.shape[1] == 3 * heads * dim, (mixed.shape, heads, dim)
    assert dim & (dim - 1) == 0, dim
    assert bias.dtype == rate.dtype == torch.float32
    shape = (rows, heads, dim)
    q, k = (torch.empty(shape, dtype=mixed.dtype, device=mixed.device) for _ in "qk")
    g = torch.empty(shape, dtype=torch.float32, device=mixed.device)
    beta = torch.empty(rows, heads, dtype=torch.float32, device=mixed.device)
    aligned(mixed, gate, strength, bias, rate)
    if rows:
        some = min(max(_ELEMENTS // dim, 1), power_of_two(heads))
        _kda_inputs[(rows, blocks(heads, some))](
            mixed, gate, strength, bias, rate, q, k, g, beta,
            mixed.stride(0), gate.stride(0), strength.stride(0),
            float(eps), dim**-0.5, 0.0 if lowest is None else float(lowest), heads,
            DIM=dim, HEADS=some, BOUNDED=lowest is not None, num_warps=4, enable_fp_fusion=False,
        )  # fmt: skip
    return q, k, g, beta

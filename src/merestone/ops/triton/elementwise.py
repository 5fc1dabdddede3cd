# mypy: disable-error-code="no-untyped-def, untyped-decorator"
"""Functions that every kernel shares, so that fused and unfused variants agree in their bits.

Compiled without fused multiply-adds and without reassociation, a function gives one value its one
result wherever it is inlined.
"""

import triton
import triton.language as tl


@triton.jit
def sigmoid(x):
    """1 / (1 + exp(-x)), fp32."""
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def silu(x):
    """x * sigmoid(x), fp32."""
    return x / (1.0 + tl.exp(-x))


@triton.jit
def softplus(x):
    """log(1 + exp(x)), fp32, without overflow."""
    return tl.log(1.0 + tl.exp(-tl.abs(x))) + tl.maximum(x, 0.0)


@triton.jit
def gated(gate, up, limit, LIMITED: tl.constexpr):
    """silu(gate) * up, fp32; LIMITED clamps the gate from above and ``up`` on both sides."""
    if LIMITED:
        gate = tl.minimum(gate, limit)
        up = tl.minimum(tl.maximum(up, -limit), limit)
    return silu(gate) * up


@triton.jit
def rms_scale(x, eps, WIDTH: tl.constexpr):
    """1 / sqrt(mean(x^2) + eps) over the last axis, zero-padded from WIDTH values: [ROWS, 1]."""
    return 1.0 / tl.sqrt(tl.sum(x * x, 1) / WIDTH + eps)[:, None]

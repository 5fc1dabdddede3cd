"""Nonlinear functions and norms whose bits do not depend on an element's place.

The library's sigmoid, silu, softplus and rsqrt treat the last, part-filled vector of a tensor
differently from the rest. ``exp``, ``log1p``, ``sqrt`` and division do not (on contiguous memory),
nor do sums over a contiguous last dimension of up to 16,384: everything here is built from those.
Products and sums stay separate calls, since a fused multiply-add would round once.
"""

from __future__ import annotations

from torch import Tensor


def sigmoid(x: Tensor) -> Tensor:
    """1 / (1 + exp(-x)), fp32, any shape."""
    return (-x).contiguous().exp_().add_(1.0).reciprocal_()


def silu(x: Tensor) -> Tensor:
    """x * sigmoid(x), fp32, any shape."""
    return x / (-x).contiguous().exp_().add_(1.0)


def softplus(x: Tensor) -> Tensor:
    """log(1 + exp(x)), fp32, any shape, without overflow."""
    return (-x.abs()).contiguous().exp_().log1p_().add_(x.clamp(min=0.0))


def swiglu(gate: Tensor, up: Tensor, limit: float | None) -> Tensor:
    """silu(gate) * up in fp32, rounded once to the inputs' dtype.

    With a ``limit`` the gate is clamped from above only, ``up`` on both sides.
    """
    dtype = gate.dtype
    gate, up = gate.float(), up.float()
    if limit is not None:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return (silu(gate) * up).to(dtype)


def rms(x: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) over the last dimension; fp32 in and out."""
    x = x.contiguous()
    return x / (x * x).mean(-1, keepdim=True).add_(eps).sqrt_()


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMS norm over the last dimension; statistics in fp32.

    As in transformers, the normalised value is rounded to ``x``'s dtype before the weight.
    """
    return rms(x.float(), eps).to(x.dtype) * weight


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """LayerNorm over the last dimension, in fp32, rounded once to ``x``'s dtype."""
    wide = x.float().contiguous()
    centred = wide - wide.mean(-1, keepdim=True)
    scaled = rms(centred, eps) * weight.float()
    return scaled.add_(bias.float()).to(x.dtype)


def l2_norm(x: Tensor, eps: float) -> Tensor:
    """x / sqrt(sum(x^2) + eps) over the last dimension; fp32 in and out."""
    x = x.contiguous()
    return x / (x * x).sum(-1, keepdim=True).add_(eps).sqrt_()


def softmax(x: Tensor) -> Tensor:
    """Softmax over the last dimension, fp32."""
    x = x.contiguous()
    weights = (x - x.amax(-1, keepdim=True)).exp_()
    return weights.div_(weights.sum(-1, keepdim=True))

"""Rotary embedding from two small tables, so that a position's bits depend on it alone.

Knows positions and halves of heads. The library's cosine changes bits with a value's place in a
tensor, and a table of every position would be large: instead position 2048 a + b is the angle of
2048 a plus that of b, whose cosines and sines are tables, made once in double precision.
"""

from __future__ import annotations

import torch
from torch import Tensor

STRIDE = 2048


class Rotary:
    """Angles ``theta ** (-i / half)`` a position for the channels i of half a head of ``dim``, at
    positions below STRIDE squared (4,194,304)."""

    def __init__(self, theta: float, dim: int) -> None:
        half = dim // 2
        rates = theta ** -(torch.arange(half, dtype=torch.float64) / half)
        fine = torch.arange(STRIDE, dtype=torch.float64)[:, None] * rates
        coarse = fine * STRIDE
        self._fine = torch.stack([fine.cos(), fine.sin()]).float()  # [2, STRIDE, half]
        self._coarse = torch.stack([coarse.cos(), coarse.sin()]).float()

    def at(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Positions [N] -> cosines and sines, [N, half] fp32 each."""
        (c, s), (u, v) = (
            self._coarse[:, positions // STRIDE],
            self._fine[:, positions % STRIDE],
        )
        return c * u - s * v, s * u + c * v


def rotate(x: Tensor, angles: tuple[Tensor, Tensor]) -> Tensor:
    """[N, H, dim] by the angles of its N positions: the two halves of a head are the parts of
    complex numbers. fp32 inside, rounded once to x's dtype."""
    cos, sin = (part[:, None] for part in angles)
    one, two = x.float().chunk(2, dim=-1)
    return torch.cat([one * cos - two * sin, two * cos + one * sin], -1).to(x.dtype)

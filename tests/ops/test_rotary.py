"""Rotary embedding: close to the formula at any position, and each position by itself."""

from __future__ import annotations

import math

import torch

from merestone.ops.rotary import STRIDE, Rotary, rotate


def test_angles_are_the_formulas() -> None:
    rotary = Rotary(10000.0, 16)
    positions = [0, 1, 7, STRIDE - 1, STRIDE, STRIDE + 1, 1_000_003, STRIDE * STRIDE - 1]
    cos, sin = rotary.at(torch.tensor(positions))
    for row, position in enumerate(positions):
        for channel in range(8):
            angle = position * 10000.0 ** (-channel / 8)
            assert abs(float(cos[row, channel]) - math.cos(angle)) < 1e-6
            assert abs(float(sin[row, channel]) - math.sin(angle)) < 1e-6


def test_a_position_stands_for_itself() -> None:
    rotary, source = Rotary(10000.0, 64), torch.Generator().manual_seed(0)
    positions = torch.randint(0, 100_000, (37,), generator=source)
    for dtype in (torch.float32, torch.bfloat16):
        x = torch.randn(37, 3, 64, generator=source).to(dtype)
        whole = rotate(x, rotary.at(positions))
        order = torch.randperm(37, generator=source)
        moved = rotate(x[order], rotary.at(positions[order]))
        assert torch.equal(moved, whole[order])
        for i in range(37):
            assert torch.equal(rotate(x[i : i + 1], rotary.at(positions[i : i + 1]))[0], whole[i])

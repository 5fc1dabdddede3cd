"""Blocks of a draft: their attention, convolutions and rotations against the definitions, equal
bits in any company and however the spans are shared out."""

import math

import pytest
import torch
from torch import Tensor

from merestone.models.dflash import _DynamicConv
from merestone.ops.elementwise import rms_norm
from merestone.ops.rotary import Rotary, rotate
from merestone.ops.triton.block import Context, attend_block, convolve
from merestone.ops.triton.rotary import norm_rotate

HEADS, SHARED, DIM, SIZE, PAGE = 4, 2, 16, 3, 64


class Blocks:
    """Blocks at ``positions`` over pages in a random order; a row that is no block's context is
    NaN."""

    def __init__(self, draw, device: str, positions: list[int], reach: int | None) -> None:
        self.positions, self.reach = positions, reach
        each = max(positions) // PAGE + 1
        order = torch.randperm(each * len(positions), generator=torch.Generator().manual_seed(3))
        self.tables = order.to(torch.int32).view(len(positions), each).to(device)
        self.rows = [draw(2, p, SHARED, DIM) for p in positions]
        shape = (each * len(positions), PAGE, SHARED, DIM)
        self.pages = torch.full((2, *shape), math.nan, device=device)
        for table, rows, p in zip(self.tables.tolist(), self.rows, positions, strict=True):
            first = 0 if reach is None else max(p - reach, 0)
            for at in range(first, p):
                self.pages[:, table[at // PAGE], at % PAGE] = rows[:, at]
        self.q = draw(len(positions) * SIZE, HEADS, DIM)
        # The block's keys and values are parts of wider rows.
        self.own = draw(len(positions) * SIZE, 2 * SHARED * DIM + 16)
        self._device = device

    def context(self, window: int | None, which: list[int]) -> Context:
        at = [self.positions[i] for i in which]
        return Context(
            torch.tensor(at, dtype=torch.int32, device=self._device), SIZE, self.pages[0],
            self.pages[1], self.tables[which].contiguous(), self.reach, window, max(at),
        )  # fmt: skip

    def attend(self, window: int | None, which: list[int], split: bool) -> Tensor:
        rows = [i * SIZE + r for i in which for r in range(SIZE)]
        keys, values, _ = self.own[rows].split([SHARED * DIM, SHARED * DIM, 16], 1)
        context = self.context(window, which)
        return attend_block(self.q[rows], keys, values, context, DIM**-0.5, split=split)

    def expected(self, window: int | None, i: int) -> Tensor:
        """The definition, in double precision."""
        own = self.own[i * SIZE : (i + 1) * SIZE, : 2 * SHARED * DIM].double()
        own = own.view(SIZE, 2, SHARED, DIM).transpose(0, 1)
        both = torch.cat([self.rows[i].double(), own], 1)  # [2, p + SIZE, SHARED, DIM]
        keys, values = both.repeat_interleave(HEADS // SHARED, 2)
        q = self.q[i * SIZE : (i + 1) * SIZE].double()
        scores = torch.einsum("rhd,khd->rhk", q, keys) * DIM**-0.5
        p, key = self.positions[i], torch.arange(both.shape[1], device=q.device)
        first = 0 if self.reach is None else max(p - self.reach, 0)
        row = p + torch.arange(SIZE, device=q.device)[:, None]
        hidden = (key < first) | (key <= row - (window or p + SIZE + 1))
        scores.masked_fill_(hidden[:, None], float("-inf"))
        return torch.einsum("rhk,khd->rhd", scores.softmax(-1), values)


@pytest.mark.parametrize(
    ("positions", "reach", "window"),
    [([0, 5, 130], 63, 64), ([70, 600], None, 20), ([64, 3], None, None)],
)
def test_a_block_sees_its_window_and_itself(draw, device, positions, reach, window) -> None:
    blocks, every = Blocks(draw, device, positions, reach), list(range(len(positions)))
    together = blocks.attend(window, every, True)
    for i in every:
        alone = blocks.attend(window, [i], True)
        assert torch.equal(alone, together[i * SIZE : (i + 1) * SIZE])
        assert torch.equal(alone, blocks.attend(window, [i], False))
        torch.testing.assert_close(alone.double(), blocks.expected(window, i), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("side", [0, 1])
def test_convolutions_stay_inside_their_block(draw, side: int) -> None:
    taps, groups, width, size = 3, 4, 64, 4
    x, base = draw(2 * size, width), draw(2, taps, width)
    dynamic = draw(2 * size, 2 * taps * groups)
    kernels = dynamic.view(2, size, 2, taps, groups, 1) + base.view(2, taps, groups, -1)
    expected = _DynamicConv.convolve(x.view(2, size, width), kernels, side)
    got = convolve(x, dynamic, base, side, size)
    torch.testing.assert_close(got, expected.flatten(0, 1), rtol=1e-5, atol=1e-5)
    assert torch.equal(convolve(x[size:], dynamic[size:], base, side, size), got[size:])


def test_heads_are_normed_and_turned(draw, device: str) -> None:
    heads, dim, at = 2, 32, [0, 1, 2047, 2048, 70000]
    x, weight, rotary = draw(len(at), heads * dim + 16), draw(dim), Rotary(10000.0, dim)
    tables = rotary._coarse.to(device), rotary._fine.to(device)
    positions = torch.tensor(at, dtype=torch.int32, device=device)
    got = norm_rotate(x[:, : heads * dim], weight, 1e-5, tables, positions)
    rows = rms_norm(x[:, : heads * dim].cpu().view(-1, heads, dim), weight.cpu(), 1e-5)
    expected = rotate(rows, rotary.at(torch.tensor(at))).flatten(1)
    torch.testing.assert_close(got.cpu(), expected, rtol=1e-5, atol=1e-5)
    for i in range(len(at)):
        one = norm_rotate(x[i : i + 1, : heads * dim], weight, 1e-5, tables, positions[i : i + 1])
        assert torch.equal(one, got[i : i + 1])

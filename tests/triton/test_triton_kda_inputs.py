"""The recurrence's inputs in one launch: the definitions, wherever a row's taps lie the same bits,
a row's bits its own, and raw rows where they belong."""

import pytest
import torch
from torch import Tensor

from merestone.ops.elementwise import l2_norm, sigmoid, softplus
from merestone.ops.triton.kda_inputs import Raw, conv_naive, kda_inputs
from merestone.ops.triton.pages import write_rows
from merestone.ops.triton.rows import Cells, Sequences

HEADS, DIM, PAGE, TAPS, ANCHOR, FRAMES, FRAME = 3, 16, 4, 4, 8, 9, 2048
WIDTH = HEADS * DIM
WIDTHS = 3 * WIDTH, WIDTH, HEADS
EPS = 1e-6


def table(*values: int, device: str) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)


def drawn(draw, rows: int) -> tuple[Raw, tuple[Tensor, Tensor, Tensor]]:
    """Raw rows as a joint product leaves them, strided, and the layer's weights."""
    parts = torch.split(draw(rows, sum(WIDTHS) + 13), [*WIDTHS, 13], 1)[:3]
    return Raw(*parts), (draw(TAPS, 3 * WIDTH), draw(WIDTH), draw(HEADS).exp())


def memory(device: str) -> tuple[Tensor, Raw]:
    """An arena that nobody wrote, and the pages of the three fields in it."""
    arena = torch.full((FRAMES, FRAME), float("nan"), device=device)
    starts = 0, PAGE * 3 * WIDTH, PAGE * 4 * WIDTH
    views = (
        arena.as_strided((FRAMES, PAGE, n), (FRAME, n, 1), at)
        for n, at in zip(WIDTHS, starts, strict=True)
    )
    return arena, Raw(*views)


def part(raw: Raw, at: slice) -> Raw:
    return Raw(raw.r[at], raw.gate[at], raw.beta[at])


def split_at(
    raw: Raw, weights: tuple[Tensor, ...], first: int, device: str, *, anchored: bool = False,
    lowest: float | None = -5.0, floor: int | None = None,
) -> tuple[tuple[Tensor, ...], Tensor]:  # fmt: skip
    """What is found of rows from ``first`` on, with what comes before in open pages and (if so) in
    an anchor; and the arena."""
    anchor = ANCHOR if anchored else 0
    arena, pages = memory(device)
    open_pages = table(7, 1, 4, 0, 6, 2, device=device)
    for at in range(anchor, first):
        pages.r[open_pages[at // PAGE].long(), at % PAGE] = raw.r[at]
    # The three rows of the tail, two of them in the anchor's second frame.
    start = PAGE * (4 * WIDTH + 4)
    places = torch.tensor([[0, start], [1, start], [1, start + 3 * WIDTH]], device=device)
    frames = (5, 3) if anchored else (-1, -1)
    if anchored:
        for cell, at in enumerate(range(anchor - TAPS + 1, anchor)):
            number, offset = places[cell].tolist()
            arena[frames[number], offset : offset + 3 * WIDTH] = raw.r[at]
    # A mate before it, and its own rows not at the start of the step's.
    new = Raw(
        *(
            torch.cat([torch.full((3, n), float("nan"), device=device), rows[first:]])
            for rows, n in zip((raw.r, raw.gate, raw.beta), WIDTHS, strict=True)
        )
    )
    sequences = Sequences(
        first=table(0, first, device=device),
        row=table(0, 3, device=device),
        anchor=table(0, anchor, device=device),
        open_pages=torch.stack([torch.full_like(open_pages, 8), open_pages]),
        anchor_frames=table(-1, -1, *frames, device=device).view(2, 2),
    )
    count = raw.r.shape[0] - first
    which = torch.tensor([0] * 3 + [1] * count, dtype=torch.int32, device=device)
    position = torch.tensor([*range(3), *range(first, first + count)], device=device).int()
    found = kda_inputs(
        new, pages, Cells(arena, places), *weights, which, position, sequences,
        eps=EPS, lowest=lowest, floor=None if floor is None else table(3, floor, device=device),
    )  # fmt: skip
    return tuple(x[3:] for x in found), arena


@pytest.mark.parametrize("lowest", [None, -5.0])
def test_the_definitions(draw, device: str, lowest: float | None) -> None:
    raw, weights = drawn(draw, 14)
    (q, k, v, g, beta), _ = split_at(raw, weights, 0, device, lowest=lowest)
    by_head = conv_naive(raw.r, weights[0]).view(14, 3, HEADS, DIM)
    torch.testing.assert_close(q, l2_norm(by_head[:, 0], EPS) * DIM**-0.5)
    torch.testing.assert_close(k, l2_norm(by_head[:, 1], EPS))
    torch.testing.assert_close(v, by_head[:, 2])
    z, speed = (raw.gate + weights[1]).view(14, HEADS, DIM), weights[2][:, None]
    wanted = softplus(z) * -speed if lowest is None else sigmoid(z * speed) * lowest
    torch.testing.assert_close(g, wanted)
    torch.testing.assert_close(beta, sigmoid(raw.beta))


def test_taps_from_anywhere(draw, device: str) -> None:
    raw, weights = drawn(draw, 14)
    whole, _ = split_at(raw, weights, 0, device)
    for first in range(1, 14):
        for anchored in {False, first >= ANCHOR}:
            found, _ = split_at(raw, weights, first, device, anchored=anchored)
            for some, wanted in zip(found, whole, strict=True):
                assert torch.equal(some, wanted[first:]), (first, anchored)


@pytest.mark.parametrize("first", [0, 8, 13])
@pytest.mark.parametrize("floor", [0, 9, 20])
def test_raw_rows_are_kept(draw, device: str, first: int, floor: int) -> None:
    """As rows that are written field by field; nothing else changes, and no result does."""
    raw, weights = drawn(draw, 14)
    expected, before = split_at(raw, weights, first, device)
    found, arena = split_at(raw, weights, first, device, floor=floor)
    for some, wanted in zip(found, expected, strict=True):
        assert torch.equal(some, wanted)
    pages = memory(device)[1]
    views = [x.as_strided(x.shape, x.stride()) for x in (pages.r, pages.gate, pages.beta)]
    open_pages = table(7, 1, 4, 0, 6, 2, device=device)[None]
    position = torch.arange(first, 14, dtype=torch.int32, device=device)
    for rows, view in zip((raw.r, raw.gate, raw.beta), views, strict=True):
        wanted = before.as_strided(view.shape, view.stride(), view.storage_offset())
        floors = table(floor, device=device)
        write_rows(rows[first:], wanted, open_pages, torch.zeros_like(position), position, floors)
    # The mate's rows lie below its floor.
    assert torch.equal(arena.nan_to_num(7.0), before.nan_to_num(7.0))


def test_old_rows_can_be_prepared_again(draw, device: str) -> None:
    """After a restore the rows since the anchor are wanted, though the step has only new ones, or
    none; a row is its own, alone and among others in any order."""
    raw, weights = drawn(draw, 12)
    expected, _ = split_at(raw, weights, 0, device)
    arena, pages = memory(device)
    pages.r[[3, 1]] = raw.r[:8].reshape(2, PAGE, 3 * WIDTH)
    sequences = Sequences(
        *(table(value, device=device) for value in (8, 0, 0)),
        open_pages=table(3, 1, 2, device=device)[None],
        anchor_frames=table(-1, device=device)[None],
    )
    tail = Cells(arena, torch.zeros(TAPS - 1, 2, dtype=torch.int64, device=device))
    for wanted in ([*range(12)], [5], [3, 0], [7, 6, 1, 2], []):
        rows = torch.tensor(wanted, dtype=torch.int64, device=device)
        new = raw.r[8:] if 11 in wanted else raw.r[:0]
        again = kda_inputs(
            Raw(new, raw.gate[rows], raw.beta[rows]), pages, tail, *weights,
            torch.zeros_like(rows).int(), rows.int(), sequences, eps=EPS, lowest=-5.0,
        )  # fmt: skip
        for some, every in zip(again, expected, strict=True):
            assert torch.equal(some, every[rows]), wanted

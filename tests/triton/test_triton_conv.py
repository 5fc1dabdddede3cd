"""The convolution: wherever a row's taps lie, the same bits."""

import torch
from torch import Tensor

from merestone.ops.triton.conv import conv, conv_naive
from merestone.ops.triton.rows import Cells, Sequences

PAGE, WIDTH, TAPS, ANCHOR = 4, 48, 4, 8


def table(*values: int, device: str) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)


def split_at(rows: Tensor, weight: Tensor, first: int, anchored: bool, device: str) -> Tensor:
    """Rows from ``first`` on, with what comes before in open pages and (if so) in an anchor."""
    anchor = ANCHOR if anchored else 0
    frame = 1024
    arena = torch.full((9, frame), float("nan"), device=device)
    pages = arena.as_strided((9, PAGE, WIDTH), (frame, WIDTH, 1), 64)
    open_pages = table(7, 1, 4, 0, 6, 2, device=device)
    for at in range(anchor, first):
        pages[open_pages[at // PAGE].long(), at % PAGE] = rows[at]
    # The three rows of the tail, two of them in the anchor's second frame.
    places = torch.tensor([[0, 512], [1, 512], [1, 512 + WIDTH]], device=device)
    frames = (5, 3) if anchored else (-1, -1)
    if anchored:
        for cell, at in enumerate(range(anchor - TAPS + 1, anchor)):
            number, offset = places[cell].tolist()
            arena[frames[number], offset : offset + WIDTH] = rows[at]
    count = rows.shape[0] - first
    # A mate before it, and its own rows not at the start of the step's.
    new = torch.cat([torch.full((3, WIDTH), float("nan"), device=device), rows[first:]])
    sequences = Sequences(
        first=table(0, first, device=device),
        row=table(0, 3, device=device),
        anchor=table(0, anchor, device=device),
        open_pages=torch.stack([torch.zeros_like(open_pages), open_pages]),
        anchor_frames=table(-1, -1, *frames, device=device).view(2, 2),
    )
    which = torch.ones(count, dtype=torch.int32, device=device)
    positions = torch.arange(first, first + count, dtype=torch.int32, device=device)
    tail = Cells(arena, places)
    return conv(new, pages, tail, weight, which, positions, sequences)


def test_taps_from_anywhere(draw, device: str) -> None:
    rows, weight = draw(14, WIDTH), draw(TAPS, WIDTH)
    expected = split_at(rows, weight, 0, False, device)
    torch.testing.assert_close(expected, conv_naive(rows, weight))
    for first in range(1, 14):
        assert torch.equal(split_at(rows, weight, first, False, device), expected[first:]), first
        if first >= ANCHOR:
            assert torch.equal(split_at(rows, weight, first, True, device), expected[first:]), first


def test_old_rows_can_be_convolved_again(draw, device: str) -> None:
    """After a restore the rows since the anchor are wanted, though the step has only new ones."""
    rows, weight = draw(12, WIDTH), draw(TAPS, WIDTH)
    expected = split_at(rows, weight, 0, False, device)
    arena = torch.full((4, 1024), float("nan"), device=device)
    pages = arena.as_strided((4, PAGE, WIDTH), (1024, WIDTH, 1), 0)
    pages[[3, 1]] = rows[:8].view(2, PAGE, WIDTH)
    sequences = Sequences(
        *(table(value, device=device) for value in (8, 0, 0)),
        open_pages=table(3, 1, 2, device=device)[None],
        anchor_frames=table(-1, device=device)[None],
    )
    tail = Cells(arena, torch.zeros(TAPS - 1, 2, dtype=torch.int64, device=device))
    positions = torch.arange(12, dtype=torch.int32, device=device)
    again = conv(
        rows[8:].clone(), pages, tail, weight, torch.zeros_like(positions), positions, sequences
    )
    assert torch.equal(again, expected)

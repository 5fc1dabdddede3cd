"""Rows into pages, rings and anchors, and out of pages: every byte where it belongs, no other."""

import pytest
import torch
from torch import Tensor

from merestone.ops.triton.latents import write_latents
from merestone.ops.triton.norms import rms_norm
from merestone.ops.triton.pages import (
    feed,
    read_rows,
    set_entries,
    write_ring,
    write_rows,
    write_tail,
)
from merestone.ops.triton.rows import Cells, Sequences

PAGE, WIDTH, FRAMES = 4, 40, 9
FRAME = 3 * PAGE * WIDTH


def ints(*values: int, device: str) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)


def pages(device: str) -> tuple[Tensor, Tensor]:
    """An arena that nobody wrote, and the pages of one field in it."""
    arena = torch.full((FRAMES, FRAME), float("nan"), device=device)
    return arena, arena.as_strided((FRAMES, PAGE, WIDTH), (FRAME, WIDTH, 1), PAGE * WIDTH)


# Two sequences' page tables and the rows of a step: slots 0 and 1, out of order.
TABLE = ((5, 0, 7), (1, 8, 3))
ROWS = ((0, 3), (0, 4), (0, 5), (1, 0), (1, 7), (1, 8))


@pytest.mark.parametrize("floor", [None, (4, 8)])
def test_rows_go_to_their_pages_and_come_back(draw, device: str, floor) -> None:
    new = draw(len(ROWS), 2 * WIDTH)[:, :WIDTH]
    arena, view = pages(device)
    table = torch.tensor(TABLE, dtype=torch.int32, device=device)
    sequence, position = (ints(*column, device=device) for column in zip(*ROWS, strict=True))
    floors = None if floor is None else ints(*floor, device=device)
    write_rows(new, view, table, sequence, position, floors)
    expected = pages(device)[0]
    wanted = expected.as_strided(view.shape, view.stride(), PAGE * WIDTH)
    kept = [i for i, (s, p) in enumerate(ROWS) if floor is None or p >= floor[s]]
    for i in kept:
        s, p = ROWS[i]
        wanted[TABLE[s][p // PAGE], p % PAGE] = new[i]
    assert torch.equal(arena.nan_to_num(7.0), expected.nan_to_num(7.0))
    read = read_rows(view, table, sequence[kept].clone(), position[kept].clone())
    assert torch.equal(read, new[kept])


@pytest.mark.parametrize("normed", [24, WIDTH])
def test_latents_are_normed_on_their_way(draw, device: str, normed: int) -> None:
    """As rows that are normed and stored in two launches; another rank's are not kept."""
    new, weight = draw(len(ROWS), 2 * WIDTH)[:, :WIDTH], draw(normed)
    table = torch.tensor(TABLE, dtype=torch.int32, device=device)
    sequence, position = (ints(*column, device=device) for column in zip(*ROWS, strict=True))
    position[4] = -1
    (arena, view), (expected, wanted) = pages(device), pages(device)
    write_latents(new, weight, 1e-5, view, table, sequence, position)
    apart = torch.cat([rms_norm(new[:, :normed], weight, 1e-5), new[:, normed:]], 1)
    write_rows(apart, wanted, table, sequence, position)
    assert torch.equal(arena.nan_to_num(7.0), expected.nan_to_num(7.0))
    for row in range(len(ROWS)):
        alone = pages(device)[1]
        at = slice(row, row + 1)
        write_latents(new[at], weight, 1e-5, alone, table, sequence[at], position[at])
        found = alone[~alone.isnan()]
        assert torch.equal(found, apart[row] if position[row] >= 0 else apart[row, :0])


def test_hidden_rows_since_the_anchor_go_to_their_slots_rings(draw, device: str) -> None:
    new, ring = draw(6, WIDTH), torch.full((3, 4, WIDTH), 9.0, device=device)
    sequence = ints(0, 0, 0, 1, 1, 1, device=device)
    position = ints(6, 7, 8, 0, 1, 2, device=device)
    # Of sequence 0 from row 7 on (its anchor is at 8), of sequence 1 all; slots 2 and 0.
    write_ring(new, ring, sequence, position, ints(2, 0, device=device), ints(8, 0, device=device))
    expected = torch.full((3, 4, WIDTH), 9.0, device=device)
    for row, slot, at in ((1, 2, 7), (2, 2, 8), (3, 0, 0), (4, 0, 1), (5, 0, 2)):
        expected[slot, at % 4] = new[row]
    assert torch.equal(ring, expected)


@pytest.mark.parametrize("first", [4, 6, 7, 8])
def test_the_tail_before_an_anchor_comes_from_pages_and_new_rows(
    draw, device: str, first: int
) -> None:
    rows = draw(12, WIDTH)
    arena, view = pages(device)
    table = torch.tensor(TABLE, dtype=torch.int32, device=device)
    for at in range(first):
        view[TABLE[1][at // PAGE], at % PAGE] = rows[at]
    memory = torch.full((FRAMES, FRAME), float("nan"), device=device)
    places = torch.tensor([[0, 16], [1, 0], [1, WIDTH]], device=device)
    none = ints(0, 0, device=device)
    sequences = Sequences(
        first=ints(0, first, device=device), row=ints(0, 2, device=device), anchor=none,
        open_pages=table, anchor_frames=torch.full((2, 2), -1, dtype=torch.int32, device=device),
    )  # fmt: skip
    new = torch.cat([draw(2, WIDTH), rows[first:]])
    frames = torch.tensor([[-1, -1], [6, 2]], dtype=torch.int32, device=device)
    write_tail(new, view, Cells(memory, places), sequences, ints(0, 9, device=device), frames)
    expected = torch.full((FRAMES, FRAME), float("nan"), device=device)
    for cell, at in enumerate((6, 7, 8)):
        number, offset = places[cell].tolist()
        expected[frames[1, number], offset : offset + WIDTH] = rows[at]
    assert torch.equal(memory.nan_to_num(7.0), expected.nan_to_num(7.0))
    assert arena.shape == (FRAMES, FRAME)


@pytest.mark.parametrize("count", [0, 1, 3, 200])
def test_entries_of_tables(device: str, count: int) -> None:
    table = torch.zeros(500, dtype=torch.int32, device=device)
    at = torch.randperm(500, generator=torch.Generator().manual_seed(1))[:count].int().to(device)
    values = torch.arange(1, count + 1, dtype=torch.int32, device=device)
    set_entries(table, at, values)
    expected = torch.zeros_like(table)
    expected[at.long()] = values
    assert torch.equal(table, expected)


@pytest.mark.parametrize("count", [1, 2, 300])
def test_fed_ids_are_ids(device: str, count: int) -> None:
    """Each takes the id drawn for it; what is no id of the vocabulary becomes 0."""
    tokens = torch.full((500,), 77, dtype=torch.int32, device=device)
    generator = torch.Generator().manual_seed(2)
    at, source = (torch.randperm(500, generator=generator)[:count].int() for _ in range(2))
    drawn = torch.randint(-50, 150, (500,), dtype=torch.int32, generator=generator)
    drawn[source[0]] = -(1 << 31)
    feed(tokens, at.to(device), drawn.to(device), source.to(device), 100)
    expected = torch.full((500,), 77, dtype=torch.int32)
    for to, place in zip(at.tolist(), source.tolist(), strict=True):
        expected[to] = drawn[place] if 0 <= drawn[place] < 100 else 0
    assert torch.equal(tokens.cpu(), expected)

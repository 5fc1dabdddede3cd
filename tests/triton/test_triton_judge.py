"""Judgements: the best id with ties to the lowest, and values that are not finite, wherever."""

import pytest
import torch

from merestone.ops.triton.judge import bad_anchors, bad_rows, best
from merestone.ops.triton.rows import Cells

BROKEN = [float("nan"), float("inf"), float("-inf")]


@pytest.mark.parametrize("width", [1, 5, 2048, 2049, 5000])
def test_the_best_of_equals_is_the_lowest(draw, device: str, width: int) -> None:
    x = (draw(4, width) * 2).round()
    ids, bad = torch.full((2, 4), 77, dtype=torch.int32, device=device)
    best(x, ids, bad)
    for row, found in zip(x.tolist(), ids.tolist(), strict=True):
        assert found == row.index(max(row))
    assert not bad.any()


@pytest.mark.parametrize("value", BROKEN)
@pytest.mark.parametrize("at", [0, 2047, 2048, 2999])
def test_a_row_that_is_not_finite_is_told(draw, device: str, value: float, at: int) -> None:
    x = draw(3, 3000)
    x[1, at] = value
    ids, bad = torch.zeros(2, 3, dtype=torch.int32, device=device)
    best(x, ids, bad)
    assert bad.tolist() == [0, 1, 0]
    out = torch.full((2,), 5, dtype=torch.int32, device=device)
    bad_rows(x, torch.tensor([1, 2], dtype=torch.int32, device=device), out)
    assert out.tolist() == [1, 0]


@pytest.mark.parametrize("value", BROKEN)
def test_one_cell_spoils_its_anchor_alone(draw, device: str, value: float) -> None:
    memory = draw(6, 64)
    places = torch.tensor([[0, 0], [1, 16], [1, 32]], device=device)
    frames = torch.tensor([[4, 1], [0, 5], [2, 3]], dtype=torch.int32, device=device)
    memory[5, 47] = value  # the last element of anchor 1's last cell
    memory[1, 48] = value  # beside the cells of anchor 0
    out = torch.full((3,), 5, dtype=torch.int32, device=device)
    bad_anchors(Cells(memory, places), 16, frames, out)
    assert out.tolist() == [0, 1, 0]

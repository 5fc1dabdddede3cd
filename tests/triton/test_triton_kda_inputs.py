"""The recurrence's inputs in one launch: the definitions, and a row's bits its own."""

import pytest
import torch

from merestone.ops.elementwise import l2_norm, sigmoid, softplus
from merestone.ops.triton.kda_inputs import kda_inputs

HEADS, DIM = 3, 16
EPS = 1e-6


@pytest.mark.parametrize("lowest", [None, -5.0])
def test_the_definitions(draw, device: str, lowest: float | None) -> None:
    mixed, gate, strength = draw(5, 3 * HEADS * DIM), draw(5, HEADS * DIM), draw(5, HEADS)
    bias, rate = draw(HEADS * DIM), draw(HEADS).exp()
    q, k, g, beta = kda_inputs(mixed, gate, strength, bias, rate, eps=EPS, lowest=lowest)
    by_head = mixed.view(5, 3, HEADS, DIM)
    torch.testing.assert_close(q, l2_norm(by_head[:, 0], EPS) * DIM**-0.5)
    torch.testing.assert_close(k, l2_norm(by_head[:, 1], EPS))
    z, speed = (gate + bias).view(5, HEADS, DIM), rate[:, None]
    wanted = softplus(z) * -speed if lowest is None else sigmoid(z * speed) * lowest
    torch.testing.assert_close(g, wanted)
    torch.testing.assert_close(beta, sigmoid(strength))


def test_a_row_is_its_own(draw, device: str) -> None:
    """Alone, among others, and as a part of wider rows."""
    width = HEADS * DIM
    wide = draw(9, 4 * width + 16)
    parts = torch.split(wide, [3 * width, width, 16], 1)
    bias, rate = draw(width), draw(HEADS).exp()

    def inputs(rows: torch.Tensor) -> list[torch.Tensor]:
        mixed, gate, rest = (part[rows] for part in parts)
        found = kda_inputs(mixed, gate, rest[:, :HEADS], bias, rate, eps=EPS, lowest=-5.0)
        return [x.clone() for x in found]

    whole = inputs(torch.arange(9, device=device))
    for rows in ([4], [8, 0], [3, 2, 1]):
        for found, all_rows in zip(inputs(torch.tensor(rows, device=device)), whole, strict=True):
            assert torch.equal(found, all_rows[rows])
    mixed, gate, rest = parts
    strided = kda_inputs(mixed, gate, rest[:, :HEADS], bias, rate, eps=EPS, lowest=-5.0)
    for found, wanted in zip(strided, whole, strict=True):
        assert torch.equal(found, wanted)

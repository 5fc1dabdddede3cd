"""Attention of many rows by the copy engine: the bits of few rows, whatever the configuration."""

import pytest
import torch
from test_triton_attention import DIM, HEADS, SCALE, paged, run

from merestone.ops.triton import attention, attention_wide
from merestone.ops.triton.attention import items
from merestone.ops.triton.attention_wide import Weighing, attend_wide

HELD = Weighing(depth=64, warps=8, stages=4, band=2, held=True)
STORED = Weighing(depth=64, warps=4, stages=3, band=2, held=False)


@pytest.fixture
def short_spans(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "TILE", 16)
    monkeypatch.setattr(attention, "SPAN", 32)
    monkeypatch.setattr(attention_wide, "ROWS", 16)


@pytest.mark.usefixtures("ordered_dot", "short_spans")
@pytest.mark.parametrize("weighing", [HELD, STORED])
@pytest.mark.parametrize("dim", [DIM, 48])
def test_wide_items_have_the_same_bits(draw, device: str, weighing: Weighing, dim: int) -> None:
    """Two prompts and a row without keys, next to rows of an arena that are NaN."""
    latents = [draw(n, dim) for n in (75, 40)]
    keys = paged(latents, device)
    q = draw(116, HEADS, dim)
    parts = [(0, 0, 75), (1, 75, 40), (1, 115, 1)]
    seen = [*range(1, 76), *range(1, 41), 0]
    expected = run(q, keys, parts, seen, split=False)
    work = items(parts, HEADS, 16).to(device)
    sees = torch.tensor(seen, dtype=torch.int32, device=device)
    wide = attend_wide(q, keys, work, sees, SCALE, longest=75, weighing=weighing)
    assert torch.equal(wide[0], expected[0])
    assert torch.equal(wide[1], expected[1])

"""Attention of many rows by the copy engine: the bits of few rows, whatever stands beside them."""

import pytest
import torch
from test_triton_attention import DIM, HEADS, SCALE, paged, run
from torch import Tensor

from merestone.ops.triton import attention, attention_wide
from merestone.ops.triton.attention import Keys, items
from merestone.ops.triton.attention_wide import attend_wide, fits


def run_wide(
    q: Tensor, keys: Keys, parts: list[tuple[int, int, int]], seen: list[int]
) -> tuple[Tensor, Tensor]:
    work = items(parts, q.shape[1], attention_wide.ROWS).to(q.device)
    sees = torch.tensor(seen, dtype=torch.int32, device=q.device)
    return attend_wide(q, keys, work, sees, SCALE, longest=max(seen, default=0))


@pytest.mark.usefixtures("ordered_dot", "short_spans")
@pytest.mark.parametrize(
    ("dim", "dtype", "weights"),
    [(DIM, torch.float32, 1 << 29), (48, torch.float32, 1 << 13), (DIM, torch.float16, 1 << 29)],
)
def test_wide_items_have_the_same_bits(
    draw, device: str, monkeypatch: pytest.MonkeyPatch, dim: int, dtype: torch.dtype, weights: int
) -> None:
    """Two prompts and a row without keys, next to rows of an arena that are NaN; all weights at
    once, and in many turns."""
    monkeypatch.setattr(attention, "MOST_WEIGHTS", weights)
    keys = paged([draw(n, dim) for n in (75, 40)], device, dtype)
    q = draw(116, HEADS, dim).to(dtype)
    parts = [(0, 0, 75), (1, 75, 40), (1, 115, 1)]
    seen = [*range(1, 76), *range(1, 41), 0]
    out, lse = run(q, keys, parts, seen, split=False)
    wide = run_wide(q, keys, parts, seen)
    assert torch.equal(wide[0], out)
    assert torch.equal(wide[1], lse)


@pytest.mark.usefixtures("short_spans")
def test_no_rows_and_no_keys(draw, device: str) -> None:
    keys = paged([draw(20, DIM)], device)
    q = draw(2, HEADS, DIM)
    assert run_wide(q[:0], keys, [], [])[0].shape == (0, HEADS, DIM)
    out, lse = run_wide(q, keys, [(0, 0, 2)], [0, 0])
    assert torch.equal(out, torch.zeros_like(out))
    assert torch.equal(lse, torch.full_like(lse, float("-inf")))


def test_which_pages_fit() -> None:
    for page, dtype, fit in (
        (1024, torch.bfloat16, True), (128, torch.bfloat16, True), (64, torch.bfloat16, False),
        (1024, torch.float32, False),
    ):  # fmt: skip
        assert fits(torch.empty(1, page, 64, dtype=dtype)) == fit


@pytest.mark.gpu
@pytest.mark.parametrize(("heads", "dim"), [(32, 576), (16, 576), (64, 512), (4, 64)])
def test_true_dimensions(
    draw, device: str, monkeypatch: pytest.MonkeyPatch, heads: int, dim: int
) -> None:
    """A prompt from its beginning, one that goes on, and single rows: the bits of other kernels."""
    latents = [draw(n, dim).bfloat16() for n in (1537, 3000)]
    rows, parts = (1537, 700, 1, 5), []
    for row, count in enumerate(rows):
        parts.append((min(row, 1), sum(rows[:row]), count))
    seen = [*range(1, 1538), *range(2301, 3001), 1, *range(509, 514)]
    q = draw(sum(rows), heads, dim).bfloat16()
    keys = paged(latents, device, torch.bfloat16, page=1024)
    small = paged(latents, device, torch.bfloat16, page=128)
    out, lse = run(q, keys, parts, seen, split=False)
    assert out.isfinite().all()
    for where in (keys, small):
        for most in (1 << 29, 1 << 22):
            monkeypatch.setattr(attention, "MOST_WEIGHTS", most)
            wide = run_wide(q, where, parts, seen)
            assert torch.equal(wide[0], out), most
            assert torch.equal(wide[1], lse), most
    some = [0, 511, 512, 1536, 1537, 2236, 2237, 2240]
    lone = [(int(row >= 1537), i, 1) for i, row in enumerate(some)]
    again = run(q[some], keys, lone, [seen[row] for row in some], split=True)
    assert torch.equal(again[0], out[some])


@pytest.mark.gpu
def test_wide_items_in_a_graph(draw, device: str) -> None:
    """A graph keeps where operands lie, not what they are."""
    keys = paged([draw(3000, 576).bfloat16()], device, torch.bfloat16, page=1024)
    q = draw(256, 32, 576).bfloat16()
    work = items([(0, 0, 256)], 32, attention_wide.ROWS).to(device)
    sees = torch.arange(1, 257, dtype=torch.int32, device=device)
    attend_wide(q, keys, work, sees, SCALE, longest=4096)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = attend_wide(q, keys, work, sees, SCALE, longest=4096)
    q.copy_(draw(256, 32, 576))
    sees += 2700
    graph.replay()
    expected = run(q, keys, [(0, 0, 256)], sees.tolist(), split=False)
    assert torch.equal(out, expected[0])
    assert torch.equal(lse, expected[1])

"""Attention over pages: split or whole, among mates, restored or forked, the same bits."""

import pytest
import torch
from torch import Tensor

from merestone.ops.triton.attention import NARROW, WIDE, Keys, attend, attend_naive, items

HEADS, DIM, PAGE, SCALE = 4, 32, 16, 0.3


def paged(
    latents: list[Tensor], device: str, dtype: torch.dtype = torch.float32, page: int = PAGE
) -> Keys:
    """Sequences in scattered frames of an arena that is NaN wherever nobody wrote."""
    dim = latents[0].shape[1]
    pages = [-(-one.shape[0] // page) for one in latents]
    frames = sum(pages) + 3
    frame = page * dim + 64
    arena = torch.full((frames, frame), float("nan"), dtype=dtype, device=device)
    view = arena.as_strided((frames, page, dim), (frame, dim, 1), 64)
    free = torch.randperm(frames, generator=torch.Generator().manual_seed(1)).tolist()
    tables = torch.full((len(latents), max(pages)), -1, dtype=torch.int32)
    for i, one in enumerate(latents):
        for number in range(pages[i]):
            tables[i, number] = frame_number = free.pop()
            rows = one[number * page : (number + 1) * page]
            view[frame_number, : rows.shape[0]] = rows.to(dtype)
    return Keys(view, tables.to(device))


def run(
    q: Tensor,
    keys: Keys,
    parts: list[tuple[int, int, int]],
    seen: list[int],
    *,
    split: bool,
    height: int | None = None,
    selection: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    work = items(parts, q.shape[1], height or (NARROW if split else WIDE)).to(q.device)
    sees = torch.tensor(seen, dtype=torch.int32, device=q.device)
    return attend(
        q,
        keys,
        work,
        sees,
        SCALE,
        longest=max(seen, default=0),
        split=split,
        height=height,
        selection=selection,
    )


@pytest.mark.usefixtures("ordered_dot", "short_spans")
def test_prefill_decode_and_mates(draw, device: str) -> None:
    """Two prompts in one launch, whole; then single rows, split, in the other order."""
    lengths = (75, 40)
    latents = [draw(n, DIM) for n in lengths]
    keys = paged(latents, device)
    q = draw(sum(lengths), HEADS, DIM)
    seen = [*range(1, 76), *range(1, 41)]
    out, lse = run(q, keys, [(0, 0, 75), (1, 75, 40)], seen, split=False)
    for row in (0, 15, 16, 31, 32, 33, 74):
        expected = attend_naive(q[row], latents[0], row + 1, SCALE)
        torch.testing.assert_close(out[row], expected)
        scores = q[row] @ latents[0][: row + 1].T * SCALE
        torch.testing.assert_close(lse[row], scores.logsumexp(1))
    some = [114, 2, 31, 74, 75, 33]
    parts = [(int(row >= 75), i, 1) for i, row in enumerate(some)]
    for split in (True, False):
        again = run(q[some], keys, parts, [seen[row] for row in some], split=split)
        assert torch.equal(again[0], out[some])
        assert torch.equal(again[1], lse[some])
    # Three rows of one sequence at once, as in verification.
    again = run(q[31:34], keys, [(0, 0, 3)], seen[31:34], split=True)
    assert torch.equal(again[0], out[31:34])


@pytest.mark.usefixtures("ordered_dot", "short_spans")
def test_a_selection_of_everything_changes_no_bits(draw, device: str) -> None:
    latents = [draw(70, DIM)]
    keys = paged(latents, device)
    q = draw(3, HEADS, DIM)
    parts = [(0, i, 1) for i in range(3)]
    seen = [70, 33, 5]
    dense = run(q, keys, parts, seen, split=True)
    every = torch.arange(96, dtype=torch.int32, device=device).repeat(3, 1)
    for split in (True, False):
        out, lse = run(q, keys, parts, seen, split=split, selection=every)
        assert torch.equal(out, dense[0])
        assert torch.equal(lse, dense[1])


@pytest.mark.usefixtures("ordered_dot", "short_spans")
def test_selected_positions(draw, device: str) -> None:
    latents = [draw(90, DIM)]
    keys = paged(latents, device)
    q = draw(2, HEADS, DIM)
    chosen = [sorted(torch.randperm(90)[:n].tolist()) for n in (37, 20)]
    # Past a row's count a selection may name any token, or none at all.
    selection = torch.full((2, 48), 1 << 20, dtype=torch.int32)
    for i, tokens in enumerate(chosen):
        selection[i, : len(tokens)] = torch.tensor(tokens)
    parts = [(0, 0, 1), (0, 1, 1)]
    selection = selection.to(device)
    out, _ = run(q, keys, parts, [37, 20], split=True, selection=selection)
    whole, _ = run(q, keys, parts, [37, 20], split=False, selection=selection)
    assert torch.equal(out, whole)
    for i, tokens in enumerate(chosen):
        expected = attend_naive(q[i], latents[0][tokens], len(tokens), SCALE)
        torch.testing.assert_close(out[i], expected)
    # A row that could not choose says so, and hurts nobody else.
    selection[0] = -1
    for split in (True, False):
        hurt, _ = run(q, keys, parts, [37, 20], split=split, selection=selection)
        assert hurt[0].isnan().all()
        assert torch.equal(hurt[1], out[1])


@pytest.mark.usefixtures("ordered_dot", "short_spans")
def test_half_precision_keys(draw, device: str) -> None:
    """Weights are rounded to the keys' dtype alike in both forms."""
    keys = paged([draw(70, DIM)], device, torch.float16)
    q = draw(70, HEADS, DIM).half()
    seen = list(range(1, 71))
    out, _ = run(q, keys, [(0, 0, 70)], seen, split=False)
    again, _ = run(q[40:], keys, [(0, i, 1) for i in range(30)], seen[40:], split=True)
    assert torch.equal(again, out[40:])


@pytest.mark.usefixtures("ordered_dot", "short_spans")
def test_a_part_of_a_key_may_only_score(draw, device: str) -> None:
    latents = draw(70, 48)
    keys = paged([latents], device)
    q = draw(70, HEADS, 48)
    seen = list(range(1, 71))
    out, _ = run(q, keys, [(0, 0, 70)], seen, split=False)
    assert out.shape == (70, HEADS, 32)
    for row in (0, 31, 32, 69):
        expected = attend_naive(q[row], latents, row + 1, SCALE, 32)
        torch.testing.assert_close(out[row], expected)
    for height in (16, 32, 64):
        parts = [(0, i, 1) for i in range(30)]
        again, _ = run(q[40:], keys, parts, seen[40:], split=True, height=height)
        assert torch.equal(again, out[40:]), height


@pytest.mark.usefixtures("short_spans")
def test_a_row_without_keys(draw, device: str) -> None:
    """A rank that holds none of a row's tokens contributes nothing to the merge."""
    keys = paged([draw(20, DIM)], device)
    q = draw(2, HEADS, DIM)
    for split in (True, False):
        out, lse = run(q, keys, [(0, 0, 2)], [0, 3], split=split)
        assert torch.equal(out[0], torch.zeros_like(out[0]))
        assert torch.equal(lse[0], torch.full_like(lse[0], float("-inf")))
        assert out[1].isfinite().all()
        # What a selection without tokens names is nobody's, and says nothing of damage.
        chosen = torch.tensor([[-1] * 4, [0, 1, 2, -1]], dtype=torch.int32, device=device)
        parts = [(0, 0, 1), (0, 1, 1)]
        some, log_sums = run(q, keys, parts, [0, 3], split=split, selection=chosen)
        assert torch.equal(some[0], out[0])
        assert torch.equal(log_sums[0], lse[0])
        assert some[1].isfinite().all()
        assert run(q[:0], keys, [], [], split=split)[0].shape == (0, HEADS, DIM)


@pytest.mark.gpu
@pytest.mark.parametrize(("heads", "dim"), [(16, 512), (64, 512), (32, 576)])
def test_true_dimensions(draw, device: str, heads: int, dim: int) -> None:
    latents = draw(3000, dim).bfloat16()
    keys = paged([latents], device, torch.bfloat16, page=1024)
    small = paged([latents], device, torch.bfloat16)
    q = draw(3000, heads, dim).bfloat16()
    seen = list(range(1, 3001))
    out, lse = run(q, keys, [(0, 0, 3000)], seen, split=False)
    for row in (0, 63, 64, 511, 512, 1023, 1500, 2999):
        expected = attend_naive(q[row], latents, row + 1, SCALE, 512)
        torch.testing.assert_close(out[row].float(), expected, rtol=3e-2, atol=3e-2)
    for some in ([2999], [5, 1024, 512], list(range(1000, 1013)), list(range(7, 2900, 41))):
        parts = [(0, i, 1) for i in range(len(some))]
        for split, height in ((True, 16), (True, 32), (True, 64), (False, 64)):
            for where in (keys, small):
                sees = [row + 1 for row in some]
                again = run(q[some], where, parts, sees, split=split, height=height)
                assert torch.equal(again[0], out[some]), (some[0], split, height)
                assert torch.equal(again[1], lse[some]), (some[0], split, height)

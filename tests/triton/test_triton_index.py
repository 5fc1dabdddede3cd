"""The sparse index: pools from anywhere, scores among mates, and a choice without accidents."""

import pytest
import torch
from torch import Tensor

from merestone.ops import index as plain
from merestone.ops.naive import pool_keys
from merestone.ops.triton.index import choose, members, pool_scores, write_pools
from merestone.ops.triton.rows import Sequences

PAGE, DIM, SIZE = 8, 16, 4


def ints(*values: int, device: str) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)


def written(keys: Tensor, gates: Tensor, positions: Tensor, first: int, device: str) -> Tensor:
    """Pools completed from row ``first`` on, with the rows before it in open pages: [n, D]."""
    frame = 3 * PAGE * DIM
    arena = torch.full((6, frame), float("nan"), device=device)
    views = [arena.as_strided((6, PAGE, DIM), (frame, DIM, 1), i * PAGE * DIM) for i in (0, 1)]
    pools = arena.as_strided((6, PAGE // SIZE, DIM), (frame, DIM, 1), 2 * PAGE * DIM)
    table = ints(5, 0, 3, device=device)
    for at in range(first):
        for view, rows in zip(views, (keys, gates), strict=True):
            view[table[at // PAGE].long(), at % PAGE] = rows[at]
    numbers = torch.arange(first // SIZE, keys.shape[0] // SIZE, dtype=torch.int32, device=device)
    none = ints(0, device=device)
    sequences = Sequences(ints(first, device=device), none, none, table[None], none[None] - 1)
    # Gates are a part of a product, keys come from a norm.
    both = torch.cat([keys, gates], 1)[first:]
    write_pools(
        keys[first:], both[:, DIM:], *views, positions, pools,
        table.flip(0)[None].contiguous(), torch.zeros_like(numbers), numbers, sequences,
    )  # fmt: skip
    assert not pools[1:3].isfinite().any(), "a frame of somebody else was written"
    return pools[table.flip(0).long()].flatten(0, 1)[numbers.long()]


def test_pools_from_anywhere(draw, device: str) -> None:
    keys, gates, positions = draw(19, DIM), draw(19, DIM), draw(SIZE, DIM)
    expected = written(keys, gates, positions, 0, device)
    torch.testing.assert_close(expected, pool_keys(keys, gates, positions))
    for first in range(1, 19):
        got = written(keys, gates, positions, first, device)
        assert torch.equal(got, expected[first // SIZE :]), first


@pytest.mark.usefixtures("ordered_dot")
def test_scores_among_mates(draw, device: str) -> None:
    heads, rows = 4, 5
    q, weights = draw(rows, heads, DIM), draw(rows, heads)
    pools = torch.full((12, PAGE, DIM), float("nan"), device=device)
    tables = torch.arange(12, dtype=torch.int32, device=device).flip(0).view(1, 12)
    complete = ints(70, 64, 3, 96, 1, device=device)
    values = draw(96, DIM)
    pools[tables[0].long()] = values.view(12, PAGE, DIM)
    which = torch.zeros_like(complete)
    out = pool_scores(q, weights, pools, tables, which, complete, longest=96)
    expected = plain.pool_scores(q[None], weights[None], values[None])[0]
    for row, count in enumerate(complete.tolist()):
        torch.testing.assert_close(out[row, :count], expected[row, :count])
    for row, count in enumerate(complete.tolist()):
        # Alone, with nothing behind its last pool but what nobody wrote.
        hostile = pools.clone()
        hostile[tables[0].long()] = torch.where(
            torch.arange(96, device=device)[:, None] < count, values, float("nan")
        ).view(12, PAGE, DIM)
        one = slice(row, row + 1)
        alone = pool_scores(
            q[one], weights[one], hostile, tables, which[one], complete[one], longest=count
        )
        assert torch.equal(alone[0], out[row, :count])


def test_choice_is_that_of_a_stable_sort(device: str) -> None:
    source = torch.Generator().manual_seed(0)
    complete = [9, 40, 700, 1024, 1025, 1500, 2100, 1337]
    scores = torch.randn(8, 2100, generator=source)
    scores[1] = scores[1].round()  # many ties
    scores[2] = 0.0  # nothing but ties, of both zeros
    scores[2, ::3] = -0.0
    scores[3, 900] = float("nan")  # damaged, but not where the next row is
    scores[4, 1025:] = float("nan")
    scores[4] = torch.where(scores[4] > 0, float("inf"), scores[4])
    scores[5] = scores[5] * 1e-38  # subnormal
    scores[6] = -scores[6].abs().round()
    counts = torch.tensor(complete, dtype=torch.int32)
    for k in (1, 8, 9):
        got = choose(scores.to(device), counts.to(device), k).cpu()
        for row, count in enumerate(complete):
            order = scores[row, :count].sort(descending=True, stable=True).indices[:k]
            expected = order.sort().values.tolist() if row != 3 else [-1] * k
            assert got[row].tolist() == expected, (k, row)
        same = plain.choose(scores, counts.long(), k)
        assert torch.equal(got.long(), same)


def test_members_and_the_open_pool(device: str) -> None:
    best = ints(0, 2, 5, 1, 3, 4, device=device).view(2, 3)
    out, counts = members(best, ints(27, 24, device=device), SIZE, 64)
    assert counts.tolist() == [15, 12]
    assert out[0, :15].tolist() == [0, 1, 2, 3, 8, 9, 10, 11, 20, 21, 22, 23, 24, 25, 26]
    assert out[1, :12].tolist() == [*range(4, 8), *range(12, 20)]
    assert not out[0, 15:].any()
    assert not out[1, 12:].any()


@pytest.mark.gpu
def test_true_dimensions(draw, device: str) -> None:
    rows, longest = 64, 32768
    q, weights = draw(rows, 32, 128).bfloat16(), draw(rows, 32).bfloat16()
    pools = draw(longest // 256, 256, 128).bfloat16()
    tables = torch.arange(longest // 256, dtype=torch.int32, device=device)[None]
    complete = torch.linspace(512, longest, rows, device=device).int()
    which = torch.zeros_like(complete)
    scores = pool_scores(q, weights, pools, tables, which, complete, longest=longest)
    best = choose(scores, complete, 512)
    counts = complete.tolist()
    for row in (0, 1, 31, 63):
        one, count = slice(row, row + 1), counts[row]
        alone = pool_scores(
            q[one], weights[one], pools, tables, which[one], complete[one], longest=count
        )
        assert torch.equal(alone[0], scores[row, :count])
        assert torch.equal(choose(alone, complete[one], 512), best[one])
        order = scores[row, :count].sort(descending=True, stable=True).indices[:512]
        assert torch.equal(best[row].long(), order.sort().values)

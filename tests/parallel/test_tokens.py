"""Who holds which row: the same answers as the geometry that the cache plans with."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from merestone.core.geometry import GroupSpec
from merestone.parallel.tokens import Shards


@given(
    st.integers(1, 8), st.sampled_from([1, 2, 4, 8]), st.sampled_from([8, 16]), st.integers(1, 200)
)
def test_rows_are_held_once_and_in_order(ranks: int, run: int, page: int, count: int) -> None:
    spec = GroupSpec("full", page, ranks, run)
    rows = torch.arange(count)
    met = []
    for rank in range(ranks):
        shards = Shards(spec, rank)
        held = rows[shards.mine(rows)]
        assert [spec.owner(row) for row in held.tolist()] == [rank] * len(held)
        own = shards.own(held)
        assert own.tolist() == list(range(len(held)))
        assert torch.equal(shards.rows(own), held)
        # A page of the sequence is a page of what is held here, and a row's place in it the same.
        assert torch.equal(own // page, held // spec.span)
        assert (own % page).tolist() == [spec.local_row(row) for row in held.tolist()]
        for end in (0, 1, count // 2, count):
            assert int(shards.held(torch.tensor(end))) == int((held < end).sum())
            assert spec.local_count(end, rank) == int((held < end).sum())
        met += held.tolist()
    assert sorted(met) == rows.tolist()


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_select_keeps_order_and_count(rank: int) -> None:
    shards = Shards(GroupSpec("full", 8, 3, 4), rank)
    rows = torch.tensor([[0, 3, 4, 11, 12, 13, 40, 41], [4, 5, 6, 7, 0, 0, 0, 0]])
    counts = torch.tensor([[7], [4]])
    own, held = shards.select(rows, counts, 4)
    for i in range(2):
        wanted = [row for row in rows[i, : counts[i]].tolist() if row // 4 % 3 == rank]
        assert int(held[i]) == len(wanted)
        assert shards.rows(own[i, : len(wanted)]).tolist() == wanted
        assert own[i, len(wanted) :].eq(0).all()
    assert own.shape[1] % 4 == 0

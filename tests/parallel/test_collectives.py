"""Sums in rank order, whatever the size; moves; time-outs."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from merestone.parallel.world import SINGLE, check_layout, connect, part_of
from parallel import exchanges
from parallel.ranks import Ranks

LAYOUTS = [(2, 1), (2, 2), (4, 1), (4, 2), (4, 4)]


def test_sums_and_moves(ranks: Ranks) -> None:
    for tp, dcp in [*LAYOUTS, (3, 1), (3, 3)]:
        ranks.run(exchanges.sums, tp, dcp)
        ranks.run(exchanges.moves, tp, dcp)


def test_the_least_is_everybodys(ranks: Ranks) -> None:
    assert ranks.run(exchanges.least, 3, 1) == [5, 5, 5]
    assert SINGLE.least(7) == 7


def test_a_late_rank_is_an_error_in_bounded_time(ranks: Ranks, tmp_path: Path) -> None:
    answers = ranks.run(exchanges.late, 3, 1, str(tmp_path), timeout_s=5.0)
    # Who gives up first has waited for as long as was said, and takes the other along.
    assert 4.9 < max(waited for waited, _ in answers) < 60
    for rank in (0, 2):
        _, words = answers[rank]
        assert f"tensor parallel group, rank {rank} of 3: a rank is lost, or later" in words


def test_a_world_of_one_copies_nothing() -> None:
    x = torch.ones(2, 3)
    assert SINGLE.ranks.sum(x) is x
    assert SINGLE.ranks.gather(x).data_ptr() == x.data_ptr()
    assert SINGLE.ranks.exchange(x[:1]).data_ptr() == x.data_ptr()
    alone = connect(0, 1, rendezvous="tcp://nobody:1")
    assert (alone.tp, alone.dcp, alone.ranks.size) == (1, 1, 1)


@pytest.mark.parametrize("count", [1, 4, 5, 7, 320])
def test_parts_cover_everything_once(count: int) -> None:
    for tp in (1, 2, 3, 4):
        parts = [list(range(count))[part_of(count, rank, tp)] for rank in range(tp)]
        assert [i for part in parts for i in part] == list(range(count))
        assert max(map(len, parts)) == len(parts[0])


@pytest.mark.parametrize(("tp", "dcp", "words"), [(0, 1, "--tp 0"), (4, 3, "--dcp 3 does not")])
def test_layouts_are_refused_by_name(tp: int, dcp: int, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        check_layout(tp, dcp)


def test_heads_must_be_shared_evenly(ranks: Ranks) -> None:
    assert SINGLE.heads(5, "KDA") == 5
    assert ranks.run(exchanges.heads, 2, 1, 4) == [2, 2]
    assert ranks.run(exchanges.heads, 3, 1, 4) == ["--tp 3 does not divide the 4 heads of KDA"] * 3

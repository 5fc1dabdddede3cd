"""Engines over several ranks: everything is restored, with the bits of the layout's cold run."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from merestone.parallel.world import SINGLE
from parallel import engines
from parallel.engines import Answer
from parallel.ranks import Ranks


def agree(
    ranks: Ranks, run: Callable[..., list[Answer]], tp: int, dcp: int, *args: object
) -> list[Answer]:
    answers = ranks.run(run, tp, dcp, *args)
    assert all(answer == answers[0] for answer in answers)
    return answers[0]


@pytest.mark.parametrize(
    ("tp", "dcp", "case", "page"), [(2, 2, "glm", 16), (4, 4, "glm", 16), (2, 2, "kimi", 64)]
)
def test_replays(ranks: Ranks, tp: int, dcp: int, case: str, page: int) -> None:
    answers = agree(ranks, engines.ladder, tp, dcp, case, page)
    alone = engines.ladder(SINGLE, case, page)
    assert [a.restored for a in answers] == [a.restored for a in alone]


def test_conversations(ranks: Ranks) -> None:
    answers = agree(ranks, engines.talk, 4, 2, "glm", 16)
    alone = engines.talk(SINGLE, "glm", 16)
    assert [a.restored for a in answers] == [a.restored for a in alone]


def test_nine_tenths_of_the_limit(ranks: Ranks) -> None:
    (first, *_) = agree(ranks, engines.fill, 4, 4, "glm")
    assert first.restored == 0


def test_preemption(ranks: Ranks) -> None:
    agree(ranks, engines.squeeze, 2, 2, "glm")


@pytest.mark.parametrize("kind", ["mtp", "dflash"])
def test_speculation(ranks: Ranks, kind: str) -> None:
    answers = agree(ranks, engines.speculate, 2, 2, kind)
    alone = engines.speculate(SINGLE, kind)
    assert [a.restored for a in answers] == [a.restored for a in alone]

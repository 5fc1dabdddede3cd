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
    ("case", "page", "layouts"),
    [("glm", 16, [(2, 1), (2, 2), (4, 2), (4, 4)]), ("kimi", 64, [(2, 2), (4, 4)])],
)
def test_replays(ranks: Ranks, case: str, page: int, layouts: list[tuple[int, int]]) -> None:
    alone = engines.ladder(SINGLE, case, page)
    for tp, dcp in layouts:
        answers = agree(ranks, engines.ladder, tp, dcp, case, page)
        assert [a.restored for a in answers] == [a.restored for a in alone]


def test_conversations(ranks: Ranks) -> None:
    alone = engines.talk(SINGLE, "glm", 16)
    for tp, dcp in ((2, 2), (4, 4)):
        answers = agree(ranks, engines.talk, tp, dcp, "glm", 16)
        assert [a.restored for a in answers] == [a.restored for a in alone]


def test_preemption(ranks: Ranks) -> None:
    agree(ranks, engines.squeeze, 2, 2, "glm")


@pytest.mark.parametrize(("kind", "layouts"), [("mtp", [(2, 2), (4, 4)]), ("dflash", [(4, 2)])])
def test_speculation(ranks: Ranks, kind: str, layouts: list[tuple[int, int]]) -> None:
    alone = engines.speculate(SINGLE, kind)
    for tp, dcp in layouts:
        answers = agree(ranks, engines.speculate, tp, dcp, kind)
        assert [a.restored for a in answers] == [a.restored for a in alone]

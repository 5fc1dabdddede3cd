"""Models over several ranks: the law of rows holds in every layout; layouts differ by rounding."""

from __future__ import annotations

import pytest
import torch

from merestone.parallel.world import SINGLE
from parallel import passes
from parallel.ranks import Ranks

LAYOUTS = [(2, 1), (2, 2), (4, 1), (4, 2), (4, 4)]


# Families and dtypes need no layout of their own each.
SCHEDULES = [
    *((tp, dcp, "glm") for tp, dcp in LAYOUTS),
    (2, 2, "glm dense"),
    (2, 2, "kimi"),
    (4, 4, "kimi"),
    (4, 2, "glm bf16"),
]


@pytest.mark.parametrize(("tp", "dcp", "case"), SCHEDULES)
def test_any_schedule_has_the_bits_of_one_pass(ranks: Ranks, tp: int, dcp: int, case: str) -> None:
    ranks.run(passes.schedules, tp, dcp, case)


@pytest.mark.parametrize("case", ["glm", "glm dense", "kimi"])
def test_layouts_agree_but_for_rounding(ranks: Ranks, case: str) -> None:
    alone, scores = passes.logits(SINGLE, case, 150)
    for tp, dcp in LAYOUTS[::2]:
        answers = ranks.run(passes.logits, tp, dcp, case, 150)
        for hidden, logits in answers:
            assert torch.equal(hidden, answers[0][0])
            assert torch.equal(logits, answers[0][1])
            torch.testing.assert_close(hidden, alone, atol=2e-4, rtol=0)
            torch.testing.assert_close(logits, scores, atol=2e-3, rtol=0)


@pytest.mark.parametrize(("tp", "dcp"), [(2, 2), (4, 2), (4, 4)])
def test_forks_share_pages_and_damage_stays_where_it_is(ranks: Ranks, tp: int, dcp: int) -> None:
    ranks.run(passes.forks, tp, dcp, "glm")
    ranks.run(passes.forks, tp, dcp, "kimi")
    ranks.run(passes.broken, tp, dcp)

"""Replies of all ranks become one result, or say why they cannot."""

from __future__ import annotations

import msgspec
import pytest

from merestone.engine.ranks.merge import (
    RanksApart,
    StepFailed,
    check_sums,
    different_facts,
    disagreement,
    merge,
)
from merestone.engine.ranks.messages import Done, Failed, Hello, RankOptions
from merestone.sched.plan import StepResult, StoreReport, TokenLogprob, WorkResult
from processes.fake_rank import facts

WORKS = (WorkResult(3, (7,), (TokenLogprob(7, -0.5),)), WorkResult(5))


def done(rank: int, works=WORKS, saves=(), slots=(), collectives: int = 9, reports=()) -> Done:
    sums = check_sums(works)
    result = StepResult(4, works if rank == 0 else (), saves, slots, reports)
    return Done(rank, result, sums, collectives)


def test_the_tokens_of_rank_0_and_what_any_rank_found_not_finite() -> None:
    replies = {1: done(1, saves=((9, 1),), slots=(5,)), 0: done(0, saves=((2, 0),)), 2: done(2)}
    assert merge(replies) == StepResult(4, WORKS, ((2, 0), (9, 1)), (5,))


def test_the_stores_of_every_rank_report() -> None:
    ours, theirs = StoreReport(1, 0), StoreReport(1, 1, "disk_full")
    merged = merge({0: done(0, reports=(ours,)), 1: done(1, reports=(theirs,))})
    assert merged.reports == (ours, theirs)


@pytest.mark.parametrize(
    "other",
    [
        (WorkResult(3, (8,), (TokenLogprob(7, -0.5),)), WORKS[1]),
        (WorkResult(3, (7,), (TokenLogprob(7, -0.5000001),)), WORKS[1]),
        (WorkResult(3), WORKS[1]),
    ],
)
def test_ranks_that_disagree_in_one_bit(other: tuple[WorkResult, ...]) -> None:
    with pytest.raises(RanksApart, match="ranks 0 and 1 disagree about slot 3 in step 4"):
        merge({0: done(0), 1: done(1, other)})
    # A slot that is bad on one rank alone draws no token there, and nobody uses the others'.
    merged = merge({0: done(0), 1: done(1, other, slots=(3,))})
    assert merged.bad_slots == (3,)


def test_a_failure_counts_whether_all_can_go_on() -> None:
    failed = Failed(1, 4, "RuntimeError: full", collectives=9)
    with pytest.raises(StepFailed, match=r"^rank 1: RuntimeError: full$"):
        merge({0: done(0), 1: failed})
    with pytest.raises(RanksApart, match="between collectives: rank 1: RuntimeError: full"):
        merge({0: done(0), 1: msgspec.structs.replace(failed, collectives=8)})
    with pytest.raises(RanksApart, match="did not run the same collectives"):
        merge({0: done(0), 1: done(1, collectives=8)})


def test_what_ranks_must_agree_on_is_named() -> None:
    hellos = {r: Hello(r, 1, f"host-{r}", {"torch": "2.13", "--dtype": "None"}) for r in range(3)}
    assert disagreement(hellos) is None
    hellos[2] = msgspec.structs.replace(hellos[2], runs_with={"torch": "2.11", "--dtype": "None"})
    assert disagreement(hellos) == (
        "rank 2 on host-2 differs from rank 0 on host-0 in torch: 2.11, not 2.13"
    )
    hellos[1] = msgspec.structs.replace(hellos[1], runs_with={"torch": "2.12", "--dtype": "None"})
    assert disagreement(hellos) == (
        "rank 1 on host-1 differs from rank 0 on host-0 in torch: 2.12, not 2.13"
    )


def test_ranks_that_are_built_differently() -> None:
    assert different_facts({0: facts(), 1: facts()}) is None
    found = different_facts({0: facts(), 1: facts(99)})
    assert found == "rank 1 differs from rank 0 in frames: 99, not 128"


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"tp": 2, "dcp": 4}, "--dcp 4 does not divide --tp 2"),
        ({"tp": 4, "nodes": 3, "master": "a:1"}, "--nodes 3 does not divide --tp 4"),
        ({"tp": 2, "nodes": 2, "node": 2, "master": "a:1"}, "--node-rank 2 is outside 0..1"),
        ({"tp": 2, "nodes": 2}, "--master HOST:PORT"),
        ({"tp": 2, "master": "a:1"}, "--master HOST:PORT"),
        ({"on_loss": "retry"}, "--on-rank-loss 'retry'"),
        ({"silence_s": 0.0}, "--rank-timeout, --step-timeout and --start-timeout"),
        ({"step_s": float("nan")}, "--rank-timeout, --step-timeout and --start-timeout"),
        ({"start_s": float("inf")}, "--rank-timeout, --step-timeout and --start-timeout"),
    ],
)
def test_options_are_refused_by_name(options: dict[str, object], says: str) -> None:
    with pytest.raises(ValueError, match=says.replace("(", r"\(")):
        RankOptions(**options)  # type: ignore[arg-type]


def test_each_machine_has_its_share() -> None:
    options = [RankOptions(tp=8, dcp=4, nodes=2, node=n, master="a:1") for n in range(2)]
    assert [list(o.local) for o in options] == [[0, 1, 2, 3], [4, 5, 6, 7]]

"""How many drafts are verified and asked for: no more than can be needed, or than fit."""

from __future__ import annotations

import pytest

from core.small_caches import tokens
from engine.test_queue import sequence
from merestone.sched.depth import Depth
from merestone.sched.request import Sequence


def decoding(drafts: int = 0, left: int = 100) -> Sequence:
    seq = sequence(tokens(9))
    seq.append(1)
    seq.computed, seq.drafts, seq.max_tokens = 9, drafts, 1 + left
    return seq


@pytest.mark.parametrize(
    ("left", "verified", "wanted"),
    [(1, 0, 0), (2, 1, 0), (3, 2, 1), (4, 3, 2), (5, 3, 3), (9, 3, 3)],
)
def test_no_more_than_the_answer_may_still_have(left: int, verified: int, wanted: int) -> None:
    """A step draws one token beyond the drafts; the step after that wants those behind it."""
    seq, depth = decoding(3, left), Depth(3)
    assert depth.trim([seq], 100) == 1 + verified
    assert (seq.drafts, depth.wanted(seq)) == (verified, wanted)


@pytest.mark.parametrize(
    ("rows", "kept"),
    [
        (99, [3, 1, 2]),
        (9, [3, 1, 2]),
        (8, [2, 1, 2]),
        (7, [1, 1, 1]),
        (5, [0, 0, 0]),
        (1, [0, 0, 0]),
    ],
)
def test_the_deepest_go_first_where_rows_are_short(rows: int, kept: list[int]) -> None:
    """Of all alike; the rows of the tokens themselves stay."""
    seqs = [decoding(drafts) for drafts in (3, 1, 2)]
    assert Depth(3).trim(seqs, rows) == 3 + sum(kept)
    assert [seq.drafts for seq in seqs] == kept
    assert Depth(3).trim([], rows) == 0


def test_depth_follows_what_was_accepted_lately() -> None:
    """At first all are asked for. A block accepted whole might have been longer."""
    seq, depth, fixed = decoding(), Depth(5, adaptive=True), Depth(5)
    asked = [depth.wanted(seq)]
    for drafted, accepted in ((0, 0), (5, 2), (3, 3), (4, 0), (4, 0), (4, 0), (4, 0)):
        depth.note(seq, drafted, accepted)
        asked.append(depth.wanted(seq))
        assert fixed.wanted(seq) == 5
    # The means are 2, 2.5, 1.9, 1.4, 1.1, 0.8.
    assert asked == [5, 5, 3, 3, 3, 2, 2, 2]
    for _ in range(30):
        depth.note(seq, 5, 5)
    assert depth.wanted(seq) == 5
    assert 5.99 < seq.acceptance <= 6


def test_only_steps_that_verified_some_are_counted() -> None:
    seq, depth = decoding(), Depth(3)
    for drafted, accepted in ((2, 1), (0, 0), (3, 3), (1, 0)):
        depth.note(seq, drafted, accepted)
    for tally in (depth.tally, seq.tally):
        assert (tally.steps, tally.drafted, tally.accepted) == (3, [3, 2, 1], [2, 1, 1])


def test_without_a_drafter_none_are_asked_for() -> None:
    assert Depth().wanted(decoding()) == 0

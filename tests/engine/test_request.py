"""The counters of one answer, verb by verb."""

from __future__ import annotations

import pytest

from core.small_caches import make, run, tokens
from engine.test_queue import sequence
from merestone.core.cache import Match
from merestone.core.checkpoint import Kind
from merestone.sched.plan import SamplingParams, TokenLogprob
from merestone.sched.request import Sequence


def answering(*ids: int, **changes: object) -> Sequence:
    """A prompt of 9 tokens, all computed but the last of these outputs."""
    seq = sequence(tokens(9))
    for name, value in changes.items():
        setattr(seq, name, value)
    for token in ids:
        seq.append(token)
    seq.computed = seq.known - 1
    return seq


def test_no_two_choices_have_one_rank() -> None:
    """Else neither could make way for the other."""
    first, second = sequence(tokens(9)), sequence(tokens(9))
    second.choice = 1
    assert first.rank < second.rank


def test_the_last_row_of_a_prompt_is_no_decode() -> None:
    seq = answering()
    assert not seq.decoding
    seq.append(1)
    assert not seq.decoding, "two rows are left"
    seq.computed = 9
    assert seq.decoding


@pytest.mark.parametrize(("least", "stops"), [(0, True), (2, True), (3, False)])
def test_a_stop_counts_from_the_least_number_of_outputs_on(least: int, stops: bool) -> None:
    seq = answering(1, 2, params=SamplingParams(min_tokens=least), stop_ids=frozenset({2}))
    assert seq.stop_reason(11) == (("stop", 2) if stops else None)
    assert seq.stop_reason(10) is None


def test_an_answer_cut_short_forgets_what_lay_beyond() -> None:
    """Rows of its last token included: the boundary of a response lies before that."""
    seq = answering(1, 7, 2, 7, ends={7: Kind.TURN})
    assert [at for at, _ in seq.boundaries] == [9, 11, 13]
    seq.truncate(11)
    assert (seq.known, seq.computed) == (11, 10)
    assert [at for at, _ in seq.boundaries] == [9, 11]


def test_grid_boundaries_follow_the_answer() -> None:
    seq = answering(7, 7, 7, 7, grid=4, ends={7: Kind.TURN})
    assert seq.boundaries[1:] == ((12, Kind.ALIGNED),)


def test_back_in_the_queue_it_is_as_it_came_but_for_its_outputs() -> None:
    cache = make()
    seq = answering(1, 2, drafts=3, slot=1, restored=5, kind="turn")
    seq.scored.append(TokenLogprob(1, -1.0))
    seq.requeue()
    assert (seq.slot, seq.computed, seq.drafts, seq.scored) == (-1, 0, 0, [])
    assert (seq.known, seq.matches, seq.preemptions) == (11, True, 1)
    seq.distrust("damaged")
    assert (seq.matches, seq.restored, seq.kind, seq.lost) == (False, 0, None, "damaged")
    seq.lease = cache.lease("r", None, 0)
    assert seq.promised(cache) == cache.frames_needed(12), "outputs are computed again"


def test_only_ids_of_the_prompt_are_scored() -> None:
    seq = answering(50, 51, prompt_logprobs=0)
    assert seq.targets(0, 4) == (1, 2, 3, 4)
    assert seq.targets(4, 9) == (5, 6, 7, 8)
    assert seq.targets(9, 10) == ()


def test_what_it_started_from_is_no_row_to_seal_with() -> None:
    cache = make()
    seq = sequence(tokens(30))
    seq.lease, seq.computed = cache.lease("r", run(cache, 20), 1), 20
    assert not seq.resumable
    seq.computed = 21
    assert seq.resumable


@pytest.mark.parametrize(
    ("known", "own", "changes", "junction"),
    [
        (35, 50, {}, False),
        (36, 50, {}, True),
        (36, 24, {}, False),
        (40, 24, {}, True),
        (36, 36, {}, False),
        (36, 50, {"grid": 16}, False),
        (60, 30, {"known": 60}, False),
    ],
)
def test_a_junction_lies_a_chunk_above_every_boundary(
    known: int, own: int, changes: dict[str, int], junction: bool
) -> None:
    """Above what it starts from and above its own below; and only where prompts really part."""
    cache = make()
    seq = sequence(tokens(70))
    seq.boundaries = ((own, Kind.TURN),)
    for name, value in changes.items():
        setattr(seq, name, value)
    seq.admit(Match(run(cache, 20), known, None, "no_boundary"), cache)
    assert ((known, Kind.JUNCTION) in seq.boundaries) == junction
    assert list(seq.boundaries) == sorted(seq.boundaries)


def test_one_that_seals_nothing_has_no_boundary_ahead() -> None:
    seq = sequence(tokens(9), seals=False)
    assert seq.boundaries
    assert (seq.above(0), seq.planned()) == ((), ())

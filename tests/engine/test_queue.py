"""The waiting queue, verb by verb: who may pass whom, what is spared, who waits for whom."""

from __future__ import annotations

import numpy as np
import pytest

from core.small_caches import make, run, tokens
from merestone.core.cache import Cache
from merestone.core.checkpoint import Kind
from merestone.sched.plan import SamplingParams
from merestone.sched.queue import OVERTAKES, WaitingQueue
from merestone.sched.request import Sequence


def sequence(text: np.ndarray, arrival: int = 1, **changes: object) -> Sequence:
    options: dict[str, object] = {"priority": 0, "root": "r", "matches": True, "seals": True}
    return Sequence(
        id=f"r{arrival}", choice=0, prompt=text.size, buffer=text, known=text.size,
        params=SamplingParams(), max_tokens=4, stop_ids=frozenset(), arrival=arrival,
        boundaries=((text.size, Kind.PROMPT),), **(options | changes),
    )  # fmt: skip


def queue_of(cache: Cache, *seqs: Sequence) -> WaitingQueue:
    queue = WaitingQueue(cache)
    for seq in seqs:
        queue.add(seq)
    queue.protect()
    return queue


def test_exact_hits_pass_a_blocked_one_so_often_and_no_more() -> None:
    cache = make()
    run(cache, 20)
    blocked, exact, longer = (sequence(tokens(n), n) for n in (60, 20, 21))
    queue = queue_of(cache, blocked, exact, longer)
    assert not queue.may_overtake(blocked, longer)
    assert [queue.may_overtake(blocked, exact) for _ in range(OVERTAKES)] == [True] * OVERTAKES
    assert not queue.may_overtake(blocked, exact)


def test_a_prompt_fits_with_its_first_page_beside_what_is_promised() -> None:
    """A prompt of whole pages needs one more for its first token."""
    needed = make().frames_needed(33)
    assert needed > make().frames_needed(32)
    seq, queue = sequence(tokens(32)), WaitingQueue(make(frames=needed))
    assert queue.fits(seq, None, 0)
    assert not queue.fits(seq, None, 1)
    assert not WaitingQueue(make(frames=needed - 1)).fits(seq, None, 0)


def test_what_it_was_spared_for_is_looked_for_anew_when_dropped() -> None:
    cache = make()
    short, deep = run(cache, 10), run(cache, 20)
    seq = sequence(tokens(30))
    queue = queue_of(cache, seq)
    assert seq.protects is deep
    cache.discard(deep, "not_finite")
    queue.protect()
    assert seq.protects is short
    assert (short.protected, deep.protected) == (1, 0)


@pytest.mark.parametrize(
    ("owner", "changes", "spared"),
    [
        (tokens(30), {}, True),
        (tokens(30), {"root": "other"}, False),
        (tokens(30), {"matches": False}, False),
        (tokens(31), {}, False),
        (np.append(tokens(29), 7).astype(np.int32), {}, False),
    ],
)
def test_a_published_one_is_spared_for_who_starts_from_it(
    owner: np.ndarray, changes: dict[str, object], spared: bool
) -> None:
    """Of the same root, a prefix of its prompt or all of it; and it must match at all."""
    cache = make()
    seq = sequence(tokens(30), **changes)
    queue = queue_of(cache, seq)
    lease = cache.lease("r", None, 0)
    cache.extend(lease, owner.size, 16, 0)
    made = cache.seal(lease, owner, owner.size, Kind.PROMPT, 0)
    assert made is not None
    cache.publish(made, 0)
    queue.offer(made, sequence(owner, 9))
    assert (seq.protects is made) == spared == (made.protected == 1)


def test_an_offer_must_be_deeper_and_comes_after_the_look_up() -> None:
    cache = make()
    short, deep = run(cache, 10), run(cache, 20)
    seq, late = sequence(tokens(30)), sequence(tokens(30), 2)
    queue = queue_of(cache, seq)
    queue.add(late)
    queue.offer(short, sequence(tokens(10), 9))
    assert seq.protects is deep
    assert late.protects is None
    queue.protect()
    assert late.protects is deep


def test_a_hole_in_a_window_is_not_started_from() -> None:
    """No seal leaves one; if there is one all the same, it is dropped, and counted."""
    cache = make()
    short, deep = run(cache, 10), run(cache, 20)
    first, frames = deep.pages["window"]
    deep.pages["window"] = first + 1, frames[1:]
    seq = sequence(tokens(30))
    assert WaitingQueue(cache).find(seq).checkpoint is short
    assert cache.counters.discards("window_hole") == 1


def test_protection_is_given_up_from_the_tail() -> None:
    cache = make()
    run(cache, 10)
    first, second = sequence(tokens(30)), sequence(tokens(30), 2)
    queue = queue_of(cache, first, second)
    assert queue.drop_protection()
    assert (first.protects is None, second.protects is None) == (False, True)
    assert queue.drop_protection()
    assert not queue.drop_protection()


def leader_of(cache: Cache, **changes: object) -> Sequence:
    """One that runs, with boundaries at 8, 24 and 40 tokens of 40, 8 of which are computed."""
    options: dict[str, object] = {"root": "r", "priority": 3} | changes
    leader = sequence(tokens(40), 1, **options)
    leader.boundaries = ((8, Kind.TURN), (24, Kind.TURN), (40, Kind.PROMPT))
    leader.lease, leader.computed = cache.lease(leader.root, None, 0), 8
    return leader


def test_a_follower_waits_for_the_deepest_boundary_on_its_way() -> None:
    cache = make()
    for length, depth in ((23, 0), (24, 24), (39, 24), (40, 40), (41, 40)):
        seq, leader = sequence(tokens(length), 2), leader_of(cache)
        queue = queue_of(cache, seq)
        assert queue.must_wait(seq, queue.find(seq), [leader]) == (depth > 0)
        assert (seq.waits_for or (None, 0))[1] == depth
        assert leader.rank[0] == (0 if depth else 3), "it runs at its follower's priority"


@pytest.mark.parametrize(
    ("leads", "follows"),
    [({"root": "other"}, {}), ({"seals": False}, {}), ({}, {"matches": False})],
)
def test_nobody_waits_for_what_he_cannot_start_from(
    leads: dict[str, object], follows: dict[str, object]
) -> None:
    """Another root's, or never sealed, or not to be matched."""
    cache = make()
    seq, leader = sequence(tokens(40), 2, **follows), leader_of(cache, **leads)
    queue = queue_of(cache, seq)
    assert not queue.must_wait(seq, queue.find(seq), [leader])
    assert leader.rank[0] == 3


def test_nobody_waits_for_what_is_no_deeper_than_its_match() -> None:
    cache = make()
    run(cache, 24)
    seq, leader = sequence(tokens(39), 2), leader_of(cache)
    queue = queue_of(cache, seq)
    assert not queue.must_wait(seq, queue.find(seq), [leader])


def test_waiting_and_the_lent_priority_end_with_their_reason() -> None:
    """The leader is past the boundary, or gone, or nobody waits for it any more."""
    cache = make()
    seq, leader = sequence(tokens(24), 2), leader_of(cache)
    queue = queue_of(cache, seq)
    assert queue.must_wait(seq, queue.find(seq), [leader])
    queue.inherit([leader])
    assert queue.still_waits(seq)
    assert leader.rank[0] == 0
    leader.computed = 24
    assert not queue.still_waits(seq)
    leader.computed, lease, leader.lease = 16, leader.lease, None
    assert not queue.still_waits(seq)
    leader.lease = lease
    assert queue.still_waits(seq)
    queue.remove(seq)
    queue.inherit([leader])
    assert leader.rank[0] == 3
    queue.add(seq)
    assert not queue.still_waits(seq), "it begins anew"
    assert queue.must_wait(seq, queue.find(seq), [leader])
    assert not queue.must_wait(seq, queue.find(seq), [])
    assert not queue.still_waits(seq)

"""Who makes way when frames or slots are short, and with what: the scheduler, plan by plan."""

from __future__ import annotations

import pytest

from core.small_caches import tokens
from engine.test_queue import sequence
from fake_device import small_spec
from merestone.core.cache import Cache, CacheSpec
from merestone.core.checkpoint import Kind
from merestone.core.orders import LoadHidden
from merestone.sched.depth import Depth
from merestone.sched.plan import StepPlan, StepResult, WorkResult
from merestone.sched.request import Sequence
from merestone.sched.scheduler import Scheduler


class Planning(Scheduler):
    """A scheduler whose device draws the same id again and again."""

    def __init__(self, spec: CacheSpec, *, slots: int = 4, budget: int = 12, drafts: int = 0):
        super().__init__(Cache(spec), slots=slots, token_budget=budget, depth=Depth(drafts))

    def start(self, *seqs: Sequence) -> None:
        """Have all of them run, and the best in rank computed."""
        for seq in seqs:
            self.add(seq)
        self.next()
        assert len(self.running) == len(seqs)

    def next(self) -> StepPlan:
        plan = self.plan()
        drawn = [WorkResult(w.slot, (7,) * (1 + w.drafts) if w.sample else ()) for w in plan.works]
        self.apply(StepResult(plan.step, tuple(drawn)))
        return plan

    def leave_free(self, frames: int) -> None:
        """Somebody else takes all others."""
        self.cache.pool.take(self.cache.free - frames, 10**6)


def answer(length: int, arrival: int, **changes: object) -> Sequence:
    """A request for a long answer to a prompt of its own. It leaves nothing that could go first."""
    seq = sequence(tokens(length, 100 * arrival), arrival, **({"seals": False} | changes))
    seq.max_tokens = 100
    return seq


def slots_of(plan: StepPlan) -> list[int]:
    return [work.slot for work in plan.works]


def rows_of(plan: StepPlan) -> int:
    return sum(work.end - work.start + work.drafts for work in plan.works)


def test_a_step_has_a_row_for_each_that_decodes_and_never_more_than_its_budget() -> None:
    """Whoever finds nothing left leaves nothing to others."""
    s = Planning(small_spec(900), slots=6, budget=9)
    s.start(*(answer(3, n) for n in (1, 2, 3)))
    s.token_budget = 3
    assert len(slots_of(s.next())) == 3
    s.token_budget = 9
    for number in (4, 5, 6):
        s.add(answer(60, number))
    assert max(rows_of(s.next()) for _ in range(12)) == 9


def test_drafts_are_rows_of_the_budget() -> None:
    s = Planning(small_spec(900, drafts=3), budget=24, drafts=3)
    s.start(*(answer(3, n) for n in (1, 2, 3)))
    s.add(answer(100, 4))
    plan = s.next()
    assert [work.drafts for work in plan.works] == [3, 3, 3, 0]
    assert rows_of(plan) == 20, "a prefill ends with a chunk"


def test_frames_are_taken_from_the_last_in_rank() -> None:
    """And never from who is before: the second one sits a step out."""
    s = Planning(small_spec(100))
    first, last, second = answer(4, 1), answer(4, 2, priority=2), answer(4, 3, priority=1)
    s.start(first, last, second)
    s.leave_free(0)  # the next row takes two frames, and a prompt holds three
    plan = s.next()
    assert slots_of(plan) == [first.slot]
    assert (s.running, s.waiting.items) == ([first, second], [last])
    assert (last.known, last.computed, last.preemptions) == (5, 0, 1), "its output is kept"


def prefill_between() -> tuple[Planning, Sequence, Sequence, Sequence]:
    """Two that decode, and a prefill, begun, that is between them in rank."""
    s = Planning(small_spec(100), budget=11)
    first, last = answer(3, 1), answer(3, 2, priority=2)
    prefill = answer(30, 3, priority=1)
    s.start(first, last)
    s.add(prefill)
    s.next()
    assert 0 < prefill.computed < 30
    return s, first, prefill, last


def test_who_has_rows_in_the_plan_makes_no_way_any_more() -> None:
    s, first, prefill, last = prefill_between()
    s.leave_free(4)  # for both rows, which begin new pages, but not for a chunk beside them
    plan = s.next()
    assert slots_of(plan) == [first.slot, last.slot]
    assert s.running == [first, last, prefill]


def test_a_prefill_takes_the_frames_of_a_decode_behind_it_and_no_more_than_its_rows() -> None:
    """The last in rank finds no frame for its row, and then makes way."""
    s, first, prefill, _ = prefill_between()
    s.leave_free(2)
    s.token_budget = 4
    plan = s.next()
    assert slots_of(plan) == [first.slot, prefill.slot]
    assert s.running == [first, prefill]
    assert rows_of(plan) == 4


@pytest.mark.parametrize(("length", "drafts", "left", "extra"), [(15, 1, 2, 1), (16, 0, 90, 3)])
def test_drafts_are_given_up_before_a_neighbour_is(
    length: int, drafts: int, left: int, extra: int
) -> None:
    """Those to verify, where its own row needs no frame, and those to ask for, where it does."""
    found = []
    for spare in range(8):
        s = Planning(small_spec(400, drafts=3), budget=40, drafts=3)
        first, last = answer(length, 1), answer(length, 2, priority=1)
        s.start(first, last)
        first.drafts, first.max_tokens = drafts, 1 + left
        s.leave_free(spare)
        work, *_ = s.next().works
        assert work.slot == first.slot
        found.append((-s.counters["preemptions"], work.drafts + work.propose))
    assert found == sorted(found)
    assert {(0, 0), (0, extra)} <= set(found) <= {(-1, 0), (0, 0), (0, extra)}


def test_a_slot_is_taken_from_the_last_in_rank_of_worse_priority() -> None:
    """By a seal: of what it computed only the row of the newest token is missing."""
    s = Planning(small_spec(400), slots=3, budget=40)
    seqs = [answer(9, n, priority=p, seals=True) for n, p in ((1, 1), (2, 3), (3, 2))]
    s.start(*seqs)
    s.next()
    equal, urgent = answer(9, 4, priority=3), answer(9, 5, priority=1)
    s.add(equal)
    s.next()
    assert s.waiting.items == [equal], "equals wait for each other"
    s.add(urgent)
    plan = s.next()
    assert s.waiting.items == [seqs[1], equal]
    assert [(save.slot, save.at) for save in plan.saves] == [(urgent.slot, 11)]
    assert s.waiting.find(seqs[1]).at == 11


def test_one_that_was_just_admitted_may_make_way_in_the_same_plan() -> None:
    """What it starts from is spared for it no more, and held once it starts: that was the room.
    Its slot is free again, and nothing is restored into it."""
    s = Planning(small_spec(400), budget=80)
    s.start(past := sequence(tokens(60, 300), 3))
    s.finish(past, Kind.RESPONSE)
    s.start(first := answer(7, 1))
    warm = answer(61, 3, priority=1)
    s.add(warm)
    s.waiting.protect()
    s.leave_free(0)
    s.waiting.drop_protection()
    plan = s.next()
    assert (s.running, s.waiting.items, s.counters["preemptions"]) == ([first], [warm], 1)
    assert (slots_of(plan), plan.frees, plan.admits, plan.before) == ([first.slot], (1,), (), ())


def test_whoever_else_was_admitted_is_restored() -> None:
    """The first copies its part-filled pages; for the second the third makes way."""
    s = Planning(small_spec(400), budget=400)
    past = sequence(tokens(58, 300), 8), sequence(tokens(240, 400), 9)
    s.start(*past)
    for seq in past:
        s.finish(seq, Kind.RESPONSE)
    s.next()
    warm = [answer(59, 3, priority=1), answer(59, 3, priority=2), answer(241, 4, priority=3)]
    for seq in warm:
        s.add(seq)
    s.waiting.protect()
    s.leave_free(2)
    s.waiting.drop_protection()
    plan = s.next()
    assert (s.running, s.waiting.items) == (warm[:2], warm[2:])
    assert plan.frees == (2,), "it was admitted as well"
    slots = [seq.slot for seq in warm[:2]]
    assert [admit.slot for admit in plan.admits] == slots
    restores = [order for order in plan.before if isinstance(order, LoadHidden)]
    assert [order.slot for order in restores] == slots
    assert len(plan.before) > 2, "pages are copied"


@pytest.mark.parametrize("better", [False, True])
@pytest.mark.parametrize(("length", "spare", "steps"), [(9, 0, 1), (9, 2, 1), (13, 3, 2)])
def test_the_oldest_starts_over_where_its_match_leaves_no_room(
    length: int, spare: int, steps: int, better: bool
) -> None:
    """What it had started from goes first: its own copy of the shared pages does not fit beside."""
    s = Planning(small_spec(400), budget=40)
    s.start(past := sequence(tokens(length, 300), 3))
    s.finish(past, Kind.RESPONSE)
    s.next()
    first, other = answer(length + 1, 1), answer(4, 2, priority=-1 if better else 1)
    first.buffer = tokens(length + 1, 300)
    s.add(first)
    s.leave_free(spare)
    assert s.next().before, "it is restored"
    for _ in range(steps - 1):
        s.next()
    s.add(other)
    starts, waits = (other, first) if better else (first, other)
    known = starts.known
    plan = s.next()
    assert [(w.slot, w.start, w.end) for w in plan.works] == [(starts.slot, 0, known)]
    assert (len(plan.admits), plan.frees, plan.before) == (1, (starts.slot,), ())
    assert (s.running, s.waiting.items) == ([starts], [waits])
    assert (starts.computed, starts.known, s.counters["unstuck"]) == (known, known + 1, 1)


def test_in_the_queue_nobody_keeps_a_priority_that_was_lent() -> None:
    """Else it would run before its betters, though who waited for it may be gone."""
    s = Planning(small_spec(400), slots=1)
    leader, follower = sequence(tokens(30), 1, priority=5), sequence(tokens(30), 2, priority=1)
    s.start(leader)
    s.add(follower)
    s.next()
    assert leader.rank[0] == 1
    best = answer(9, 3)
    s.add(best)
    s.next()
    assert s.running == [best]
    assert leader.rank[0] == 5
    assert s.waiting.items == [follower, leader]

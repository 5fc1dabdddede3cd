"""Plans made ahead of the one in flight change no answer, no boundary and no failure."""

from __future__ import annotations

import pytest

from engine.harness import Harness, Reply
from fake_device import extend_hash, next_token, oracle, prefix_hashes, small_spec
from merestone.core.checkpoint import State
from merestone.sched.outside import Nothing
from merestone.sched.plan import SamplingParams

PROMPT = [3, 1, 4, 1, 5]


def kept(h: Harness) -> set[tuple[int, str, tuple[int, ...]]]:
    assert all(c.state is State.PUBLISHED for c in h.cache.checkpoints())
    return {(c.at, str(c.kind), tuple(h.cache.tokens(c))) for c in h.cache.checkpoints()}


def ahead(h: Harness) -> int:
    return h.scheduler.counters["ahead"]


def until_ahead(h: Harness, reply: Reply) -> None:
    """Step until a plan is ahead of a result that has not been taken."""
    while h.engine.landing is None or not reply.ids():
        h.step()


def test_every_row_but_those_that_complete_a_chunk_is_planned_ahead() -> None:
    """From the first one behind a row that draws; the last one, too."""
    h = Harness(overlap=True)
    h.ask(PROMPT, 59)
    assert ahead(h) == sum(end % h.spec.chunk > 0 for end in range(7, 64))
    assert [plan.step for plan in h.device.plans] == list(range(1, len(h.device.plans) + 1))


def test_frames_that_could_be_evicted_are_frames_to_lead_with() -> None:
    h = Harness(small_spec(frames=64), overlap=True)
    for key in range(12):
        h.ask([key, *PROMPT], 30)
    assert h.cache.free < 10
    before = ahead(h)
    h.ask(PROMPT, 60)
    assert ahead(h) - before == 50


def test_those_that_wait_for_a_slot_are_no_reason_to_wait() -> None:
    """A server whose slots are all taken leads as one that nobody waits for."""
    h = Harness(slots=2, overlap=True)
    prompts = [[key, *PROMPT] for key in range(6)]
    replies = [h.send(prompt, 40) for prompt in prompts]
    h.drain()
    assert [reply.ids() for reply in replies] == [oracle(prompt, 40) for prompt in prompts]
    alone = Harness(slots=2, overlap=True)
    for pair in (prompts[:2], prompts[2:4], prompts[4:]):
        for prompt in pair:
            alone.send(prompt, 40)
        alone.drain()
    assert ahead(h) == ahead(alone) > 90


def test_whoever_may_take_a_slot_is_let_in_at_once() -> None:
    """A free one, or that of a less urgent one."""
    for slots, priority in ((3, 0), (2, -1)):
        h = Harness(slots=slots, overlap=True)
        first = h.send(PROMPT, 60)
        h.send([6, 6], 60)
        until_ahead(h, first)
        late = h.send([7, 7, 7], 5, priority=priority)
        h.step()
        assert len(late.ids()) == 1
        h.drain()
        assert late.ids() == oracle([7, 7, 7], 5)
        assert first.ids() == oracle(PROMPT, 60)


def test_a_priority_that_was_lent_protects_no_slot_when_the_boundary_is_there() -> None:
    """The urgent one comes when a boundary of its prompt is about to be written, and waits for it:
    then it takes the slot of whoever wrote it."""
    h = Harness(small_spec(frames=400), slots=2, overlap=True)
    answer = oracle(PROMPT, 60)
    leader = h.send(PROMPT, 60, priority=5, ends=((answer[3], "turn"),))
    mate = h.send([9] * 9, 60)
    h.step(4)
    assert leader.ids() == answer[:3], "the next one is on its way"
    urgent = h.send([*PROMPT, *answer[:4], 7], 4)
    h.step()
    assert h.scheduler.running[0].rank[0] == 0, "it is lent"
    h.step()
    assert len(urgent.ids()) == 1
    h.drain()
    assert urgent.restored == len(PROMPT) + 4
    assert (leader.ids(), mate.ids()) == (answer, oracle([9] * 9, 60))


def test_who_waits_for_frames_is_thought_of_with_every_plan() -> None:
    h = Harness(small_spec(frames=60), slots=4, budget=64, overlap=True)
    running, late = h.send([3] * 50, 9), h.send([4] * 50, 9)
    for _ in range(9):
        assert running.finished() is None
        h.step()
        assert len(h.scheduler.waiting) == 1
        assert h.engine.landing is None
    h.drain()
    assert late.ids() == oracle([4] * 50, 9)
    assert ahead(h) > 0


@pytest.mark.parametrize("overlap", [False, True])
def test_most_steps_of_plain_decoding_are_planned_ahead(overlap: bool) -> None:
    h = Harness(overlap=overlap)
    replies = [h.send(PROMPT, 60), h.send(PROMPT[:3], 60)]
    h.drain()
    for tokens, reply in zip((PROMPT, PROMPT[:3]), replies, strict=True):
        assert reply.ids() == oracle(tokens, 60)
    assert ahead(h) >= 40 if overlap else ahead(h) == 0
    # No row behind the last token that an answer may have.
    assert h.device.rows == sum(len(tokens) + 59 for tokens in (PROMPT, PROMPT[:3]))


def test_the_same_boundaries_are_kept_with_and_without() -> None:
    """Reasoning ends, stops, turns, and answers that end at a whole chunk or beside one."""
    found = []
    for overlap in (False, True):
        # Room for all: a plan ahead holds its frames a step longer, so other ones might go.
        h = Harness(small_spec(frames=256), overlap=overlap)
        for count in (11, 12, 13, 30):
            prompt = [count, 1, 4, 1, 5]
            answer = oracle(prompt, count)
            ends = ((answer[count // 2], "reasoning"),)
            first = h.ask(prompt, count, ends=ends)
            again = h.ask([*prompt, *first.ids(), 7, 8], 5, stop_ids=(answer[0], answer[1]))
            assert again.restored == len(prompt) + count - 1
        found.append(kept(h))
        assert bool(ahead(h)) == overlap
    assert found[0] == found[1]


def test_a_stop_seen_with_a_row_beyond_it_in_flight() -> None:
    answer = oracle(PROMPT, 20)
    stop = next(i for i in range(5, 20) if answer[i] not in answer[:i])
    h = Harness(overlap=True)
    reply = h.send(PROMPT, 20, stop_ids=(answer[stop],))
    other = h.send([9, 9], 60)
    while not reply.finished():
        h.step()
    assert reply.ids() == answer[: stop + 1]
    h.step(2)  # the plan ahead, and the one that saves what the answer left
    assert (len(PROMPT) + stop, "response") in {(at, kind) for at, kind, _ in kept(h)}
    assert len(other.ids()) < 60
    h.drain()
    assert other.ids() == oracle([9, 9], 60)
    turn = h.ask([*PROMPT, *reply.ids(), 2, 2], 4)
    assert turn.restored == len(PROMPT) + stop


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(logprobs=0),
        SamplingParams(presence_penalty=0.5),
        SamplingParams(banned=(1,), min_tokens=3),
        SamplingParams(logit_bias=((1, 2.0),)),
    ],
)
def test_what_the_host_chooses_is_waited_for(params: SamplingParams) -> None:
    h = Harness(overlap=True)
    reply = h.ask(PROMPT, 20, params=params)
    assert reply.ids() == oracle(PROMPT, 20)
    assert ahead(h) == 0
    # Its neighbours wait with it, except where its own row completes a chunk.
    plain, reply = h.send([9, 9], 40), h.send(PROMPT, 40, params=params)
    h.step(24)
    assert len(h.scheduler.running) == 2
    assert ahead(h) <= 3
    slot = next(seq.slot for seq in h.scheduler.running if seq.params == params)
    assert not any(w.fed for plan in h.device.plans for w in plan.works if w.slot == slot)
    h.drain()
    assert (plain.ids(), reply.ids()) == (oracle([9, 9], 40), oracle(PROMPT, 40))


class Watching:
    """Whatever sees each plan and each result, and does nothing."""

    def __getattr__(self, name: str) -> object:
        return getattr(Nothing(), name)

    def judge(self, flight: object, result: object) -> dict[int, str]:
        return {}


@pytest.mark.parametrize("who", ["nobody", "a drafter", "stores", "a verifier"])
def test_whoever_wants_to_see_each_step_is_waited_for(who: str) -> None:
    h = Harness(small_spec(200, drafts=3 * (who == "a drafter")), overlap=True)
    if who == "stores":
        h.scheduler.outside = Watching()
    if who == "a verifier":
        h.scheduler.verifier = Watching()
    h.ask(PROMPT, 20)
    assert bool(ahead(h)) == (who == "nobody")


@pytest.mark.parametrize("which", ["in flight", "ahead"])
def test_a_failure_takes_the_plan_ahead_along(which: str) -> None:
    """Nothing of either is published, and the next request finds an engine that works."""
    h = Harness(overlap=True)
    reply = h.send(PROMPT, 40)
    until_ahead(h, reply)
    before, got = kept(h), len(reply.ids())
    if which == "ahead":
        h.device.fail_next = True  # the next launch
        h.step()
        assert len(reply.ids()) == got + 1  # the step in flight was good
    else:
        landing = h.engine.landing
        assert landing is not None

        def broken():
            landing()
            raise RuntimeError("injected")

        h.engine.landing = broken
        h.step()
        assert reply.finished().reason == "error"
        assert h.scheduler.ahead is None is h.scheduler.flight
        h.device.flying.clear()
    h.drain()
    assert reply.finished().reason == "error"
    assert h.engine.counters["failed_steps"] == 1
    assert kept(h) == before
    assert h.ask(PROMPT, 12).ids() == oracle(PROMPT, 12)


def test_what_is_not_finite_is_dropped_with_what_it_fed() -> None:
    h = Harness(overlap=True)
    h.ask(PROMPT, 4)
    bad, good = h.send(PROMPT, 40), h.send([8, 8, 8], 40)
    while not (h.engine.landing and len(bad.ids()) > 2 and len(good.ids()) > 2):
        h.step()
    slots = {seq.id: seq.slot for seq in h.scheduler.running}
    h.device.bad_slots = {slots["r2"]}
    h.drain()
    # It had started from a checkpoint: it starts again, from nothing.
    assert h.scheduler.counters["not_finite"] == 1
    assert bad.ids() == oracle(PROMPT, 40)
    assert good.ids() == oracle([8, 8, 8], 40)


def test_whoever_comes_or_asks_finds_no_plan_in_flight() -> None:
    h = Harness(overlap=True)
    reply = h.send(PROMPT, 40, id="first")
    until_ahead(h, reply)
    seen = []
    h.engine._post(lambda: seen.append((h.scheduler.flight, h.engine.landing)))
    h.engine.take()
    assert seen == [(None, None)]
    until_ahead(h, reply)
    h.engine.abort("first")
    h.step()
    ids = reply.ids()
    assert ids == oracle(PROMPT, 40)[: len(ids)]
    h.drain()
    assert h.ask([*PROMPT, *ids], 4).restored >= len(PROMPT) + len(ids) - 1


def test_a_sink_that_fails_with_a_row_in_flight() -> None:
    h = Harness(overlap=True)
    prefix = prefix_hashes(PROMPT)[-1]
    reply, other = h.send(PROMPT, 40), h.send([6, 6], 40)
    until_ahead(h, reply)
    reply.gone = True
    h.drain()
    assert other.ids() == oracle([6, 6], 40)
    assert reply.ids()[0] == next_token(prefix)
    assert reply.ids()[1] == next_token(extend_hash(prefix, reply.ids()[0]))
    assert ahead(h) > 20


def test_a_client_that_leaves_with_an_anchor_ahead() -> None:
    """Of its other choice, whose row in flight completes a chunk, nothing can be sealed."""
    met = 0
    for steps in range(4, 12):
        h = Harness(small_spec(frames=120, chunk=4), overlap=True)
        reply, mate = h.send([5] * 8, 40, n=2), h.send([3], 40)
        h.step(steps)
        met += any(seq.lease.anchor > seq.computed for seq in h.scheduler.running)
        reply.gone = True
        h.drain()
        assert h.cache.counters.discarded == {}
        assert mate.ids() == oracle([3], 40)
    assert met > 0


def test_frames_that_run_short_end_the_lead() -> None:
    """Preemption and eviction are decided with nothing in flight; every answer is right."""
    preempted = 0
    for frames in range(36, 70):
        h = Harness(small_spec(frames=frames, anchor_frames=5), overlap=True)
        prompts = [[i, *[2] * (i + 2)] for i in range(4)]  # they complete chunks by turns
        replies = [h.send(prompt, 26) for prompt in prompts]
        h.drain()
        for prompt, reply in zip(prompts, replies, strict=True):
            assert reply.ids() == oracle(prompt, 26)
        preempted += h.scheduler.counters["preemptions"]
        assert ahead(h) > 0
    assert preempted > 0

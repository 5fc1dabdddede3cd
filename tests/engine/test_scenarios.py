"""The restore contract's scenarios, on the device double: bookkeeping only, in milliseconds."""

from __future__ import annotations

import random

import msgspec
import numpy as np
import pytest

from engine.harness import Harness, Reply
from fake_device import oracle, small_spec
from merestone.engine.api import EngineRefusal, Event, Finished, GenerateRequest, Started
from merestone.sched.plan import SamplingParams, StepPlan


def stream(count: int, key: int) -> list[int]:
    rng = random.Random(key)
    return [key % 50] + [rng.randrange(50) for _ in range(count - 1)]


@pytest.mark.parametrize("length", [1, 2, 3, 7, 8, 9, 15, 16, 17, 63, 64, 65, 100])
def test_exact_replay_runs_no_row(length: int) -> None:
    h = Harness()
    prompt = stream(length, 1)
    assert h.ask(prompt).restored == 0
    for _ in range(2):
        before = h.device.rows
        reply = h.send(prompt, 1)
        h.drain()
        assert reply.restored == length
        assert reply.ids() == oracle(prompt, 1)
        assert h.device.rows == before
        assert reply.finished().cache.kind == "prompt"


def test_next_turn_restores_all_but_the_last_token() -> None:
    h = Harness(small_spec(frames=200))
    history, known = stream(13, 2), 0
    for turn in range(6):
        reply = h.ask(history, 9)
        if turn:
            assert reply.restored == known - 1
        history = history + reply.ids()
        known = len(history)
        history = history + stream(5, 10 + turn)


def test_instruction_and_turn_boundaries() -> None:
    h = Harness(small_spec(frames=200), budget=64)
    head = stream(21, 3)
    first = head + stream(40, 4)
    h.ask(first, 4, boundaries=((21, "instruction"), (58, "turn")))
    other = h.ask(head + stream(33, 5), 4, boundaries=((21, "instruction"),))
    assert (other.restored, other.finished().cache.kind) == (21, "instruction")
    again = h.ask(first[:58] + stream(7, 6), 4)
    assert (again.restored, again.finished().cache.kind) == (58, "turn")


def test_reuse_does_not_depend_on_the_budget() -> None:
    for budget in (4, 7, 8, 9, 32, 500):
        h = Harness(small_spec(frames=200), budget=budget)
        prompt = stream(90, 1)
        h.ask(prompt, 2, boundaries=((30, "instruction"), (61, "turn")))
        assert h.ask(prompt, 2).restored == 90
        assert h.ask([*prompt[:61], 1, 2], 2).restored == 61
        assert h.ask([*prompt[:30], 1, 2], 2).restored == 30


def test_divergence_inside_a_page_uses_no_foreign_row() -> None:
    h = Harness(small_spec(frames=200))
    prompt = stream(37, 1)
    h.ask(prompt)
    for cut in reversed(range(1, 37)):  # a junction lies where the last one parted
        assert h.ask([*prompt[:cut], (prompt[cut] + 1) % 50], 3).restored == 0


def test_n_choices_fork_from_the_prompt_boundary() -> None:
    h = Harness()
    reply = h.send(stream(40, 1), 6, n=4)
    h.drain()
    for choice in range(4):
        assert reply.ids(choice) == oracle(stream(40, 1), 6, choice)
    # One computes the prompt, the others restore all of it.
    assert sorted(reply.finished(c).cache.restored for c in range(4)) == [0, 40, 40, 40]
    assert h.device.rows == 40 + 4 * 5


def test_without_cache_nothing_is_looked_up_or_left() -> None:
    h = Harness()
    for _ in range(2):
        reply = h.send(stream(40, 1), 6, cache=False, n=2)
        h.drain()
        assert reply.restored == 0
        assert not list(h.cache.checkpoints())
        assert h.cache.free == h.spec.frames


def test_single_flight_computes_a_shared_prefix_once() -> None:
    h = Harness(small_spec(frames=300), slots=8, budget=16)
    head = stream(64, 1)
    prompts = [head + stream(9, 20 + i) for i in range(6)]
    replies = [h.send(p, 5, boundaries=((64, "instruction"),)) for p in prompts]
    h.drain()
    assert [r.restored for r in replies] == [0, 64, 64, 64, 64, 64]
    for prompt, reply in zip(prompts, replies, strict=True):
        assert reply.ids() == oracle(prompt, 5)


def test_a_follower_leads_when_its_leader_is_aborted() -> None:
    h = Harness(small_spec(frames=300), budget=8)
    head = stream(64, 1)
    leader = h.send([*head, 1], 5, boundaries=((64, "instruction"),))
    follower = h.send([*head, 2], 5, boundaries=((64, "instruction"),))
    h.step(3)
    h.engine.abort("r1")
    h.drain()
    assert leader.finished().reason == "abort"
    assert follower.ids() == oracle([*head, 2], 5)
    # The rows that the leader had finished are the follower's.
    assert follower.restored == 24


def test_the_leader_inherits_priority() -> None:
    h = Harness(small_spec(frames=300), slots=4, budget=8)
    head = stream(64, 1)
    other = h.send(stream(80, 9), 2, priority=1)
    h.send([*head, 1], 2, priority=5, boundaries=((64, "instruction"),))
    h.step()
    urgent = h.send([*head, 2], 2, priority=0, boundaries=((64, "instruction"),))
    while urgent.finished() is None:
        h.step()
    assert other.finished() is None
    h.drain()


def test_an_aborted_prefill_is_sealed_where_it_stood() -> None:
    h = Harness(budget=16)
    prompt = stream(100, 1)
    reply = h.send(prompt)
    h.step(3)
    h.engine.abort("r1")
    h.drain()
    assert reply.finished().reason == "abort"
    again = h.ask(prompt)
    assert (again.restored, again.finished().cache.kind) == (48, "aligned")


def test_retries_under_a_time_limit_make_progress() -> None:
    h = Harness(budget=16)
    prompt = stream(100, 1)
    done = 0
    for attempt in range(4):
        h.send(prompt, 1)
        h.step(3)
        if h.cache.match(("", ""), _array(prompt)).at == 100:
            break
        h.engine.abort(f"r{attempt + 1}")
        h.drain()
        now = h.cache.match(("", ""), _array(prompt)).at
        assert now > done
        done = now
    h.drain()
    assert h.ask(prompt, 1).restored == 100


def _array(tokens):
    return np.array(tokens, np.int32)


def test_abort_of_a_queued_request_leaves_the_running_one_alone() -> None:
    h = Harness(slots=1)
    running = h.send(stream(20, 1), 30)
    queued = h.send(stream(20, 2), 5)
    h.step(5)
    h.engine.abort("r2")
    h.drain()
    assert queued.finished().reason == "abort"
    assert running.ids() == oracle(stream(20, 1), 30)


def test_the_last_response_of_an_idle_engine_is_published() -> None:
    h = Harness()
    prompt = stream(20, 1)
    reply = h.ask(prompt, 7)
    kinds = {(c.at, str(c.kind)) for c in h.cache.checkpoints()}
    assert kinds == {(20, "prompt"), (26, "response")}
    assert all(str(c.state) == "published" for c in h.cache.checkpoints()), reply
    assert h.engine.stats()["checkpoints_spared"] == 0, "nobody asked for that"


def test_a_hundred_next_turns_sent_at_once_never_miss() -> None:
    """The next turn arrives with the last event of the answer, before its seal is published."""
    h = Harness(small_spec(frames=400), slots=4)
    follow: list[tuple[int, Reply]] = []
    for turn in range(100):
        history = stream(10 + turn % 17, turn)
        reply = Reply()

        def sink(events: list[Event], reply: Reply = reply, history=history) -> None:
            reply.sink(events)
            if reply.finished():
                ids = history + reply.ids()
                follow.append((len(ids) - 1, h.send([*ids, 1, 2, 3], 1)))

        request = GenerateRequest(f"t{turn}", tuple(history), SamplingParams(), 3)
        h.engine.submit(request, sink)
        h.drain()
    assert [second.restored for _, second in follow] == [known for known, _ in follow]
    assert len(follow) == 100


def test_preemption_gives_the_same_answers() -> None:
    h = Harness(small_spec(frames=60), slots=4, budget=32)
    prompts = [stream(9 + 3 * i, 30 + i) for i in range(4)]
    replies = [h.send(p, 90) for p in prompts]
    h.drain()
    assert h.scheduler.counters["preemptions"] > 0
    for prompt, reply in zip(prompts, replies, strict=True):
        assert reply.ids() == oracle(prompt, 90)


def test_priority_takes_a_slot_by_a_seal() -> None:
    h = Harness(small_spec(frames=200), slots=1)
    slow = h.send(stream(30, 1), 30, priority=5)
    h.step(8)
    urgent = h.send(stream(12, 2), 3, priority=0)
    h.step(5)
    assert urgent.finished() is not None
    assert slow.finished() is None
    rows = h.device.rows
    h.drain()
    assert slow.ids() == oracle(stream(30, 1), 30)
    # Nothing of the preempted request was computed twice.
    assert h.device.rows - rows <= 30


def test_requests_near_the_pool_answer_or_are_refused_at_once() -> None:
    h = Harness(small_spec(frames=40), budget=16)
    limit = h.cache.capacity()
    for share in (0.5, 0.95, 0.98, 0.99):
        prompt = stream(int(limit * share) - 1, 7)
        assert h.ask(prompt, 1).finished().reason == "length"
    with pytest.raises(EngineRefusal, match=str(limit)):
        h.send(stream(limit, 8), 1)
    reply = h.send(stream(limit - 5, 9), None)
    h.drain()
    assert reply.finished().completion_tokens == 5


def test_continuations_together_keep_their_neighbours_states() -> None:
    """Six warm prompts fill the pool; four continuations at once restore everything."""
    probe = Harness(small_spec(frames=1000))
    for key in range(6):
        probe.ask(stream(48, key), 1)
    used = probe.spec.frames - probe.cache.free
    h = Harness(small_spec(frames=used + 24), slots=4, budget=64)
    for key in range(6):
        h.ask(stream(48, key), 1)
    replies = [h.send([*stream(48, key), 3, 4], 2) for key in range(4)]
    h.drain()
    assert [r.restored for r in replies] == [48] * 4
    assert h.scheduler.counters["preemptions"] == 0


def test_a_failed_step_publishes_nothing_and_poisons_nothing() -> None:
    h = Harness()
    prompt = stream(30, 1)
    reply = h.send(prompt)
    h.device.fail_next = True
    h.drain()
    assert reply.finished().reason == "error"
    assert "injected" in reply.finished().error
    assert not list(h.cache.checkpoints())
    assert h.ask(prompt).restored == 0


def test_a_state_that_is_not_finite_is_not_published() -> None:
    h = Harness()
    prompt = stream(30, 1)
    h.device.bad_saves = True
    h.ask(prompt, 3)
    assert not [c for c in h.cache.checkpoints() if c.at == 30]
    assert h.cache.counters.discards("not_finite") == 1
    assert h.ask(prompt, 1).restored == 0
    assert h.ask(prompt, 1).restored == 30


def test_a_poisoned_checkpoint_is_dropped_and_recomputed() -> None:
    h = Harness()
    prompt = stream(30, 1)
    h.ask(prompt, 1)
    reply = h.send([*prompt, 5], 4)
    h.device.bad_slots = {0}
    h.drain()
    assert reply.ids() == oracle([*prompt, 5], 4)
    assert h.scheduler.counters["not_finite"] == 1


def test_a_slot_that_is_not_finite_publishes_nothing_of_its_step() -> None:
    """Though the hidden row that was saved of it is finite."""
    h = Harness()
    reply = h.send(stream(30, 1), 4)
    h.device.bad_slots = {0}
    h.drain()
    assert reply.finished().reason == "error"
    assert not list(h.cache.checkpoints())
    assert h.cache.counters.discards("not_finite") == 1


def test_with_a_poisoned_checkpoint_goes_all_that_shares_a_frame_with_it() -> None:
    h, prompt = Harness(small_spec(frames=200)), stream(30, 1)
    h.ask(prompt, 1)
    h.ask([*prompt, 5], 4)
    h.ask(stream(20, 9), 1)
    origin = h.cache.match(("", ""), _array(prompt)).checkpoint
    kin = h.cache.relatives(origin)
    assert len(kin) > 2
    reply = h.send([*prompt, 6], 4)
    h.device.bad_slots = {0}
    h.drain()
    assert reply.ids() == oracle([*prompt, 6], 4)
    assert {str(c.state) for c in kin} == {"dropped"}
    assert h.ask(stream(20, 9), 1).restored == 20


def test_decodes_go_on_beside_a_long_prefill() -> None:
    h = Harness(small_spec(frames=600), slots=4, budget=16)
    decodes = [h.send(stream(9, key), 60) for key in range(3)]
    h.step(4)
    before = [len(d.ids()) for d in decodes]
    long = h.send(stream(200, 9), 1)
    h.step(10)
    assert [len(d.ids()) for d in decodes] == [b + 10 for b in before]
    h.drain()
    assert long.ids() == oracle(stream(200, 9), 1)


def test_prompt_logprobs_match_nothing_and_still_seal() -> None:
    h = Harness(budget=16)
    prompt = stream(50, 1)
    h.ask(prompt, 1)
    reply = h.send(prompt, 1, prompt_logprobs=0)
    h.drain()
    scored = reply.finished().prompt_logprobs
    assert reply.restored == 0
    assert scored[0] is None
    assert [entry.token for entry in scored[1:]] == prompt[1:]
    assert h.ask(prompt, 1).restored == 50


def test_echo_alone_needs_no_sample() -> None:
    h = Harness()
    reply = h.send(stream(20, 1), 0, prompt_logprobs=0)
    h.drain()
    assert reply.ids() == []
    assert len(reply.finished().prompt_logprobs) == 20
    assert [c.at for c in h.cache.checkpoints()] == [20], "no row of a response"
    assert h.ask(stream(20, 1), 1).restored == 20


def test_events_begin_with_started_and_end_with_finished() -> None:
    h = Harness()
    reply = h.ask(stream(20, 1), 4)
    assert isinstance(reply.events[0], Started)
    assert isinstance(reply.events[-1], Finished)
    assert sum(isinstance(e, Finished) for e in reply.events) == 1


def test_plans_and_results_survive_serialisation() -> None:
    h = Harness(budget=16)
    h.ask(stream(60, 1), 4, boundaries=((21, "instruction"),))
    h.ask(stream(60, 1), 4)
    assert len(h.device.plans) > 5
    for plan in h.device.plans:
        data = msgspec.msgpack.encode(plan)
        assert msgspec.msgpack.decode(data, type=StepPlan) == plan
    assert StepPlan(step=1).empty

"""Stops, boundaries and shortages in the middle of an accepted block, on the device double."""

from __future__ import annotations

import random

import numpy as np
import pytest

from engine.harness import Harness, Reply
from engine.test_scenarios import stream
from fake_device import oracle, small_spec
from merestone.engine.api import Finished
from merestone.sched.plan import SamplingParams


def drafted(accuracy: float = 1.0, drafts: int = 3, frames: int = 300, **options) -> Harness:
    return Harness(small_spec(frames, drafts=drafts), accuracy=accuracy, **options)


def test_blocks_save_steps_and_never_go_past_the_end() -> None:
    for count in range(1, 14):
        h = drafted()
        reply = h.ask(stream(9, 1), count)
        assert reply.ids() == oracle(stream(9, 1), count)
        # One token with the prompt, then blocks of four, all of it wanted.
        works = [work for plan in h.device.plans for work in plan.works]
        assert len(works) == 1 + -(-(count - 1) // 4)
        assert sum(1 + work.drafts for work in works) == count
        assert h.scheduler.depth.tally.drafted == h.scheduler.depth.tally.accepted


def test_wrong_drafts_cost_rows_only() -> None:
    h = drafted(accuracy=0.0)
    assert h.ask(stream(9, 1), 13).ids() == oracle(stream(9, 1), 13)
    assert sum(h.scheduler.depth.tally.accepted) == 0
    assert len([work for plan in h.device.plans for work in plan.works]) == 13


@pytest.mark.parametrize("place", range(1, 14))
def test_a_stop_inside_a_block_ends_there(place: int) -> None:
    prompt = stream(12, 7)
    answer = oracle(prompt, 30)
    token = answer[place]
    wanted = answer[: answer.index(token) + 1]
    h = drafted()
    reply = h.ask(prompt, 30, stop_ids=(token,))
    end = reply.finished()
    assert (reply.ids(), end.reason, end.stop) == (wanted, "stop", token)
    assert end.completion_tokens == len(wanted)
    # All tokens but the last returned one, wherever in a block that was.
    history = [*prompt, *wanted]
    assert h.ask([*history, 1, 2], 2).restored == max(len(history) - 1, 12)


def test_min_tokens_holds_inside_a_block() -> None:
    prompt = stream(12, 7)
    answer = oracle(prompt, 30)
    for least in range(1, 12):
        h = drafted()
        params = SamplingParams(min_tokens=least)
        reply = h.ask(prompt, 30, stop_ids=tuple(range(50)), params=params)
        assert reply.ids() == answer[:least]


class Words:
    """Text of one choice: a letter a token, and a stop string of three tokens."""

    def __init__(self, stop: list[int]) -> None:
        self.stop, self.seen, self.matched = stop, [], None

    def push(self, token: int) -> tuple[str, bool]:
        assert self.matched is None, "pushed past the stop"
        self.seen.append(token)
        if self.seen[-3:] == self.stop:
            self.matched = "stop"
        return chr(65 + token), self.matched is not None

    def flush(self) -> str:
        return ""


@pytest.mark.parametrize("place", range(3, 12))
def test_a_stop_string_inside_a_block(place: int) -> None:
    prompt = stream(12, 7)
    answer = oracle(prompt, 30)
    h = drafted()
    reply = h.ask(prompt, 30, text=lambda: Words(answer[place - 3 : place]))
    assert reply.ids() == answer[:place]
    assert h.ask([*prompt, *answer[:place], 3], 1).restored == 12 + place - 1


def kept(h: Harness) -> set[tuple[int, str, tuple[int, ...]]]:
    return {(c.at, str(c.kind), tuple(h.cache.tokens(c).tolist())) for c in h.cache.checkpoints()}


@pytest.mark.parametrize("accuracy", [0.0, 0.6, 1.0])
@pytest.mark.parametrize(("drafts", "adaptive"), [(1, False), (3, False), (5, False), (5, True)])
def test_the_same_boundaries_are_kept_with_drafts_and_without(
    accuracy: float, drafts: int, adaptive: bool
) -> None:
    """And the same answers, reports and reuse."""
    plain, fast = Harness(small_spec(1500)), drafted(accuracy, drafts, 1500, adaptive=adaptive)
    rng = random.Random(drafts)
    history: list[int] = []
    for turn in range(25):
        history = history[: rng.randrange(60)] + stream(rng.randrange(1, 30), rng.randrange(9))
        options = {
            "max_tokens": rng.randrange(24),
            "stop_ids": tuple(rng.sample(range(50), rng.choice([0, 6]))),
            "ends": tuple((token, "reasoning") for token in rng.sample(range(50), 8)),
            "boundaries": ((rng.randrange(1, len(history) + 1), "turn"),),
        }
        replies = []
        for h in (plain, fast):
            replies.append(h.send(history, **options))
            h.engine.take()
            while h.engine.step():
                pass
        first, second = (reply.finished() for reply in replies)
        assert replies[0].ids() == replies[1].ids()
        assert (first.reason, first.cache) == (second.reason, second.cache), turn
        assert kept(plain) == kept(fast), turn
        # Each is asked for once, and where it can be.
        assert not fast.cache.counters.discarded
        assert fast.cache.counters.duplicate == plain.cache.counters.duplicate
        fast.audit()
        history = history + replies[0].ids()
    assert (sum(fast.scheduler.depth.tally.accepted) > 0) == (accuracy > 0)


@pytest.mark.parametrize("group", ["mtp", "window", "full"])
@pytest.mark.parametrize("part", [0, -1])
def test_a_checkpoint_with_a_hole_is_not_restored(group: str, part: int) -> None:
    h = drafted()
    prompt = stream(30, 3)
    h.ask(prompt[:20], 1)
    h.ask(prompt, 1)
    deep = next(c for c in h.cache.checkpoints() if c.at == 30)
    first, frames = deep.pages[group]
    h.cache.protect(deep)
    h.cache.pool.drop(frames[[part]], deep.id)
    deep.pages[group] = first + (part == 0), np.delete(frames, part)
    h.cache.unprotect(deep)
    reply = h.ask(prompt, 9)
    assert reply.restored == 20
    assert h.cache.counters.discards("window_hole") == 1
    assert h.ask(prompt, 9).restored == 30


@pytest.mark.parametrize("accuracy", [0.0, 0.6, 1.0])
@pytest.mark.parametrize("steps", range(2, 7))
def test_aborted_in_verification(accuracy: float, steps: int) -> None:
    """What was committed stays useful; drafts on the way are nobody's."""
    h = drafted(accuracy)
    prompt = stream(20, 3)
    reply = h.send(prompt, 40, id="gone")
    h.step(steps)
    done = len(reply.ids())
    h.engine.abort("gone")
    h.drain()
    answer = oracle(prompt, 40)
    again = h.send([*prompt, *answer[:done]], 40 - done)
    h.drain()
    assert again.ids() == answer[done:]
    assert again.restored == 20 + done - 1


@pytest.mark.parametrize("accuracy", [0.6, 1.0])
def test_preempted_in_the_middle_of_a_block(accuracy: float) -> None:
    """By a seal, at whatever the last block left: nothing is computed twice."""
    for steps in range(2, 9):
        h = drafted(accuracy, slots=1)
        slow = h.send(stream(30, 1), 30, priority=5)
        h.step(steps)
        done = len(slow.ids())
        urgent = h.send(stream(12, 2), 3, priority=0)
        h.drain()
        assert urgent.ids() == oracle(stream(12, 2), 3)
        assert slow.ids() == oracle(stream(30, 1), 30)
        assert h.scheduler.counters["preemptions"] == 1
        starts = [w.start for p in h.device.plans for w in p.works if w.start >= 30]
        assert starts.count(30 + done - 1) == 1, "it began again elsewhere"


def test_short_of_frames_there_are_fewer_drafts_and_the_same_tokens() -> None:
    h = Harness(small_spec(110, drafts=3), slots=4, budget=32, accuracy=0.9)
    prompts = [stream(9 + 3 * i, 30 + i) for i in range(4)]
    replies = [h.send(p, 80) for p in prompts]
    h.drain()
    assert h.scheduler.counters["preemptions"] > 0
    for prompt, reply in zip(prompts, replies, strict=True):
        assert reply.ids() == oracle(prompt, 80)
    works = [w for p in h.device.plans for w in p.works]
    assert any(w.sample and not w.propose for w in works)


def test_short_of_budget_there_are_fewer_drafts_and_prefills_go_on() -> None:
    h = drafted(slots=4, budget=8)
    decodes = [h.send(stream(5, key), 40) for key in range(3)]
    h.step(6)
    long = h.send(stream(40, 9), 1)
    while long.finished() is None:
        before = [len(d.ids()) for d in decodes]
        h.step()
        assert all(len(d.ids()) > b for d, b in zip(decodes, before, strict=True))
    assert h.scheduler.step < 30
    h.drain()
    for key, reply in enumerate(decodes):
        assert reply.ids() == oracle(stream(5, key), 40)
    for plan in h.device.plans:
        assert sum(w.end - w.start + w.drafts for w in plan.works) <= 8


@pytest.mark.parametrize(("accuracy", "most"), [(0.0, 1.3), (1.0, 4.9)])
def test_depth_follows_acceptance(accuracy: float, most: float) -> None:
    h = drafted(accuracy, drafts=5, adaptive=True)
    assert h.ask(stream(9, 1), 100).ids() == oracle(stream(9, 1), 100)
    tally = h.scheduler.depth.tally
    mean = sum(tally.drafted) / tally.steps
    assert mean < most if accuracy == 0.0 else mean > most - 0.5


def test_usage_counts_drafts_by_place() -> None:
    reply: Reply = drafted(0.6).ask(stream(9, 1), 40)
    end = reply.finished()
    assert isinstance(end, Finished)
    drafts = end.drafts
    assert drafts.steps == drafts.drafted[0] >= drafts.drafted[1] >= drafts.drafted[2]
    assert list(drafts.accepted) == sorted(drafts.accepted, reverse=True)
    # Every token but the prompt's is an accepted draft or ends a step.
    assert sum(drafts.accepted) <= 39 <= sum(drafts.accepted) + drafts.steps + 1
    assert Harness().ask(stream(9, 1), 4).finished().drafts is None

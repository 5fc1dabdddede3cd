"""With speculation = without, bit for bit, on the real engine, whatever the drafts are worth.

Answers are compared with the plain loop: ids, and the bits of log probabilities. What a drafter
proposes after a restore is compared with what it proposed cold.
"""

from __future__ import annotations

import pytest

from engine.real import cold, stream
from spec_engine.spoken import ACCURACIES, KINDS, Spoken, agree


@pytest.mark.parametrize(
    ("kind", "accuracy"), [("lag", 0.0), ("lag", 0.7), ("lag", 1.0), ("window", 0.7)]
)
def test_replays_equal_the_plain_loop_and_draft_as_before(kind: str, accuracy: float) -> None:
    real = Spoken(kind, accuracy, frames=2500)
    prompts = [stream(length, 3 + length) for length in (1, 2, 63, 64, 65, 129)]
    for prompt in prompts:
        reply = real.say(prompt, 22)
        real.drain()
        real.check(prompt, reply)
    cold_accepted, first = real.accepted, real.proposals()
    if accuracy == 1.0:
        assert cold_accepted == len(prompts) * 15  # of 22 tokens: one, five blocks of four, one
    assert (cold_accepted > 0) == (accuracy > 0)
    for count in (1, 22):
        before = real.segments
        replies = [real.say(prompt, count) for prompt in prompts]
        real.drain()
        for prompt, reply in zip(prompts, replies, strict=True):
            assert real.check(prompt, reply).cache.restored == len(prompt)
        if count == 1:
            assert real.segments == before, "an exact hit ran a layer"
    assert agree(first, real.proposals()) == len(first)
    assert real.accepted == 2 * cold_accepted


@pytest.mark.parametrize("accuracy", ACCURACIES)
def test_depth_by_acceptance_changes_no_bit_and_no_boundary(accuracy: float) -> None:
    real = Spoken("lag", accuracy, 5, frames=2500, speculate="mtp:auto")
    assert str(real.engine.retention) == "boundaries"
    history = stream(50, 9)
    depths = set()
    for turn in range(4):
        reply = real.say(history, 24)
        real.drain()
        assert real.check(history, reply).cache.restored >= len(history) - 6 or turn == 0
        depths |= {len(ids) for ids in real.proposals().values()}
        history = (*history, *reply.ids(), *stream(5, 20 + turn))
    assert len(depths) > 1


@pytest.mark.parametrize(
    ("kind", "at"),
    [("lag", 32), ("lag", 33), ("lag", 64), ("lag", 65), ("window", 31), ("window", 64)],
)
def test_two_readers_beside_a_live_producer(kind: str, at: int) -> None:
    """Around the ends of pages and chunks: nobody writes what another reads."""
    head = stream(at, 5)
    prompts = [head, (*head, *stream(9, 6)), (*head, *stream(40, 7))]
    alone = Spoken(kind, 0.7, frames=1500)
    for prompt in prompts:
        alone.say(prompt, 12, salt=str(len(prompt)))
        alone.drain()
    wanted = alone.proposals()
    real = Spoken(kind, 0.7, frames=1500)
    replies = [real.say(head, 12)]
    for _ in range(3):
        real.step()
    assert 1 < len(replies[0].ids()) < 12
    replies += [real.say(prompt, 12) for prompt in prompts]
    real.drain()
    for prompt, reply in zip([head, *prompts], replies, strict=True):
        end = real.check(prompt, reply)
        assert end.cache.restored == (0 if reply is replies[0] else at)
    assert agree(wanted, real.proposals()) >= len(wanted) - 3


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("accuracy", [0.7, 1.0])
def test_aborted_and_preempted_in_the_middle_of_a_block(kind: str, accuracy: float) -> None:
    prompt = stream(60, 9)
    real = Spoken(kind, accuracy, frames=1500, max_running=1)
    for steps in (2, 3, 4):
        reply = real.say(prompt, 40, id="gone", salt=str(steps))
        for _ in range(steps):
            real.step()
        real.engine.abort("gone")
        real.drain()
        longer = (*prompt, *reply.ids())
        again = real.say(longer, 20, salt=str(steps))
        real.drain()
        assert real.check(longer, again).cache.restored == len(longer) - 1
        slow = real.say(prompt, 40, priority=5, salt=f"x{steps}")
        for _ in range(steps):
            real.step()
        urgent = real.say(stream(20, steps), 3)
        real.drain()
        real.check(stream(20, steps), urgent)
        real.check(prompt, slow)
    assert real.engine.scheduler.counters["preemptions"] == 3


@pytest.mark.parametrize("kind", KINDS)
def test_turns_with_stops_inside_blocks(kind: str) -> None:
    """Instruction, turn and response are restored as without drafts; the tokens of a next turn
    and the drafts made for it are those of a cold run."""
    real, plain = Spoken(kind, 1.0, 5, frames=2500), Spoken(kind, 0.0, 5, frames=2500)
    head = stream(37, 3)
    history = (*head, *stream(21, 4))
    known = 0
    for turn in range(5):
        stop = cold(real.model, history, 12)[0][5 + turn]
        for one in (real, plain):
            reply = one.say(history, 20, boundaries=((37, "instruction"),), stop_ids=(stop,))
            one.drain()
            end = one.check(history, reply)
            assert end.reason == "stop"
            assert end.cache.restored == known
        known = len(history) + len(reply.ids()) - 1
        history = (*history, *reply.ids(), *stream(7, 30 + turn))
    other = (*head, *stream(30, 8))
    reply = real.say(other, 8)
    real.drain()
    assert real.check(other, reply).cache.kind == "instruction"
    made = real.proposals()
    again = Spoken(kind, 1.0, 5, frames=2500)
    again.say(other, 8)
    again.drain()
    assert agree(made, again.proposals()) > 0

"""With speculation = without, bit for bit, on the real engine, whatever the drafts are worth.

Greedy answers are compared with the plain loop, sampled ones with an engine that has no drafter:
ids, and the bits of log probabilities. What a drafter proposes after a restore is compared with
what it proposed cold.
"""

from __future__ import annotations

import pytest

from engine.real import Real, cold, stream, tiny
from merestone.sched.plan import SamplingParams
from spec_engine.parrot import Parrot

KINDS = {"lag": None, "window": 40}
ACCURACIES = (0.0, 0.7, 1.0)


class Spoken(Real):
    """Greedy requests, each with a seed of its own by which the parrot knows it."""

    def __init__(self, kind: str = "lag", accuracy: float = 0.7, depth: int = 3, **options) -> None:
        self.parrot = Parrot(depth, accuracy, KINDS[kind])
        super().__init__(tiny(), self.parrot, **options)

    def say(self, tokens, count: int, **options):
        seed = hash(tuple(tokens)) % 10**6
        answer = cold(self.model, tuple(tokens), max(count, 1))[0]
        self.parrot.book[seed, 0] = (*tokens, *answer)
        params = SamplingParams(logprobs=5, seed=seed, **options.pop("params", {}))
        return self.send(tokens, count, params=params, **options)

    def proposals(self) -> dict[tuple[int, int, int], list[int]]:
        made, self.parrot.proposed = self.parrot.proposed, {}
        return made

    @property
    def accepted(self) -> int:
        return sum(self.engine.scheduler.depth.tally.accepted)


def agree(first, second) -> int:
    """Proposals of two runs at the same places are the same; returns how many there were."""
    both = first.keys() & second.keys()
    assert {key: first[key] for key in both} == {key: second[key] for key in both}
    return len(both)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("accuracy", ACCURACIES)
def test_replays_equal_the_plain_loop_and_draft_as_before(kind: str, accuracy: float) -> None:
    real = Spoken(kind, accuracy, frames=2500)
    prompts = [stream(length, 3 + length) for length in (1, 2, 63, 64, 65, 129)]
    for prompt in prompts:
        reply = real.say(prompt, 30)
        real.drain()
        real.check(prompt, reply)
    cold_accepted, first = real.accepted, real.proposals()
    if accuracy == 1.0:
        assert cold_accepted == len(prompts) * 21  # of 30 tokens: one, seven blocks of four, one
    assert (cold_accepted > 0) == (accuracy > 0)
    for count in (1, 30):
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

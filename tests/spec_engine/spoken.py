"""A real tiny engine with a parrot, and the comparison of its answers with the plain loop's."""

from __future__ import annotations

from engine.real import Real, cold, tiny
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

"""Sampled answers with drafts are those without: a position has one token, whoever asks."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import pytest

from engine.real import Real, stream, tiny
from merestone.engine.api import TokenEvent
from merestone.sched.plan import SamplingParams
from spec_engine.parrot import Parrot

PROMPT = stream(70, 3)
WAYS = (
    {"temperature": 0.7},
    {"temperature": 1.3},
    {"temperature": 0.7, "top_p": 0.9},
    {"temperature": 1.3, "top_p": 0.8, "top_k": 40},
    {"temperature": 1.0, "min_p": 0.02, "repetition_penalty": 1.3, "frequency_penalty": 0.5},
    {"temperature": 0.0, "presence_penalty": 1.5, "logit_bias": ((7, 4.0),)},
)


@dataclass
class Told:
    """Ids and log probabilities of one choice."""

    ids: list[int]
    logprobs: list[object]


def answers(real: Real, requests: list[SamplingParams], n: int) -> dict[tuple[int, int], Told]:
    """All at once; by (seed, choice)."""
    replies = [(params, real.send(PROMPT, 10, params=params, n=n)) for params in requests]
    real.drain()
    told = {}
    for params, reply in replies:
        for choice in range(n):
            events = [e for e in reply.events if isinstance(e, TokenEvent) and e.choice == choice]
            ids, logprobs = [e.token for e in events], [e.logprob for e in events]
            told[params.seed, choice] = Told(ids, logprobs)
    return told


REQUESTS = [SamplingParams(seed=i, logprobs=3, **WAYS[i % len(WAYS)]) for i in range(20)]


@cache
def plain() -> dict[tuple[int, int], Told]:
    return answers(Real(tiny(), frames=3000, token_budget=200), REQUESTS, 4)


@pytest.mark.parametrize("kind", ["lag", "window"])
def test_twenty_seeds_and_four_choices(kind: str) -> None:
    parrot = Parrot(4, 0.8, 30 if kind == "window" else None)
    parrot.book = {key: (*PROMPT, *told.ids) for key, told in plain().items()}
    real = Real(tiny(), parrot, frames=3000, token_budget=200)
    assert answers(real, REQUESTS, 4) == plain()
    accepted = real.engine.scheduler.depth.tally.accepted
    assert all(accepted), accepted
    # They do differ where they may: the noise is real.
    assert len({tuple(told.ids) for told in plain().values()}) > 60

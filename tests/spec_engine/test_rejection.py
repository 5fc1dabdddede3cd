"""Rejection: other tokens than without drafts, of the same distribution."""

from __future__ import annotations

import math

import pytest
import torch
from msgspec.structs import replace

from engine.real import Real, stream, tiny
from merestone.ops.sampler import Draft, gumbel, sample
from merestone.sched.plan import SamplingParams
from merestone.spec.accept import accept
from merestone.spec.draw import Draws
from merestone.spec.interface import Continuation
from spec_engine.parrot import Parrot
from spec_engine.spoken import Spoken

VOCAB = 8
NONE = torch.zeros(0, dtype=torch.int64)


def target(token: int) -> torch.Tensor:
    """Logits after a token: a small Markov chain."""
    generator = torch.Generator().manual_seed(token)
    return torch.randn(VOCAB, generator=generator) * 1.5


def drafted(token: int) -> torch.Tensor:
    """What a drafter believes of it."""
    generator = torch.Generator().manual_seed(100 + token)
    return target(token) + torch.randn(VOCAB, generator=generator)


def three(seed: int, params: SamplingParams, chances: bool) -> tuple[tuple[int, ...], int]:
    """Three tokens after token 0 at position 0, two of them drafted; and how many a step gave."""
    params = replace(params, seed=seed)
    one = Continuation(0, 0, 2, 0, {}, params, 0)
    draws = Draws([one], chances)
    newest = 0
    for _ in range(2):
        newest = int(draws.draw(drafted(newest)[None])[0])
    made = draws.drafts()
    ids = [0]

    def draw(place: int) -> int:
        draft = None
        if place < 2:
            draft = Draft(int(made.ids[0, place]))
            if chances:
                draft = Draft(draft.token, made.candidates[0, place], made.probabilities[0, place])
        token = sample(
            target(ids[-1]), params, prompt=NONE, output=NONE, position=len(ids), choice=0,
            draft=draft,
        )  # fmt: skip
        ids.append(token)
        return token

    given = len(accept(made.ids[0].tolist(), draw))
    while len(ids) < 4:
        place = len(ids)
        ids.append(
            sample(target(ids[-1]), params, prompt=NONE, output=NONE, position=place, choice=0)
        )
    return tuple(ids[1:]), given


def chances_of(token: int, params: SamplingParams) -> torch.Tensor:
    p = (target(token).double() / params.temperature).softmax(0)
    if params.top_k:
        p[p.sort(descending=True).indices[params.top_k :]] = 0.0
    return p / p.sum()


@pytest.mark.parametrize(
    ("params", "chances"),
    [
        (SamplingParams(temperature=1.0), True),
        (SamplingParams(temperature=0.7, top_k=4), True),
        (SamplingParams(temperature=1.3), False),
    ],
)
def test_tokens_are_those_of_the_target(params: SamplingParams, chances: bool) -> None:
    """Chi-square over the first two tokens together, and the third: quantiles of one in 10,000."""
    count, pairs, thirds, given = 2500, {}, {}, 0
    for seed in range(count):
        ids, more = three(seed, params, chances)
        pairs[ids[:2]] = pairs.get(ids[:2], 0) + 1
        thirds[ids[2]] = thirds.get(ids[2], 0) + 1
        given += more
    first = chances_of(0, params)
    wanted = {
        (a, b): float(first[a] * chances_of(a, params)[b]) * count
        for a in range(VOCAB)
        for b in range(VOCAB)
    }
    assert chi_square(pairs, wanted)
    second = sum(first[a] * chances_of(a, params) for a in range(VOCAB))
    third = sum(second[a] * chances_of(a, params) for a in range(VOCAB))
    assert chi_square(thirds, {a: float(third[a]) * count for a in range(VOCAB)})
    # It accepts something, and not everything.
    assert 1.3 * count < given < 2.7 * count


def chi_square(found: dict, wanted: dict) -> bool:
    """Whether counts fit, rare cells together (Wilson and Hilferty's bound, z = 3.72)."""
    assert all(wanted[cell] > 0 for cell in found)
    cells = [(found.get(cell, 0), mean) for cell, mean in wanted.items() if mean >= 8]
    rest = [(found.get(cell, 0), mean) for cell, mean in wanted.items() if mean < 8]
    if sum(mean for _, mean in rest) >= 8:
        cells.append((sum(n for n, _ in rest), sum(mean for _, mean in rest)))
    statistic = sum((n - mean) ** 2 / mean for n, mean in cells)
    free = len(cells) - 1
    spread = 2 / (9 * free)
    return statistic < free * (1 - spread + 3.72 * math.sqrt(spread)) ** 3


def test_the_test_would_see_a_wrong_distribution() -> None:
    """Accepting by the shared noise instead, whatever the chances, is found out."""
    params = SamplingParams(temperature=1.0)
    count, found = 2500, {}
    for seed in range(count):
        noise = gumbel(VOCAB, seed, 0, 1)
        token = int((drafted(0).double() + noise).argmax())
        found[token] = found.get(token, 0) + 1
    first = chances_of(0, params)
    assert not chi_square(found, {a: float(first[a]) * count for a in range(VOCAB)})


def test_greedy_answers_do_not_change() -> None:
    real = Spoken("lag", 0.7, frames=1000, accept="rejection")
    reply = real.say(stream(40, 3), 20)
    real.drain()
    real.check(stream(40, 3), reply)


def test_an_answer_is_the_same_whenever_it_is_drafted_the_same() -> None:
    """Cold, restored and beside others."""
    params = SamplingParams(temperature=1.0, seed=5)
    parrot = Parrot(3, 1.0)
    plain = Real(tiny(), frames=1000).ask(stream(40, 3), 20, params=params).ids()
    parrot.book[5, 0] = (*stream(40, 3), *plain)
    real = Real(tiny(), parrot, frames=2000, accept="rejection")
    first = real.ask(stream(40, 3), 20, params=params)
    others = [real.send(stream(30, 60 + i), 20) for i in range(3)]
    again = real.send(stream(40, 3), 20, params=params)
    real.drain()
    assert all(other.finished() for other in others)
    assert again.restored == 40
    assert again.ids() == first.ids()
    # These drafts are certain: each is accepted with its probability, not because it is drawn.
    assert first.ids() != plain

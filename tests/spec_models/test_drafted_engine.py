"""Real drafters in the real engine: the plain loop's bits, and after a restore the cold drafts."""

from __future__ import annotations

from functools import cache

import pytest
from training.evaluate import HELD_OUT
from training.rows import Examples, make

from engine.real import Real, stream
from merestone.engine.api import TokenEvent
from merestone.sched.plan import SamplingParams
from merestone.spec.interface import Drafter, DraftRows, Drafts
from spec_models.targets import BUNDLED, drafter_of, target

CASES = [
    ("dense", "mtp:1"),
    ("sparse", "mtp:3"),
    ("sparse", "mtp:5"),
    ("dense", "dflash"),
    ("bundled", "mtp:3"),
    ("bundled", "dflash"),
]
PATTERN = (785, 3974, 13867, 38627, 34041, 916, 279, 15666, 5562, 13)


class Recorder:
    """A drafter, and what it proposed, by the request's seed, choice and newest position."""

    def __init__(self, inner: Drafter) -> None:
        self.inner = inner
        self.depth, self.lag, self.groups = inner.depth, inner.lag, inner.groups
        self.features, self.fields, self.observe = inner.features, inner.fields, inner.observe
        self.made: dict[tuple[int, int, int], list[int]] = {}

    def propose(self, rows: DraftRows, state) -> Drafts:
        drafts = self.inner.propose(rows, state)
        for c, ids in zip(rows.continuations, drafts.ids.tolist(), strict=True):
            key, found = (c.params.seed, c.choice, c.position), ids[: c.depth]
            earlier = self.made.setdefault(key, found)
            # A request near its end asks for fewer.
            assert all(a == b for a, b in zip(earlier, found, strict=False)), key
        return drafts


class Drafting(Real):
    """An engine of a target and a drafter; the drafts of two runs of a text must be the same."""

    def __init__(self, name: str, kind: str, **options) -> None:
        self.recorder = Recorder(drafter_of(name, kind))
        super().__init__(target(name)[1], self.recorder, **options)

    def say(self, tokens, count: int, **options):
        """One request, alone or beside others: its seed is its text's, and greedy."""
        seed = hash(tuple(tokens)) % 10**6
        return self.send(tokens, count, params=SamplingParams(logprobs=5, seed=seed), **options)


@cache
def chat(key: int) -> Examples:
    """A held-out conversation of the bundled model."""
    return make(HELD_OUT, key, 1, 256, BUNDLED / "tokenizer.json")


def text(name: str, length: int, key: int) -> tuple[int, ...]:
    """Ids of the target's vocabulary; for the bundled model, text that it can continue."""
    if name != "bundled":
        return stream(length, key)
    return tuple(chat(key).ids[0, :length].tolist())


def events(reply) -> list[tuple[int, object]]:
    return [(e.token, e.logprob) for e in reply.events if isinstance(e, TokenEvent)]


@pytest.mark.parametrize(("name", "kind"), CASES)
def test_ladder_of_replays(name: str, kind: str) -> None:
    real = Drafting(name, kind, frames=2500)
    lengths = (1, 64, 65) if name == "bundled" else (1, 2, 63, 64, 65, 130)
    prompts = [text(name, length, 3 + length) for length in lengths]
    replies = [real.say(prompt, 16) for prompt in prompts]
    real.drain()
    for prompt, reply in zip(prompts, replies, strict=True):
        real.check(prompt, reply)
    first = dict(real.recorder.made)
    for prompt, reply in zip(prompts, replies, strict=True):
        again = real.say(prompt, 16)
        real.drain()
        assert real.check(prompt, again).cache.restored == len(prompt)
        assert events(again) == events(reply)
    # Alone and restored, each drafted at the same places as in company and cold.
    assert real.recorder.made.keys() == first.keys()


@pytest.mark.parametrize(("name", "kind"), CASES)
def test_conversation(name: str, kind: str) -> None:
    """Instructions, a turn, a response, another turn: every restore as deep as without drafts."""
    real, prompt = Drafting(name, kind, frames=2500), text(name, 90, 1)
    reply = real.say(prompt, 12, boundaries=((40, "instruction"), (77, "turn")))
    real.drain()
    real.check(prompt, reply)
    following = (*prompt, *reply.ids(), *text(name, 20, 2))
    second = real.say(following, 12)
    real.drain()
    assert real.check(following, second).cache.restored == len(prompt) + 11
    for cut, kind_of in ((40, "instruction"), (77, "turn")):
        branch = (*prompt[:cut], *text(name, 30, 5))
        other = real.say(branch, 12)
        real.drain()
        end = real.check(branch, other)
        assert (end.cache.restored, end.cache.kind) == (cut, kind_of)
    # The same texts cold: the same drafts at the same places.
    fresh = Drafting(name, kind, frames=2500)
    fresh.recorder.made = dict(real.recorder.made)
    for tokens in (following, branch):
        cold_reply = fresh.say(tokens, 12)
        fresh.drain()
        assert fresh.check(tokens, cold_reply).cache.restored == 0
    assert fresh.recorder.made == real.recorder.made


@pytest.mark.parametrize(("name", "kind"), CASES[:4])
def test_the_open_case(name: str, kind: str) -> None:
    """A periodic prompt that ends inside a page and a chunk, replayed and continued."""
    real = Drafting(name, kind, frames=2500)
    vocab = real.model.info.vocab_size
    prompt = tuple(PATTERN[i % 10] % vocab for i in range(191))
    replies = [real.say(prompt, 24)]
    real.drain()
    for _ in range(2):
        replies.append(real.say(prompt, 24))
        real.drain()
    assert [real.check(prompt, reply).cache.restored for reply in replies] == [0, 191, 191]
    longer = (*prompt, *replies[0].ids(), *(token % vocab for token in PATTERN[:5]))
    continued = real.say(longer, 24)
    real.drain()
    assert real.check(longer, continued).cache.restored == 191 + 23
    control = real.say(longer, 24, salt="fresh")
    real.drain()
    assert real.check(longer, control).cache.restored == 0
    assert events(control) == events(continued)


@pytest.mark.parametrize("kind", ["mtp:3", "dflash"])
def test_bundled_drafts_are_accepted(kind: str) -> None:
    """Or the equalities above would only test rejection: drafts of a reply, in fewer steps."""
    real, spans = Drafting("bundled", kind, frames=2500), chat(7).spans[0]
    span = max(spans, key=lambda span: span.end - span.start)
    steps, count = 0, span.end - span.start
    reply = real.say(text("bundled", span.start, 7), count)
    while real.engine.scheduler.busy or real.engine.inbox:
        real.step()
        steps += 1
    assert len(reply.ids()) == count
    assert (count - 1) / (steps - 1) > 1.5, (kind, steps, count)


@pytest.mark.parametrize(("name", "kind"), [CASES[1], CASES[3], CASES[5]])
def test_sampled_answers_are_those_without_drafts(name: str, kind: str) -> None:
    with_drafts, without = Drafting(name, kind, frames=2500), Real(target(name)[1], frames=2500)
    prompt = text(name, 70, 4)
    for seed in range(3):
        params = SamplingParams(temperature=(0.7, 1.3, 1.0)[seed], top_p=0.9, seed=seed, logprobs=2)
        both = [real.ask(prompt, 12, params=params, n=2) for real in (with_drafts, without)]
        for choice in range(2):
            got, expected = (
                [(e.token, e.logprob) for e in reply.events if _is_of(e, choice)] for reply in both
            )
            assert got == expected
            assert len(got) == 12


def _is_of(event: object, choice: int) -> bool:
    return isinstance(event, TokenEvent) and event.choice == choice

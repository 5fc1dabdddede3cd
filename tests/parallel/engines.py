"""What ranks do in the tests of engines: each runs the whole engine, so that all make one plan.

A rank's arena, its copies and its collectives are those of a server; only the plan is not sent.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from engine.harness import Reply
from engine.real import Real, stream
from merestone.engine.api import TokenEvent
from merestone.parallel.world import World
from merestone.sched.plan import TokenLogprob
from parallel import passes

LADDER = (1, 7, 64, 65, 129, 200)


class Answer(NamedTuple):
    """What a cache may never change, and how much it restored."""

    said: tuple[TokenLogprob, ...]
    restored: int


class Asked(Real):
    """A rank's engine. ``cold`` asks where nothing can be known yet."""

    def step(self) -> None:
        if self.world.rank == 0:
            super().step()
        else:  # with the same decisions, which are audited once
            self.engine.take()
            self.engine.step()

    def answer(self, reply: Reply) -> Answer:
        said = [e.logprob for e in reply.events if isinstance(e, TokenEvent)]
        assert said
        return Answer(tuple(said), reply.restored)

    def warm(self, prompt: Sequence[int], count: int, **options) -> Answer:
        return self.answer(self.ask(prompt, count, **options))

    def cold(self, prompt: Sequence[int], count: int) -> Answer:
        answer = self.warm(prompt, count, salt=f"cold {self.count}")
        assert answer.restored == 0
        return answer


def ladder(world: World, case: str, page: int) -> list[Answer]:
    """Prompts of any length: a replay restores every token and runs no layer."""
    asked = Asked(passes.build(case, world), world=world, page=page, frames=1000)
    answers = []
    for length in LADDER:
        prompt = stream(length, length % 256)
        first = asked.cold(prompt, 4)
        assert asked.warm(prompt, 4) == first
        before = asked.segments
        again = asked.warm(prompt, 1)
        assert asked.segments == before
        assert again == (first.said[:1], length)
        longer = asked.warm((*prompt, 7), 3)
        assert longer.restored == length
        assert longer.said == asked.cold((*prompt, 7), 3).said
        answers += [first, again, longer]
    return answers


def talk(world: World, case: str, page: int) -> list[Answer]:
    """Eight conversations at once that share instructions: each turn restores what there was."""
    asked = Asked(passes.build(case, world), world=world, page=page, frames=2000, token_budget=100)
    head = stream(75, 5)
    asked.warm((*head, 3), 1, boundaries=((75, "instruction"),))
    texts = [(*head, *stream(11 + 3 * i, 20 + i)) for i in range(8)]
    answers = []
    for turn in range(2):
        waiting = [asked.send(text, 6, boundaries=((75, "instruction"),)) for text in texts]
        asked.drain()
        for i, reply in enumerate(waiting):
            answer = asked.answer(reply)
            known = 75 if turn == 0 else len(texts[i]) - (3 + i % 4)
            assert answer.restored == known, (turn, i, answer.restored)
            assert answer.said == asked.cold(texts[i], 6).said
            answers.append(answer)
            # All but the last token returned is known; the next turn says something new.
            texts[i] = (*texts[i], *reply.ids()[:-1], *stream(3 + i % 4, 50 + 8 * turn + i))
    return answers


def squeeze(world: World, case: str) -> list[Answer]:
    """Too little memory: preempted, evicted and resumed answers are the undisturbed ones."""
    asked = Asked(
        passes.build(case, world), world=world, page=16, frames=110, max_running=4, token_budget=128
    )
    prompts = [stream(20 + 5 * i, 40 + i) for i in range(4)]
    waiting = [asked.send(prompt, 70) for prompt in prompts]
    asked.drain()
    assert asked.engine.scheduler.counters["preemptions"] > 0
    answers = [asked.answer(reply) for reply in waiting]
    for prompt, answer in zip(prompts, answers, strict=True):
        assert answer.said == asked.cold(prompt, 70).said
    return answers

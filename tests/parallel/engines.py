"""What ranks do in the tests of engines: each runs the whole engine, so that all make one plan.

A rank's arena, its copies and its collectives are those of a server; only the plan is not sent.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from engine.harness import Reply
from engine.real import Real, stream
from merestone.engine.api import DraftReport, TokenEvent
from merestone.models.interface import Model
from merestone.parallel.world import World
from merestone.sched.plan import TokenLogprob
from merestone.spec.dflash import DFlashDrafter
from merestone.spec.interface import Drafter
from merestone.spec.mtp import MtpDrafter
from parallel import passes

LADDER = (1, 7, 65, 129)


class Answer(NamedTuple):
    """What a cache may never change, what became of drafts, and how much was restored."""

    said: tuple[TokenLogprob, ...]
    drafts: DraftReport | None
    restored: int


class Asking:
    """An engine that is asked, with its answers. ``cold`` asks where nothing can be known yet."""

    def answer(self, reply: Reply) -> Answer:
        said = [e.logprob for e in reply.events if isinstance(e, TokenEvent)]
        assert said
        return Answer(tuple(said), reply.finished().drafts, reply.restored)

    def warm(self, prompt: Sequence[int], count: int, **options) -> Answer:
        return self.answer(self.ask(prompt, count, **options))

    def cold(self, prompt: Sequence[int], count: int) -> Answer:
        answer = self.warm(prompt, count, salt=f"cold {self.count}")
        assert answer.restored == 0
        return answer


class Asked(Asking, Real):
    """A rank's engine on the CPU."""

    def step(self) -> None:
        if self.world.rank == 0:
            super().step()
        else:  # with the same decisions, which are audited once
            self.engine.take()
            self.engine.step()


def ladder(world: World, case: str, page: int) -> list[Answer]:
    asked = Asked(passes.build(case, world), world=world, page=page, frames=1000)
    return climb(asked, LADDER)


def climb(asked: Asking, lengths: Sequence[int]) -> list[Answer]:
    """Prompts of any length: a replay restores every token and runs no layer."""
    answers = []
    for length in lengths:
        prompt = stream(length, length % 256)
        first = asked.cold(prompt, 4)
        assert asked.warm(prompt, 4) == first
        before = asked.segments
        again = asked.warm(prompt, 1)
        assert asked.segments == before
        assert again == (first.said[:1], None, length)
        longer = asked.warm((*prompt, 7), 3)
        assert longer.restored == length
        assert longer.said == asked.cold((*prompt, 7), 3).said
        answers += [first, again, longer]
    return answers


def talk(world: World, case: str, page: int) -> list[Answer]:
    model = passes.build(case, world)
    return chat(Asked(model, world=world, page=page, frames=2000, token_budget=100))


def chat(asked: Asking) -> list[Answer]:
    """Eight conversations at once that share instructions: each turn restores what there was."""
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


def fill(world: World, case: str) -> list[Answer]:
    """A prompt of nine tenths of what the memory holds at most, replayed and continued."""
    asked = Asked(passes.build(case, world), world=world, page=16, frames=45)
    limit = asked.engine.info.context_limit
    prompt = stream(limit * 9 // 10, 7)
    first = asked.warm(prompt, 3)
    again = asked.warm(prompt, 3)
    assert again == (first.said, None, len(prompt))
    longer = (*prompt, *(said.token for said in first.said[:-1]), 9)
    onward = asked.warm(longer, 3)
    assert onward.restored == len(longer) - 1
    assert onward.said == asked.cold(longer, 3).said
    return [first, again, onward]


def squeeze(world: World, case: str) -> list[Answer]:
    """Too little memory: preempted, evicted and resumed answers are the undisturbed ones."""
    asked = Asked(
        passes.build(case, world), world=world, page=16, frames=90, max_running=4, token_budget=128
    )
    prompts = [stream(20 + 5 * i, 40 + i) for i in range(4)]
    waiting = [asked.send(prompt, 50) for prompt in prompts]
    asked.drain()
    assert asked.engine.scheduler.counters["preemptions"] > 0
    answers = [asked.answer(reply) for reply in waiting]
    for prompt, answer in zip(prompts, answers, strict=True):
        assert answer.said == asked.cold(prompt, 50).said
    return answers


def drafter(kind: str, model: Model, world: World) -> Drafter:
    if kind == "mtp":
        return MtpDrafter(passes.mtp(world), model, 3)
    return DFlashDrafter(passes.dflash(), model)


def speculate(world: World, kind: str) -> list[Answer]:
    """Drafts change no bit of an answer, and what is kept of them is restored with the rest."""
    model = passes.build("glm", world)
    plain = Asked(model, world=world, page=16, frames=1000)
    asked = Asked(model, drafter(kind, model, world), world, page=16, frames=1000)
    answers = []
    for length in (37, 130):
        prompt = stream(length, length)
        first = asked.cold(prompt, 12)
        assert first.said == plain.cold(prompt, 12).said
        assert asked.warm(prompt, 12) == first
        again = asked.warm(prompt, 12)
        assert again == (first.said, first.drafts, length)
        # The response's boundary, and drafts from there.
        longer = (*prompt, *(said.token for said in first.said[:-1]), 9, 8)
        answer = asked.warm(longer, 6)
        assert answer.restored == length + 11
        assert answer.said == plain.cold(longer, 6).said
        answers += [first, again, answer]
    assert all(answer.drafts.steps for answer in answers)
    return answers

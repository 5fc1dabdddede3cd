"""Chats about records, whose answers are right or wrong by the letter.

Equal bits show that a cache changes nothing; a literal value shows that there was something to
change. Texts and questions are plain enough for the bundled model. A model that does not find one
record among three makes these rows unsupported: what it says is no evidence.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from random import Random
from typing import Any

from merestone.probe.chat import assistant, system, user
from merestone.probe.context import Probe, require_cold
from merestone.probe.conversation import Message, instruction_end
from merestone.probe.ladder import Row
from merestone.probe.reply import Reply, Unsupported
from merestone.probe.report import Check

Judge = Callable[[Reply], str | None]
"""What is wrong with an answer; None if nothing is."""

RECORD_TOKENS = 9
"""Of one record, with merestone-tiny's tokenizer; with others about as many."""

_ANSWER_TOKENS = 64  # an answer ends itself; this is for models that ramble
_FIRST_TOKENS = 24  # of the first question of all, which a model may not understand
_KEYS = [f"{letter}{number}" for letter in "ABCDEFGHIJKLMNOPQRSTUVWXYZ" for number in range(1, 100)]
_NAMES = ("Ada", "Felix", "Nora", "Hugo", "Clara", "Omar", "Rosa", "Theo")
_QUESTIONS = (
    "What does record {} hold? Reply with the number only.",
    "What does record {} hold?",
    "Give me only the value of record {}.",
    "Tell me what record {} holds.",
)
_TEMPLATES: tuple[dict[str, Any], ...] = ({}, {"enable_thinking": False})


def _function(name: str, description: str, parameter: str) -> Message:
    schema = {
        "type": "object",
        "properties": {parameter: {"type": "string"}},
        "required": [parameter],
    }
    described = {"name": name, "description": description, "parameters": schema}
    return {"type": "function", "function": described}


TOOLS = (
    _function("get_weather", "Get the weather of a city.", "city"),
    _function("find_key", "Find the key of a person's record.", "name"),
)


@dataclass(frozen=True, slots=True)
class Table:
    """Records by key, in the order of their statements. No key and no value occurs twice."""

    values: dict[str, str]

    @classmethod
    def draw(cls, tokens: int, number: int, seed: int) -> Table:
        """About ``tokens`` tokens. Tables of one seed have the same keys at the same places, and
        their values differ by ``number``: the state of another table gives another answer."""
        count = max(tokens // RECORD_TOKENS, 3)
        keys = Random(f"{seed}/keys").sample(_KEYS, len(_KEYS))[:count]
        values = Random(f"{seed}/values/{number}").sample(range(10_000, 100_000), len(keys))
        return cls(dict(zip(keys, map(str, values), strict=True)))

    def parts(self, count: int) -> list[Table]:
        """Consecutive parts of nearly equal size."""
        whole = list(self.values.items())
        cuts = [len(whole) * part // count for part in range(count + 1)]
        return [Table(dict(whole[low:high])) for low, high in pairwise(cuts)]

    def spread(self, count: int) -> list[str]:
        """Keys at two or more depths, from the first record to the last."""
        keys = list(self.values)
        return [keys[at * (len(keys) - 1) // (count - 1)] for at in range(count)]

    def __str__(self) -> str:
        return "\n".join(f"Record {key} holds {value}." for key, value in self.values.items())


def says(value: str) -> Judge:
    """The answer has this number, and no other."""

    def judge(reply: Reply) -> str | None:
        text = reply.message.get("content") or ""
        right = set(re.findall(r"\b\d+\b", text)) == {value}
        return None if right else f"{text!r}, not {value}"

    return judge


def calls(name: str, arguments: dict[str, str]) -> Judge:
    """The answer is one call of this function, with these arguments."""

    def judge(reply: Reply) -> str | None:
        found = [call["function"] for call in reply.message.get("tool_calls") or ()]
        try:
            made = [(one["name"], json.loads(one["arguments"])) for one in found]
        except ValueError:
            return f"the arguments are no JSON: {found}"
        return None if made == [(name, arguments)] else f"{reply.message}, no call of {name}"

    return judge


def anything(reply: Reply) -> str | None:
    """An answer that says something."""
    return None if reply.message.get("content") else "an empty answer"


@dataclass(slots=True)
class Interview:
    """One conversation under a salt. Every answer is judged by the letter and held against a cold
    control; ``kept`` is the least that the next prompt must restore, in tokens."""

    probe: Probe
    check: Check
    template: dict[str, Any]
    salt: str
    messages: list[Message]
    tools: Sequence[Message] = ()
    kept: int = 0
    asked: list[Message] = field(default_factory=list)
    oracle: Reply = field(default_factory=Reply)

    async def ask(self, message: Message, judge: Judge, what: str) -> Reply:
        """Send the conversation and ``message``; the answer becomes part of the conversation."""
        self.messages.append(message)
        self.asked = list(self.messages)
        reply = await self._send(self.salt)
        self.oracle = await self._send(self.probe.salt())
        require_cold(self.oracle)
        for how, answer in (("warm", reply), ("cold", self.oracle)):
            wrong = judge(answer)
            self.check.that(wrong is None, f"{what}, {how}: {wrong}")
        self.check.equal(reply, self.oracle, what)
        self.check.at_least(reply, self.kept, what)
        self.check.note("L", len(reply.prompt_ids))
        self.check.note("C", reply.cached)
        # The response boundary: the last token returned was never computed on.
        self.kept = len(reply.prompt_ids) + len(reply.ids) - 1
        self.messages.append({**assistant(""), **reply.message})
        return reply

    async def about(self, table: Table, key: str, number: int, what: str) -> Reply:
        """Ask for a record, in one of the forms."""
        question = _QUESTIONS[number % len(_QUESTIONS)].format(key)
        return await self.ask(user(question), says(table.values[key]), f"{what}, {key}")

    async def again(self, what: str) -> None:
        """The last request once more: its whole prompt is restored, and the answer is the same."""
        reply = await self._send(self.salt)
        length = len(reply.prompt_ids)
        self.check.cached(reply, length, f"{what} again")
        self.check.equal(reply, self.oracle, f"{what} again")
        self.check.note("replayed", f"{reply.cached} of {length}")

    async def _send(self, salt: str) -> Reply:
        return await _send(self.probe, self.asked, salt, self.template, self.tools)


async def _send(
    probe: Probe,
    messages: Sequence[Message],
    salt: str,
    template: dict[str, Any],
    tools: Sequence[Message] = (),
    most: int = _ANSWER_TOKENS,
) -> Reply:
    """A chat request whose answer ends where the model ends it."""
    body: dict[str, Any] = {
        "messages": list(messages),
        "ignore_eos": False,
        "logprobs": True,
        "top_logprobs": 5,
    }
    if tools:
        body["tools"] = list(tools)
    if template:
        body["chat_template_kwargs"] = template
    path = "/v1/chat/completions"
    return await probe.server.generate(path, body, most, salt, stream=False)


async def answering(probe: Probe) -> dict[str, Any]:
    """Variables of the chat template with which the model finds one record among three.

    Raises:
        Unsupported: it does not.
    """
    table = Table.draw(0, 0, probe.seed)
    key = table.spread(3)[-1]
    messages = [system(str(table)), user(_QUESTIONS[0].format(key))]
    for template in _TEMPLATES:
        reply = await _send(probe, messages, probe.salt(), template, most=_FIRST_TOKENS)
        wrong = says(table.values[key])(reply)
        if wrong is None:
            return template
    raise Unsupported(f"the model does not find one record among three: {wrong}"[:200])


def _instruction(table: Table) -> Message:
    return system(f"Use the records below.\n\n{table}")


async def instruction_branches(probe: Probe, check: Check) -> None:
    """Questions that branch from one instruction: each restores all of it and finds its record."""
    template = await answering(probe)
    for number, size in enumerate(probe.pick((1000,), (1000, 4000, 8000))):
        if not probe.fits(check, 2 * size):
            continue
        table, salt = Table.draw(size, number, probe.seed), probe.salt()
        end = await instruction_end(probe, [_instruction(table), user("?")])
        for branch, key in enumerate(table.spread(probe.pick(3, 5))):
            talk = Interview(probe, check, template, salt, [_instruction(table)])
            talk.kept = end if branch else 0
            what = f"instruction of {end} tokens"
            await talk.about(table, key, branch, what)
            await talk.again(f"{what}, {key}")


async def continuations(probe: Probe, check: Check) -> None:
    """A chat that goes on with the server's own answers: each turn restores all that was computed
    of the turn before, and finds records of every earlier turn."""
    template = await answering(probe)
    size, documents, questions = probe.pick((700, 2, 2), (11_000, 4, 3))
    if not probe.fits(check, 2 * size):
        return
    table = Table.draw(size, 10, probe.seed)
    talk = Interview(probe, check, template, probe.salt(), [])
    turn = 0
    for part in table.parts(documents):
        turn += 1
        await talk.ask(user(f"Here are the records.\n{part}"), anything, f"turn {turn}")
        # The document just read, and the oldest one through all turns since.
        for key in [*part.spread(questions)[1:], next(iter(table.values))]:
            turn += 1
            await talk.about(table, key, turn, f"turn {turn}")
    await talk.again("the last turn")


async def tool_histories(probe: Probe, check: Check) -> None:
    """Call, result, answer: the result names a record whose value only the instruction holds. The
    whole history is restored, calls and results included."""
    template = await answering(probe)
    size, rounds = probe.pick((500, 2), (11_000, 6))
    if not probe.fits(check, 2 * size):
        return
    table = Table.draw(size, 20, probe.seed)
    talk = Interview(probe, check, template, probe.salt(), [_instruction(table)], TOOLS)
    for number, (name, key) in enumerate(zip(_NAMES, table.spread(rounds), strict=False)):
        what = f"round {number + 1}"
        question = user(f"Find the key of {name} and tell me what the record holds.")
        reply = await talk.ask(question, calls("find_key", {"name": name}), f"{what}, call")
        made = reply.message.get("tool_calls")
        if not made:
            return
        result = {"role": "tool", "tool_call_id": made[0]["id"], "content": key}
        await talk.ask(result, says(table.values[key]), f"{what}, answer from {key}")
    await talk.again("the last round")


async def eight_at_once(probe: Probe, check: Check) -> None:
    """Eight chats side by side, with the same keys and other values; then all of them replayed."""
    template, salt = await answering(probe), probe.salt()
    size, turns = probe.pick((300, 2), (2000, 4))
    if not probe.fits(check, 2 * size):
        return
    talks = []
    for number in range(8):
        table = Table.draw(size, 30 + number, probe.seed)
        talk = Interview(probe, check, template, salt, [_instruction(table)])
        talks.append((table, talk))

    async def converse(number: int, table: Table, talk: Interview) -> None:
        for turn, key in enumerate(table.spread(turns)):
            await talk.about(table, key, turn, f"chat {number + 1}, turn {turn + 1}")

    async with asyncio.TaskGroup() as group:
        for number, (table, talk) in enumerate(talks):
            group.create_task(converse(number, table, talk))
    async with asyncio.TaskGroup() as group:
        for number, (_, talk) in enumerate(talks):
            group.create_task(talk.again(f"chat {number + 1}"))


_NEEDS = "ids tokens logprobs cached salt power chat"
ROWS: list[tuple[str, str, Row]] = [
    ("records-instruction", f"{_NEEDS} render", instruction_branches),
    ("records-continuation", _NEEDS, continuations),
    ("records-tools", _NEEDS, tool_histories),
    ("records-concurrent", _NEEDS, eight_at_once),
]
"""As in ``rows``; these need a model that answers."""

"""Rows on where prompts meet unplanned: junctions, earlier messages, marks inside a message."""

from __future__ import annotations

from typing import Any

from merestone.probe import streams
from merestone.probe.chat import assistant, user
from merestone.probe.context import Probe
from merestone.probe.conversation import Conversation
from merestone.probe.reply import Unsupported
from merestone.probe.report import Check


async def junction(probe: Probe, check: Check) -> None:
    """C48 on plain ids: where two prompts part and no boundary is, the third one is resumed."""
    talk = Conversation(probe, check)
    shared = probe.stream(probe.pick(301, 2001), 1)
    for number in range(3):
        prompt = shared + probe.stream(probe.pick(100, 700), number + 2)
        reply = await talk.ask(prompt, 8, f"prompt {number + 1}")
        check.at_least(reply, len(shared) if number == 2 else 0, f"prompt {number + 1}")


async def earlier_messages(probe: Probe, check: Check) -> None:
    """C37 of a chat that comes whole: the last 1, 2 or 5 questions dropped, another one asked."""
    talk = Conversation(probe, check, control=not probe.full)
    size = probe.pick(30, 200)
    messages: list[dict[str, Any]] = [user(streams.text(size, 0, seed=probe.seed))]
    for number in range(1, 12):
        messages.append(assistant(streams.text(size, number + 50, seed=probe.seed)))
        messages.append(user(streams.text(size, number, seed=probe.seed)))
    await talk.say(messages, 4, "twelve questions")
    for dropped in (1, 2, 5):
        kept = messages[: -2 * dropped]
        end = await _turn(probe, kept)
        again = [*kept, assistant("Well."), user(streams.text(size, 90 + dropped, seed=probe.seed))]
        reply = await talk.say(again, 4, f"{dropped} dropped")
        check.at_least(reply, end, f"{dropped} dropped")


async def marked_part(probe: Probe, check: Check) -> None:
    """``cache_control`` on a part of a message: what follows it may change."""
    talk = Conversation(probe, check)
    text = streams.text(probe.pick(200, 1500), 6, seed=probe.seed)
    part = {"type": "text", "text": text, "cache_control": {"type": "ephemeral", "ttl": "5m"}}
    for number in range(3):
        tail = {"type": "text", "text": streams.text(40, number + 30, seed=probe.seed)}
        messages = [{"role": "user", "content": [part, tail]}]
        _, boundaries = await probe.server.render(messages)
        marks = [at for at, kind in boundaries or () if kind == "mark"]
        if not marks:
            raise Unsupported("/tokenize names no mark at a cache_control")
        reply = await talk.say(messages, 4, f"tail {number + 1}")
        check.at_least(reply, marks[0] if number else 0, f"tail {number + 1}")


async def _turn(probe: Probe, messages: list[dict[str, Any]]) -> int:
    """Tokens of a conversation without the header of a reply."""
    _, boundaries = await probe.server.render(messages)
    for at, kind in boundaries or ():
        if kind == "turn":
            return at
    raise Unsupported("/tokenize names no turn boundary")

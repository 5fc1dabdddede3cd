"""Requests under one salt, each held against what the salt has seen and against a cold control."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from merestone.probe.context import Probe, require_cold
from merestone.probe.reply import Reply, Unsupported, shared_prefix
from merestone.probe.report import Check

HEADER = 16
"""Tokens. No reply's header is taken to be longer, where a server does not say where it begins."""

Message = Mapping[str, Any]
Seen = tuple[list[int], list[int]]
"""Token ids sent and answered, and the counts at which they can be resumed."""


class Conversation:
    """A client that remembers what it sent, and so knows what a server must have kept.

        instruction | turn, before the header | prompt | response, all but its last token

    Each of these boundaries of an earlier request that begins a new prompt is a floor for what is
    restored; the longest prefix ever sent is the ceiling. ``marks`` are boundaries too.
    """

    def __init__(self, probe: Probe, check: Check, *, control: bool = True) -> None:
        self.probe, self.check, self.control = probe, check, control
        self.salt = probe.salt()
        self._seen: list[Seen] = []

    async def ask(
        self,
        prompt: Sequence[int],
        max_tokens: int,
        what: str,
        *,
        marks: Sequence[int] = (),
        stream: bool = False,
    ) -> Reply:
        """Send token ids, and judge C and the answer."""
        floor = _floor(self._seen, prompt)
        entry = self._enter(list(prompt))
        reply = await self.probe.server.complete(
            prompt, max_tokens, salt=self.salt, marks=marks, stream=stream
        )
        oracle = await self.probe.cold(prompt, max_tokens) if self.control else None
        self._judge(reply, oracle, entry, floor, what)
        entry[1].extend(marks)
        return reply

    async def say(
        self,
        messages: Sequence[Message],
        max_tokens: int,
        what: str,
        *,
        tools: Sequence[Message] = (),
        template: Mapping[str, Any] | None = None,
        stream: bool = False,
    ) -> Reply:
        """Send messages, and judge C and the answer."""
        server = self.probe.server
        # What is known when the request leaves is what it must find; the reply brings its ids.
        known = [(ids, list(boundaries)) for ids, boundaries in self._seen]
        reply = await server.chat(
            messages, max_tokens, salt=self.salt, tools=tools, template=template, stream=stream
        )
        prompt = reply.prompt_ids
        floor = _floor(known, prompt)
        entry = self._enter(prompt)
        oracle = None
        if self.control:
            oracle = await server.chat(
                messages, max_tokens, salt=self.probe.salt(), tools=tools, template=template
            )
            require_cold(oracle)
        self._judge(reply, oracle, entry, floor, what)
        entry[1].extend(await self._boundaries(messages, prompt, tools, template))
        return reply

    async def _boundaries(
        self,
        messages: Sequence[Message],
        prompt: list[int],
        tools: Sequence[Message],
        template: Mapping[str, Any] | None,
    ) -> list[int]:
        """Where the server says that it may resume; else a point safely before the header."""
        if "render" in self.probe.have:
            ids, boundaries = await self.probe.server.render(messages, tools, template)
            if boundaries is not None and ids == prompt:
                return [at for at, _ in boundaries]
        return [max(len(prompt) - HEADER, 0)]

    def _enter(self, prompt: list[int]) -> Seen:
        entry = (list(prompt), list[int]())
        self._seen.append(entry)
        return entry

    def _judge(
        self,
        reply: Reply,
        oracle: Reply | None,
        entry: Seen,
        floor: int,
        what: str,
    ) -> None:
        ids, boundaries = entry
        prompt = list(ids)
        others = [seen for seen in self._seen if seen is not entry]
        ceiling = max((shared_prefix(seen[0], prompt) for seen in others), default=0)
        self.check.at_least(reply, floor, what)
        self.check.that(
            reply.cached <= ceiling,
            f"{what}: C={reply.cached}, but only {ceiling} tokens were ever sent",
        )
        if oracle is not None:
            self.check.equal(reply, oracle, what)
        ids.extend(reply.ids)
        boundaries.extend([len(prompt), len(prompt) + len(reply.ids) - 1])


def _floor(seen: Sequence[Seen], prompt: Sequence[int]) -> int:
    """The deepest boundary known that is a prefix of the prompt."""
    found = 0
    for ids, boundaries in seen:
        shared = shared_prefix(ids, list(prompt))
        found = max(found, *(at for at in boundaries if at <= shared), 0)
    return found


async def instruction_end(probe: Probe, messages: Sequence[Message]) -> int:
    """Tokens of the leading system messages, as the server sees them.

    Raises:
        Unsupported: the server does not say.
    """
    _, boundaries = await probe.server.render(messages)
    for at, kind in boundaries or ():
        if kind == "instruction":
            return at
    raise Unsupported("/tokenize names no instruction boundary")

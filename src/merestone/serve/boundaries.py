"""Where a conversation may be resumed: the ends of its parts and the caller's marks, in tokens.

Knows messages, templates and how texts are cut into tokens. Must not know HTTP or the engine.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from merestone.serve.errors import ApiError
from merestone.serve.template import ChatTemplate, TemplateRefusal
from merestone.serve.text import Vocabulary

TEXT_PARTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}
SPARSE = (1, 2, 3, 5)
"""Of the ends of earlier turns, the n-th ones from the end that are kept: a client that drops its
last messages and asks again resumes near there."""
DEFAULT_TTL_S, LONGEST_TTL_S = 300.0, 86400.0
MOST_MARKS = 256
"""Marks of one request. Each is a rendering of the conversation up to it, or a seal."""
_UNITS = {"s": 1, "m": 60, "h": 3600}


@dataclass(frozen=True, slots=True)
class Mark:
    """A place that the caller wants kept for ``ttl_s`` seconds: behind the first ``messages``, and
    behind ``text``, the beginning of the next one, if given; or behind the first ``tools``."""

    messages: int
    ttl_s: float
    text: str | None = None
    tools: int | None = None


class Cuts:
    """Where texts that begin a prompt end in its tokens."""

    def __init__(self, vocabulary: Vocabulary, text: str, tokens: tuple[int, ...]) -> None:
        self._vocabulary = vocabulary
        self._text = text
        self._tokens = tokens
        # A byte-level token has fixed bytes; only a normaliser makes them others than the text's.
        self._ends = list(accumulate(len(vocabulary.bytes_of(token)) for token in tokens))
        self._plain = bool(tokens) and self._ends[-1] == len(text.encode())

    def at(self, part: str) -> int:
        """Tokens of ``part``, if it begins the text and a token ends with it; else 0."""
        if not self._text.startswith(part):
            return 0
        count, exact = self._count(part)
        return count if exact else 0

    def below(self, part: str) -> int:
        """Tokens that end within what ``part`` and the text have in common."""
        low, high = 0, len(part)
        while low < high:  # the longest beginning of ``part`` that begins the text
            middle = (low + high + 1) // 2
            if self._text.startswith(part[:middle]):
                low = middle
            else:
                high = middle - 1
        return self._count(part[:low])[0]

    def _count(self, part: str) -> tuple[int, bool]:
        if self._plain:
            size = len(part.encode())
            count = bisect_right(self._ends, size)
            return count, count > 0 and self._ends[count - 1] == size
        alone = self._vocabulary.encode(part)
        pairs = enumerate(zip(alone, self._tokens, strict=False))
        shared = next((i for i, (mine, theirs) in pairs if mine != theirs), len(alone))
        return shared, shared == len(alone) > 0


class Conversation:
    """A rendered conversation, whose parts can be found in it."""

    def __init__(
        self,
        template: ChatTemplate,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]],
        variables: Mapping[str, Any],
        cuts: Cuts,
    ) -> None:
        self._template = template
        self._messages = messages
        self._tools = tools
        self._variables = variables
        self._cuts = cuts

    def boundaries(self) -> dict[int, str]:
        """Kinds by token count; 0 stands for parts that are no exact prefix of the whole."""
        found: dict[int, str] = {}
        leading = 0
        while leading < len(self._messages) and self._messages[leading]["role"] == "system":
            leading += 1
        if leading or self._tools:
            found[self._end(leading)] = "instruction"
        found.setdefault(self._end(len(self._messages)), "turn")
        for count in earlier_ends([message["role"] for message in self._messages]):
            if count > leading:
                tool = self._messages[count - 1]["role"] == "tool"
                found.setdefault(self._end(count), "tool" if tool else "message")
        return found

    def place(self, mark: Mark) -> int:
        """Tokens before a mark: the last token's end at or below it."""
        messages = list(self._messages[: mark.messages])
        if mark.text is not None:
            messages.append({**self._messages[mark.messages], "content": mark.text})
        part = self._render(messages, self._tools[: mark.tools])
        return self._cuts.below(part)

    def _end(self, count: int) -> int:
        return self._cuts.at(self._render(self._messages[:count], self._tools))

    def _render(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]
    ) -> str:
        try:
            return self._template.render(messages, tools, False, self._variables)
        except TemplateRefusal:  # a template need not take a conversation without a user
            return ""


def earlier_ends(roles: Sequence[str]) -> list[int]:
    """Message counts, ascending, at whose ends an earlier state is worth keeping: before the last
    message, and behind some of the earlier messages that asked for a reply."""
    asked = [
        count
        for count in range(1, len(roles))
        if roles[count - 1] == "user" or (roles[count - 1] == "tool" != roles[count])
    ]
    kept = {asked[-n] for n in SPARSE if n <= len(asked)} | {len(roles) - 1}
    return sorted(kept - {0})


def marks_of(
    messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]
) -> list[Mark]:
    """The ``cache_control`` of messages, of their parts and of tools, in order.

    Raises:
        ApiError: one that says something else than "ephemeral" and a time to live; too many.
    """
    found: list[Mark] = []

    def add(mark: Mark) -> None:
        if len(found) == MOST_MARKS:
            raise ApiError(f"more than {MOST_MARKS} cache_control", "messages", "invalid_value")
        found.append(mark)

    for i, tool in enumerate(tools):
        function = tool.get("function") or {}
        control = tool.get("cache_control") or function.get("cache_control")
        if control is not None:
            ttl_s = time_to_live(control, f"tools[{i}].cache_control")
            add(Mark(0, ttl_s, tools=i + 1))
    for i, message in enumerate(messages):
        content = message.get("content")
        parts = content if isinstance(content, list) else []
        text = ""
        for j, part in enumerate(parts):
            text += part[TEXT_PARTS[part["type"]]]
            if part.get("cache_control") is not None:
                path = f"messages[{i}].content[{j}].cache_control"
                ttl_s = time_to_live(part["cache_control"], path)
                last = j == len(parts) - 1
                add(Mark(i + 1, ttl_s) if last else Mark(i, ttl_s, text))
        if message.get("cache_control") is not None:
            ttl_s = time_to_live(message["cache_control"], f"messages[{i}].cache_control")
            add(Mark(i + 1, ttl_s))
    return found


def time_to_live(control: object, path: str) -> float:
    """Seconds of ``{"type": "ephemeral", "ttl": "5m"}``.

    Raises:
        ApiError: anything else.
    """
    if not isinstance(control, dict) or control.get("type") != "ephemeral":
        raise ApiError(f'{path} must be an object of type "ephemeral"', path, "invalid_value")
    ttl = control.get("ttl")
    if ttl is None:
        return DEFAULT_TTL_S
    found = re.fullmatch(r"([1-9][0-9]{0,4})([smh])", ttl) if isinstance(ttl, str) else None
    seconds = float(int(found[1]) * _UNITS[found[2]]) if found else 0.0
    if not 0 < seconds <= LONGEST_TTL_S:
        raise ApiError(f'{path}.ttl must be like "5m" or "1h", to 24h', path, "invalid_value")
    return seconds

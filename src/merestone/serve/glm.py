"""Reads replies in the GLM format: thinking, content and tool calls, as the text arrives.

    <think>..</think> content
    <tool_call>NAME<arg_key>K</arg_key><arg_value>V</arg_value>..</tool_call>

Knows text only; how it is cut into pieces never changes the result. What is not well formed stays
content, so no text is lost. Format: GLM 4.5 and later, as their chat templates write it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto

THINK, END_THINK = "<think>", "</think>"
CALL, END_CALL = "<tool_call>", "</tool_call>"
ARG_KEY = "<arg_key>"
MARKS = (THINK, END_THINK, CALL, END_CALL, ARG_KEY, "</arg_key>", "<arg_value>", "</arg_value>")

_ARGUMENT = re.compile(r"\s*<arg_key>(.*?)</arg_key>\s*<arg_value>(.*?)</arg_value>\s*", re.DOTALL)
_NAME = re.compile(r"[^\s<>]+")


@dataclass(frozen=True, slots=True)
class Thought:
    """Text of the reply's thinking."""

    text: str


@dataclass(frozen=True, slots=True)
class Content:
    """Text of the reply itself."""

    text: str


@dataclass(frozen=True, slots=True)
class Call:
    """A complete tool call; ``arguments`` is a JSON object as text."""

    name: str
    arguments: str


Part = Thought | Content | Call


class _Place(Enum):
    START = auto()  # nothing but white space yet: thinking may begin
    THINKING = auto()
    CONTENT = auto()
    CALL = auto()


class ReplyParser:
    """One reply. ``push`` returns the parts that are certain, ``flush`` the rest.

    ``prompt`` is the text before the reply: a template that opens (or closes) the thinking itself
    is recognised by its end. ``tools`` maps each tool's name to the JSON schema of its parameters;
    without tools, calls are content. A call is reported when it is complete, since only then is
    it known to be one.
    """

    def __init__(self, prompt: str, tools: Mapping[str, Mapping[str, object]]) -> None:
        self._tools = tools
        self._held = ""
        ending = prompt.rstrip()
        self._place = _Place.START
        if ending.endswith(THINK):
            self._place = _Place.THINKING
        elif ending.endswith(END_THINK):
            self._place = _Place.CONTENT
        self._scanned = 0

    @property
    def thinking(self) -> bool:
        """Whether the text so far ends inside the thinking."""
        return self._place is _Place.THINKING

    def push(self, text: str) -> list[Part]:
        """Take the next piece of the reply."""
        self._held += text
        parts: list[Part] = []
        while self._advance(parts):
            pass
        return parts

    def flush(self) -> list[Part]:
        """The reply is over: an unfinished call or mark is text."""
        held, self._held = self._held, ""
        if not held:
            return []
        return [Thought(held) if self.thinking else Content(held)]

    def _advance(self, parts: list[Part]) -> bool:
        """Consume held text up to the next mark. False: more text is needed."""
        match self._place:
            case _Place.START:
                return self._start(parts)
            case _Place.THINKING:
                return self._until(END_THINK, _Place.CONTENT, Thought, parts)
            case _Place.CONTENT:
                if self._tools:
                    return self._until(CALL, _Place.CALL, Content, parts)
                self._release(len(self._held), Content, parts)
                return False
            case _Place.CALL:
                return self._call(parts)

    def _start(self, parts: list[Part]) -> bool:
        ahead = self._held.lstrip()
        if ahead.startswith(THINK):
            # white space before the thinking is formatting
            self._held = ahead[len(THINK) :]
            self._place = _Place.THINKING
            parts.append(Thought(""))  # an empty thinking is not the same as none
            return True
        if THINK.startswith(ahead):
            return False
        self._place = _Place.CONTENT
        return True

    def _until(
        self, mark: str, then: _Place, kind: type[Thought | Content], parts: list[Part]
    ) -> bool:
        found = self._held.find(mark)
        if found < 0:
            self._release(len(self._held) - partial_mark(self._held, mark), kind, parts)
            return False
        self._release(found, kind, parts)
        if then is _Place.CONTENT:
            self._held = self._held[len(mark) :]
        self._place = then  # a call keeps its mark, in case it turns out to be content
        self._scanned = len(CALL)
        return True

    def _call(self, parts: list[Part]) -> bool:
        found = self._held.find(END_CALL, self._scanned)
        if found < 0:
            self._scanned = max(len(CALL), len(self._held) - len(END_CALL) + 1)
            return False
        end = found + len(END_CALL)
        call = parse_call(self._held[len(CALL) : found], self._tools)
        if call is None:
            self._release(end, Content, parts)
        else:
            parts.append(call)
            self._held = self._held[end:]
        self._place = _Place.CONTENT
        return True

    def _release(self, length: int, kind: type[Thought | Content], parts: list[Part]) -> None:
        if length:
            parts.append(kind(self._held[:length]))
            self._held = self._held[length:]


def partial_mark(text: str, mark: str) -> int:
    """Length of the longest end of ``text`` that is a proper beginning of ``mark``."""
    for length in range(min(len(mark) - 1, len(text)), 0, -1):
        if text.endswith(mark[:length]):
            return length
    return 0


def parse_call(body: str, tools: Mapping[str, Mapping[str, object]]) -> Call | None:
    """Read what stands between the marks of a call; None if it is not well formed."""
    begin = body.find(ARG_KEY)
    name = (body if begin < 0 else body[:begin]).strip()
    if not _NAME.fullmatch(name):
        return None
    properties = tools.get(name, {}).get("properties")
    schemas = properties if isinstance(properties, Mapping) else {}
    arguments: dict[str, object] = {}
    place = len(body) if begin < 0 else begin
    while place < len(body):
        found = _ARGUMENT.match(body, place)
        if found is None:
            return None
        key, value = found.groups()
        arguments[key.strip()] = parse_value(value, schemas.get(key.strip()))
        place = found.end()
    return Call(name, json.dumps(arguments, ensure_ascii=False))


def parse_value(text: str, schema: object) -> object:
    """The value of an argument: a string where the schema says string, else JSON if it is JSON."""
    types = schema_types(schema)
    if "string" in types and not ("null" in types and text.strip() == "null"):
        return text
    try:
        value: object = json.loads(text)
        # what cannot be written back (infinities, half surrogates) stays a string
        json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
    except (ValueError, RecursionError):
        return text
    return value


def schema_types(schema: object) -> set[str]:
    """The JSON types that a schema names, through its unions."""
    if not isinstance(schema, Mapping):
        return set()
    named = schema.get("type")
    types = {named} if isinstance(named, str) else set()
    if isinstance(named, Sequence) and not isinstance(named, str):
        types |= {entry for entry in named if isinstance(entry, str)}
    for union in ("anyOf", "oneOf"):
        members = schema.get(union)
        if isinstance(members, Sequence) and not isinstance(members, str):
            for member in members:
                types |= schema_types(member)
    allowed = schema.get("enum")
    if not types and isinstance(allowed, list) and allowed:
        types = {"string"} if all(isinstance(value, str) for value in allowed) else set()
    return types

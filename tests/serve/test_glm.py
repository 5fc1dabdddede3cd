"""The reply parser: chunking changes nothing, nothing is lost, arguments have their types."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from merestone.serve.glm import (
    MARKS,
    Call,
    Content,
    Part,
    ReplyParser,
    Thought,
    parse_call,
    parse_value,
)

TOOLS = {
    "weather": {
        "type": "object",
        "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
    },
    "now": {},
}
SUNNY = "<tool_call>weather<arg_key>city</arg_key><arg_value>Oslo</arg_value></tool_call>"


def parse(pieces: list[str], prompt: str = "<|assistant|>", tools: object = TOOLS) -> list[Part]:
    """The parts, neighbours of one kind joined."""
    parser = ReplyParser(prompt, tools)  # type: ignore[arg-type]
    found: list[Part] = []
    for part in [p for piece in pieces for p in parser.push(piece)] + parser.flush():
        last = found[-1] if found else None
        if isinstance(part, Content) and isinstance(last, Content):
            found[-1] = Content(last.text + part.text)
        elif isinstance(part, Thought) and isinstance(last, Thought):
            found[-1] = Thought(last.text + part.text)
        else:
            found.append(part)
    return found


def test_thinking_content_and_calls() -> None:
    assert parse(["<think>hm</think>It is ", SUNNY, "<tool_call>now</tool_call>", " done"]) == [
        Thought("hm"),
        Content("It is "),
        Call("weather", '{"city": "Oslo"}'),
        Call("now", "{}"),
        Content(" done"),
    ]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("plain", [Content("plain")]),
        ("\n<think>a</think>b", [Thought("a"), Content("b")]),
        ("<think></think>b", [Thought(""), Content("b")]),
        ("<think>never closed", [Thought("never closed")]),
        ("x<think>late</think>", [Content("x<think>late</think>")]),
        ("<thin", [Content("<thin")]),
        ("a<tool_call>weather<arg_key>ci", [Content("a<tool_call>weather<arg_key>ci")]),
        ("<tool_call>two words</tool_call>", [Content("<tool_call>two words</tool_call>")]),
        ("<tool_call></tool_call>x", [Content("<tool_call></tool_call>x")]),
        (
            "<tool_call>now<arg_key>a</arg_key></tool_call>",
            [Content("<tool_call>now<arg_key>a</arg_key></tool_call>")],
        ),
        ("<tool_call>\nnow\n</tool_call>", [Call("now", "{}")]),
    ],
)
def test_odd_replies(text: str, expected: list[Part]) -> None:
    assert parse([text]) == expected
    assert parse(list(text)) == expected


def test_the_header_says_where_a_reply_begins() -> None:
    assert parse(["a</think>b"], "<|assistant|><think>\n") == [Thought("a"), Content("b")]
    assert parse(["<think>a"], "<|assistant|><think></think>") == [Content("<think>a")]


def test_without_tools_a_call_is_content() -> None:
    assert parse([SUNNY], tools={}) == [Content(SUNNY)]


@pytest.mark.parametrize(
    ("text", "schema", "value"),
    [
        ("12", {"type": "string"}, "12"),
        ("12", {"type": "integer"}, 12),
        ("12", {}, 12),
        ("12", None, 12),
        ("twelve", {"type": "integer"}, "twelve"),
        ('{"a": [1]}', {"type": "object"}, {"a": [1]}),
        ("null", {"type": ["string", "null"]}, None),
        ("null", {"anyOf": [{"type": "string"}, {"type": "null"}]}, None),
        ("true", {"anyOf": [{"type": "string"}, {"type": "null"}]}, "true"),
        ("1", {"enum": ["1", "2"]}, "1"),
        ("NaN", {"type": "number"}, "NaN"),
        ("1e999", {"type": "number"}, "1e999"),
        ('"\\ud800"', {}, '"\\ud800"'),
        ("[" * 100000, {}, "[" * 100000),
    ],
)
def test_values(text: str, schema: object, value: object) -> None:
    assert parse_value(text, schema) == value


def test_white_space_around_arguments() -> None:
    body = "weather\n<arg_key>city</arg_key>\n<arg_value> Oslo\n</arg_value>\n"
    body += "<arg_key>days</arg_key>\n<arg_value>3</arg_value>\n"
    call = parse_call(body, TOOLS)
    assert call is not None
    assert json.loads(call.arguments) == {"city": " Oslo\n", "days": 3}


PIECES = st.lists(st.sampled_from([*MARKS, "weather", "now", "city", "x", " ", "\n", "<", "</"]))


@settings(max_examples=300)
@given(PIECES, st.lists(st.integers(1, 9), min_size=1), st.booleans())
def test_chunking_changes_nothing_and_loses_nothing(
    words: list[str], sizes: list[int], tools: bool
) -> None:
    text, pieces, place, turn = "".join(words), [], 0, 0
    while place < len(text):
        size = sizes[turn % len(sizes)]
        pieces.append(text[place : place + size])
        place, turn = place + size, turn + 1
    given_tools = TOOLS if tools else {}
    whole = parse([text], tools=given_tools)
    assert parse(pieces, tools=given_tools) == whole
    if not any(isinstance(part, Call) for part in whole):
        kept = "".join(part.text for part in whole if not isinstance(part, Call))
        thought = any(isinstance(part, Thought) for part in whole)
        lost = text.lstrip().removeprefix("<think>").replace("</think>", "", 1) if thought else text
        assert kept == lost

"""The chat template of tiny checkpoints: exact strings, and ids that stay prefixes."""

from __future__ import annotations

import json
from typing import Any

import jinja2
import pytest
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer

from merestone.models.tiny_tokenizer import chat_template, tokenizer_files

Message = dict[str, Any]
TOKENIZER = Tokenizer.from_str(tokenizer_files(1024)["tokenizer.json"])


def raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def environment(trim: bool) -> ImmutableSandboxedEnvironment:
    made = ImmutableSandboxedEnvironment(trim_blocks=trim, lstrip_blocks=trim)
    made.filters["tojson"] = lambda value: json.dumps(value, ensure_ascii=False)
    made.globals["raise_exception"] = raise_exception
    return made


def render(messages: list[Message], **options: Any) -> str:
    """Rendered with and without block trimming, which must not matter."""
    texts = [
        environment(trim).from_string(chat_template()).render(messages=messages, **options)
        for trim in (True, False)
    ]
    assert texts[0] == texts[1]
    return texts[0]


def ids(messages: list[Message], **options: Any) -> list[int]:
    return list(TOKENIZER.encode(render(messages, **options), add_special_tokens=False).ids)


WEATHER = {"type": "function", "function": {"name": "weather", "parameters": {"city": "é"}}}
CALL = {"id": "1", "function": {"name": "weather", "arguments": {"city": "Łódź", "days": 2}}}
CALL_TEXT = (
    "<tool_call>weather<arg_key>city</arg_key><arg_value>Łódź</arg_value>"
    "<arg_key>days</arg_key><arg_value>2</arg_value></tool_call>"
)
TOOLS_TEXT = (
    "<|system|># Tools\n\nThe functions that you may call, one a line:\n<tools>\n"
    '{"type": "function", "function": {"name": "weather", "parameters": {"city": "é"}}}\n'
    "</tools>\n\nWrite a call as <tool_call>name<arg_key>key</arg_key><arg_value>value</arg_value>"
    "</tool_call>, with one key and value for each argument."
)

SYSTEM = {"role": "system", "content": "Be brief."}
ASK = {"role": "user", "content": " Hi\n"}
REPLY = {"role": "assistant", "content": "Hello. "}
THOUGHT = {"role": "assistant", "reasoning_content": "greet", "content": "Hello."}
MORE = {"role": "user", "content": "More"}

EXACT: list[tuple[list[Message], dict[str, Any], str]] = [
    ([ASK], {}, "<|user|> Hi\n"),
    ([ASK], {"add_generation_prompt": True}, "<|user|> Hi\n<|assistant|>"),
    (
        [ASK],
        {"add_generation_prompt": True, "enable_thinking": False},
        "<|user|> Hi\n<|assistant|><think></think>",
    ),
    ([SYSTEM, ASK], {}, "<|system|>Be brief.<|user|> Hi\n"),
    ([{"role": "developer", "content": "Be brief."}], {}, "<|system|>Be brief."),
    ([SYSTEM, ASK], {"tools": [WEATHER]}, TOOLS_TEXT + "<|system|>Be brief.<|user|> Hi\n"),
    ([], {"tools": [WEATHER, WEATHER]}, TOOLS_TEXT.replace(
        "</tools>", json.dumps(WEATHER, ensure_ascii=False) + "\n</tools>"
    )),
    ([ASK, REPLY, MORE], {}, "<|user|> Hi\n<|assistant|>Hello. <|user|>More"),
    (
        [ASK, REPLY, MORE],
        {"enable_thinking": False},
        "<|user|> Hi\n<|assistant|><think></think>Hello. <|user|>More",
    ),
    ([ASK, THOUGHT], {}, "<|user|> Hi\n<|assistant|><think>greet</think>Hello."),
    (
        [ASK, THOUGHT, MORE],
        {},
        "<|user|> Hi\n<|assistant|><think></think>Hello.<|user|>More",
    ),
    (
        [ASK, THOUGHT, MORE],
        {"clear_thinking": False},
        "<|user|> Hi\n<|assistant|><think>greet</think>Hello.<|user|>More",
    ),
    (
        [ASK, {"role": "assistant", "content": "<think>greet</think>Hello."}],
        {},
        "<|user|> Hi\n<|assistant|><think>greet</think>Hello.",
    ),
    (
        [ASK, {"role": "assistant", "content": "<think>greet</think>Hello."}, MORE],
        {},
        "<|user|> Hi\n<|assistant|><think></think>Hello.<|user|>More",
    ),
    (
        [ASK, {"role": "assistant", "reasoning_content": "", "content": None}],
        {},
        "<|user|> Hi\n<|assistant|><think></think>",
    ),
    (
        [
            ASK,
            {"role": "assistant", "content": None, "tool_calls": [CALL, CALL]},
            {"role": "tool", "content": "rain", "tool_call_id": "1"},
            {"role": "tool", "content": [{"type": "text", "text": "sun"}], "tool_call_id": "1"},
        ],
        {"add_generation_prompt": True},
        f"<|user|> Hi\n<|assistant|>{CALL_TEXT}{CALL_TEXT}<|observation|><tool_response>rain"
        "</tool_response><tool_response>sun</tool_response><|assistant|>",
    ),
    (
        [ASK, {"role": "assistant", "tool_calls": [{"function": {"name": "now"}}]}],
        {},
        "<|user|> Hi\n<|assistant|><tool_call>now</tool_call>",
    ),
    (
        [ASK, {"role": "assistant", "tool_calls": [{"name": "f", "arguments": '{"a": 1}'}]}],
        {},
        '<|user|> Hi\n<|assistant|><tool_call>f{"a": 1}</tool_call>',
    ),
    (
        [ASK, {"role": "assistant", "tool_calls": [{"name": "f", "arguments": {"a": ["é", 0]}}]}],
        {},
        "<|user|> Hi\n<|assistant|><tool_call>f<arg_key>a</arg_key>"
        '<arg_value>["é", 0]</arg_value></tool_call>',
    ),
    (
        [{"role": "user", "content": ["a", {"type": "text", "text": "b"}]}],
        {},
        "<|user|>ab",
    ),
    ([{"role": "user", "content": "{{ 1 + 1 }}"}], {}, "<|user|>{{ 1 + 1 }}"),
]  # fmt: skip


@pytest.mark.parametrize(("messages", "options", "expected"), EXACT)
def test_exact(messages: list[Message], options: dict[str, Any], expected: str) -> None:
    assert render(messages, **options) == "[gMASK]<sop>" + expected


@pytest.mark.parametrize(
    ("message", "problem"),
    [
        ({"role": "narrator", "content": "x"}, "unknown role 'narrator'"),
        ({"role": "user", "content": [{"type": "image_url"}]}, "part of type 'image_url'"),
        ({"role": "user", "content": {"text": "x"}}, "must be a string or a list of parts"),
    ],
)
def test_refused(message: Message, problem: str) -> None:
    with pytest.raises(jinja2.TemplateError, match=problem):
        render([message])


def test_instruction_and_turn_are_prefixes() -> None:
    """What a server renders to find its boundaries: the leading part, and no generation header."""
    messages = [SYSTEM, ASK, REPLY, MORE]
    whole = ids(messages, tools=[WEATHER], add_generation_prompt=True)
    for shorter in ([SYSTEM], [SYSTEM, ASK], messages):
        part = ids(shorter, tools=[WEATHER])
        assert whole[: len(part)] == part


@pytest.mark.parametrize(
    ("options", "reply", "message"),
    [
        ({"enable_thinking": False}, "Hello. ", {"content": "Hello. "}),
        ({}, "Hello. ", {"content": "Hello. "}),
        (
            {"clear_thinking": False},
            "<think>greet</think>Hello.",
            {"content": "Hello.", "reasoning_content": "greet"},
        ),
        (
            {"enable_thinking": False},
            f"Wait.{CALL_TEXT}",
            {"content": "Wait.", "tool_calls": [CALL]},
        ),
    ],
)
@pytest.mark.parametrize("role", ["user", "tool"])
def test_a_reply_is_found_again(
    options: dict[str, Any], reply: str, message: Message, role: str
) -> None:
    """Prompt, reply and the end token that opens what follows are a prefix of the next prompt."""
    history = [SYSTEM, ASK]
    prompt = ids(history, add_generation_prompt=True, **options)
    generated = TOKENIZER.encode(reply).ids
    end = TOKENIZER.token_to_id("<|user|>" if role == "user" else "<|observation|>")
    longer = [*history, {"role": "assistant", **message}, {"role": role, "content": "next"}]
    known = [*prompt, *generated, end]
    assert ids(longer, add_generation_prompt=True, **options)[: len(known)] == known


def test_thinking_survives_a_tool_loop_and_goes_with_the_next_question() -> None:
    step = {"role": "assistant", "reasoning_content": "look", "content": "", "tool_calls": [CALL]}
    result = {"role": "tool", "content": "rain"}
    loop: list[Message] = [ASK, step, result]
    prompt = ids(loop, add_generation_prompt=True)
    longer = ids([*loop, step, result], add_generation_prompt=True)
    assert longer[: len(prompt)] == prompt
    cleared = render([*loop, MORE])
    assert "look" not in cleared
    # Up to the old question's end, the prompt is still the same: the turn boundary.
    turn = ids([ASK])
    assert ids([*loop, MORE])[: len(turn)] == turn

"""``/v1/chat/completions`` through the real client: messages, boundaries, thinking, tools."""

from __future__ import annotations

import json
from typing import Any

import pytest
from live_server import Running

from merestone.serve.chat import build_prompt, normalise
from merestone.serve.template import ChatTemplate, ModelText

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "Weather of a city",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
                "required": ["city"],
            },
        },
    },
    {"type": "function", "function": {"name": "now"}},
]
CALLS = (
    "<think>Which city?</think>Let me see."
    "<tool_call>weather<arg_key>city</arg_key><arg_value>Oslo</arg_value>"
    "<arg_key>days</arg_key><arg_value>3</arg_value></tool_call>"
    "<tool_call>now</tool_call>"
)


def chat(server: Running, messages: list[Any], **options: Any) -> Any:
    options = {"temperature": 0, "max_tokens": 400, **options}
    return server.client.chat.completions.create(model="fake", messages=messages, **options)


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def test_a_reply(server: Running) -> None:
    server.says("<think>hm</think>Hello")
    answer = chat(server, [user("hi")], extra_body={"return_token_ids": True})
    choice = answer.choices[0]
    assert choice.message.content == "Hello"
    assert choice.message.model_extra["reasoning_content"] == "hm"
    assert choice.finish_reason == "stop"
    assert choice.model_extra["stop_reason"] is None
    prompt = answer.model_extra["prompt_token_ids"]
    assert server.text.vocabulary.decode(prompt) == "[gMASK]<sop><|user|>hi<|assistant|>"
    ids = server.ids("<think>hm</think>Hello")
    assert choice.model_extra["token_ids"] == [*ids, server.engine.info.eos_ids[0]]
    assert answer.usage.completion_tokens == len(ids) + 1
    assert answer.usage.completion_tokens_details.reasoning_tokens == 4
    assert server.engine.requests[0].max_tokens == 400


def test_every_form_of_message_is_one_prompt(server: Running) -> None:
    forms = [
        [{"role": "system", "content": "S"}, user("ab")],
        [{"role": "developer", "content": [{"type": "text", "text": "S"}]}, user("ab")],
        [
            {"role": "system", "content": "S", "name": "x"},
            {
                "role": "user",
                "content": [{"type": "input_text", "text": "a"}, {"type": "text", "text": "b"}],
            },
        ],
    ]
    for messages in forms:
        chat(server, messages, max_tokens=1)
    assert len({request.tokens for request in server.engine.requests}) == 1
    normal = normalise(
        [
            {"role": "assistant", "content": None, "refusal": "no"},
            {"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]},
            {"role": "assistant", "content": None},
        ]
    )
    assert [message["content"] for message in normal] == ["no", "no", ""]


def test_both_dialects_have_the_same_ids_and_hits(server: Running) -> None:
    messages = [{"role": "system", "content": "S"}, user("ab")]
    for body in ({}, {"enable_thinking": False}, {"chat_template_kwargs": {"x": 1}}):
        answer = chat(server, messages, extra_body=body, max_tokens=3)
        rendered = server.http.post("/tokenize", json={"messages": messages, **body}).json()
        tokens = server.engine.requests[-1].tokens
        assert tuple(rendered["tokens"]) == tokens
        plain = server.client.completions.create(
            model="fake", prompt=rendered["prompt"], max_tokens=3, temperature=0
        )
        assert server.engine.requests[-1].tokens == tokens
        assert plain.usage.prompt_tokens_details.cached_tokens == len(tokens)
        assert plain.choices[0].text == answer.choices[0].message.content


@pytest.mark.parametrize("thinking", [True, False])
@pytest.mark.parametrize("tools", [[], TOOLS])
@pytest.mark.parametrize("system", [[], ["A"], ["A", "B"]])
def test_boundaries_are_exact_prefixes(
    model_text: ModelText, thinking: bool, tools: list[Any], system: list[str]
) -> None:
    vocabulary, template = model_text.vocabulary, model_text.template
    assert template is not None
    messages = [{"role": "system", "content": text} for text in system]
    messages += [user("hi"), {"role": "assistant", "content": "x"}, user("and?")]
    variables = {"enable_thinking": thinking}
    prompt = build_prompt(vocabulary, template, messages, tools, variables)
    kinds = {kind: count for count, kind in prompt.boundaries}
    assert set(kinds) == {"message", "turn"} | ({"instruction"} if system or tools else set())
    header = "<|assistant|>" if thinking else "<|assistant|><think></think>"
    assert prompt.text.endswith("and?" + header)
    turn = vocabulary.decode(prompt.tokens[: kinds["turn"]])
    assert turn + header == prompt.text
    if "instruction" in kinds:
        before = vocabulary.decode(prompt.tokens[: kinds["instruction"]])
        assert prompt.text.startswith(before + "<|user|>hi")


def test_boundaries_that_are_no_prefix_are_dropped(model_text: ModelText) -> None:
    looks_ahead = ChatTemplate(
        "{{ messages | length }}{% for m in messages %}{{ m.content }}{% endfor %}"
        "{{ '>' if add_generation_prompt }}",
        {},
    )
    messages = [{"role": "system", "content": "S"}, user("u")]
    prompt = build_prompt(model_text.vocabulary, looks_ahead, messages, [], {})
    assert prompt.boundaries == ((3, "turn"),)
    closes = ChatTemplate("{{ '>' if add_generation_prompt else '<' }}", {})
    assert build_prompt(model_text.vocabulary, closes, messages, [], {}).boundaries == ()


@pytest.mark.parametrize("thinking", [True, False])
def test_turns_build_on_each_other(server: Running, thinking: bool) -> None:
    messages: list[Any] = [{"role": "system", "content": "S"}]
    body = {"enable_thinking": thinking}
    total = 0
    for turn in range(5):
        messages.append(user(f"question {turn}"))
        server.says(("<think>t</think>" if thinking else "") + f"answer {turn}")
        answer = chat(server, messages, extra_body=body)
        cached = answer.usage.prompt_tokens_details.cached_tokens
        # thinking is cut out of earlier turns, so the turn boundary is the last one shared
        assert cached >= total if turn else cached == 0
        message = answer.choices[0].message
        messages.append({"role": "assistant", "content": message.content})
        if thinking:
            messages[-1]["reasoning_content"] = message.model_extra["reasoning_content"]
            total = dict(map(reversed, server.engine.requests[-1].boundaries))["turn"]
        else:
            total = answer.usage.prompt_tokens + answer.usage.completion_tokens - 1


@pytest.mark.parametrize("tokens_a_step", [1, 4])
def test_stream_equals_whole(server: Running, tokens_a_step: int) -> None:
    server.engine.tokens_a_step = tokens_a_step
    server.says(CALLS)
    whole = chat(server, [user("weather?")], tools=TOOLS).choices[0]
    server.says(CALLS)
    options = {"include_usage": True}
    stream = chat(server, [user("weather?")], tools=TOOLS, stream=True, stream_options=options)
    thought, content, calls, reasons, roles = "", "", [], [], []
    *chunks, last = stream
    for chunk in chunks:
        choice = chunk.choices[0]
        thought += choice.delta.model_extra.get("reasoning_content") or ""
        content += choice.delta.content or ""
        calls += choice.delta.tool_calls or []
        reasons.append(choice.finish_reason)
        roles.append(choice.delta.role)
    assert roles[0] == "assistant"
    assert not any(roles[1:])
    assert reasons[-1] == whole.finish_reason == "tool_calls"
    assert not any(reasons[:-1])
    assert thought == whole.message.model_extra["reasoning_content"] == "Which city?"
    assert content == whole.message.content == "Let me see."
    assert [call.index for call in calls] == [0, 1]
    assert [(call.function.name, json.loads(call.function.arguments)) for call in calls] == [
        ("weather", {"city": "Oslo", "days": 3}),
        ("now", {}),
    ]
    assert len({call.id for call in calls}) == 2
    assert whole.message.tool_calls[0].function.arguments == '{"city": "Oslo", "days": 3}'
    assert last.usage.prompt_tokens_details.cached_tokens == last.usage.prompt_tokens


def test_tool_round_trip_keeps_the_ids(server: Running) -> None:
    messages: list[Any] = [user("weather?")]
    server.says(CALLS)
    answer = chat(server, messages, tools=TOOLS)
    message = answer.choices[0].message
    reply = server.engine.requests[-1].tokens + tuple(server.ids(CALLS))
    messages.append(message.model_dump(exclude_none=True))
    for call in message.tool_calls:
        messages.append({"role": "tool", "tool_call_id": call.id, "content": "sunny"})
    follow = chat(server, messages, tools=TOOLS, max_tokens=1)
    # the whole reply, thinking and calls included, begins the next prompt
    assert server.engine.requests[-1].tokens[: len(reply)] == reply
    assert follow.usage.prompt_tokens_details.cached_tokens == len(reply)
    assert follow.usage.model_extra["merestone"]["boundary"] == "response"


def test_forced_calls_begin_in_the_prompt(server: Running) -> None:
    named = {"type": "function", "function": {"name": "weather"}}
    server.says("city</arg_key><arg_value>Oslo</arg_value></tool_call>")
    answer = chat(server, [user("x")], tools=TOOLS, tool_choice=named)
    call = answer.choices[0].message.tool_calls[0]
    assert (call.function.name, call.function.arguments) == ("weather", '{"city": "Oslo"}')
    prompt = server.text.vocabulary.decode(server.engine.requests[-1].tokens)
    assert prompt.endswith("<|assistant|><think></think><tool_call>weather<arg_key>")
    server.says("now</tool_call>")
    answer = chat(server, [user("x")], tools=TOOLS, tool_choice="required", stream=True)
    names = [c.function.name for chunk in answer for c in chunk.choices[0].delta.tool_calls or []]
    assert names == ["now"]
    server.says("")
    named = {"type": "function", "function": {"name": "now"}}
    answer = chat(server, [user("x")], tools=TOOLS, tool_choice=named)
    assert answer.choices[0].message.tool_calls[0].function.name == "now"
    assert answer.choices[0].finish_reason == "tool_calls"


def test_tool_choice_none(server: Running) -> None:
    server.says("<tool_call>now</tool_call>")
    answer = chat(server, [user("x")], tools=TOOLS, tool_choice="none")
    assert answer.choices[0].message.tool_calls is None
    assert answer.choices[0].message.content == "<tool_call>now</tool_call>"
    token = server.text.vocabulary.id_of("<tool_call>")
    assert server.engine.requests[-1].params.logit_bias == ((token, -100.0),)
    with_none = server.engine.requests[-1].tokens
    chat(server, [user("x")], tools=TOOLS, max_tokens=1)
    assert server.engine.requests[-1].tokens == with_none


def test_an_unfinished_call_is_content(server: Running) -> None:
    server.says(CALLS)
    answer = chat(server, [user("x")], tools=TOOLS, max_tokens=32)
    choice = answer.choices[0]
    assert choice.finish_reason == "length"
    assert choice.message.tool_calls is None
    assert choice.message.content == "Let me see.<tool_call>weather"


@pytest.mark.parametrize("stream", [False, True])
def test_logprobs(server: Running, stream: bool) -> None:
    server.says("h\u00e9")
    answer = chat(server, [user("x")], logprobs=True, top_logprobs=2, stream=stream)
    rows = []
    for chunk in answer if stream else [answer]:
        for choice in chunk.choices:
            rows += choice.logprobs.content if choice.logprobs else []
    assert [row.token for row in rows[:3]] == ["h", "bytes:\\xc3", "bytes:\\xa9"]
    assert [row.bytes for row in rows[:3]] == [[104], [0xC3], [0xA9]]
    assert [len(row.top_logprobs) for row in rows] == [2] * 4
    assert rows[0].logprob == -0.125


def test_accepted_without_effect(server: Running) -> None:
    chat(
        server,
        [user("x")],
        max_completion_tokens=3,
        user="u",
        metadata={"a": "b"},
        store=True,
        response_format={"type": "text"},
        parallel_tool_calls=False,
    )
    assert server.engine.requests[-1].max_tokens == 3

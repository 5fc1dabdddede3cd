"""What is refused, and how: status, parameter and code in the API's error shape."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from live_server import Running

from merestone.serve.protocol import ChatBody, CompletionBody

USER = [{"role": "user", "content": "x"}]
TOOL = {"type": "function", "function": {"name": "f"}}
MARKED_PART = {"type": "text", "text": "x", "cache_control": {"type": "ephemeral"}}
MARKED = {"role": "user", "content": "x", "cache_control": {"type": "ephemeral"}}

COMPLETIONS: list[tuple[dict[str, Any], str | None]] = [
    ({"prompt": None}, "prompt"),
    ({"prompt": 5}, "prompt"),
    ({"prompt": {}}, "prompt"),
    ({"prompt": []}, "prompt"),
    ({"prompt": ""}, "prompt"),
    ({"prompt": [[]]}, "prompt"),
    ({"prompt": [1, "a"]}, "prompt[0]"),
    ({"prompt": [[1], [1.5]]}, "prompt[1]"),
    ({"prompt": [True]}, "prompt[0]"),
    ({"prompt": [320]}, "prompt"),
    ({"prompt": [-1]}, "prompt"),
    ({"prompt": [2**70]}, "prompt"),
    ({"prompt": "a" * 4096}, "prompt"),
    ({"prompt": "a" * 666}, "prompt"),
    ({"max_tokens": 4096}, "max_tokens"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": -1}, "max_tokens"),
    ({"max_tokens": "5"}, "max_tokens"),
    ({"max_tokens": 1.5}, "max_tokens"),
    ({"max_tokens": True}, "max_tokens"),
    ({"max_tokens": 2**40}, "max_tokens"),
    ({"min_tokens": 17}, "min_tokens"),
    ({"temperature": -0.1}, "temperature"),
    ({"temperature": 2.1}, "temperature"),
    ({"temperature": "hot"}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"top_p": 1.1}, "top_p"),
    ({"top_k": -2}, "top_k"),
    ({"min_p": 1.5}, "min_p"),
    ({"repetition_penalty": 0}, "repetition_penalty"),
    ({"presence_penalty": 3}, "presence_penalty"),
    ({"frequency_penalty": -3}, "frequency_penalty"),
    ({"logit_bias": {"a": 1}}, "logit_bias"),
    ({"logit_bias": {"320": 1}}, "logit_bias"),
    ({"logit_bias": {"007": 1}}, "logit_bias"),
    ({"logit_bias": {"9" * 5000: 1}}, "logit_bias"),
    ({"logit_bias": {"1": 101}}, "logit_bias.1"),
    ({"logit_bias": {str(token): 1 for token in range(1025)}}, "logit_bias"),
    ({"logit_bias": []}, "logit_bias"),
    ({"seed": "x"}, "seed"),
    ({"seed": 2**64}, "seed"),
    ({"n": 0}, "n"),
    ({"n": 129}, "n"),
    ({"n": 2, "best_of": 3}, "best_of"),
    ({"stop": ""}, "stop"),
    ({"stop": [""]}, "stop[0]"),
    ({"stop": ["a", 5]}, "stop[1]"),
    ({"stop": 5}, "stop"),
    ({"stop": ["a"] * 33}, "stop"),
    ({"stop_token_ids": [-1]}, "stop_token_ids[0]"),
    ({"stop_token_ids": [320]}, "stop_token_ids"),
    ({"logprobs": 21}, "logprobs"),
    ({"logprobs": True}, "logprobs"),
    ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
    ({"echo": True, "logprobs": 1, "stream": True}, "echo"),
    ({"stream": "yes"}, "stream"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"stream": True, "stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
    ({"suffix": "z"}, "suffix"),
    ({"guided_json": {"a": 1}}, "guided_json"),
    ({"cache_boundaries": [0]}, "cache_boundaries[0]"),
    ({"cache_boundaries": [3]}, "cache_boundaries"),
    ({"cache_boundaries": [1] * 257}, "cache_boundaries"),
    ({"cache_salt": 5}, "cache_salt"),
    ({"priority": 2**31}, "priority"),
    ({"prompt": ["a"] * 9, "n": 128}, "prompt"),
]

CHATS: list[tuple[dict[str, Any], str | None]] = [
    ({"messages": None}, "messages"),
    ({"messages": []}, "messages"),
    ({"messages": "x"}, "messages"),
    ({"messages": ["x"]}, "messages[0]"),
    ({"messages": [{}]}, "messages[0].role"),
    ({"messages": [{"role": "king", "content": "x"}]}, "messages[0].role"),
    ({"messages": [{"role": ["user"], "content": "x"}]}, "messages[0].role"),
    ({"messages": [{"role": "user"}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": ["x"]}]}, "messages[0].content[0]"),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
        "messages[0].content[0]",
    ),
    (
        {"messages": [{"role": "user", "content": [{"type": "text"}]}]},
        "messages[0].content[0].text",
    ),
    ({"messages": [{"role": "user", "content": "x", "tool_calls": []}]}, "messages[0].tool_calls"),
    ({"messages": [{"role": "assistant", "tool_calls": {}}, *USER]}, None),
    (
        {"messages": [{"role": "assistant", "tool_calls": [{}]}]},
        "messages[0].tool_calls[0].function",
    ),
    (
        {
            "messages": [
                {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}
            ]
        },
        "messages[0].tool_calls[0].function.arguments",
    ),
    ({"messages": [MARKED] * 257}, "messages"),
    ({"messages": [{"role": "user", "content": 257 * [MARKED_PART]}]}, "messages"),
    ({"tools": [{"type": "function"}]}, "tools[0].function"),
    ({"tools": [{"type": "web", "function": {"name": "f"}}]}, "tools[0].type"),
    ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tool_choice": "perhaps", "tools": [TOOL]}, "tool_choice"),
    (
        {"tool_choice": {"type": "function", "function": {"name": "g"}}, "tools": [TOOL]},
        "tool_choice",
    ),
    ({"tool_choice": {"type": "allowed_tools"}, "tools": [TOOL]}, "tool_choice"),
    ({"response_format": {"type": "json_object"}}, "response_format"),
    ({"response_format": {"type": "json_schema"}}, "response_format"),
    ({"modalities": ["text", "audio"]}, "modalities"),
    ({"audio": {"voice": "x"}}, "audio"),
    ({"functions": [{}]}, "functions"),
    ({"top_logprobs": 2}, "top_logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ({"logprobs": 1}, "logprobs"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_completion_tokens": 0}, "max_completion_tokens"),
    ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs.messages"),
    ({"enable_thinking": "no"}, "enable_thinking"),
]


def refused(server: Running, path: str, body: dict[str, Any]) -> dict[str, Any]:
    answer = server.http.post(path, json=body)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error"
    assert error["message"]
    return error


@pytest.mark.parametrize(("change", "param"), COMPLETIONS, ids=lambda value: repr(value)[:80])
def test_completions(server: Running, change: dict[str, Any], param: str | None) -> None:
    assert refused(server, "/v1/completions", {"prompt": "ab", **change})["param"] == param
    assert not server.engine.requests


@pytest.mark.parametrize(("change", "param"), CHATS, ids=lambda value: repr(value)[:80])
def test_chats(server: Running, change: dict[str, Any], param: str | None) -> None:
    if param is None:  # an empty list of calls is no list of calls, but harmless
        assert server.http.post(
            "/v1/chat/completions", json={"messages": USER, **change}
        ).is_success
        return
    assert refused(server, "/v1/chat/completions", {"messages": USER, **change})["param"] == param
    assert not server.engine.requests


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b'"x"',
        b"\xff",
        b'{"prompt": "a", "temperature": NaN}',
        b'{"prompt": "a", "temperature": Infinity}',
        b'{"prompt": "\\ud800"}',
        b'{"prompt": "a", "x": ' + b"[" * 5000 + b"]" * 5000 + b"}",
        b'{"prompt": "a"} x',
    ],
)
def test_malformed_bodies(server: Running, body: bytes) -> None:
    answer = server.http.post("/v1/completions", content=body)
    assert answer.status_code == 400
    assert answer.json()["error"]["message"]


def test_half_surrogates_inside_arguments(server: Running) -> None:
    function = {"name": "f", "arguments": '{"a": "\\ud800"}'}
    messages = [*USER, {"role": "assistant", "tool_calls": [{"function": function}]}]
    assert refused(server, "/v1/chat/completions", {"messages": messages})["param"] == "messages"


def test_a_list_of_stops_is_not_told_to_be_a_text(server: Running) -> None:
    found = [
        refused(server, "/v1/completions", {"prompt": "a", "stop": stop})["message"]
        for stop in ([""], ["a"] * 33)
    ]
    assert found[0] == "stop[0]: String should have at least 1 character"
    assert found[1].startswith("stop: List should have at most 32 items")


def test_too_long_says_both_numbers(server: Running) -> None:
    error = refused(server, "/v1/completions", {"prompt": "a" * 5000})
    assert "4096" in error["message"]
    assert "5000" in error["message"]
    assert error["code"] == "context_length_exceeded"
    error = refused(server, "/v1/completions", {"prompt": "a" * 666})
    assert error["code"] == "pool_too_small"


def test_names_and_paths(server: Running) -> None:
    with pytest.raises(openai.NotFoundError) as missing:
        server.client.completions.create(model="other", prompt="a")
    assert missing.value.code == "model_not_found"
    assert server.http.get("/v1/models/other").status_code == 404
    assert server.http.get("/nothing").json()["error"]["type"] == "invalid_request_error"
    assert server.http.get("/v1/completions").status_code == 405
    with pytest.raises(openai.BadRequestError):
        server.client.completions.create(model="fake", prompt="a", temperature=9)


def test_a_refused_prompt_takes_its_neighbours_along(server: Running) -> None:
    server.engine.hold = "queue"
    refused(server, "/v1/completions", {"prompt": ["a", "b", "c" * 666]})
    assert len(server.engine.requests) == 2
    assert server.engine.aborted == [request.id for request in server.engine.requests]


def test_a_failed_engine_is_unavailable(server: Running) -> None:
    server.engine.status = "failed"
    answer = server.http.post("/v1/completions", json={"prompt": "a"})
    assert answer.status_code == 503
    assert server.http.get("/health").status_code == 503


def test_an_engine_that_stops_after_it_was_found_well(server: Running) -> None:
    """It is nobody's prompt that is at fault."""
    server.engine.stops = True
    answer = server.http.post("/v1/completions", json={"prompt": ["a", "b"]})
    assert answer.status_code == 503
    error = answer.json()["error"]
    assert (error["code"], error["param"]) == ("engine_unavailable", None)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 400) | st.floats() | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner),
    max_leaves=6,
)
KNOWN = {*CompletionBody.model_fields, *ChatBody.model_fields, "suffix", "user", "guided_json"}
FIELDS = st.sampled_from(sorted(KNOWN - {"model", "max_tokens"}))
SENSIBLE = st.fixed_dictionaries(
    {},
    optional={
        "stream": st.booleans(),
        "echo": st.booleans(),
        "logprobs": st.integers(0, 3) | st.booleans(),
        "n": st.integers(1, 2),
        "return_token_ids": st.booleans(),
        "stop": st.text(min_size=1, max_size=2),
        "temperature": st.floats(0, 2),
    },
)


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/tokenize"])
@settings(
    max_examples=40,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
@given(odd=st.dictionaries(FIELDS, JSON, max_size=2), sensible=SENSIBLE, text=st.text(max_size=5))
def test_never_a_server_error(
    server: Running, path: str, odd: dict[str, Any], sensible: dict[str, Any], text: str
) -> None:
    start: dict[str, Any] = {"prompt": "a" + text, "max_tokens": 3}
    if path != "/v1/completions":
        start = {"messages": [{"role": "user", "content": text}], "max_tokens": 3}
    body = {**start, **sensible, **odd}
    answer = server.http.post(path, content=json.dumps(body).encode())
    assert answer.status_code in (200, 400), answer.text

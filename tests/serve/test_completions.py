"""``/v1/completions`` through the real client."""

from __future__ import annotations

from typing import Any

import pytest
from live_server import Running, samples


def complete(server: Running, prompt: Any, **options: Any) -> Any:
    options = {"max_tokens": 5, "temperature": 0, **options}
    return server.client.completions.create(model="fake", prompt=prompt, **options)


def test_every_form_of_prompt_gives_the_same(server: Running) -> None:
    ids = server.ids("hello")
    extra = {"extra_body": {"return_token_ids": True}}
    answers = [
        complete(server, prompt, **extra) for prompt in ("hello", ["hello"], ids, [ids, ids])
    ]
    choices = [choice for answer in answers for choice in answer.choices]
    assert [choice.index for choice in choices] == [0, 0, 0, 0, 1]
    assert len({choice.text for choice in choices}) == 1
    assert all(choice.model_extra["prompt_token_ids"] == ids for choice in choices)
    token_ids = choices[0].model_extra["token_ids"]
    assert server.text.vocabulary.decode(token_ids) == choices[0].text
    assert choices[0].finish_reason == "length"
    assert answers[0].usage.completion_tokens == 5


def test_defaults_follow_the_api(server: Running) -> None:
    server.client.completions.create(model="fake", prompt="a")
    server.client.completions.create(model="fake", prompt="a")
    first, second = server.engine.requests
    assert first.max_tokens == 16
    assert first.params.temperature == 1.0
    assert first.params.seed != second.params.seed
    assert 0 <= first.params.seed < 2**63
    assert first.stop_ids == server.engine.info.eos_ids
    assert first.cache
    assert first.salt == ""


def test_options_reach_the_engine(server: Running) -> None:
    extra = {
        "top_k": -1,
        "min_p": 0.1,
        "repetition_penalty": 1.5,
        "stop_token_ids": [9, 9],
        "ignore_eos": True,
        "min_tokens": 2,
        "cache_salt": "s",
        "cache_prompt": False,
        "priority": 3,
        "cache_boundaries": [4, 2, 2],
        "unheard_of": 1,
    }
    complete(
        server,
        "hello",
        seed=-1,
        top_p=0.5,
        presence_penalty=1,
        frequency_penalty=-1,
        logit_bias={"7": 5},
        n=2,
        temperature=0.5,
        logprobs=3,
        extra_body=extra,
    )
    request = server.engine.requests[0]
    params = request.params
    assert (params.temperature, params.top_p, params.top_k, params.min_p) == (0.5, 0.5, 0, 0.1)
    assert (params.presence_penalty, params.frequency_penalty) == (1, -1)
    assert params.repetition_penalty == 1.5
    assert params.seed == 2**63 - 1
    assert params.logit_bias == ((7, 5.0),)
    assert (params.min_tokens, params.banned, params.logprobs) == (2, (9,), 3)
    assert request.stop_ids == (9,)
    assert (request.salt, request.cache, request.priority, request.n) == ("s", False, 3, 2)
    assert request.boundaries == ((2, "mark"), (4, "mark"))


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("tokens_a_step", [1, 3])
def test_stream_equals_whole(server: Running, stream: bool, tokens_a_step: int) -> None:
    server.engine.tokens_a_step = tokens_a_step
    server.engine.replies.extend([server.ids("h\u00e9llo"), server.ids("na\u00efve")])
    extra = {"extra_body": {"return_token_ids": True}}
    answer = complete(server, ["x", "y"], max_tokens=20, stream=stream, logprobs=2, **extra)
    texts, ids, reasons, offsets = ["", ""], [[], []], [None, None], [[], []]
    for chunk in answer if stream else [answer]:
        for choice in chunk.choices:
            texts[choice.index] += choice.text
            ids[choice.index] += choice.model_extra["token_ids"]
            reasons[choice.index] = choice.finish_reason or reasons[choice.index]
            if choice.logprobs:
                offsets[choice.index] += choice.logprobs.text_offset
    assert texts == ["h\u00e9llo", "na\u00efve"]
    assert reasons == ["stop", "stop"]
    # the end-of-sequence token is returned, and has no text
    assert ids[0] == [*server.ids("h\u00e9llo"), server.engine.info.eos_ids[0]]
    assert offsets[0] == [0, 1, 1, 2, 3, 4, 5]


def test_stop_strings_straddle_tokens(server: Running) -> None:
    server.says("one</en two</end>three")
    answer = complete(server, "x", max_tokens=50, stop=["</end>", "zzz"])
    choice = answer.choices[0]
    assert choice.text == "one</en two"
    assert choice.finish_reason == "stop"
    assert choice.model_extra["stop_reason"] == "</end>"
    server.says("one</en two</end>three")
    stream = complete(server, "x", max_tokens=50, stop="</end>", stream=True)
    assert "".join(chunk.choices[0].text for chunk in stream) == "one</en two"


def test_stop_token_ids(server: Running) -> None:
    server.says("abcd")
    answer = complete(server, "x", extra_body={"stop_token_ids": [ord("c")]})
    assert answer.choices[0].text == "ab"
    assert answer.choices[0].model_extra["stop_reason"] == ord("c")


def test_echo_and_logprobs(server: Running) -> None:
    server.says("cd")
    answer = complete(server, "ab", max_tokens=2, echo=True, logprobs=2)
    choice = answer.choices[0]
    assert choice.text == "abcd"
    table = choice.logprobs
    assert table.tokens == ["a", "b", "c", "d"]
    assert table.token_logprobs == [None, -0.125, -0.125, -0.125]
    assert table.text_offset == [0, 1, 2, 3]
    assert table.top_logprobs[0] is None
    assert table.top_logprobs[1] == {"b": -0.125, "c": -2.0}
    assert answer.usage.prompt_tokens_details.cached_tokens == 0


def test_scoring_without_output(server: Running) -> None:
    answer = complete(server, ["ab", "cd"], max_tokens=0, echo=True, logprobs=0, n=2)
    assert [choice.text for choice in answer.choices] == ["ab", "ab", "cd", "cd"]
    assert answer.choices[1].logprobs.token_logprobs == [None, -0.125]
    assert answer.usage.completion_tokens == 0
    assert answer.choices[0].finish_reason == "length"


def test_echo_in_a_stream(server: Running) -> None:
    stream = complete(server, ["ab", server.ids("cd")], echo=True, stream=True, max_tokens=3)
    texts = ["", ""]
    for chunk in stream:
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert [text[:2] for text in texts] == ["ab", "cd"]
    assert [len(text) for text in texts] == [5, 5]


def test_prompt_logprobs(server: Running) -> None:
    answer = complete(server, "ab", extra_body={"prompt_logprobs": 1})
    assert answer.choices[0].model_extra["prompt_logprobs"] == [
        None,
        {"98": {"logprob": -0.125, "rank": 1, "decoded_token": "b"}},
    ]


def test_choices_differ_by_their_number(server: Running) -> None:
    answer = complete(server, "ab", n=3, temperature=1, seed=1, max_tokens=12)
    again = complete(server, "ab", n=3, temperature=1, seed=1, max_tokens=12)
    texts = [choice.text for choice in answer.choices]
    assert len(set(texts)) == 3
    assert texts == [choice.text for choice in again.choices]


def test_usage_says_what_the_cache_did(server: Running) -> None:
    for cached, kind, lost in ((0, None, "unknown"), (5, "prompt", "")):
        usage = complete(server, "hello").usage
        assert usage.prompt_tokens_details.cached_tokens == cached
        account = {"matched": cached, "restored": cached, "boundary": kind, "lost": lost}
        account["written"] = 0
        assert usage.model_extra["merestone"] == account
    usage = complete(server, ["hello", "other"]).usage
    assert usage.prompt_tokens == 10
    assert usage.prompt_tokens_details.cached_tokens == 5
    assert [entry["restored"] for entry in usage.model_extra["merestone"]["prompts"]] == [5, 0]
    usage = complete(server, "hello", extra_body={"cache_salt": "other"}).usage
    assert usage.prompt_tokens_details.cached_tokens == 0


@pytest.mark.parametrize("always", [False, True])
def test_usage_in_streams(server: Running, always: bool) -> None:
    complete(server, "hello")
    options = {"include_usage": True, "continuous_usage_stats": always}
    *chunks, last = complete(server, "hello", stream=True, stream_options=options)
    assert last.choices == []
    assert last.usage.prompt_tokens_details.cached_tokens == 5
    assert last.usage.completion_tokens == 5
    assert all((chunk.usage is not None) == always for chunk in chunks)
    if always:
        assert [chunk.usage.completion_tokens for chunk in chunks] == [1, 2, 3, 4, 5]
    plain = list(complete(server, "hello", stream=True))
    assert all(chunk.usage is None for chunk in plain)
    assert all(chunk.choices for chunk in plain)


def test_engine_errors_are_answers(server: Running) -> None:
    server.engine.fail_next = "the state is not finite"
    answer = server.http.post("/v1/completions", json={"prompt": "a"})
    assert answer.status_code == 500
    assert answer.json()["error"]["message"] == "the state is not finite"
    server.engine.fail_next = "the state is not finite"
    answer = server.http.post("/v1/completions", json={"prompt": "a", "stream": True})
    assert answer.status_code == 200
    assert "the state is not finite" in answer.text
    assert answer.text.endswith("data: [DONE]\n\n")


@pytest.mark.parametrize("stream", [False, True])
def test_an_error_ends_the_other_prompts_of_its_call_before_it_is_told(
    server: Running, stream: bool
) -> None:
    server.engine.fail_next, server.engine.step_seconds = "the state is not finite", 0.01
    body = {"prompt": ["a", "b"], "max_tokens": 4000, "stream": stream}
    before = samples(server)
    answer = server.http.post("/v1/completions", json=body)
    assert "the state is not finite" in answer.text
    _, other = server.engine.requests
    assert server.engine.aborted == [other.id]
    after = samples(server)
    for reason, count in (("error", 2), ("disconnect", 0)):
        name = f"merestone_requests_total{{reason={reason}}}"
        assert after.get(name, 0) - before.get(name, 0) == count

"""Where conversations may be resumed: parts' ends, earlier messages, marks and their lives."""

from __future__ import annotations

from typing import Any

import pytest
from live_server import Running
from tokenizers import Tokenizer, decoders, normalizers

from merestone.serve.boundaries import Cuts, Mark, earlier_ends, marks_of, time_to_live
from merestone.serve.chat import ChatPrompt, build_prompt, normalise
from merestone.serve.errors import ApiError
from merestone.serve.template import ChatTemplate, ModelText
from merestone.serve.text import Vocabulary

EPHEMERAL = {"type": "ephemeral"}
HOUR = {"type": "ephemeral", "ttl": "1h"}


def user(content: Any, **more: Any) -> dict[str, Any]:
    return {"role": "user", "content": content, **more}


def assistant(content: str, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **more}


def part(text: str, **more: Any) -> dict[str, Any]:
    return {"type": "text", "text": text, **more}


def build(text: ModelText, messages: list[Any], tools: list[Any] | None = None) -> ChatPrompt:
    assert text.template is not None
    marks = marks_of(messages, tools or [])
    bare = [{k: v for k, v in tool.items() if k != "cache_control"} for tool in tools or []]
    return build_prompt(text.vocabulary, text.template, normalise(messages), bare, {}, marks=marks)


def ends(text: ModelText, prompt: ChatPrompt) -> list[tuple[str, str]]:
    """The last characters before each boundary, and its kind."""
    return [
        (text.vocabulary.decode(prompt.tokens[:count])[-4:], kind)
        for count, kind in prompt.boundaries
    ]


@pytest.mark.parametrize(
    ("roles", "kept"),
    [
        ("u", []),
        ("su", [1]),
        ("uau", [1, 2]),
        ("uauau", [1, 3, 4]),
        ("uu", [1]),
        ("uaut", [1, 3]),
        ("uattau", [1, 4, 5]),
        ("ua" * 11 + "u", [13, 17, 19, 21, 22]),
        ("uat" + "at" * 40, [73, 77, 79, 81, 82]),
    ],
)
def test_earlier_ends_are_few_and_near_the_end(roles: str, kept: list[int]) -> None:
    names = {"s": "system", "u": "user", "a": "assistant", "t": "tool"}
    found = earlier_ends([names[letter] for letter in roles])
    assert found == kept


def test_ends_of_messages_and_tool_results(model_text: ModelText) -> None:
    call = {"id": "c", "type": "function", "function": {"name": "now", "arguments": "{}"}}
    messages = [
        {"role": "system", "content": "Be."},
        user("one?"),
        assistant("1111"),
        user("two?"),
        assistant("", tool_calls=[call]),
        {"role": "tool", "content": "noon", "tool_call_id": "c"},
        assistant("2222"),
        user("sure"),
    ]
    found = ends(model_text, build(model_text, messages))
    assert found == [
        (">Be.", "instruction"),
        ("one?", "message"),
        ("two?", "message"),
        ("nse>", "tool"),
        ("2222", "message"),
        ("sure", "turn"),
    ]


def test_dropping_the_last_messages_resumes_where_they_began(model_text: ModelText) -> None:
    """Twelve questions at once; then 1, 2 or 5 messages, or turns, fewer, and another question."""
    messages = [user("q0 ?")]
    for number in range(1, 12):
        messages += [assistant(f"a{number} ."), user(f"q{number} ?")]
    prompt = build(model_text, messages)
    for dropped in (1, 2, 5):
        for kept in (messages[:-dropped], messages[: -2 * dropped]):
            last = max(i for i, m in enumerate(kept) if m["role"] == "user")
            part = build(model_text, kept[: last + 1])
            end = dict(map(reversed, part.boundaries))["turn"]
            assert end in [count for count, _ in prompt.boundaries]
            assert prompt.tokens[:end] == part.tokens[:end]


def test_marks_of_every_spelling(model_text: ModelText) -> None:
    tools = [
        {"type": "function", "function": {"name": "a"}, "cache_control": HOUR},
        {"type": "function", "function": {"name": "b"}},
    ]
    messages = [
        {"role": "system", "content": [part("S1"), part("S2", cache_control=EPHEMERAL)]},
        user([part("long", cache_control={"type": "ephemeral", "ttl": "30s"}), part("tail")]),
        assistant("x", cache_control=HOUR),
        user("and?"),
    ]
    prompt = build(model_text, messages, tools)
    lives = dict(prompt.lives)
    found = {
        model_text.vocabulary.decode(prompt.tokens[:count])[-4:]: (kind, lives.get(count))
        for count, kind in prompt.boundaries
    }
    assert found["S1S2"] == ("instruction", 300.0)
    assert found["long"] == ("mark", 30.0)
    assert found["nt|>x"[-4:]] == ("message", 3600.0)
    assert found["and?"] == ("turn", None)
    assert 3600.0 in [life for kind, life in found.values() if kind == "mark"], "behind tool a"
    assert "cache_control" not in prompt.text


@pytest.mark.parametrize(
    "control",
    [
        1,
        {},
        {"type": "persistent"},
        {"type": "ephemeral", "ttl": 300},
        {"type": "ephemeral", "ttl": "5"},
        {"type": "ephemeral", "ttl": "0m"},
        {"type": "ephemeral", "ttl": "25h"},
        {"type": "ephemeral", "ttl": "-5m"},
    ],
)
def test_what_is_no_time_to_live(control: object) -> None:
    with pytest.raises(ApiError, match="cache_control"):
        time_to_live(control, "cache_control")
    with pytest.raises(ApiError, match=r"messages\[1\].content\[0\].cache_control"):
        marks_of([user("x"), user([part("y", cache_control=control)])], [])


def test_times_to_live() -> None:
    assert time_to_live(EPHEMERAL, "") == 300
    times = [time_to_live({"type": "ephemeral", "ttl": t}, "") for t in ("5m", "1h", "7s", "24h")]
    assert times == [300, 3600, 7, 86400]


def test_a_mark_inside_a_token_lies_before_it(model_text: ModelText) -> None:
    template = ChatTemplate("{% for m in messages %}{{ m.content }}{% endfor %}", {})
    prompt = build_prompt(
        model_text.vocabulary, template, [user("h\u00e9llo")], [], {}, "<", [Mark(0, 9.0, "h")]
    )
    assert prompt.boundaries[0] == (1, "mark")
    # another normal form of the same text: the mark's text is not how the prompt begins
    assert Cuts(model_text.vocabulary, "", ()).at("x") == 0


def test_a_normaliser_makes_the_parts_be_tokenised_alone() -> None:
    tokenizer = Tokenizer.from_str(
        '{"model": {"type": "BPE", "vocab": {"e": 0, "\u00c3\u00a9": 1, "x": 2, "\u00c3": 3,'
        ' "\u00a9": 4}, "merges": [["\u00c3", "\u00a9"]]}, "added_tokens": [], "pre_tokenizer":'
        ' {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true}}'
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.normalizer = normalizers.NFC()
    vocabulary = Vocabulary(tokenizer)
    text = "xe\u0301xx"  # three bytes more than its tokens have
    tokens = vocabulary.encode(text)
    assert tokens == (2, 1, 2, 2)
    cuts = Cuts(vocabulary, text, tokens)
    assert (cuts.at("xe\u0301"), cuts.at("xe"), cuts.below("xe")) == (2, 0, 1)


def test_marks_reach_the_engine(server: Running) -> None:
    messages = [{"role": "system", "content": "S", "cache_control": HOUR}, user("ab")]
    body = {"extra_body": {"cache_control": EPHEMERAL}}
    server.client.chat.completions.create(model="fake", messages=messages, max_tokens=1, **body)
    request = server.engine.requests[-1]
    kinds = dict(request.boundaries)
    lives = {kinds[count]: life for count, life in request.lives}
    assert lives == {"instruction": 3600.0, "turn": 300.0}
    assert [kind for _, kind in request.ends] == ["reasoning"]
    complete = server.client.completions.create
    complete(model="fake", prompt="hello", extra_body={"prompt_cache_retention": "24h"})
    assert server.engine.requests[-1].lives == ((5, 86400.0),)
    marks = {"cache_boundaries": [2, 3], "cache_control": HOUR}
    complete(model="fake", prompt="hello", extra_body=marks)
    assert server.engine.requests[-1].lives == ((2, 3600.0), (3, 3600.0))
    answer = server.http.post(
        "/v1/chat/completions",
        json={"messages": [user("x", cache_control={"type": "x"})], "max_tokens": 1},
    )
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "messages[0].cache_control"

"""The terminal chat, against the fake engine."""

from __future__ import annotations

import io
from collections.abc import Iterable

import pytest
from live_server import Running
from rich.console import Console

from merestone.serve.terminal import Conversation, ServerRefusal, account


def talk(server: Running, lines: Iterable[str], monkeypatch: pytest.MonkeyPatch) -> str:
    out = io.StringIO()
    console = Console(file=out, width=200)
    waiting = iter(lines)

    def answer(*_: object, **__: object) -> str:
        try:
            return next(waiting)
        except StopIteration:
            raise EOFError from None

    monkeypatch.setattr(console, "input", answer)
    with Conversation(console, server.url + "/v1", None, system="S", max_tokens=50) as chat:
        chat.run()
    return out.getvalue()


def test_turns_show_their_hits(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    server.says("<think>hm</think>[bold]Hello", "Again")
    shown = talk(server, ["hi", "/help", "more", "/exit"], monkeypatch)
    assert "fake at http://" in shown
    assert "hm[bold]Hello" in shown
    assert "restored 0 of 8 prompt tokens (unknown), 16 new, first after" in shown
    assert "at a prompt boundary" in shown
    first, second = server.engine.requests
    assert second.tokens[: len(first.tokens)] == first.tokens
    text = server.text.vocabulary.decode(second.tokens)
    assert text.startswith("[gMASK]<sop><|system|>S<|user|>hi<|assistant|>")


def test_reset_and_system(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    server.says("a", "b")
    talk(server, ["one", "/reset", "/system T", "", "two"], monkeypatch)
    text = server.text.vocabulary.decode(server.engine.requests[-1].tokens)
    assert text == "[gMASK]<sop><|system|>T<|user|>two<|assistant|>"


def test_a_refused_turn_is_forgotten(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    server.says("a")
    shown = talk(server, ["x" * 5000, "fine"], monkeypatch)
    assert "400: The context limit is 4096" in shown
    assert "fine" in server.text.vocabulary.decode(server.engine.requests[-1].tokens)
    server.engine.fail_next = "broken state"
    assert "broken state" in talk(server, ["again"], monkeypatch)


def test_no_server() -> None:
    with (
        Conversation(Console(file=io.StringIO()), "http://127.0.0.1:9", None) as chat,
        pytest.raises(ServerRefusal, match=r"127\.0\.0\.1:9"),
    ):
        chat.run()


def test_other_servers_say_less() -> None:
    assert account({"prompt_tokens": 3}, None) == "restored 0 of 3 prompt tokens, 0 new"
    assert account({"prompt_tokens_details": None}, None).startswith("restored 0 of 0")

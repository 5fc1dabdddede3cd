"""The real engine behind the real server: what only both together can get wrong."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from bench.serving import serving

from engine.real import stream
from merestone.engine.build import EngineOptions, build_engine
from merestone.models.tiny import write_tiny
from merestone.serve.app import create_app
from merestone.serve.service import ServerOptions, Service
from merestone.serve.template import load_text


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    directory: Path = tmp_path_factory.mktemp("tiny")
    write_tiny(directory)
    engine = build_engine(directory, EngineOptions(memory=256 << 20, poison=True), "tiny")
    service = Service(engine, load_text(directory), ServerOptions("tiny"))
    with serving(create_app(service)) as address:
        yield address


def ask(client: httpx.Client, prompt: list[int], count: int) -> tuple[list[int], int]:
    """Stream a completion to its ``[DONE]``; (ids, cached tokens)."""
    body = {
        "model": "tiny", "prompt": prompt, "max_tokens": count, "temperature": 0, "stream": True,
        "return_token_ids": True, "ignore_eos": True, "stream_options": {"include_usage": True},
    }  # fmt: skip
    ids: list[int] = []
    cached = -1
    with client.stream("POST", "/v1/completions", json=body) as reply:
        assert reply.status_code == 200
        for line in reply.iter_lines():
            if not line.startswith("data: "):
                continue
            if line == "data: [DONE]":
                return ids, cached
            chunk = json.loads(line.removeprefix("data: "))
            for choice in chunk["choices"]:
                ids += choice.get("token_ids") or []
            if chunk.get("usage"):
                cached = chunk["usage"]["prompt_tokens_details"]["cached_tokens"]
    raise AssertionError("the stream ended without [DONE]")


def test_a_hundred_next_turns_on_done_never_miss(url: str) -> None:
    with httpx.Client(base_url=url, timeout=60) as client:
        for turn in range(100):
            prompt = list(stream(20 + turn, turn))
            ids, _ = ask(client, prompt, 3)
            assert len(ids) == 3
            longer = [*prompt, *ids, 1, 2, 3]
            _, cached = ask(client, longer, 1)
            assert cached == len(prompt) + 2


def test_health_answers_while_a_long_prompt_is_computed(url: str) -> None:
    """The HTTP loop and the model loop do not block each other."""
    answered = 0
    with httpx.Client(base_url=url, timeout=60) as client:
        body = {
            "model": "tiny", "prompt": list(stream(6000, 9)), "max_tokens": 1, "stream": True,
        }  # fmt: skip
        with client.stream("POST", "/v1/completions", json=body) as reply:
            with httpx.Client(base_url=url, timeout=60) as other:
                while other.get("/metrics").text.find("merestone_requests_running 1.0") < 0:
                    pass
                for _ in range(5):
                    assert other.get("/health").status_code == 200
                    answered += 1
                running = other.get("/health").json()["running"]
            reply.read()
    assert answered == 5
    assert running == 1, "the prompt was finished before health was asked: make it longer"

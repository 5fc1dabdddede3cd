"""The real engine behind the real server: what only both together can get wrong."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from bench.serving import serving

from engine.real import stream
from merestone.engine.build import EngineOptions, build_engine
from merestone.models.tiny import write_tiny
from merestone.sched.plan import StepPlan, StepResult
from merestone.serve.app import create_app
from merestone.serve.service import ServerOptions, Service
from merestone.serve.template import load_text


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Service:
    directory: Path = tmp_path_factory.mktemp("tiny")
    write_tiny(directory)
    engine = build_engine(directory, EngineOptions(memory=256 << 20, poison=True), "tiny")
    return Service(engine, load_text(directory), ServerOptions("tiny"))


@pytest.fixture(scope="module")
def url(service: Service) -> Iterator[str]:
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


def test_health_answers_while_a_step_runs(
    service: Service, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The HTTP loop and the model loop do not block each other."""
    device = service.engine.device
    begun, may_end, run = threading.Event(), threading.Event(), device.run

    def held(plan: StepPlan) -> StepResult:
        if plan.works:  # else it closes the slot of whoever asked before
            begun.set()
            assert may_end.wait(120)
        return run(plan)

    monkeypatch.setattr(device, "run", held)
    body = {"model": "tiny", "prompt": [1, 2, 3], "max_tokens": 1, "stream": True}
    with (
        httpx.Client(base_url=url, timeout=60) as client,
        client.stream("POST", "/v1/completions", json=body) as reply,
    ):
        try:
            assert begun.wait(60)
            with httpx.Client(base_url=url, timeout=60) as other:
                for _ in range(5):
                    health = other.get("/health")
                    assert (health.status_code, health.json()["running"]) == (200, 1)
        finally:
            may_end.set()
        assert reply.read().endswith(b"data: [DONE]\n\n")

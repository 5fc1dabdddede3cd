"""Disconnects, metrics, cache endpoints, keys, shutdown."""

from __future__ import annotations

import asyncio
import gc
import json
import logging
import socket
import sys
import threading
import time
from typing import Any

import openai
import pytest
from fake_engine import FakeEngine
from live_server import Running, samples, serving, wait_for
from starlette.requests import Request

from merestone import __version__
from merestone.engine.api import GenerateRequest
from merestone.sched.plan import SamplingParams
from merestone.serve import server as server_module
from merestone.serve.errors import ApiError
from merestone.serve.flight import Flight
from merestone.serve.metrics import Metrics
from merestone.serve.protocol import CompletionBody
from merestone.serve.server import SWITCH_S, AddressRefused, Server, bind
from merestone.serve.service import ServerOptions, Service
from merestone.serve.template import ModelText


def raw_call(server: Running, path: str, body: dict[str, Any]) -> socket.socket:
    """Send a request by hand, so that the connection can be cut at any moment."""
    data = json.dumps(body).encode()
    host, port = server.url.removeprefix("http://").split(":")
    connection = socket.create_connection((host, int(port)))
    head = f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-length: {len(data)}\r\n\r\n"
    connection.sendall(head.encode() + data)
    return connection


def aborted(server: Running) -> int:
    """How many of this test's requests were aborted (others may still be leaving)."""
    return len({r.id for r in server.engine.requests} & set(server.engine.aborted))


@pytest.mark.parametrize("hold", ["queue", "prefill", ""])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_a_disconnect_aborts_at_once(server: Running, hold: str, stream: bool, path: str) -> None:
    engine = server.engine
    engine.hold, engine.step_seconds = hold, 0.01
    body: dict[str, Any] = {"max_tokens": 2000, "stream": stream}
    if path == "/v1/completions":
        body["prompt"] = ["a", "b"]
    else:
        body["messages"] = [{"role": "user", "content": "x"}]
    with raw_call(server, path, body):
        wait_for(lambda: engine.requests, "the request did not arrive")
        time.sleep(0.05)
        assert not aborted(server)
    wait_for(lambda: aborted(server) == len(engine.requests), "not aborted")


def test_a_disconnect_is_counted_before_the_engine_is_told() -> None:
    seen: list[float | None] = []

    class Told(FakeEngine):
        def abort(self, request_id: str) -> None:
            labels = {"reason": "disconnect"}
            seen.append(metrics.registry.get_sample_value("merestone_requests_total", labels))

    engine = Told()
    metrics = Metrics(engine)
    requests = [GenerateRequest(name, (1,), SamplingParams(), 4) for name in "ab"]
    flight = Flight(engine, metrics, requests)
    flight.close()
    flight.close()
    assert seen == [1, 2]


def test_a_finished_request_is_not_aborted(server: Running) -> None:
    server.client.completions.create(model="fake", prompt="a")
    list(server.client.completions.create(model="fake", prompt="a", stream=True))
    assert not aborted(server)


def test_a_client_of_the_api_that_leaves(server: Running) -> None:
    server.engine.step_seconds = 0.01
    stream = server.client.completions.create(
        model="fake", prompt="a", max_tokens=2000, stream=True
    )
    next(iter(stream))
    stream.close()
    wait_for(lambda: aborted(server), "not aborted")


def test_a_reader_that_never_reads_does_not_block_the_others(server: Running) -> None:
    server.engine.tokens_a_step = 50
    body = {"prompt": ["a"] * 20, "max_tokens": 4000, "stream": True, "return_token_ids": True}
    with raw_call(server, "/v1/completions", body):
        wait_for(lambda: len(server.engine.requests) == 20, "not all requests came")
        answer = server.client.completions.create(model="fake", prompt="quick", max_tokens=3)
        assert answer.usage is not None
        assert answer.usage.completion_tokens == 3


def test_prompts_of_one_call_run_together(server: Running) -> None:
    server.engine.hold = "prefill"
    with raw_call(server, "/v1/completions", {"prompt": ["a", "b", "c"]}):
        wait_for(lambda: len(server.engine.requests) == 3, "they wait for each other")
    wait_for(lambda: aborted(server) == 3, "not aborted")


def test_small_endpoints(server: Running) -> None:
    assert [model.id for model in server.client.models.list()] == ["fake"]
    assert server.client.models.retrieve("fake").model_extra == {"max_model_len": 4096}
    assert server.http.get("/version").json() == {"version": __version__}
    assert server.http.get("/health").json()["status"] == "ok"
    tokens = server.http.post("/tokenize", json={"prompt": "h\u00e9"}).json()
    assert tokens == {"tokens": server.ids("h\u00e9"), "count": 3, "max_model_len": 4096}
    text = server.http.post("/detokenize", json={"tokens": tokens["tokens"]}).json()
    assert text == {"prompt": "h\u00e9"}
    assert server.http.post("/detokenize", json={"tokens": [320]}).status_code == 400
    assert server.http.post("/tokenize", json={}).status_code == 400
    paths = server.http.get("/openapi.json").json()["paths"]
    assert "/v1/chat/completions" in paths


def test_cache_endpoints(server: Running, model_text: ModelText) -> None:
    server.client.completions.create(model="fake", prompt="hello")
    view = server.http.get("/cache").json()["data"]
    assert {entry["kind"] for entry in view} == {"prompt", "response"}
    assert not any("token_ids" in entry for entry in view)
    first = server.http.get("/cache", params={"limit": 1}).json()
    assert (len(first["data"]), first["has_more"]) == (1, True)
    rest = server.http.get("/cache", params={"after": first["data"][0]["id"]}).json()
    assert first["data"] + rest["data"] == view
    assert not rest["has_more"]
    prompts = server.http.get("/cache", params={"kind": "prompt", "salt": ""}).json()["data"]
    assert [entry["kind"] for entry in prompts] == ["prompt"]
    assert server.http.get("/cache", params={"salt": "other"}).json()["data"] == []
    assert server.http.get("/cache", params={"limit": 0}).status_code == 400
    server.engine.busy = True
    busy = server.http.post("/cache/reset")
    assert busy.status_code == 409
    assert busy.json()["error"]["code"] == "cache_busy"
    server.engine.busy = False
    assert server.http.post("/cache/reset").json() == {"dropped": len(view)}
    assert server.http.get("/cache").json()["data"] == []
    with serving(model_text, ServerOptions("fake", cache_tokens=True)) as open_server:
        open_server.client.completions.create(model="fake", prompt="hello")
        view = open_server.http.get("/cache").json()["data"]
        assert open_server.ids("hello") in [entry["token_ids"] for entry in view]


@pytest.mark.parametrize("frank", [False, True])
def test_what_another_salt_knows_is_said_to_the_operator_alone(
    model_text: ModelText, frank: bool
) -> None:
    with serving(model_text, ServerOptions("fake", cache_tokens=frank)) as server:
        for salt in ("one", "two"):
            body = {"prompt": "hello", "max_tokens": 1, "cache_salt": salt}
            answer = server.http.post("/v1/completions", json=body).json()
        found = samples(server)
    assert answer["usage"]["merestone"]["lost"] == ("other_salt" if frank else "unknown")
    assert not [name for name in found if "other_salt" in name]


def test_metrics(model_text: ModelText) -> None:
    with serving(model_text) as server:
        for prompt in ("hello", "hello", "hello world"):
            server.client.completions.create(model="fake", prompt=prompt, max_tokens=4)
        server.client.completions.create(
            model="fake", prompt="hello", max_tokens=4, extra_body={"cache_prompt": False}
        )
        server.http.post("/v1/completions", json={})
        found = samples(server)
    assert found["merestone_requests_total{reason=length}"] == 4
    assert found["merestone_refused_total{status=400}"] == 1
    assert found["merestone_prompt_tokens_total{}"] == 26
    assert found["merestone_restored_tokens_total{}"] == 10
    assert found["merestone_generated_tokens_total{}"] == 16
    for outcome in ("exact", "partial", "miss", "not_eligible"):
        assert found[f"merestone_lookups_total{{outcome={outcome}}}"] == 1
    assert found["merestone_time_to_first_token_seconds_count{}"] == 4
    assert found["merestone_inter_token_seconds_count{}"] == 12
    assert found["merestone_smallest_reusable_tokens{}"] == 1
    assert found["merestone_checkpoints_published_total{kind=prompt}"] > 0
    assert found["merestone_checkpoints_discarded_total{kind=prompt,reason=not_finite}"] == 1
    assert found["merestone_frames_anchors{}"] == 2
    assert found["merestone_steps_total{}"] == 7
    assert found["merestone_engine_peculiar{}"] == 9


def test_one_log_line_a_request(server: Running, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "merestone.request"):
        for _ in range(2):
            answer = server.client.completions.create(model="fake", prompt="hello", max_tokens=4)
    assert answer.id == f"cmpl-{server.engine.requests[1].id}"
    first, second = [record.getMessage() for record in caplog.records]
    assert first.startswith(server.engine.requests[0].id)
    assert "prompt=5 matched=0 restored=0 computed=5 output=4 ttft=" in first
    assert "matched=5 restored=5 computed=0" in second
    assert second.endswith("reason=length")


def test_the_first_token_of_a_request_is_that_of_any_choice(
    server: Running, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "merestone.request"):
        server.client.completions.create(model="fake", prompt="a", max_tokens=4, n=3)
    assert "output=12 ttft=0.001s total=0.200s" in caplog.text


def test_api_key(model_text: ModelText) -> None:
    options = ServerOptions("fake", api_key="secret", cors_origins=("http://ui",))
    with serving(model_text, options) as server:
        server.client.completions.create(model="fake", prompt="a")
        assert server.http.get("/health").status_code == 200
        assert server.http.get("/metrics").status_code == 200
        for path in ("/v1/models", "/cache", "/docs", "/nothing"):
            assert server.http.get(path).status_code == 401
        with pytest.raises(openai.AuthenticationError) as refused:
            server.client.with_options(api_key="guess").models.list()
        assert refused.value.code == "invalid_api_key"
        assert samples(server)["merestone_refused_total{status=401}"] == 5
        origin = {"origin": "http://ui", "access-control-request-method": "POST"}
        preflight = server.http.options("/v1/completions", headers=origin)
        assert preflight.headers["access-control-allow-origin"] == "http://ui"


def test_no_cors_unless_asked_for(server: Running) -> None:
    answer = server.http.get("/health", headers={"origin": "http://ui"})
    assert "access-control-allow-origin" not in answer.headers


@pytest.mark.parametrize("stream", [False, True])
def test_shutdown_gives_clients_what_there_is(model_text: ModelText, stream: bool) -> None:
    answers: list[Any] = []

    def call(server: Running) -> None:
        body = {"prompt": "a", "max_tokens": 4000, "stream": stream}
        answers.append(server.http.post("/v1/completions", json=body))

    with serving(model_text) as server:
        server.engine.step_seconds = 0.01
        caller = threading.Thread(target=call, args=(server,))
        caller.start()
        wait_for(lambda: server.engine.requests, "the request did not arrive")
        server.shut_down()
        caller.join(60)
    assert answers[0].status_code == 200
    assert '"finish_reason":"abort"' in answers[0].text


def test_shutdown_does_not_wait_for_half_a_body(
    model_text: ModelText, caplog: pytest.LogCaptureFixture
) -> None:
    with (
        serving(model_text) as server,
        socket.create_connection(("127.0.0.1", int(server.url.rpartition(":")[2]))) as client,
    ):
        head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\n"
        client.sendall(head + b'{"prompt":')
        server.http.get("/health")
        server.shut_down()
        client.settimeout(60)
        answer = client.recv(4096)
    assert answer.startswith(b"HTTP/1.1 503 ")
    # Nor of tasks that had to be cancelled after five seconds more.
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


def test_a_connection_is_kept_for_longer_than_by_the_client(model_text: ModelText) -> None:
    service = Service(FakeEngine(), model_text, ServerOptions("fake"))
    theirs = openai.DEFAULT_CONNECTION_LIMITS.keepalive_expiry
    assert theirs is not None
    assert Server(service).config.timeout_keep_alive > 2 * theirs


def test_nothing_begins_after_everything_was_ended(model_text: ModelText) -> None:
    """A body that comes then, or a prompt that was looked through meanwhile, is not waited for."""
    engine = FakeEngine()
    service = Service(engine, model_text, ServerOptions("fake"))
    service.abort_all()
    request = GenerateRequest("late", (1,), SamplingParams(), 4)
    with pytest.raises(ApiError) as refused:
        service.stream([request], lambda flight: pytest.fail("it began"))
    assert refused.value.status == 503
    with pytest.raises(ApiError) as refused:
        asyncio.run(service.read(Request({"type": "http"}), CompletionBody))
    assert refused.value.status == 503
    assert not engine.requests


def test_an_address_in_use_is_one_error() -> None:
    listener = bind("127.0.0.1", 0)
    listener.listen()
    port = listener.getsockname()[1]
    with pytest.raises(AddressRefused, match=f"cannot listen on 127.0.0.1:{port}"):
        bind("127.0.0.1", port)
    listener.close()


def test_the_process_of_a_server_is_set_up_for_its_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """No thread waits for Python's 5 ms, and no collection looks through what was loaded."""
    seen: list[tuple[float, bool]] = []

    class Brief:
        lost = None

        def __init__(self, *_: object) -> None: ...

        def run(self, sockets: list[socket.socket]) -> None:
            seen.append((sys.getswitchinterval(), gc.get_freeze_count() > 0))

    monkeypatch.setattr(server_module, "Server", Brief)
    before = sys.getswitchinterval()
    try:
        with socket.socket() as listener:
            assert server_module.run(Any, listener, 0.0, lambda: None) is None  # type: ignore[arg-type]
    finally:
        sys.setswitchinterval(before)
        gc.unfreeze()
    assert seen == [(SWITCH_S, True)]

"""A server with the fake engine, in a thread, on a port of its own."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import httpx
import openai
from fake_engine import FakeEngine
from prometheus_client.parser import text_string_to_metric_families

from merestone.serve.server import Server, bind
from merestone.serve.service import ServerOptions, Service
from merestone.serve.template import ModelText


@dataclass
class Running:
    """A server that runs: its engine, a plain client and OpenAI's."""

    url: str
    engine: FakeEngine
    text: ModelText
    http: httpx.Client
    client: openai.OpenAI
    shut_down: Callable[[], None]

    def ids(self, text: str) -> list[int]:
        return list(self.text.vocabulary.encode(text))

    def says(self, *texts: str) -> None:
        """Script the next replies."""
        self.engine.replies.extend(self.ids(text) for text in texts)


@contextmanager
def serving(text: ModelText, options: ServerOptions | None = None) -> Iterator[Running]:
    engine = FakeEngine()
    service = Service(engine, text, options or ServerOptions("fake"))
    listener = bind("127.0.0.1", 0)
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    server = Server(service, grace=0.2)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    while not server.started:
        assert thread.is_alive()
        time.sleep(0.005)
    key = service.options.api_key or "none"

    def shut_down() -> None:
        server.should_exit = True

    try:
        with (
            httpx.Client(base_url=url, timeout=120) as http,
            openai.OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0, timeout=120) as client,
        ):
            yield Running(url, engine, text, http, client, shut_down)
    finally:
        engine.hold = ""
        shut_down()
        thread.join(120)
    assert not thread.is_alive()


def wait_for(condition: Callable[[], object], what: str) -> None:
    """Wait until it is so; ``what`` is said where it never is."""
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end, what
        time.sleep(0.005)


def samples(server: Running) -> dict[str, float]:
    """What `/metrics` says, by name and labels."""
    found = {}
    for family in text_string_to_metric_families(server.http.get("/metrics").text):
        for sample in family.samples:
            labels = ",".join(f"{key}={value}" for key, value in sorted(sample.labels.items()))
            found[f"{sample.name}{{{labels}}}"] = sample.value
    return found

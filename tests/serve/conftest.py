"""The shared server of the tests, with the fake engine and the tiny tokenizer."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from live_server import Running, serving, wait_for

from merestone.models.tiny_tokenizer import tokenizer_files
from merestone.serve.template import ModelText, load_text


@pytest.fixture(scope="session")
def model_text(tmp_path_factory: pytest.TempPathFactory) -> ModelText:
    directory = tmp_path_factory.mktemp("tokenizer")
    for name, content in tokenizer_files(4096).items():
        Path(directory, name).write_text(content, encoding="utf-8")
    return load_text(directory)


@pytest.fixture(scope="session")
def session_server(model_text: ModelText) -> Iterator[Running]:
    with serving(model_text) as running:
        yield running


@pytest.fixture
def server(session_server: Running) -> Running:
    """The shared server, with a fresh memory, once what the last test's clients left has ended."""
    engine = session_server.engine
    wait_for(lambda: engine.idle, "somebody's request does not end")
    engine.requests.clear()
    engine.aborted.clear()
    engine.replies.clear()
    engine.cache.clear()
    engine.hold, engine.tokens_a_step, engine.step_seconds = "", 1, 0.0
    engine.status, engine.busy, engine.stops, engine.fail_next = "ok", False, False, ""
    return session_server

"""Servers for tests and measurements: an ASGI application in a thread, merestone in a process."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import uvicorn

from merestone.serve.server import IDLE_S

_COMMAND = "from merestone.serve.cli import main; main()"
_SOURCE = Path(__file__).parents[1] / "src"


@contextmanager
def serving(app: Any) -> Iterator[str]:
    """Serve ``app`` on a free port, in a thread, and yield its URL."""
    listener = socket.create_server(("127.0.0.1", 0))
    config = uvicorn.Config(
        app, log_level="critical", timeout_keep_alive=IDLE_S, timeout_graceful_shutdown=5
    )
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    try:
        deadline = time.monotonic() + 30
        while not server.started:
            assert thread.is_alive(), "the server did not start"
            assert time.monotonic() < deadline, "the server did not start in time"
            time.sleep(0.01)
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join()
        listener.close()


@contextmanager
def merestone_process(
    arguments: Sequence[str], end: signal.Signals = signal.SIGTERM
) -> Iterator[str]:
    """Run ``merestone serve`` on a free port, in a process of its own that is ended by ``end``, and
    yield its URL.

    Raises:
        RuntimeError: it ended before it listened.
    """
    path = os.pathsep.join([str(_SOURCE), os.environ.get("PYTHONPATH", "")])
    process = subprocess.Popen(
        [
            sys.executable,
            "-c",
            _COMMAND,
            "serve",
            "--port",
            "0",
            "--log-level",
            "error",
            *arguments,
        ],
        env={**os.environ, "PYTHONPATH": path},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    try:
        for line in process.stdout:
            if found := re.search(r"http://\S+", line):
                yield found[0]
                return
        raise RuntimeError(f"merestone serve ended with {process.wait()}")
    finally:
        process.send_signal(end)
        process.wait()
        process.stdout.close()

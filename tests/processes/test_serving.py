"""The server over several ranks, from its command line: a lost rank, two machines, refusals."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import httpx
import pytest

from merestone.engine.ranks.device import hold
from merestone.models.tiny import write_tiny

SOURCE = Path(__file__).parents[2] / "src"
LINGER = """
from merestone.serve import server
from merestone.serve.cli import main
server.LINGER_S = 15.0
main()
"""
SERVE = (sys.executable, "-c", LINGER, "serve")
"""A server that is asked for its health after its end: whoever asks may have to wait for a core."""
BOUND_S = 120.0
BODY = {"prompt": "several ranks, one answer", "max_tokens": 6, "temperature": 0, "logprobs": 2}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory: Path = tmp_path_factory.mktemp("ranks") / "tiny"
    write_tiny(directory)
    return directory


@contextmanager
def started(model: Path, *options: str) -> Iterator[subprocess.Popen[str]]:
    command = [*SERVE, str(model), "--memory", "64MiB", "--threads", "1", "--tp", "2", *options]
    environment = {**os.environ, "PYTHONPATH": str(SOURCE)}
    pipe = subprocess.PIPE
    with subprocess.Popen(command, env=environment, stdout=pipe, stderr=pipe, text=True) as process:
        try:
            yield process
        finally:
            if process.poll() is None:
                process.kill()


def address(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    assert process.stderr is not None
    line = process.stdout.readline()
    found = re.search(r"http://\S+", line)
    assert found, line + process.stderr.read()
    return found[0]


def workers(process: subprocess.Popen[str]) -> list[int]:
    """Process ids of a server's ranks."""
    found = []
    for status in Path("/proc").glob("[0-9]*/status"):
        with suppress(FileNotFoundError, ProcessLookupError):  # others come and go
            if f"PPid:\t{process.pid}\n" in status.read_text():
                found.append(int(status.parent.name))
    return found


def test_a_rank_killed_under_the_server(model: Path) -> None:
    """The client gets an error, /health the reason, and the server ends with 1."""
    with started(model, "--port", "0") as process:
        with httpx.Client(base_url=address(process), timeout=60) as http:
            first = http.post("/v1/completions", json=BODY).json()
            again = http.post("/v1/completions", json=BODY).json()
            assert again["choices"] == first["choices"]
            usage = again["usage"]
            assert usage["merestone"]["restored"] == usage["prompt_tokens"]
            pids = workers(process)
            assert len(pids) == 2
            long = {**BODY, "max_tokens": 3000, "ignore_eos": True, "stream": True}
            with http.stream("POST", "/v1/completions", json=long) as reply:
                lines = reply.iter_lines()
                while "text" not in next(lines):
                    pass
                os.kill(pids[1], signal.SIGKILL)
                rest = "".join(lines)
            assert "was ended by SIGKILL" in rest
            health = http.get("/health")
            assert health.status_code == 503
            assert health.json()["status"] == "lost"
            assert f"(process {pids[1]}) was ended by SIGKILL" in health.json()["reason"]
            assert process.wait(BOUND_S) == 1
        assert process.stderr is not None
        assert "merestone: error: rank " in process.stderr.read().splitlines()[-1]
        assert not any(Path(f"/proc/{pid}").exists() for pid in pids)


def test_ranks_of_two_machines(model: Path) -> None:
    """Node 1 lends its ranks to node 0, which ends them in order."""
    held = hold("127.0.0.1")
    nodes = ("--nodes", "2", "--master", f"127.0.0.1:{held.getsockname()[1]}")
    with (
        held,
        started(model, *nodes, "--node-rank", "1") as lender,
        started(model, *nodes, "--port", "0") as process,
    ):
        with httpx.Client(base_url=address(process), timeout=60) as http:
            first = http.post("/v1/completions", json=BODY).json()
            again = http.post("/v1/completions", json=BODY).json()
            assert again["choices"] == first["choices"]
            assert [rank["rank"] for rank in http.get("/health").json()["ranks"]] == [0, 1]
        process.send_signal(signal.SIGTERM)
        assert process.wait(BOUND_S) == 0
        assert lender.wait(BOUND_S) == 0

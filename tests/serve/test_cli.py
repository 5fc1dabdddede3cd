"""The command line: options, one-line errors, exit codes, a real server and its signals."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from merestone import __version__
from merestone.models.loader import load_model
from merestone.serve import cli

SOURCE = Path(__file__).parents[2] / "src"
START = [sys.executable, "-c", "from merestone.serve.cli import main; main()"]


def invoke(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: str
) -> tuple[int, str, str]:
    monkeypatch.setattr(sys, "argv", ["merestone", *arguments])
    with pytest.raises(SystemExit) as end:
        cli.main()
    shown = capsys.readouterr()
    assert isinstance(end.value.code, int)
    return end.value.code, shown.out, shown.err


@pytest.mark.parametrize(
    ("text", "size"),
    [("512MiB", 2**29), ("2GB", 2 * 10**9), ("1.5k", 1500), ("77", 77), ("1 gib", 2**30)],
)
def test_sizes(text: str, size: int) -> None:
    assert cli.parse_size(text) == size


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (["serve", "--memory", "much"], 2, "'much' is not a size"),
        (["serve", "--port", "x"], 2, "--port"),
        (["serve", "--log-level", "loud"], 2, "'loud' is not one of"),
        (["serve", "--device", "tpu"], 2, "--device 'tpu' is not one of auto, cpu, cuda, cuda:N"),
        (["serve", "--device", "cuda:77"], 2, "--device cuda:77: no such CUDA device"),
        (["serve", "--dtype", "fp8"], 2, "--dtype 'fp8' is not one of float32, bfloat16, float16"),
        (["serve", "--load-format", "gguf"], 2, "--load-format 'gguf' is not one of auto, random"),
        (["serve", "--device", "cpu", "--memory", "9999999GiB"], 2, "--memory, --frames: a pool"),
        (["serve", "/does/not/exist"], 2, "/does/not/exist is no directory"),
        (["serve", "--unheard-of"], 2, "--unheard-of"),
        (["serve", "--store", "tape:1GB"], 2, "--store 'tape:1GB' is not memory:SIZE"),
        (["serve", "--store", "disk:/proc/none:1GB"], 2, "--store disk:/proc/none: "),
        (["serve", "--device", "cpu", "--memory", "5"], 2, "0 frames of"),
        (["serve", "--grace", "inf"], 2, "--grace"),
        (["serve", "--store-wait", "inf"], 2, "--store-wait"),
        (["serve", "--tp", "2", "--step-timeout", "nan"], 2, "--step-timeout"),
        (["frobnicate"], 2, "frobnicate"),
        (["tiny", "x", "--arch", "glm9"], 2, "'glm9' is not one of"),
        (["chat", "--url", "http://127.0.0.1:9"], 1, "127.0.0.1:9"),
    ],
)
def test_errors_are_one_line(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    arguments: list[str],
    code: int,
    says: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    if arguments[0] == "serve" and "--port" not in arguments:  # the usual one may be in use
        arguments = [*arguments, "--port", "0"]
    found, _, err = invoke(monkeypatch, capsys, *arguments)
    assert found == code
    assert says in err
    assert err.startswith("merestone: error: ")
    assert err.count("\n") == 1


def test_version_and_tiny(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert invoke(monkeypatch, capsys, "--version")[:2] == (0, f"merestone {__version__}\n")
    for arch in ("glm5_next", "kimi_linear"):
        directory = tmp_path / arch
        assert invoke(monkeypatch, capsys, "tiny", str(directory), "--arch", arch)[0] == 0
        assert (directory / "tokenizer.json").is_file()
        assert load_model(directory).info.vocab_size > 0
    (tmp_path / "empty").mkdir()
    code, _, err = invoke(monkeypatch, capsys, "serve", str(tmp_path / "empty"), "--port", "0")
    assert code == 2
    assert "no such file" in err


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), SystemExit(1)])
def test_a_server_that_cannot_print_its_address_serves(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, error: BaseException
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(cli.console, "print", fail)
    cli.announce("merestone at http://somewhere")
    assert "http://somewhere" in caplog.text


def test_without_a_command_there_is_help(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    _, out, err = invoke(monkeypatch, capsys)
    assert "Usage" in out + err
    assert "error" not in err


def test_a_template_that_is_no_text_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff")
    code, _, err = invoke(monkeypatch, capsys, "serve", str(tmp_path), "--port", "0")
    assert code == 2
    assert "chat_template.jinja" in err


def test_a_port_in_use(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        code, _, err = invoke(monkeypatch, capsys, "serve", "--port", port)
    assert code == 1
    assert f"cannot listen on 127.0.0.1:{port}" in err


def test_the_default_model_is_the_bundled_one() -> None:
    assert (cli.BUNDLED / "config.json").is_file()
    assert (cli.BUNDLED / "tokenizer.json").is_file()


@contextmanager
def running() -> Iterator[tuple[subprocess.Popen[str], str]]:
    environment = {**os.environ, "PYTHONPATH": str(SOURCE)}
    command = [*START, "serve", "--port", "0", "--grace", "1", "--memory", "64MiB"]
    with subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        line = process.stdout.readline()
        found = re.search(r"http://\S+", line)
        assert found, line + process.stderr.read()
        try:
            yield process, found[0]
        finally:
            if process.poll() is None:
                process.kill()


@pytest.mark.parametrize("sent", [signal.SIGTERM, signal.SIGINT])
def test_the_real_server_from_start_to_signal(sent: signal.Signals) -> None:
    with running() as (process, url), httpx.Client(base_url=url, timeout=60) as http:
        body = {"prompt": "hello", "max_tokens": 4, "temperature": 0, "return_token_ids": True}
        first = http.post("/v1/completions", json=body).json()
        again = http.post("/v1/completions", json=body).json()
        assert first["choices"][0]["token_ids"] == again["choices"][0]["token_ids"]
        prompt = again["usage"]["prompt_tokens"]
        assert again["usage"]["merestone"]["restored"] == prompt
        echo = {"prompt": "hello", "max_tokens": 0, "echo": True}
        assert http.post("/v1/completions", json=echo).json()["choices"][0]["text"] == "hello"
        scored = {**echo, "logprobs": 2, "n": 2}
        table = http.post("/v1/completions", json=scored).json()["choices"][1]["logprobs"]
        assert len(table["token_logprobs"]) == prompt
        messages = [{"role": "user", "content": "hi"}]
        chat = {"messages": messages, "max_tokens": 4, "stream": True}
        assert http.post("/v1/chat/completions", json=chat).text.endswith("data: [DONE]\n\n")
        assert "merestone_frames" in http.get("/metrics").text
        assert http.get("/cache").json()["data"]
        assert http.get("/health").status_code == 200
        assert http.post("/cache/reset").json()["dropped"] > 0
        process.send_signal(sent)
        assert process.wait(120) == 0


def test_explain_prints_the_gate_and_the_choice(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, _ = invoke(monkeypatch, capsys, "serve", "--explain", "--retention", "aligned:128")
    assert code == 0
    assert out.splitlines()[-1] == "retention aligned:128: as asked for"
    assert "speculation dynamic" in out
    code, _, err = invoke(monkeypatch, capsys, "serve", "--explain", "--retention", "aligned:100")
    assert code == 2
    assert "--retention aligned:100: 100 is not a multiple of 64 tokens" in err

"""A chat in the terminal with any server that speaks OpenAI's API.

After each turn it says what the server reports of its cache.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping
from types import TracebackType
from typing import Any

import httpx
from rich.console import Console
from rich.text import Text

HELP = "/system TEXT sets the system message, /reset forgets the conversation, /exit leaves"


class ServerRefusal(Exception):
    """The server cannot be reached, or its answer is an error."""


class Conversation:
    """A conversation and its connection. ``None`` options are not sent.

    Raises:
        ServerRefusal: from every method that asks the server.
    """

    def __init__(
        self,
        console: Console,
        url: str,
        api_key: str | None,
        *,
        model: str | None = None,
        system: str | None = None,
        max_tokens: int | None = None,
        temperature: float | None = None,
        thinking: bool | None = None,
    ) -> None:
        base = url.rstrip("/").removesuffix("/v1")
        headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
        # a prompt may be computed for long before the first token
        timeout = httpx.Timeout(30, read=None)
        self._console = console
        self._http = httpx.Client(base_url=base, headers=headers, timeout=timeout)
        self._model = model
        options = {
            "max_tokens": max_tokens,
            "temperature": temperature,
            "enable_thinking": thinking,
        }
        self._options = {key: value for key, value in options.items() if value is not None}
        self._system = system
        self.messages: list[dict[str, Any]] = []

    def __enter__(self) -> Conversation:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._http.close()

    def run(self) -> None:
        """Read lines until the end of input."""
        model = self.model()
        self._console.print(f"{model} at {self._http.base_url}  ({HELP})", style="dim")
        while True:
            try:
                line = self._console.input("[bold]> [/bold]").strip()
            except (EOFError, KeyboardInterrupt):
                self._console.print()
                return
            if line == "/exit":
                return
            if line == "/reset":
                self.messages.clear()
            elif line.startswith("/system"):
                self._system = line.removeprefix("/system").strip() or None
            elif line.startswith("/"):
                self._console.print(HELP, style="dim")
            elif line:
                try:
                    self.turn(line)
                except ServerRefusal as refusal:  # the conversation before it still stands
                    self.messages.pop()
                    self._console.print(Text(str(refusal), "red"), soft_wrap=True)

    def model(self) -> str:
        """The model's name; the server's first one if none was given."""
        if self._model is None:
            try:
                answer = self._http.get("/v1/models")
                check(answer)
                self._model = str(answer.json()["data"][0]["id"])
            except (httpx.HTTPError, ValueError, LookupError, TypeError) as error:
                raise ServerRefusal(f"{self._http.base_url}: {error}") from error
        return self._model

    def turn(self, text: str) -> None:
        """Send a user message, print the reply as it comes and what the cache did."""
        self.messages.append({"role": "user", "content": text})
        began, first = time.monotonic(), None
        thought: str | None = None
        content = ""
        usage: Mapping[str, Any] | None = None
        try:
            for chunk in self._chunks():
                usage = chunk.get("usage") or usage
                for choice in chunk.get("choices", ()):
                    delta = choice.get("delta", {})
                    if (piece := delta.get("reasoning_content")) is not None:
                        thought = (thought or "") + piece
                        self._show(piece, "dim italic")
                    if piece := delta.get("content"):
                        content += piece
                        self._show(piece, "")
                    if first is None and (thought or content):
                        first = time.monotonic() - began
        except KeyboardInterrupt:
            self._show(" [interrupted]", "red")
        self._console.print()
        reply: dict[str, Any] = {"role": "assistant", "content": content}
        if thought is not None:
            reply["reasoning_content"] = thought
        self.messages.append(reply)
        if usage:
            self._console.print(account(usage, first), style="dim", highlight=False)

    def _show(self, text: str, style: str) -> None:
        self._console.print(Text(text, style), end="", soft_wrap=True)

    def _chunks(self) -> Iterator[dict[str, Any]]:
        system = [{"role": "system", "content": self._system}] if self._system else []
        body = {
            "model": self.model(),
            "messages": [*system, *self.messages],
            "stream": True,
            "stream_options": {"include_usage": True},
            **self._options,
        }
        try:
            with self._http.stream("POST", "/v1/chat/completions", json=body) as answer:
                if answer.is_error:
                    answer.read()
                check(answer)
                for line in answer.iter_lines():
                    data = line.removeprefix("data:").strip()
                    if not line.startswith("data:") or data == "[DONE]":
                        continue
                    chunk = json.loads(data)
                    if "error" in chunk:
                        raise ServerRefusal(str(chunk["error"].get("message", chunk["error"])))
                    yield chunk
        except (httpx.HTTPError, ValueError) as error:
            raise ServerRefusal(f"{self._http.base_url}: {error}") from error


def account(usage: Mapping[str, Any], first: float | None) -> str:
    """One line on a turn: restored and prompt tokens, and why not more."""
    prompt = usage.get("prompt_tokens", 0)
    details = usage.get("prompt_tokens_details") or {}
    line = f"restored {details.get('cached_tokens') or 0} of {prompt} prompt tokens"
    own = usage.get("merestone") or {}
    if own.get("boundary"):
        line += f" at a {own['boundary']} boundary"
    if own.get("lost"):
        line += f" ({own['lost']})"
    line += f", {usage.get('completion_tokens', 0)} new"
    return line if first is None else f"{line}, first after {first:.2f} s"


def check(answer: httpx.Response) -> None:
    """Raise what a server answered instead of what it was asked for.

    Raises:
        ServerRefusal: with its message.
    """
    if answer.is_error:
        try:
            message = answer.json()["error"]["message"]
        except (ValueError, LookupError, TypeError):
            message = answer.text[:200]
        raise ServerRefusal(f"{answer.status_code}: {message}")

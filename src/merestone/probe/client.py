"""Requests to any OpenAI-compatible server, and their answers. Knows HTTP; must not judge."""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any

import httpx

from merestone.probe.reply import Broken, Reply, Unsupported, brings_tokens, read_choice, read_usage

TOP = 5
"""Alternatives asked for at every position."""

_SAMPLE = re.compile(r"^([A-Za-z_:][\w:]*(?:\{[^}]*\})?)\s+(\S+)", re.MULTILINE)


class Refused(Exception):
    """An answer with status 4xx: the server does not want to do it."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(f"HTTP {status}: {text[:300]}")
        self.status = status


class Server:
    """A server by its URL, with or without the ``/v1`` at its end."""

    def __init__(
        self,
        url: str,
        *,
        model: str | None = None,
        api_key: str | None = None,
        timeout_s: float = 1800.0,
    ) -> None:
        self.root = url.rstrip("/").removesuffix("/v1")
        self.model = model
        self._http = httpx.AsyncClient(
            base_url=self.root,
            headers={"authorization": f"Bearer {api_key}"} if api_key else None,
            timeout=httpx.Timeout(timeout_s, connect=10.0),
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=64),
        )

    async def __aenter__(self) -> Server:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self._http.aclose()

    async def complete(
        self,
        prompt: Sequence[int],
        max_tokens: int,
        *,
        salt: str,
        marks: Sequence[int] = (),
        stream: bool = False,
        prompt_logprobs: int | None = None,
    ) -> Reply:
        """``/v1/completions`` of token ids: greedy, seed 0, ends ignored, top-5 log probabilities.

        Raises:
            Refused: status 4xx.
            Broken: status 5xx, an error in a stream, or no connection.
        """
        body: dict[str, Any] = {"prompt": list(prompt), "logprobs": TOP}
        if marks:
            body["cache_boundaries"] = list(marks)
        if prompt_logprobs is not None:
            body["prompt_logprobs"] = prompt_logprobs
        return await self.generate("/v1/completions", body, max_tokens, salt, stream)

    async def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        max_tokens: int,
        *,
        salt: str,
        tools: Sequence[Mapping[str, Any]] = (),
        template: Mapping[str, Any] | None = None,
        stream: bool = False,
    ) -> Reply:
        """``/v1/chat/completions``, likewise; ``template`` are variables of the chat template."""
        body: dict[str, Any] = {"messages": list(messages), "logprobs": True, "top_logprobs": TOP}
        body |= _conversation(tools, template)
        return await self.generate("/v1/chat/completions", body, max_tokens, salt, stream)

    async def generate(
        self, path: str, body: Mapping[str, Any], max_tokens: int, salt: str, stream: bool
    ) -> Reply:
        """Send a body with the fields that every request of the probe has."""
        full = {
            "model": self.model,
            "temperature": 0,
            "seed": 0,
            "ignore_eos": True,
            "max_tokens": max_tokens,
            "return_token_ids": True,
            "cache_salt": salt,
            **body,
        }
        began = time.perf_counter()
        if stream:
            return await self._stream(path, full, began)
        answer = await self.post(path, full)
        reply = Reply(total_s=time.perf_counter() - began)
        choices = answer.get("choices")
        if not choices:
            raise Broken(f"an answer without choices: {str(answer)[:300]}")
        read_choice(reply, answer, choices[0])
        read_usage(reply, answer.get("usage"))
        return reply

    async def _stream(self, path: str, body: dict[str, Any], began: float) -> Reply:
        body |= {"stream": True, "stream_options": {"include_usage": True}}
        reply, done = Reply(), False
        try:
            async with self._http.stream("POST", path, json=body) as response:
                if response.status_code >= 400:
                    await response.aread()
                    _raise_status(response)
                async for line in response.aiter_lines():
                    data = line.removeprefix("data:").strip()
                    if not line.startswith("data:"):
                        continue
                    if data == "[DONE]":
                        done = True
                        break
                    _read_chunk(reply, json.loads(data), began)
        except httpx.HTTPError as error:
            raise Broken(f"no answer: {type(error).__name__}: {error}") from error
        if not done:
            raise Broken("a stream ended without [DONE]")
        reply.total_s = time.perf_counter() - began
        return reply

    async def abandon(self, prompt: Sequence[int], salt: str, after_s: float) -> bool:
        """Send a prompt and close the connection after a while; False if the answer was sooner."""
        try:
            async with asyncio.timeout(after_s):
                await self.complete(prompt, 1, salt=salt, stream=True)
        except TimeoutError:
            return True
        return False

    async def tokenize(self, text: str) -> list[int]:
        """The ids of a text.

        Raises:
            Unsupported: there is no ``/tokenize``.
        """
        return _ids(await self._tokenize({"prompt": text, "add_special_tokens": False}))

    async def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] = (),
        template: Mapping[str, Any] | None = None,
    ) -> tuple[list[int], list[tuple[int, str]] | None]:
        """The ids of a conversation with the header of the reply, and the boundaries (token count,
        kind) that the server sees in it; None where it does not say.

        Raises:
            Unsupported: there is no ``/tokenize`` for messages.
        """
        body = {"messages": list(messages), **_conversation(tools, template)}
        found = await self._tokenize(body)
        boundaries = found.get("boundaries")
        if boundaries is not None:
            boundaries = [(int(at), str(kind)) for at, kind in boundaries]
        return _ids(found), boundaries

    async def _tokenize(self, body: dict[str, Any]) -> dict[str, Any]:
        try:
            return await self.post("/tokenize", {"model": self.model, **body})
        except Refused as refusal:
            raise Unsupported(f"/tokenize: {refusal}") from refusal

    async def metrics(self) -> dict[str, float]:
        """Samples of ``/metrics`` by name and labels.

        Raises:
            Unsupported: there are none.
        """
        try:
            response = await self._http.get("/metrics")
            _raise_status(response)
        except Refused as refusal:
            raise Unsupported(f"/metrics: {refusal}") from refusal
        except httpx.HTTPError as error:
            raise Broken(f"no answer: {type(error).__name__}: {error}") from error
        return {name: float(value) for name, value in _SAMPLE.findall(response.text)}

    async def get(self, path: str) -> dict[str, Any]:
        """A JSON object. Raises as ``complete`` does."""
        return await self._json("GET", path, None)

    async def post(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """Send an object and return one. Raises as ``complete`` does."""
        return await self._json("POST", path, body)

    async def _json(self, verb: str, path: str, body: Mapping[str, Any] | None) -> dict[str, Any]:
        try:
            response = await self._http.request(verb, path, json=body)
        except httpx.HTTPError as error:
            raise Broken(f"no answer: {type(error).__name__}: {error}") from error
        _raise_status(response)
        answer = response.json()
        if not isinstance(answer, dict):
            raise Broken(f"{path} answered with no object")
        return answer


def _conversation(
    tools: Sequence[Mapping[str, Any]], template: Mapping[str, Any] | None
) -> dict[str, Any]:
    body: dict[str, Any] = {}
    if tools:
        body["tools"] = list(tools)
    if template:
        body["chat_template_kwargs"] = dict(template)
    return body


def _ids(found: Mapping[str, Any]) -> list[int]:
    if not isinstance(found.get("tokens"), list):
        raise Unsupported("/tokenize answers without tokens")
    return [int(token) for token in found["tokens"]]


def _read_chunk(reply: Reply, chunk: Mapping[str, Any], began: float) -> None:
    if "error" in chunk:
        raise Broken(f"an error in a stream: {chunk['error']}")
    for choice in (chunk.get("choices") or [])[:1]:
        if brings_tokens(choice):
            reply.arrivals.append(time.perf_counter() - began)
        read_choice(reply, chunk, choice)
    read_usage(reply, chunk.get("usage"))


def _raise_status(response: httpx.Response) -> None:
    if response.status_code >= 500:
        raise Broken(f"HTTP {response.status_code}: {response.text[:300]}")
    if response.status_code >= 400:
        raise Refused(response.status_code, response.text)

"""What every endpoint needs: the engine, the model's text side, options, metrics, open flights."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from starlette.requests import Request
from starlette.responses import Response

from merestone import __version__
from merestone.engine.api import Engine, GenerateRequest
from merestone.serve.errors import ApiError, from_validation, unavailable
from merestone.serve.flight import Flight, unless_disconnected
from merestone.serve.metrics import Metrics
from merestone.serve.protocol import Body
from merestone.serve.replies import EventStream, JsonResponse
from merestone.serve.template import ModelText

log = logging.getLogger("merestone.serve")
ENDS = "the server ends"
MAX_BODY = 64 << 20
CLIENT_GONE = 499  # nobody reads this status; it is the usual one in logs
Parsed = TypeVar("Parsed", bound=Body)


@dataclass(frozen=True, slots=True)
class ServerOptions:
    """How the server shows itself. ``cache_tokens`` lets ``GET /cache`` list token ids, which are
    users' texts."""

    model: str
    api_key: str | None = None
    cache_tokens: bool = False
    cors_origins: tuple[str, ...] = ()


class Service:
    """The state that endpoints share."""

    def __init__(self, engine: Engine, text: ModelText, options: ServerOptions) -> None:
        self.engine = engine
        self.text = text
        self.options = options
        self.metrics = Metrics(engine)
        self.created = int(time.time())
        self._flights: set[Flight] = set()
        self._uploads: set[asyncio.Task[bytes]] = set()
        self._ending = False

    async def read(self, request: Request, kind: type[Parsed]) -> Parsed:
        """Read and validate a body.

        Raises:
            ApiError: too large, not JSON, not valid, for another model, or never at its end.
        """
        body = validate(await self._upload(request), kind)
        if unknown := body.unknown():
            log.debug("fields that nobody reads: %s", ", ".join(unknown))
        model = getattr(body, "model", None)
        if model is not None:
            self.check_model(model)
        return body

    async def _upload(self, request: Request) -> bytes:
        """The bytes of a body, if they are there before the server ends."""
        self._refuse_at_the_end()
        upload = asyncio.create_task(_bytes_of(request))
        self._uploads.add(upload)
        try:
            return await upload
        except asyncio.CancelledError:
            if not self._ending:
                raise
            raise unavailable(ENDS) from None
        finally:
            self._uploads.discard(upload)

    def _refuse_at_the_end(self) -> None:
        """Nobody would end what comes after everything was ended."""
        if self._ending:
            raise unavailable(ENDS)

    def check_model(self, name: str) -> None:
        """Refuse a model that is not served."""
        if name != self.options.model:
            raise ApiError(
                f"The model {name!r} is not served here, {self.options.model!r} is",
                "model",
                "model_not_found",
                404,
            )

    def envelope(self, prefix: str, kind: str, request: GenerateRequest) -> dict[str, Any]:
        """The fields that begin every answer and every chunk; ``request`` is the call's first, by
        whose id the log knows it."""
        return {
            "id": f"{prefix}-{request.id}",
            "object": kind,
            "created": int(time.time()),
            "model": self.options.model,
            "system_fingerprint": f"merestone-{__version__}",
        }

    async def answer(
        self,
        request: Request,
        requests: Sequence[GenerateRequest],
        fold: Callable[[Flight], Awaitable[dict[str, Any]]],
    ) -> Response:
        """Run the requests and answer once, or end them as soon as the client is gone."""
        flight = self._launch(requests)
        try:
            body = await unless_disconnected(request.receive, _coroutine(fold(flight)))
        finally:
            self._land(flight)
        return Response(status_code=CLIENT_GONE) if body is None else JsonResponse(body)

    def stream(
        self,
        requests: Sequence[GenerateRequest],
        chunks: Callable[[Flight], AsyncIterator[dict[str, Any]]],
    ) -> Response:
        """Run the requests and stream what ``chunks`` makes of their steps."""
        flight = self._launch(requests)
        return EventStream(chunks(flight), lambda: self._land(flight))

    def abort_all(self) -> None:
        """End every open flight; its clients get what there is. Nobody's body is waited for."""
        self._ending = True
        for upload in list(self._uploads):
            upload.cancel()
        for flight in list(self._flights):
            flight.abort()

    def _launch(self, requests: Sequence[GenerateRequest]) -> Flight:
        self._refuse_at_the_end()
        health = self.engine.health()
        if health.get("status") != "ok":
            reason = health.get("reason") or "the engine is not running"
            raise unavailable(str(reason))
        flight = Flight(self.engine, self.metrics, requests)
        flight.launch()
        self._flights.add(flight)
        return flight

    def _land(self, flight: Flight) -> None:
        flight.close()
        self._flights.discard(flight)


async def _bytes_of(request: Request) -> bytes:
    data = bytearray()
    async for piece in request.stream():
        data += piece
        if len(data) > MAX_BODY:
            raise ApiError(f"The body is larger than {MAX_BODY} bytes", status=413)
    return bytes(data)


def validate(data: bytes, kind: type[Parsed]) -> Parsed:
    """A body from its bytes, by the rules of its model."""
    try:
        return kind.model_validate_json(data)
    except ValidationError as error:
        raise from_validation(error) from error


def schema_of(kind: type[BaseModel]) -> dict[str, Any]:
    """OpenAPI's description of a body that the endpoint reads itself, with its parts inlined."""
    schema = kind.model_json_schema()
    parts = schema.pop("$defs", {})

    def inline(node: Any) -> Any:
        if isinstance(node, list):
            return [inline(entry) for entry in node]
        if not isinstance(node, dict):
            return node
        if "$ref" in node:
            return inline(parts[node["$ref"].rsplit("/", 1)[1]])
        return {key: inline(value) for key, value in node.items()}

    content = {"application/json": {"schema": inline(schema)}}
    return {"requestBody": {"required": True, "content": content}}


async def _coroutine(work: Awaitable[dict[str, Any]]) -> dict[str, Any]:
    return await work

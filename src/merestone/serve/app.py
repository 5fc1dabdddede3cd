"""The HTTP application: routes, authorisation, errors."""

from __future__ import annotations

import asyncio
import hmac
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import Annotated, Any

from fastapi import FastAPI, Query
from fastapi.exceptions import RequestValidationError
from fastapi.middleware.cors import CORSMiddleware
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from merestone import __version__
from merestone.engine.api import CacheBusy, CacheQuery
from merestone.serve import chat_completions, completions
from merestone.serve.errors import ApiError
from merestone.serve.protocol import ChatBody, CompletionBody, DetokenizeBody, TokenizeBody
from merestone.serve.replies import JsonResponse
from merestone.serve.service import CLIENT_GONE, Service, schema_of

log = logging.getLogger("merestone.serve")
OPEN_PATHS = frozenset({"/health", "/metrics"})


def create_app(service: Service) -> FastAPI:
    """The application around a service; it starts the engine and stops it."""

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        service.engine.start()
        try:
            yield
        finally:
            await asyncio.to_thread(service.engine.stop)

    app = FastAPI(title="merestone", version=__version__, lifespan=lifespan)
    _add_generation(app, service)
    _add_text(app, service)
    _add_operations(app, service)
    _add_errors(app, service)
    if service.options.api_key:
        refused = service.metrics.refused
        app.add_middleware(ApiKey, key=service.options.api_key, refused=refused)
    if service.options.cors_origins:  # outermost: a preflight carries no key
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(service.options.cors_origins),
            allow_methods=["*"],
            allow_headers=["*"],
        )
    return app


def _add_generation(app: FastAPI, service: Service) -> None:
    @app.post("/v1/completions", openapi_extra=schema_of(CompletionBody))
    async def complete(request: Request) -> Response:
        body = await service.read(request, CompletionBody)
        call = await asyncio.to_thread(completions.prepare, service, body)
        if body.stream:
            return service.stream(call.requests, partial(completions.chunks, service, call))
        return await service.answer(
            request, call.requests, partial(completions.fold, service, call)
        )

    @app.post("/v1/chat/completions", openapi_extra=schema_of(ChatBody))
    async def chat(request: Request) -> Response:
        body = await service.read(request, ChatBody)
        call = await asyncio.to_thread(chat_completions.prepare, service, body)
        if body.stream:
            return service.stream([call.request], partial(chat_completions.chunks, service, call))
        return await service.answer(
            request, [call.request], partial(chat_completions.fold, service, call)
        )


def _add_text(app: FastAPI, service: Service) -> None:
    vocabulary, info = service.text.vocabulary, service.engine.info

    @app.post("/tokenize", openapi_extra=schema_of(TokenizeBody))
    async def tokenize(request: Request) -> Response:
        body = await service.read(request, TokenizeBody)
        if (body.prompt is None) == (body.messages is None):
            raise ApiError("exactly one of prompt and messages is needed", "prompt")
        found: dict[str, Any] = {}
        if body.prompt is not None:
            special = body.add_special_tokens is not False
            tokens = await asyncio.to_thread(vocabulary.encode, body.prompt, special)
        else:
            prompt = await asyncio.to_thread(
                chat_completions.render, service, body, body.messages or []
            )
            tokens = prompt.tokens
            found = {"prompt": prompt.text, "boundaries": prompt.boundaries}
        size = {"count": len(tokens), "max_model_len": info.context_limit}
        return JsonResponse({"tokens": tokens, **size, **found})

    @app.post("/detokenize", openapi_extra=schema_of(DetokenizeBody))
    async def detokenize(request: Request) -> Response:
        body = await service.read(request, DetokenizeBody)
        for token in body.tokens:
            if token >= info.vocab_size:
                raise ApiError(
                    f"token id {token} is outside the vocabulary of {info.vocab_size}", "tokens"
                )
        return JsonResponse({"prompt": vocabulary.decode(body.tokens)})


def _add_operations(app: FastAPI, service: Service) -> None:
    engine, options = service.engine, service.options
    card = {
        "id": options.model,
        "object": "model",
        "created": service.created,
        "owned_by": "merestone",
        "max_model_len": engine.info.context_limit,
    }

    @app.get("/v1/models")
    async def models() -> Response:
        return JsonResponse({"object": "list", "data": [card]})

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> Response:
        service.check_model(name)
        return JsonResponse(card)

    @app.get("/version")
    async def version() -> Response:
        return JsonResponse({"version": __version__})

    @app.get("/health")
    async def health() -> Response:
        report = engine.health()
        return JsonResponse(report, 200 if report.get("status") == "ok" else 503)

    @app.get("/metrics")
    async def metrics() -> Response:
        text = await asyncio.to_thread(service.metrics.render)
        return Response(text, media_type=CONTENT_TYPE_LATEST)

    @app.get("/cache")
    async def cache(
        kind: str | None = None,
        salt: str | None = None,
        min_tokens: Annotated[int, Query(ge=0)] = 0,
        after: Annotated[int, Query(ge=0)] = 0,
        limit: Annotated[int, Query(ge=1, le=10000)] = 1000,
    ) -> Response:
        query = CacheQuery(kind, salt, min_tokens, after, limit, options.cache_tokens)
        page = await asyncio.to_thread(engine.cache_view, query)
        return JsonResponse({"object": "list", "data": page.entries, "has_more": page.more})

    @app.post("/cache/reset")
    async def reset() -> Response:
        try:
            dropped = await asyncio.to_thread(engine.reset_cache)
        except CacheBusy as busy:
            raise ApiError(str(busy), code="cache_busy", status=409) from busy
        return JsonResponse({"dropped": dropped})


def _add_errors(app: FastAPI, service: Service) -> None:
    def answer(error: ApiError, headers: dict[str, str] | None = None) -> Response:
        service.metrics.refused(error.status)
        return JsonResponse(error.body(), error.status, headers)

    async def refused(_: Request, error: Exception) -> Response:
        assert isinstance(error, ApiError)
        return answer(error)

    async def query(_: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        first = error.errors()[0]
        name = str(first["loc"][-1])
        return answer(ApiError(f"{name}: {first['msg']}", name, "invalid_value"))

    async def http(_: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        headers = dict(error.headers) if error.headers else None
        return answer(ApiError(str(error.detail), status=error.status_code), headers)

    async def failed(request: Request, error: Exception) -> Response:
        log.error("%s failed", request.url.path, exc_info=error)
        return answer(ApiError("internal error", status=500))

    async def gone(_: Request, error: Exception) -> Response:
        return Response(status_code=CLIENT_GONE)

    handlers: dict[type[Exception], Callable[[Request, Exception], Awaitable[Response]]] = {
        ApiError: refused,
        RequestValidationError: query,
        HTTPException: http,
        ClientDisconnect: gone,
        Exception: failed,
    }
    for kind, handler in handlers.items():
        app.add_exception_handler(kind, handler)


class ApiKey:
    """Middleware: every path but ``OPEN_PATHS`` needs ``Authorization: Bearer KEY``. ``refused``
    counts what has none, by its status."""

    def __init__(self, app: ASGIApp, key: str, refused: Callable[[int], None]) -> None:
        self._app = app
        self._refused = refused
        self._expected = f"Bearer {key}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] not in OPEN_PATHS:
            given = dict(scope["headers"]).get(b"authorization", b"")
            if not hmac.compare_digest(given, self._expected):
                error = ApiError("The API key is missing or wrong", None, "invalid_api_key", 401)
                headers = {"www-authenticate": "Bearer"}
                self._refused(error.status)
                await JsonResponse(error.body(), 401, headers)(scope, receive, send)
                return
        await self._app(scope, receive, send)

"""The engine's events on the server's side: one HTTP call and its requests.

Crosses from the engine's thread to the event loop, and ends the requests when the client goes.
Must not know what the events are made into.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, MutableMapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from merestone.engine.api import (
    STOPPED,
    CacheReport,
    Engine,
    EngineRefusal,
    Event,
    Finished,
    GenerateRequest,
    Sink,
    Started,
    TokenEvent,
)
from merestone.serve.errors import ApiError, unavailable
from merestone.serve.metrics import Metrics

log = logging.getLogger("merestone.request")
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Answer = TypeVar("Answer")


@dataclass(slots=True)
class ChoiceStep:
    """What one step brought one choice of one prompt."""

    prompt: int
    choice: int
    started: CacheReport | None = None
    tokens: list[TokenEvent] = field(default_factory=list)
    finished: Finished | None = None

    @property
    def text(self) -> str:
        """All text that was released."""
        released = "".join(event.text for event in self.tokens)
        return released + (self.finished.text if self.finished else "")


@dataclass(slots=True)
class _Progress:
    """One request of the flight, for the log and the metrics."""

    request: GenerateRequest
    cache: CacheReport | None = None
    output: int = 0
    open: int = 0
    first: float | None = None
    """Seconds to the first token of any choice that has ended."""
    last: dict[int, float] = field(default_factory=dict)


class Flight:
    """The engine requests of one HTTP call; prompts are numbered in their order."""

    def __init__(
        self, engine: Engine, metrics: Metrics, requests: Sequence[GenerateRequest]
    ) -> None:
        self.requests = requests
        self._engine = engine
        self._metrics = metrics
        self._progress = [_Progress(request, open=request.n) for request in requests]
        self._left = "disconnect"
        """Why nobody waits for those that are still open when the flight is closed."""
        self._events: asyncio.Queue[tuple[int, float, list[Event]]] = asyncio.Queue()

    def launch(self) -> None:
        """Submit all requests, or none.

        Raises:
            ApiError: the engine refuses one of them.
        """
        loop = asyncio.get_running_loop()
        for place, request in enumerate(self.requests):
            try:
                self._engine.submit(request, self._sink(loop, place))
            except EngineRefusal as refusal:
                for earlier in self.requests[:place]:
                    self._engine.abort(earlier.id)
                if refusal.code == STOPPED:  # since its health was asked for
                    raise unavailable(str(refusal)) from refusal
                raise ApiError(str(refusal), "prompt", refusal.code) from refusal

    def _sink(self, loop: asyncio.AbstractEventLoop, place: int) -> Sink:
        def sink(events: list[Event]) -> None:
            entry = (place, time.monotonic(), events)
            try:
                loop.call_soon_threadsafe(self._events.put_nowait, entry)
            except RuntimeError:  # the loop is closed: nobody is left to read
                return

        return sink

    async def steps(self) -> AsyncIterator[list[ChoiceStep]]:
        """The steps of all choices, until the last one has finished."""
        while any(progress.open for progress in self._progress):
            place, now, events = await self._events.get()
            yield self._group(place, now, events)

    def _group(self, place: int, now: float, events: list[Event]) -> list[ChoiceStep]:
        """Gather a step's events by choice, and count them."""
        progress = self._progress[place]
        steps: dict[int, ChoiceStep] = {}
        for event in events:
            choice = event.choice
            step = steps.setdefault(choice, ChoiceStep(place, choice))
            match event:
                case Started(cache=cache):
                    step.started = cache
                    if progress.cache is None:
                        progress.cache = cache
                        self._metrics.started(progress.request, cache)
                case TokenEvent():
                    first = not step.tokens
                    before = progress.last.get(choice)
                    self._metrics.token(now - before if first and before is not None else None)
                    step.tokens.append(event)
                    progress.output += 1
                    progress.last[choice] = now
                case Finished():
                    step.finished = event
                    progress.open -= 1
                    took = (progress.first, event.timing.first_token_s)
                    progress.first = min((s for s in took if s is not None), default=None)
                    self._metrics.finished(event)
                    if event.reason == "error":  # the call is answered with it, all of the call
                        self._left = "error"
                    if not progress.open:
                        self._log(progress, event.reason, event)
        return list(steps.values())

    def abort(self) -> None:
        """Ask the engine to end what is still open; the choices then finish with "abort"."""
        for progress in self._progress:
            if progress.open:
                self._engine.abort(progress.request.id)

    def close(self) -> None:
        """Nobody reads any more. Nothing if everything has finished."""
        for progress in self._progress:
            if progress.open:  # counted before the engine is told: who sees it end, sees it counted
                self._metrics.left(progress.open, self._left)
                self._log(progress, self._left, None)
                progress.open = 0
                self._engine.abort(progress.request.id)

    def _log(self, progress: _Progress, reason: str, end: Finished | None) -> None:
        cache = progress.cache or CacheReport()
        total = len(progress.request.tokens)
        computed = total - cache.restored if progress.cache else 0
        first = progress.first
        log.info(
            "%s prompt=%d matched=%d restored=%d computed=%d output=%d ttft=%s total=%s "
            "reason=%s%s",
            progress.request.id,
            total,
            cache.matched,
            cache.restored,
            computed,
            progress.output,
            f"{first:.3f}s" if first is not None else "-",
            f"{end.timing.total_s:.3f}s" if end else "-",
            reason,
            f" error={end.error}" if end and end.error else "",
        )


async def disconnected(receive: Receive) -> None:
    """Return when the client is gone. The request's body must have been read."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def unless_disconnected(receive: Receive, work: Coroutine[Any, Any, Answer]) -> Answer | None:
    """Run ``work``, or cancel it and return None as soon as the client is gone."""
    watcher = asyncio.create_task(disconnected(receive))
    worker = asyncio.create_task(work)
    try:
        await asyncio.wait({watcher, worker}, return_when=asyncio.FIRST_COMPLETED)
        return worker.result() if worker.done() else None
    finally:
        watcher.cancel()
        worker.cancel()
        await asyncio.gather(watcher, worker, return_exceptions=True)

"""A tiny double of the engine, at the seam: no model, no torch, tokens from a fixed function.

It keeps a cache of the same kind (boundaries of prompts, exact), so that usage can be tested.
"""

from __future__ import annotations

import hashlib
import threading
import time
from collections import deque
from dataclasses import dataclass, field

from merestone.engine.api import (
    STOPPED,
    CacheBusy,
    CachePage,
    CacheQuery,
    CacheReport,
    EngineInfo,
    EngineRefusal,
    Event,
    Finished,
    GenerateRequest,
    Sink,
    Started,
    Stats,
    TextStream,
    Timing,
    TokenEvent,
)
from merestone.sched.plan import TokenLogprob

LETTERS = tuple(b"abcdefghijklmnopqrstuvwxyz    ")
EOS = (262, 259, 261)


def next_token(tokens: tuple[int, ...], choice: int, seed: int) -> int:
    """A letter that depends on everything before it."""
    key = repr((tokens, choice, seed)).encode()
    return LETTERS[hashlib.sha256(key).digest()[0] % len(LETTERS)]


def logprob_of(token: int, top: int) -> TokenLogprob:
    entries = ((token, -0.125), *(((token + i) % 256, -1.0 - i) for i in range(1, top)))
    return TokenLogprob(token, -0.125, entries[:top], 1)


@dataclass
class _Choice:
    number: int
    text: TextStream | None
    output: list[int] = field(default_factory=list)
    started: bool = False


@dataclass
class _Running:
    request: GenerateRequest
    sink: Sink
    reply: list[int] | None
    report: CacheReport
    choices: list[_Choice]


class FakeEngine:
    """``hold`` "queue" lets nothing start, "prefill" lets nothing be generated. ``replies`` are
    scripted outputs for the next requests. ``tokens_a_step`` as if by speculation."""

    def __init__(self, context_limit: int = 4096) -> None:
        self.info = EngineInfo("fake", context_limit, 320, EOS, "boundaries")
        self.requests: list[GenerateRequest] = []
        self.aborted: list[str] = []
        self.replies: deque[list[int]] = deque()
        self.hold = ""
        self.tokens_a_step = 1
        self.step_seconds = 0.0
        self.fail_next = ""
        self.status = "ok"
        self.busy = False
        self.stops = False
        """As an engine that ends between a look at its health and a request."""
        self.cache: dict[tuple[str, tuple[int, ...]], str] = {}
        self._running: dict[str, _Running] = {}
        self._lock = threading.Condition()
        self._stop = False
        self._thread: threading.Thread | None = None

    @property
    def idle(self) -> bool:
        """Whether no request is left."""
        return not self._running

    def submit(self, request: GenerateRequest, sink: Sink) -> None:
        if self.stops:
            raise EngineRefusal(STOPPED, "the engine has stopped")
        if len(request.tokens) == 666:
            raise EngineRefusal("pool_too_small", "666 tokens do not fit in a pool of 665")
        with self._lock:
            self.requests.append(request)
            reply = self.replies.popleft() if self.replies else None
            choices = [
                _Choice(i, request.text() if request.text else None) for i in range(request.n)
            ]
            report = self._match(request)
            self._running[request.id] = _Running(request, sink, reply, report, choices)
            self._lock.notify()

    def abort(self, request_id: str) -> None:
        with self._lock:
            self.aborted.append(request_id)
            running = self._running.pop(request_id, None)
        if running is not None:
            for choice in running.choices:
                running.sink([self._finished(running, choice, "abort", None)])

    def cache_view(self, query: CacheQuery) -> CachePage:
        found = [
            {
                **dict.fromkeys(("bytes", "hits", "age_s", "leases", "spared_s"), 0),
                "id": i,
                "parent": None,
                "root": salt,
                "kind": kind,
                "tokens": len(tokens),
                "token_ids": list(tokens),
            }
            for i, ((salt, tokens), kind) in enumerate(self.cache.items(), 1)
            if i > query.after and query.kind in (None, kind) and query.salt in (None, salt)
        ]
        if not query.token_ids:
            found = [{k: v for k, v in entry.items() if k != "token_ids"} for entry in found]
        return CachePage(found[: query.limit], len(found) > query.limit)

    def reset_cache(self) -> int:
        if self.busy:
            raise CacheBusy("1 request holds parts of the cache")
        dropped = len(self.cache)
        self.cache.clear()
        return dropped

    def health(self) -> dict[str, object]:
        return {"status": self.status, "reason": "" if self.status == "ok" else "told so"}

    def stats(self) -> Stats:
        return {
            "checkpoints_published": {"prompt": float(len(self.cache))},
            "checkpoints_discarded": {"prompt not_finite": 1.0},
            "frames_used": 3,
            "frames_free": 5,
            "frames_anchors": 2,
            "steps": 7,
            "peculiar": 9,
        }

    def start(self) -> None:
        self._thread = threading.Thread(target=self._loop)
        self._thread.start()

    def stop(self) -> None:
        with self._lock:
            self._stop = True
            self._lock.notify()
        assert self._thread is not None
        self._thread.join()

    def _match(self, request: GenerateRequest) -> CacheReport:
        if not request.cache or request.prompt_logprobs is not None:
            return CacheReport()
        best, elsewhere = 0, False
        for salt, tokens in self.cache:
            if request.tokens[: len(tokens)] == tokens:
                if salt == request.salt:
                    best = max(best, len(tokens))
                else:
                    elsewhere = True
        if not best:
            return CacheReport(lost="unknown", elsewhere=elsewhere)
        kind = self.cache[request.salt, request.tokens[:best]]
        return CacheReport(best, best, kind)

    def _seal(self, request: GenerateRequest, output: list[int]) -> None:
        if request.cache:
            whole = request.tokens + tuple(output)
            for at, kind in [*request.boundaries, (len(request.tokens), "prompt")]:
                self.cache.setdefault((request.salt, request.tokens[:at]), kind)
            self.cache.setdefault((request.salt, whole[:-1]), "response")

    def _loop(self) -> None:
        while True:
            with self._lock:
                if self._stop:
                    return
                if not self._running or self.hold == "queue":
                    self._lock.wait(0.005)
                batch = [] if self.hold == "queue" else list(self._running.values())
            for running in batch:
                self._step(running)
            if batch:
                time.sleep(max(self.step_seconds, 0.001 if self.hold else 0))

    def _step(self, running: _Running) -> None:
        for choice in list(running.choices):
            events: list[Event] = []
            if not choice.started:
                choice.started = True
                events.append(Started(choice.number, running.report))
            done: Event | None = None
            if running.request.max_tokens == 0:
                done = self._finished(running, choice, "length", None)
            for _ in range(0 if self.hold or done else self.tokens_a_step):
                done = self._token(running, choice, events)
                if done is not None:
                    break
            if done is not None:
                events.append(done)
                running.choices.remove(choice)
                if not running.choices:
                    self._running.pop(running.request.id, None)
            if events:
                running.sink(events)

    def _token(self, running: _Running, choice: _Choice, events: list[Event]) -> Event | None:
        request, params = running.request, running.request.params
        if self.fail_next:
            error, self.fail_next = self.fail_next, ""
            return self._finished(running, choice, "error", None, error)
        place = len(choice.output)
        seed = params.seed if params.temperature > 0 else 0
        number = choice.number if params.temperature > 0 else 0
        if running.reply is not None:
            token = running.reply[place] if place < len(running.reply) else EOS[0]
        else:
            token = next_token(request.tokens + tuple(choice.output), number, seed)
        choice.output.append(token)
        text, met = choice.text.push(token) if choice.text else ("", False)
        scored = None if params.logprobs is None else logprob_of(token, params.logprobs)
        events.append(TokenEvent(choice.number, token, text, scored))
        limit = self.info.context_limit - len(request.tokens)
        if request.max_tokens is not None:
            limit = min(limit, request.max_tokens)
        if met and choice.text:
            return self._finished(running, choice, "stop", choice.text.matched)
        if token in request.stop_ids and place + 1 >= params.min_tokens:
            return self._finished(running, choice, "stop", token)
        if place + 1 == limit:
            return self._finished(running, choice, "length", None)
        return None

    def _finished(
        self,
        running: _Running,
        choice: _Choice,
        reason: str,
        stop: int | str | None,
        error: str | None = None,
    ) -> Finished:
        request = running.request
        if choice.number == 0 and reason in ("stop", "length"):
            self._seal(request, choice.output)
        scored = None
        if request.prompt_logprobs is not None and choice.number == 0:
            top = request.prompt_logprobs
            scored = (None, *(logprob_of(token, top) for token in request.tokens[1:]))
        return Finished(
            choice=choice.number,
            reason=reason,
            stop=stop,
            text=choice.text.flush() if choice.text else "",
            cache=running.report,
            prompt_tokens=len(request.tokens),
            completion_tokens=len(choice.output),
            prompt_logprobs=scored,
            timing=Timing(0.0, 0.001 * (1 + choice.number) if choice.output else None, 0.2),
            error=error,
        )

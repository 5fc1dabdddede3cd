"""Parts of answers that both dialects share: usage, log probabilities, JSON and event streams."""

from __future__ import annotations

import json
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from itertools import zip_longest
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from merestone.engine.api import CacheReport, DraftReport, EngineInfo, Finished, GenerateRequest
from merestone.sched.plan import TokenLogprob
from merestone.serve.errors import ApiError
from merestone.serve.flight import ChoiceStep, unless_disconnected
from merestone.serve.text import Vocabulary

log = logging.getLogger("merestone.serve")


def to_json(value: Any) -> bytes:
    """Compact JSON; a number that JSON does not have is our mistake."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode()


class JsonResponse(Response):
    """A JSON answer. Floats keep their bits."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return to_json(content)


class EventStream(Response):
    """Server-sent events; ``close`` is called before their end is sent, and again behind it or
    when the client goes, at any moment."""

    media_type = "text/event-stream"

    def __init__(self, chunks: AsyncIterator[dict[str, Any]], close: Callable[[], None]) -> None:
        super().__init__(headers={"cache-control": "no-store", "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self._chunks = chunks
        self._close = close

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await unless_disconnected(receive, self._write(send))
        finally:
            self._close()

    async def _write(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})

        async def event(data: bytes) -> None:
            body = b"data: " + data + b"\n\n"
            await send({"type": "http.response.body", "body": body, "more_body": True})

        failure: ApiError | None = None
        try:
            async for chunk in self._chunks:
                await event(to_json(chunk))
        except ApiError as error:  # the status line is long gone
            failure = error
        except Exception:
            log.exception("a stream failed")
            failure = ApiError("internal error", status=500)
        self._close()  # whoever reads the end knows that nothing of it runs
        if failure is not None:
            await event(to_json(failure.body()))
        await event(b"[DONE]")
        await send({"type": "http.response.body", "body": b"", "more_body": False})


def raise_failure(step: ChoiceStep) -> None:
    """Raise what the engine reports as an error of the request."""
    if step.finished is not None and step.finished.reason == "error":
        message = step.finished.error or "the engine failed"
        raise ApiError(message, code="engine_error", status=500)


def stop_reason(info: EngineInfo, end: Finished) -> int | str | None:
    """The stop token or string that ended a choice; None for the model's own end."""
    return None if end.stop in info.eos_ids else end.stop


class Usage:
    """Token counts of a flight. Prompt tokens count once for all choices of a prompt.

    Unless ``frank``, nothing differs for a client whether another salt holds its prompt or not.
    """

    def __init__(self, requests: Sequence[GenerateRequest], *, frank: bool) -> None:
        self._prompt = [len(request.tokens) for request in requests]
        self._cache: list[CacheReport | None] = [None] * len(requests)
        self._frank = frank
        self._completion = 0
        self._drafts: list[DraftReport] = []
        self.reasoning = 0

    def add(self, step: ChoiceStep) -> None:
        """Count a step. The first choice speaks for the prompt."""
        self._completion += len(step.tokens)
        if step.finished and step.finished.drafts:
            self._drafts.append(step.finished.drafts)
        report = step.finished.cache if step.finished else step.started
        if report is not None and step.choice == 0:
            self._cache[step.prompt] = report

    def report(self) -> dict[str, Any]:
        """The ``usage`` object, with the cache's own account as ``merestone``."""
        prompt = sum(self._prompt)
        reports = [cache or CacheReport() for cache in self._cache]
        accounts = [
            {
                "matched": c.matched,
                "restored": c.restored,
                "boundary": c.kind,
                "lost": "other_salt" if self._frank and c.elsewhere else c.lost,
                "written": c.written,
            }
            for c in reports
        ]
        account: dict[str, Any] = dict(accounts[0])
        if len(accounts) > 1:
            account = {
                "matched": sum(c.matched for c in reports),
                "restored": sum(c.restored for c in reports),
                "boundary": None,
                "lost": next((a["lost"] for a in accounts if a["lost"]), ""),
                "written": sum(c.written for c in reports),
                "prompts": accounts,
            }
        if self._drafts:
            account["speculation"] = speculation(self._drafts)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": self._completion,
            "total_tokens": prompt + self._completion,
            "prompt_tokens_details": {"cached_tokens": sum(c.restored for c in reports)},
            "completion_tokens_details": {"reasoning_tokens": self.reasoning},
            "merestone": account,
        }


def speculation(reports: list[DraftReport]) -> dict[str, Any]:
    """Drafts of all choices: counts, accepted ones a verifying step, and both by place."""
    steps = sum(report.steps for report in reports)
    drafted = [sum(counts) for counts in zip_longest(*(r.drafted for r in reports), fillvalue=0)]
    accepted = [sum(counts) for counts in zip_longest(*(r.accepted for r in reports), fillvalue=0)]
    return {
        "steps": steps,
        "drafted": sum(drafted),
        "accepted": sum(accepted),
        "mean_accepted": round(sum(accepted) / steps, 3),
        "drafted_at": drafted,
        "accepted_at": accepted,
    }


def finite(logprob: float) -> float:
    """A log probability that JSON can hold: minus infinity becomes -9999, as OpenAI writes it."""
    return logprob if logprob > -9999.0 else -9999.0


def prompt_logprobs(
    vocabulary: Vocabulary, entries: Sequence[TokenLogprob | None], top: int
) -> list[dict[str, Any] | None]:
    """One entry a prompt token: id -> log probability, rank and text; None for the first."""
    found: list[dict[str, Any] | None] = []
    for entry in entries:
        if entry is None:
            found.append(None)
            continue
        ranked = {
            str(token): _ranked(vocabulary, token, value, place)
            for place, (token, value) in enumerate(entry.top[:top], start=1)
        }
        chosen = _ranked(vocabulary, entry.token, entry.logprob, entry.rank)
        found.append({str(entry.token): chosen, **ranked})
    return found


def _ranked(vocabulary: Vocabulary, token: int, logprob: float, rank: int) -> dict[str, Any]:
    return {"logprob": finite(logprob), "rank": rank, "decoded_token": vocabulary.label(token)}

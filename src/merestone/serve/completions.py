"""``POST /v1/completions``: prompts as texts or ids, answers as text."""

from __future__ import annotations

import codecs
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from merestone.engine.api import EngineInfo, Finished, GenerateRequest
from merestone.sched.plan import TokenLogprob
from merestone.serve.errors import ApiError
from merestone.serve.flight import ChoiceStep, Flight
from merestone.serve.protocol import CompletionBody
from merestone.serve.replies import (
    Usage,
    finite,
    prompt_logprobs,
    raise_failure,
    stop_reason,
)
from merestone.serve.sampling import generate_request
from merestone.serve.service import Service
from merestone.serve.text import Vocabulary

DEFAULT_MAX_TOKENS = 16  # OpenAI's


@dataclass(frozen=True, slots=True)
class CompletionCall:
    """A validated call: a request and the text of each prompt, if it is to be echoed."""

    body: CompletionBody
    requests: list[GenerateRequest]
    texts: list[str]


def prepare(service: Service, body: CompletionBody) -> CompletionCall:
    """Tokenise and check; may take long for long prompts.

    Raises:
        ApiError: something cannot be done.
    """
    body.check()
    vocabulary = service.text.vocabulary
    scored = body.logprobs if body.echo else None
    if body.prompt_logprobs is not None:
        scored = max(body.prompt_logprobs, scored or 0)
    max_tokens = DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens
    requests, texts = [], []
    for prompt in body.prompts():
        if isinstance(prompt, str):
            tokens = vocabulary.encode(prompt, body.add_special_tokens is not False)
        else:
            tokens = prompt
        marks, ttl_s = _marks(body, len(tokens)), body.time_to_live()
        lasting = body.cache_boundaries or [len(tokens)]
        request = generate_request(
            body,
            tokens,
            service.engine.info,
            service.text,
            max_tokens=max_tokens,
            logprobs=body.logprobs,
            prompt_logprobs=scored,
            boundaries=marks,
            lives=() if ttl_s is None else tuple((at, ttl_s) for at in lasting),
        )
        requests.append(request)
        if body.echo:
            texts.append(prompt if isinstance(prompt, str) else vocabulary.decode(prompt))
    return CompletionCall(body, requests, texts)


def _marks(body: CompletionBody, length: int) -> tuple[tuple[int, str], ...]:
    marks = sorted(set(body.cache_boundaries or []))
    if marks and marks[-1] > length:
        raise ApiError(
            f"cache_boundaries: {marks[-1]} is beyond the prompt of {length} tokens",
            "cache_boundaries",
            "invalid_value",
        )
    # the end of the prompt is a boundary of its own
    return tuple((mark, "mark") for mark in marks if mark < length)


@dataclass(slots=True)
class _Choice:
    """What has come of one choice."""

    text: str = ""
    tokens: list[int] = field(default_factory=list)
    logprobs: list[tuple[int, TokenLogprob | None]] = field(default_factory=list)
    end: Finished | None = None

    def add(self, step: ChoiceStep) -> None:
        self.end = step.finished or self.end
        self.text += step.text
        self.tokens += [event.token for event in step.tokens]
        self.logprobs += [(event.token, event.logprob) for event in step.tokens]


async def fold(service: Service, call: CompletionCall, flight: Flight) -> dict[str, Any]:
    """The answer that is not a stream."""
    usage = Usage(call.requests, frank=service.options.cache_tokens)
    choices: dict[tuple[int, int], _Choice] = {}
    async for steps in flight.steps():
        for step in steps:
            raise_failure(step)
            choices.setdefault((step.prompt, step.choice), _Choice()).add(step)
            usage.add(step)
    answer = service.envelope("cmpl", "text_completion", call.requests[0])
    answer["choices"] = [_whole(service, call, place, choices) for place in sorted(choices)]
    answer["usage"] = usage.report()
    return answer


def _whole(
    service: Service,
    call: CompletionCall,
    place: tuple[int, int],
    choices: Mapping[tuple[int, int], _Choice],
) -> dict[str, Any]:
    body, vocabulary, prompt = call.body, service.text.vocabulary, place[0]
    choice, first = choices[place], choices[prompt, 0].end
    request, end = call.requests[prompt], choice.end
    assert end is not None
    assert first is not None
    out: dict[str, Any] = {
        "index": prompt * request.n + place[1],
        "text": (call.texts[prompt] if body.echo else "") + choice.text,
        "logprobs": None,
        "finish_reason": end.reason,
        "stop_reason": stop_reason(service.engine.info, end),
    }
    # the prompt is scored once, for all its choices
    scored: Sequence[TokenLogprob | None] = first.prompt_logprobs or ()
    if body.logprobs is not None:
        table = LogprobTable(vocabulary, body.logprobs)
        if body.echo:
            table.add(list(zip(request.tokens, scored, strict=True)), special=True)
        table.add(choice.logprobs)
        out["logprobs"] = table.take()
    if body.prompt_logprobs is not None:
        out["prompt_logprobs"] = prompt_logprobs(vocabulary, scored, body.prompt_logprobs)
    if body.return_token_ids:
        out["prompt_token_ids"] = list(request.tokens)
        out["token_ids"] = choice.tokens
    return out


async def chunks(
    service: Service, call: CompletionCall, flight: Flight
) -> AsyncIterator[dict[str, Any]]:
    """The chunks of a stream."""
    body, usage = call.body, Usage(call.requests, frank=service.options.cache_tokens)
    envelope = service.envelope("cmpl", "text_completion", call.requests[0])
    tables: dict[tuple[int, int], LogprobTable] = {}
    async for steps in flight.steps():
        for step in steps:
            raise_failure(step)
            usage.add(step)
            place = (step.prompt, step.choice)
            if body.logprobs is not None and place not in tables:
                tables[place] = LogprobTable(service.text.vocabulary, body.logprobs)
            choice = _piece(service.engine.info, call, step, tables.get(place))
            if choice is None:
                continue
            chunk = {**envelope, "choices": [choice]}
            if body.usage_at_end or body.usage_always:
                chunk["usage"] = usage.report() if body.usage_always else None
            yield chunk
    if body.usage_at_end:
        yield {**envelope, "choices": [], "usage": usage.report()}


def _piece(
    info: EngineInfo, call: CompletionCall, step: ChoiceStep, table: LogprobTable | None
) -> dict[str, Any] | None:
    """What a step adds to its choice; None if nothing that a client can see."""
    body, request, end = call.body, call.requests[step.prompt], step.finished
    events, text = step.tokens, step.text
    if step.started and body.echo:
        text = call.texts[step.prompt] + text
    shown = bool(text) or end is not None
    out: dict[str, Any] = {
        "index": step.prompt * request.n + step.choice,
        "text": text,
        "logprobs": None,
        "finish_reason": end.reason if end else None,
        "stop_reason": stop_reason(info, end) if end else None,
    }
    if table is not None and events:
        table.add([(event.token, event.logprob) for event in events])
        out["logprobs"] = table.take()
        shown = True
    if body.return_token_ids:
        if step.started:
            out["prompt_token_ids"] = list(request.tokens)
        out["token_ids"] = [event.token for event in events]
        shown = shown or bool(events) or step.started is not None
    return out if shown else None


class LogprobTable:
    """The ``logprobs`` object of one choice; ``text_offset`` counts characters of its text."""

    def __init__(self, vocabulary: Vocabulary, top: int) -> None:
        self._vocabulary = vocabulary
        self._top = top
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._offset = 0
        self._rows: list[tuple[str, float | None, dict[str, float] | None, int]] = []

    def add(
        self, entries: Sequence[tuple[int, TokenLogprob | None]], special: bool = False
    ) -> None:
        """Append tokens; special ones have text in a prompt and none in an answer."""
        label = self._vocabulary.label
        for token, entry in entries:
            value = top = None
            if entry is not None:
                value = finite(entry.logprob)
                best = entry.top[: self._top]
                top = {label(token): value, **{label(t): finite(p) for t, p in best}}
            self._rows.append((label(token), value, top, self._offset))
            if special or token not in self._vocabulary.special:
                self._offset += len(self._decoder.decode(self._vocabulary.bytes_of(token)))

    def take(self) -> dict[str, Any]:
        """The rows since the last call."""
        rows, self._rows = self._rows, []
        return {
            "tokens": [row[0] for row in rows],
            "token_logprobs": [row[1] for row in rows],
            "top_logprobs": [row[2] for row in rows],
            "text_offset": [row[3] for row in rows],
        }

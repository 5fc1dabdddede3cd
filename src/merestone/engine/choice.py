"""One choice on its way out: tokens become events, text, stops and a final report.

Knows text streams and clocks' values. Must not know plans or frames.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from merestone.core.checkpoint import Kind, Root
from merestone.core.policy import boundaries_to_seal
from merestone.engine.api import (
    CacheReport,
    DraftReport,
    EngineInfo,
    EngineRefusal,
    Event,
    Finished,
    GenerateRequest,
    Sink,
    Started,
    TextStream,
    Timing,
    TokenEvent,
)
from merestone.sched.plan import WorkResult
from merestone.sched.request import Sequence, Tokens
from merestone.sched.tally import Tally


def check(request: GenerateRequest, info: EngineInfo) -> Tokens:
    """Refuse what can never run. Returns the prompt's ids, int32 [n].

    Raises:
        EngineRefusal: with a stable code, and the numbers in its message.
    """
    limit, size, prompt = info.context_limit, info.vocab_size, len(request.tokens)
    if prompt == 0:
        raise EngineRefusal("empty_prompt", "the prompt has no tokens")
    output = 1 if request.max_tokens is None else request.max_tokens
    if output < 0 or request.n < 1:
        raise EngineRefusal("invalid_count", f"max_tokens {output} and n {request.n} are counts")
    if prompt + output > limit:
        raise EngineRefusal(
            "context_length_exceeded",
            f"This server's context is {limit} tokens, but the request needs at least "
            f"{prompt + output}: {prompt} in the prompt and {output} in the completion.",
        )
    biased = [token for token, _ in request.params.logit_bias]
    ids = _ids(request.tokens, size)
    _ids((*biased, *request.params.banned), size)
    for at, kind in (*request.boundaries, *request.ends):
        if kind not in tuple(Kind):
            raise EngineRefusal("invalid_boundary", f"{kind!r} at {at} is no kind of boundary")
    return ids


def _ids(tokens: tuple[int, ...], size: int) -> Tokens:
    """Ids of a vocabulary of ``size``, int32, not to be written to: answers share them.

    Of a long prompt a loop takes longer than the device's part of a replay: this is the only one.
    """
    try:
        ids = np.fromiter(tokens, np.int32, len(tokens))
        good = ids.size == 0 or bool(ids.min() >= 0 and ids.max() < size)
    except OverflowError:
        good = False
    if good:
        ids.setflags(write=False)
        return ids
    token = next(token for token in tokens if not 0 <= token < size)
    raise EngineRefusal("invalid_token_id", f"token ids must lie in [0, {size}), not {token}")


def sequence_of(
    request: GenerateRequest,
    ids: Tokens,
    choice: int,
    root: Root,
    arrival: int,
    limit: int,
    *,
    shared: bool,
    grid: int,
) -> Sequence:
    """One of a request's answers to its prompt ``ids``; it may take ``limit`` tokens where the
    request names no limit. ``shared``: its boundaries are for others, too; with a ``grid`` they are
    its multiples."""
    prompt = len(ids)
    wanted = [(at, Kind(kind)) for at, kind in request.boundaries] if shared else []
    return Sequence(
        id=request.id,
        choice=choice,
        root=root,
        prompt=prompt,
        buffer=ids,
        known=prompt,
        params=request.params,
        max_tokens=limit if request.max_tokens is None else request.max_tokens,
        stop_ids=frozenset(request.stop_ids),
        boundaries=boundaries_to_seal(prompt, wanted, grid),
        seals=shared or request.n > 1,
        # A private root holds nothing but what the request itself left there.
        matches=choice > 0 or request.prompt_logprobs is None,
        priority=request.priority,
        arrival=arrival,
        prompt_logprobs=request.prompt_logprobs if choice == 0 else None,
        grid=grid,
        ends={token: Kind(kind) for token, kind in request.ends},
        lives={} if grid else dict(request.lives),
    )


@dataclass(slots=True, eq=False)
class Choice:
    """The outward half of a sequence. Times in seconds of the engine's clock."""

    request: GenerateRequest
    sequence: Sequence
    sink: Sink
    text: TextStream | None
    submitted: float
    cached: bool
    """Whether the cache that requests share was asked at all."""
    off_grid: str
    """What is lost where only aligned states are kept: "gate", if boundaries were asked for."""
    admitted: float | None = None
    first: float | None = None

    @property
    def report(self) -> CacheReport:
        seq = self.sequence
        # Choices beyond the first start from the first one's prompt, whatever the cache is.
        lost = seq.lost if self.cached or seq.restored else "disabled"
        elsewhere = lost == "other_salt"
        if elsewhere:  # for whoever may not know: as if the other salt were not there
            lost = "no_boundary" if seq.matched else "unknown"
        if lost == "no_boundary" and seq.grid:
            lost = "too_short" if seq.matched < seq.grid else self.off_grid
        written = max(0, seq.written - seq.restored)
        return CacheReport(seq.matched, seq.restored, seq.kind, lost, written, elsewhere)

    def started(self, now: float) -> list[Event]:
        """The first event, once the sequence has been admitted."""
        if self.admitted is not None or not self.sequence.admitted:
            return []
        self.admitted = now
        return [Started(self.sequence.choice, self.report)]

    def take(self, result: WorkResult, now: float) -> tuple[list[Event], bool]:
        """Events of one step's result, and whether the choice has ended with it."""
        seq = self.sequence
        events: list[Event] = self.started(now)
        seq.scored += result.prompt_logprobs
        if not result.tokens:
            done = seq.max_tokens == 0 and seq.computed == seq.known
            return events + ([self.finished("length", None, now)] if done else []), done
        if self.first is None:
            self.first = now
        known = seq.known - len(result.tokens)
        for place, token in enumerate(result.tokens):
            known += 1
            released, met = self.text.push(token) if self.text else ("", False)
            entry = result.logprobs[place] if result.logprobs else None
            events.append(TokenEvent(seq.choice, token, released, entry))
            end: tuple[str, int | str | None] | None = seq.stop_reason(known)
            if met and self.text is not None:
                end = "stop", self.text.matched
            if end is not None:
                seq.truncate(known)
                return [*events, self.finished(*end, now)], True
        return events, False

    def failed(self, error: str, now: float) -> Finished:
        """The last event after something broke; its text is not asked for any more."""
        self.text = None
        return self.finished("error", None, now, error)

    def finished(
        self, reason: str, stop: int | str | None, now: float, error: str | None = None
    ) -> Finished:
        seq = self.sequence
        scored = None
        if seq.prompt_logprobs is not None:
            scored = (None, *seq.scored)
        return Finished(
            choice=seq.choice,
            reason=reason,
            stop=stop,
            text=self.text.flush() if self.text else "",
            cache=self.report,
            prompt_tokens=seq.prompt,
            completion_tokens=seq.outputs,
            prompt_logprobs=scored,
            timing=Timing(
                queued_s=(now if self.admitted is None else self.admitted) - self.submitted,
                first_token_s=None if self.first is None else self.first - self.submitted,
                total_s=now - self.submitted,
            ),
            error=error,
            drafts=_drafts(seq.tally),
        )


def _drafts(tally: Tally) -> DraftReport | None:
    if tally.steps == 0:
        return None
    return DraftReport(tally.steps, tuple(tally.drafted), tuple(tally.accepted))

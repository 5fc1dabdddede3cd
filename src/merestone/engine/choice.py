"""One choice on its way out: tokens become events, text, stops and a final report.

Knows text streams and clocks' values. Must not know plans or frames.
"""

from __future__ import annotations

from dataclasses import dataclass

from merestone.engine.api import (
    CacheReport,
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
from merestone.sched.request import Sequence


@dataclass(slots=True, eq=False)
class Choice:
    """The outward half of a sequence. Times in seconds of the engine's clock."""

    request: GenerateRequest
    sequence: Sequence
    sink: Sink
    text: TextStream | None
    submitted: float
    admitted: float | None = None
    first: float | None = None

    @property
    def report(self) -> CacheReport:
        seq = self.sequence
        return CacheReport(seq.matched, seq.restored, seq.kind, seq.lost)

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
        if result.token is None:
            done = seq.max_tokens == 0 and seq.computed == seq.known
            return events + ([self.finished("length", None, now)] if done else []), done
        if self.first is None:
            self.first = now
        released, met = self.text.push(result.token) if self.text else ("", False)
        events.append(TokenEvent(seq.choice, result.token, released, result.logprob))
        end = seq.stop_reason()
        if met:
            assert self.text is not None
            events.append(self.finished("stop", self.text.matched, now))
        elif end is not None:
            events.append(self.finished(*end, now))
        return events, met or end is not None

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
        )

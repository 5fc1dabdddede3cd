"""An engine in this process, asked without HTTP: answers with their arrival times."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import count

from merestone.engine.api import Event, Finished, GenerateRequest, TokenEvent
from merestone.engine.engine import LocalEngine
from merestone.sched.plan import SamplingParams, TokenLogprob

TIMEOUT_S = 600.0
_numbers = count()


@dataclass
class Answer:
    """What one prompt gave. Seconds since all were handed over; ``ids`` without the prompt."""

    ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob | None] = field(default_factory=list)
    first_s: float = 0.0
    total_s: float = 0.0
    restored: int = 0
    error: str | None = None

    @property
    def decode_rate(self) -> float:
        """Tokens a second after the first one."""
        return (len(self.ids) - 1) / (self.total_s - self.first_s)


def ask(
    engine: LocalEngine,
    prompts: Sequence[Sequence[int]],
    tokens: int,
    salt: str = "",
    logprobs: int | None = None,
) -> list[Answer]:
    """``tokens`` greedy tokens after each prompt, all submitted at once. Log probabilities are
    taken on the host, row by row: times are those of requests without.

    Raises:
        TimeoutError: an answer does not come.
    """
    answers = [Answer() for _ in prompts]
    ended = [threading.Event() for _ in prompts]
    began = time.perf_counter()
    for prompt, answer, end in zip(prompts, answers, ended, strict=True):
        request = GenerateRequest(
            id=f"bench-{next(_numbers)}",
            tokens=tuple(prompt),
            params=SamplingParams(logprobs=logprobs),
            max_tokens=tokens,
            salt=salt,
        )
        engine.submit(request, _sink(answer, end, began))
    for end in ended:
        if not end.wait(TIMEOUT_S):
            raise TimeoutError("the engine does not answer")
    return answers


def _sink(answer: Answer, ended: threading.Event, began: float) -> Callable[[list[Event]], None]:
    def sink(events: list[Event]) -> None:
        now = time.perf_counter() - began
        for event in events:
            if isinstance(event, TokenEvent):
                answer.first_s = answer.first_s if answer.ids else now
                answer.ids.append(event.token)
                answer.logprobs.append(event.logprob)
            elif isinstance(event, Finished):
                answer.total_s, answer.error = now, event.error
                answer.restored = event.cache.restored
                ended.set()

    return sink

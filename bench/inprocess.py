"""An engine asked without HTTP: what a client in the same process would see."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import count

from merestone.engine.api import Event, Finished, GenerateRequest, TokenEvent
from merestone.engine.engine import LocalEngine
from merestone.sched.plan import SamplingParams

TIMEOUT_S = 600.0


class WrongResult(Exception):
    """The answers are not what they must be; figures would be worth nothing."""


@dataclass
class Timed:
    """What one prompt gave. Seconds since it was handed over; ``ids`` without the prompt, ``times``
    when each came."""

    ids: list[int] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    total_s: float = 0.0
    restored: int = 0

    @property
    def first_s(self) -> float:
        """To the first token."""
        return self.times[0]

    @property
    def decode_rate(self) -> float:
        """Tokens a second after the first one."""
        return (len(self.ids) - 1) / (self.total_s - self.first_s)


class InProcess:
    """An engine asked without HTTP."""

    def __init__(self, engine: LocalEngine) -> None:
        self.engine = engine
        self.vocab = engine.info.vocab_size
        self._numbers = count()

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        count: int,
        salt: str,
        *,
        boundaries: tuple[tuple[int, str], ...] = (),
        cache: bool = True,
    ) -> list[Timed]:
        """``count`` greedy tokens after each prompt, all submitted at once."""
        results = [Timed() for _ in prompts]
        ended = [threading.Event() for _ in prompts]
        began = time.perf_counter()
        for place, prompt in enumerate(prompts):
            request = GenerateRequest(
                id=f"bench-{next(self._numbers)}",
                tokens=tuple(prompt),
                params=SamplingParams(),
                max_tokens=count,
                boundaries=boundaries,
                salt=salt,
                cache=cache,
            )
            self.engine.submit(request, _sink(results[place], ended[place], began))
        for event in ended:
            if not event.wait(TIMEOUT_S):
                raise WrongResult("the engine did not answer")
        return results


def _sink(result: Timed, ended: threading.Event, began: float) -> Callable[[list[Event]], None]:
    def sink(events: list[Event]) -> None:
        now = time.perf_counter() - began
        for event in events:
            if isinstance(event, TokenEvent):
                result.ids.append(event.token)
                result.times.append(now)
            elif isinstance(event, Finished):
                result.total_s, result.restored = now, event.cache.restored
                ended.set()

    return sink


def rates_together(results: Sequence[Timed]) -> float:
    """Tokens a second while all decode: from the first token of the last one until one ends."""
    began = max(result.first_s for result in results)
    ended = min(result.times[-1] for result in results)
    if ended <= began:
        raise WrongResult("one ended before all had begun")
    return sum(began < at <= ended for r in results for at in r.times) / (ended - began)

"""An engine over the device double, stepped by hand."""

from __future__ import annotations

from dataclasses import dataclass, field

from fake_device import VOCAB, FakeDevice, LeadingFake, oracle, small_spec
from merestone.core.audit import audit
from merestone.core.cache import Cache, CacheSpec
from merestone.engine.api import EngineInfo, Event, Finished, GenerateRequest, TokenEvent
from merestone.engine.engine import LocalEngine
from merestone.sched.depth import Depth
from merestone.sched.plan import SamplingParams
from merestone.sched.scheduler import Scheduler


@dataclass
class Reply:
    """Everything one request got back, by choice."""

    events: list[Event] = field(default_factory=list)
    gone: bool = False
    """Whether whoever asked has hung up."""

    def sink(self, events: list[Event]) -> None:
        if self.gone:
            raise ConnectionError("gone")
        self.events += events

    def ids(self, choice: int = 0) -> list[int]:
        return [e.token for e in self.events if isinstance(e, TokenEvent) and e.choice == choice]

    def finished(self, choice: int = 0) -> Finished | None:
        for event in self.events:
            if isinstance(event, Finished) and event.choice == choice:
                return event
        return None

    @property
    def restored(self) -> int:
        end = self.finished()
        assert end is not None
        return end.cache.restored


class Harness:
    def __init__(
        self,
        spec: CacheSpec | None = None,
        *,
        slots: int = 4,
        budget: int = 32,
        context: int | None = None,
        retention: str = "boundaries",
        reason: str = "as asked for",
        accuracy: float = 0.5,
        adaptive: bool = False,
        overlap: bool = False,
    ) -> None:
        self.spec = spec or small_spec()
        self.cache = Cache(self.spec)
        self.device = (LeadingFake if overlap else FakeDevice)(self.spec, accuracy)
        depth = Depth(self.spec.drafts, adaptive=adaptive)
        self.scheduler = Scheduler(self.cache, slots=slots, token_budget=budget, depth=depth)
        info = EngineInfo(
            model="fake",
            context_limit=context or self.cache.capacity(),
            vocab_size=VOCAB,
            eos_ids=(),
            retention=retention,
            retention_reason=reason,
        )
        self.now = 0.0
        self.engine = LocalEngine(
            info, self.cache, self.scheduler, self.device, clock=self.clock, overlap=overlap
        )
        self.count = 0

    def clock(self) -> float:
        self.now += 0.001
        return self.now

    def send(self, tokens, max_tokens: int | None = 8, **options) -> Reply:
        self.count += 1
        reply = Reply()
        request = GenerateRequest(
            id=options.pop("id", f"r{self.count}"),
            tokens=tuple(tokens),
            params=options.pop("params", SamplingParams()),
            max_tokens=max_tokens,
            **options,
        )
        self.engine.submit(request, reply.sink)
        return reply

    def step(self, count: int = 1) -> None:
        for _ in range(count):
            self.engine.take()
            self.engine.step()
            self.audit()

    def audit(self) -> None:
        leases = [seq.lease for seq in self.scheduler.running]
        assert None not in leases
        audit(self.cache, leases)

    def drain(self, limit: int = 5000) -> None:
        for _ in range(limit):
            self.step()
            if not self.scheduler.busy and not self.engine.inbox:
                return
        raise AssertionError("the engine does not come to rest")

    def ask(self, tokens, max_tokens: int | None = 8, **options) -> Reply:
        """Send one request, run to rest, check its answer against the oracle."""
        reply = self.send(tokens, max_tokens, **options)
        self.drain()
        end = reply.finished()
        assert end is not None
        if max_tokens is not None and end.reason == "length":
            assert reply.ids() == oracle(tokens, max_tokens)
        return reply


def at_rest(h: Harness, failed: int = 0) -> None:
    """Nothing of any request is left but checkpoints, and those hold every used frame."""
    engine = h.engine
    held = [engine.choices, engine.requests, engine.private, engine.inbox, h.device.slots]
    assert not any([*held, h.scheduler.busy])
    assert engine.counters["failed_steps"] == failed
    counts = h.cache.counters
    live = list(h.cache.checkpoints())
    assert not any(c.leases or c.protected for c in live)
    gone = sum(counts.evicted.values()) + sum(counts.discarded.values())
    assert sum(counts.sealed.values()) == gone + len(live)
    h.cache.reset()
    assert h.cache.free == h.spec.frames

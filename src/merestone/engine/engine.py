"""The engine: one thread that plans, runs and reports, and a thread-safe front.

Knows the scheduler, a device that runs plans, and choices. Must not know HTTP or tensors.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

from merestone.core.cache import Cache
from merestone.core.checkpoint import Kind, Root
from merestone.core.gate import parse
from merestone.engine.api import (
    STOPPED,
    CacheBusy,
    CachePage,
    CacheQuery,
    EngineInfo,
    EngineRefusal,
    Event,
    GenerateRequest,
    Sink,
    Stats,
)
from merestone.engine.choice import Choice, check, sequence_of
from merestone.engine.device import Attendant, Device, DeviceLost, Landing, launch
from merestone.engine.flush import flush
from merestone.engine.report import cache_view, condition, engine_stats
from merestone.sched.ahead import plan_ahead
from merestone.sched.flight import Outcome
from merestone.sched.loss import lose_device
from merestone.sched.request import Sequence, Tokens
from merestone.sched.scheduler import Scheduler
from merestone.store.stores import Stores

log = logging.getLogger("merestone.engine")
Answer = TypeVar("Answer")


class LocalEngine:
    """Implements ``engine.api.Engine`` over one scheduler and one device.

    All state is touched by the engine's thread alone; the front posts into an inbox.
    """

    def __init__(
        self,
        info: EngineInfo,
        cache: Cache,
        scheduler: Scheduler,
        device: Device,
        *,
        clock: Callable[[], float] = time.monotonic,
        overlap: bool = False,
    ) -> None:
        """``overlap``: plan ahead of the step that runs; the device is a LeadingDevice then."""
        self.info = info
        self.cache = cache
        self.scheduler = scheduler
        self.device = device
        self.clock = clock
        self.overlap = overlap
        self.landing: Landing | None = None
        """The result of the plan in flight, to be waited for."""
        self.choices: dict[Sequence, Choice] = {}
        self.requests: dict[str, list[Choice]] = {}
        self.private: set[Root] = set()
        self.counters: Counter[str] = Counter()
        retention = parse(info.retention, cache.spec.chunk)
        assert retention is not None, "the gate has not been asked"
        self.retention = retention
        self.off_grid = "no_boundary" if info.retention_reason == "as asked for" else "gate"
        self.arrivals = 0
        self.inbox: deque[Callable[[], None]] = deque()
        self.wake = threading.Condition()
        self.live: set[str] = set()
        """Ids of requests that have not ended; guarded by ``wake``."""
        self.lost_in_a_row = 0
        self.stopping = False
        self.broken: str | None = None
        self.down: str | None = None
        """Why the device runs no plans for now."""
        self.attendant: Attendant | None = None
        self.thread: threading.Thread | None = None

    def attach(self, stores: Stores) -> None:
        """Keep checkpoints in stores, too. Before the start."""
        stores.shared = lambda root: root not in self.private
        stores.bell.wake = self._ring
        self.scheduler.outside = stores

    def _ring(self) -> None:
        with self.wake:
            self.wake.notify()

    # -- front: any thread ----------------------------------------------------------------------

    def submit(self, request: GenerateRequest, sink: Sink) -> None:
        ids = check(request, self.info)
        with self.wake:
            if self.stopping:
                raise EngineRefusal(STOPPED, "the engine has stopped")
            if request.id in self.live:
                raise EngineRefusal("duplicate_id", f"request {request.id!r} is still running")
            self.live.add(request.id)
            self.inbox.append(lambda: self._add(request, ids, sink))
            self.wake.notify()

    def abort(self, request_id: str) -> None:
        self._post(lambda: self._abort(request_id))

    def reset_cache(self) -> int:
        def reset() -> int:
            if self.broken is not None or self.stopping:
                raise CacheBusy(f"the engine has stopped: {self.broken or 'it was told to'}")
            return self.scheduler.reset()

        return self.ask(reset)

    def cache_view(self, query: CacheQuery) -> CachePage:
        return self.ask(lambda: cache_view(self.cache, query, self.scheduler.step, self.clock()))

    def stats(self) -> Stats:
        return self.ask(lambda: engine_stats(self.cache, self.scheduler, self.counters))

    def health(self) -> dict[str, object]:
        runs = self.thread is not None and self.thread.is_alive() and not self.stopping
        # Each is read once, and in this order: whoever reads a final loss as `down` sees `broken`.
        down, failures = self.down, self.lost_in_a_row
        status, reason = condition(
            self.broken, down, failures, runs=runs, returns=self.attendant is not None
        )
        return {
            "status": status,
            "reason": reason,
            "running": len(self.scheduler.running),
            "waiting": len(self.scheduler.waiting),
            "steps": self.scheduler.step,
            "retention": self.info.retention,
            "retention_reason": self.info.retention_reason,
            "speculation": self.info.speculation,
            **({} if self.attendant is None else self.attendant.report()),
        }

    def start(self) -> None:
        assert self.thread is None, "the engine was started before"
        self.thread = threading.Thread(target=self._loop, name="merestone-engine", daemon=True)
        self.thread.start()

    def stop(self) -> None:
        with self.wake:
            self.stopping = True
            self.wake.notify()
        if self.thread is not None:
            self.thread.join()
        else:
            self._close()
        if self.attendant is not None:
            self.attendant.close()

    def device_lost(self, reason: str, returns: bool) -> None:
        """The device is gone; ``returns``: another one like it will come. Any thread may call."""
        self._post(lambda: self._lose(reason, returns))

    def device_back(self, heard: Callable[[], None] = lambda: None) -> None:
        """A device as good as new is there; ``heard`` is called when plans are made for it."""
        self._post(lambda: self._resume(heard))

    def _post(self, action: Callable[[], None]) -> bool:
        """Hand an action to the engine's thread. False if that takes none any more."""
        with self.wake:
            if self.stopping:
                return False
            self.inbox.append(action)
            self.wake.notify()
            return True

    def ask(self, question: Callable[[], Answer]) -> Answer:
        """Run a question between two steps, on the engine's thread."""
        if self.thread is None or not self.thread.is_alive():
            return question()
        future: Future[Answer] = Future()

        def answer() -> None:
            try:
                future.set_result(question())
            except Exception as error:
                future.set_exception(error)

        if not self._post(answer):
            self.thread.join()  # it may still be ending requests, and writing to stores
            return question()
        return future.result()

    # -- the loop -------------------------------------------------------------------------------

    def _loop(self) -> None:
        idle = False
        while True:
            with self.wake:
                self._rest(idle)
            try:
                if not self.stopping:
                    self.take()
                    idle = not self.step()
            except Exception as error:
                # Nothing is trusted after a failure in deciding: end, say so, publish nothing.
                log.exception("the engine stopped")
                self.broken = f"{type(error).__name__}: {error}"
            if self.stopping or self.broken is not None:
                self._close()
                return

    def _rest(self, idle: bool) -> None:
        """Wait, holding ``wake``, until there is something to do. ``idle``: the last plan was
        empty, so whoever waits then waits for a store."""
        while not (self.inbox or self.stopping):
            if self._ready() and not (idle and self.scheduler.outside.holding):
                return
            rest = None if self.down else self.scheduler.outside.rest()
            self.wake.wait(rest)
            if rest is not None:
                return

    def take(self) -> None:
        """Run what was posted, in order, with no plan in flight."""
        while self.inbox:
            self._land()
            self.inbox.popleft()()

    def _close(self) -> None:
        """No new actions; those already posted still run, then every request ends."""
        with self.wake:
            self.stopping = True
        while self.inbox:
            try:
                self.take()
            except Exception:
                log.exception("an action failed while the engine stopped")
        if not self.broken:
            self._land()
        self._end_all()
        if not (self.broken or self.down):
            flush(self.scheduler, self.step, self.clock)
        self.scheduler.outside.close()

    def step(self) -> bool:
        """Plan, run and report one step, the next one started before it is waited for, where that
        may be. False if there was nothing to do."""
        if self.down is not None:
            return False
        self.cache.tick(self.clock())
        self.scheduler.outside.tick(self.clock())
        if self.landing is None:
            plan = self.scheduler.plan()
            if plan.empty:
                self.scheduler.skip()
                return False
            self.landing = launch(self.device, plan)
        ahead = plan_ahead(self.scheduler) if self.overlap else None
        self._land(launch(self.device, ahead) if ahead else None)
        return True

    def _land(self, ahead: Landing | None = None) -> None:
        """Wait for the step in flight, if there is one, and report it; ``ahead`` flies then."""
        if self.landing is None:
            return
        landing, self.landing = self.landing, ahead
        try:
            result = landing()
        except DeviceLost as error:
            self._lose(str(error), error.returns)
            return
        except Exception as error:
            log.exception("a step failed")
            self.landing = None  # what is ahead took its ids from the step that failed
            self.counters["failed_steps"] += 1
            self.lost_in_a_row += 1
            outcomes = self.scheduler.fail(f"a step failed: {type(error).__name__}: {error}")
        else:
            outcomes = self.scheduler.apply(result)
            self.lost_in_a_row = 0
        self._report(outcomes)

    def _ready(self) -> bool:
        return self.scheduler.busy and self.down is None

    def _lose(self, reason: str, returns: bool) -> None:
        """What the device held is lost: so are running requests and every checkpoint."""
        if self.down is None:  # we are told by whoever notices first, and by the attendant
            self.counters["devices_lost"] += 1
        if not returns:
            self.broken = reason  # before anyone is told: who then asks for our health reads it
        self.down, self.landing = reason, None
        self._report(lose_device(self.scheduler, reason))

    def _resume(self, heard: Callable[[], None]) -> None:
        self.down, self.lost_in_a_row = None, 0
        heard()

    def _report(self, outcomes: list[Outcome]) -> None:
        now = self.clock()
        ended = {o.sequence: self.choices[o.sequence] for o in outcomes if o.result is None}
        # All at once: no sink that fails may have aborted what is in no queue any more.
        for one in ended.values():
            self._forget(one)
        for outcome in outcomes:
            if outcome.result is None:
                one = ended[outcome.sequence]
                self._emit(one, [one.failed(outcome.error or "", now)])
                continue
            choice = self.choices.get(outcome.sequence)
            if choice is None:  # ended by another choice's failing sink
                continue
            try:
                events, done = choice.take(outcome.result, now)
            except Exception as error:
                log.exception("a choice could not be reported")
                self.scheduler.abort(outcome.sequence)
                self._forget(choice)
                self._emit(choice, [choice.failed(f"{type(error).__name__}: {error}", now)])
                continue
            if done:
                self.scheduler.finish(outcome.sequence, Kind.RESPONSE)
                self._forget(choice)
            self._emit(choice, events)

    def _emit(self, choice: Choice, events: list[Event]) -> None:
        if not events:
            return
        try:
            choice.sink(events)
        except Exception:
            log.exception("a sink failed; its request is dropped")
            for other in list(self.requests.get(choice.request.id, ())):
                self.scheduler.abort(other.sequence)
                self._forget(other)

    # -- requests -------------------------------------------------------------------------------

    def _add(self, request: GenerateRequest, ids: Tokens, sink: Sink) -> None:
        now = self.clock()
        shared = request.cache and self.retention.mode != "none"
        grid = self.retention.grid
        root: Root = ("", request.salt) if shared else ("private", request.id)
        limit = self.info.context_limit - len(request.tokens)
        choices = []
        for number in range(request.n):
            self.arrivals += 1
            sequence = sequence_of(
                request, ids, number, root, self.arrivals, limit, shared=shared, grid=grid
            )
            text = request.text() if request.text else None
            choices.append(Choice(request, sequence, sink, text, now, shared, self.off_grid))
        if not shared:
            self.private.add(root)
        self.requests[request.id] = choices
        for choice in choices:
            self.choices[choice.sequence] = choice
            self.scheduler.add(choice.sequence)

    def _abort(self, request_id: str) -> None:
        now = self.clock()
        for choice in list(self.requests.get(request_id, ())):
            if choice.sequence not in self.choices:  # another one's sink failed: all were dropped
                continue
            self.scheduler.abort(choice.sequence)
            self._forget(choice)
            self._emit(choice, [choice.finished("abort", None, now)])

    def _forget(self, choice: Choice) -> None:
        """A choice has ended. Count it, and drop what was kept for its request alone."""
        sequence = choice.sequence
        del self.choices[sequence]
        left = self.requests[sequence.id]
        left.remove(choice)
        if not left:
            del self.requests[sequence.id]
            with self.wake:
                self.live.discard(sequence.id)
            if sequence.root in self.private:
                self.private.discard(sequence.root)
                self.cache.reset(sequence.root)

    def _end_all(self) -> None:
        now = self.clock()
        ended = list(self.choices.values())
        self.choices.clear()
        self.requests.clear()
        for choice in ended:
            broken = choice.failed(self.broken, now) if self.broken else None
            self._emit(choice, [broken or choice.finished("abort", None, now)])

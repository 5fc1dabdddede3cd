"""A device that is lost with its memory, and an engine that ends: what is told, kept and left."""

from __future__ import annotations

import time
from collections.abc import Container

import pytest

from engine.harness import Harness
from engine.test_scenarios import stream
from fake_device import oracle, small_spec
from merestone.engine.device import DeviceLost
from merestone.engine.flush import FLUSH_S, PATIENCE_S, flush
from merestone.sched.outside import Nothing
from merestone.sched.request import Sequence


def lose(h: Harness) -> None:
    """The next step finds that the device is gone, and that another one will come."""

    def gone(plan: object) -> None:
        raise DeviceLost("it is gone", returns=True)

    h.device.run = h.device.launch = gone


def come_back(h: Harness, overlap: bool) -> None:
    h.engine.device = h.device = Harness(h.spec, overlap=overlap).device
    h.engine.device_back()


class Asked(Nothing):
    """Stores that remember who has left them."""

    def __init__(self) -> None:
        self.left: list[str] = []

    def leaves(self, seq: Sequence) -> str:
        self.left.append(seq.id)
        return ""


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("steps", [0, 1, 5])
def test_who_waits_is_answered_by_the_next_device(steps: int, overlap: bool) -> None:
    """Who runs is told at once; nothing that the old memory held, or was to hold, is found."""
    h = Harness(small_spec(frames=200), slots=1, overlap=overlap)
    prompt = stream(40, 1)
    h.ask(prompt, 4)
    running = h.send(stream(20, 2), 60)
    waiting = h.send([*prompt, 1], 4)
    h.step(steps)
    lose(h)
    h.step(1 + overlap)  # a result that is on its way arrives
    end = running.finished()
    assert end is not None
    assert (end.reason, end.error) == ("error", "it is gone")
    h.engine.device_lost("the attendant has seen it, too", returns=True)
    h.step(3)
    assert h.engine.down is not None
    assert waiting.events == []
    assert h.cache.free == h.spec.frames
    come_back(h, overlap)
    h.drain()
    assert (waiting.ids(), waiting.restored) == (oracle([*prompt, 1], 4), 0)
    assert (h.engine.counters["devices_lost"], h.engine.counters["failed_steps"]) == (1, 0)
    assert h.ask([*prompt, 1], 4).restored == 41


def test_a_seal_that_was_to_be_saved_next_is_lost_with_the_device() -> None:
    """Between two steps, with an answer that has just ended."""
    h = Harness(small_spec(frames=200))
    prompt = stream(20, 1)
    reply = h.send(prompt, 3)
    while reply.finished() is None:
        h.step()
    assert h.scheduler.seals.late
    h.engine.device_lost("it is gone", returns=True)
    h.step()
    assert h.cache.counters.discards("device_lost") == 1
    assert h.cache.free == h.spec.frames
    come_back(h, False)
    assert h.ask([*prompt, *reply.ids()], 2).restored == 0


def test_who_waits_may_ask_stores_again() -> None:
    h, stores = Harness(slots=1), Asked()
    h.send(stream(9, 1), 60, id="runs")
    h.send(stream(9, 2), 60, id="waits")
    h.step(3)
    h.scheduler.outside = stores
    h.engine.device_lost("it is gone", returns=True)
    h.step()
    assert stores.left == ["waits"]


# -- the last steps of an engine that ends ------------------------------------------------------


class Busy(Nothing):
    """Stores that want so many more steps, and rest in between."""

    def __init__(self, steps: int, rest_s: float = 0.001) -> None:
        self.steps, self.rest_s = steps, rest_s

    def rest(self) -> float | None:
        return self.rest_s if self.steps else None


class Ending:
    """Runs the last steps of an engine over such stores, in no time; each takes half a second.
    ``fruitless``: those that find nothing to do."""

    def __init__(self, outside: Busy, monkeypatch: pytest.MonkeyPatch) -> None:
        self.h, self.outside = Harness(small_spec(frames=200), slots=2), outside
        self.h.scheduler.outside = outside
        self.made, self.slept = 0, 0.0
        self.fruitless: Container[int] = range(10**6)
        monkeypatch.setattr(time, "sleep", self.sleep)
        for key in range(3):
            self.h.send(stream(20, key), 60)
        self.h.step(2)
        assert (len(self.h.scheduler.running), len(self.h.scheduler.waiting)) == (2, 1)

    def sleep(self, seconds: float) -> None:
        self.slept += seconds
        self.h.now += seconds

    def step(self) -> bool:
        self.h.now += 0.5
        self.made += 1
        self.outside.steps -= 1
        return self.made not in self.fruitless

    def run(self) -> None:
        flush(self.h.scheduler, self.step, lambda: self.h.now)


def test_stores_are_stepped_until_they_have_nothing_to_do(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """With a rest where there was nothing to do for us, and at most as long as they say."""
    ending = Ending(Busy(6, PATIENCE_S), monkeypatch)
    ending.fruitless = (2, 4, 6)
    ending.run()
    assert (ending.made, ending.slept) == (6, 2 * PATIENCE_S)
    scheduler = ending.h.scheduler
    assert scheduler.running == scheduler.waiting.items == [], "nobody waits for an answer"
    assert not caplog.records


def test_for_stores_without_work_nothing_more_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    ending = Ending(Busy(0), monkeypatch)
    ending.run()
    assert (ending.made, len(ending.h.scheduler.running)) == (0, 2)


def test_stores_that_have_failed_are_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """They rest longer. What there is to do is done all the same."""
    ending = Ending(Busy(10**6, PATIENCE_S + 0.01), monkeypatch)
    ending.fruitless = (4,)
    ending.run()
    assert (ending.made, ending.slept) == (4, 0.0)


def test_stores_are_waited_for_so_long_and_no_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    ending = Ending(Busy(10**6), monkeypatch)
    before = ending.h.now
    ending.run()
    assert FLUSH_S <= ending.h.now - before < FLUSH_S + 0.6
    assert ending.slept > 0


def test_a_last_step_that_fails_does_not_keep_the_engine_from_ending(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    ending = Ending(Busy(5), monkeypatch)

    def step() -> bool:
        raise RuntimeError("injected")

    flush(ending.h.scheduler, step, ending.h.clock)
    assert "could not be finished" in caplog.text

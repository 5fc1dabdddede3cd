"""A device that is lost with its memory, and an engine that ends: what is told, kept and left."""

from __future__ import annotations

import logging

import pytest

from engine.harness import Harness
from engine.test_scenarios import stream
from fake_device import oracle, small_spec
from merestone.engine.device import DeviceLost
from merestone.engine.flush import FLUSH_S, PATIENCE_S, flush
from merestone.sched.outside import Nothing


def lose(h: Harness) -> None:
    """The next step finds that the device is gone, and that another one will come."""

    def gone(plan: object) -> None:
        raise DeviceLost("it is gone", returns=True)

    h.device.run = h.device.launch = gone


def come_back(h: Harness, overlap: bool) -> None:
    h.engine.device = h.device = Harness(h.spec, overlap=overlap).device
    h.engine.device_back()


@pytest.mark.parametrize("overlap", [False, True])
def test_who_waits_is_answered_by_the_next_device(overlap: bool) -> None:
    """Who runs is told at once; nothing that the old memory held is found."""
    h = Harness(small_spec(frames=200), slots=1, overlap=overlap)
    prompt = stream(40, 1)
    h.ask(prompt, 4)
    running = h.send(stream(20, 2), 60)
    waiting = h.send([*prompt, 1], 4)
    h.step(5)
    lose(h)
    h.step()
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


# -- the last steps of an engine that ends ------------------------------------------------------


class Busy(Nothing):
    """Stores that want so many more steps, and rest in between."""

    def __init__(self, steps: int, rest_s: float | None = 0.0) -> None:
        self.steps, self.rest_s = steps, rest_s

    def rest(self) -> float | None:
        return self.rest_s if self.steps else None


def ending(outside: Busy, every: int = 1) -> tuple[Harness, list[float]]:
    """Runs the last steps; every so many find something to do. Returns when they were made."""
    h, made = Harness(small_spec(frames=200)), []
    h.scheduler.outside = outside
    for key in (1, 2):
        h.send(stream(20, key), 60)
    h.step(2)
    h.send(stream(20, 3), 60)
    h.engine.take()

    def step() -> bool:
        h.now += 0.5
        made.append(h.now)
        outside.steps -= 1
        return len(made) % every > 0

    flush(h.scheduler, step, lambda: h.now)
    return h, made


@pytest.mark.parametrize("every", [1, 3])
def test_stores_are_stepped_until_they_have_nothing_to_do(every: int) -> None:
    h, made = ending(Busy(6), every)
    assert len(made) == 6
    assert h.scheduler.running == h.scheduler.waiting.items == [], "nobody waits for an answer"


def test_for_stores_without_work_nothing_more_is_done() -> None:
    h, made = ending(Busy(0))
    assert made == []
    assert len(h.scheduler.running) == 2


@pytest.mark.parametrize(("rest_s", "steps"), [(0.001, FLUSH_S / 0.5), (PATIENCE_S + 0.001, 1)])
def test_stores_are_waited_for_so_long_and_no_longer(rest_s: float, steps: float) -> None:
    """For a bounded time, and not at all if they have failed."""
    _, made = ending(Busy(10**6, rest_s))
    assert len(made) == steps


def test_a_last_step_that_fails_does_not_keep_the_engine_from_ending(
    caplog: pytest.LogCaptureFixture,
) -> None:
    h = Harness()
    h.scheduler.outside = Busy(5)

    def step() -> bool:
        raise RuntimeError("injected")

    with caplog.at_level(logging.ERROR):
        flush(h.scheduler, step, h.clock)
    assert "could not be finished" in caplog.text

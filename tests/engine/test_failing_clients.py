"""Clients that cannot be told, and text that cannot be made: each ends its own request alone."""

from __future__ import annotations

import pytest

from engine.harness import Harness, at_rest
from engine.test_scenarios import stream
from fake_device import oracle
from merestone.engine.api import GenerateRequest
from merestone.sched.plan import SamplingParams


class BrokenText:
    matched = None

    def push(self, token: int) -> tuple[str, bool]:
        raise ValueError("no such token")

    def flush(self) -> str:
        return ""


def test_a_failing_text_stream_ends_its_own_request_only() -> None:
    h = Harness()
    broken = h.send(stream(20, 1), 5, text=BrokenText)
    mate = h.send(stream(20, 2), 20)
    h.drain()
    assert broken.finished().reason == "error"
    assert mate.ids() == oracle(stream(20, 2), 20)
    at_rest(h)


def test_a_failing_sink_ends_its_own_request() -> None:
    def sink(events: object) -> None:
        raise RuntimeError("nobody listens")

    h = Harness()
    mate = h.send(stream(20, 2), 20)
    h.engine.submit(GenerateRequest("deaf", tuple(stream(20, 1)), SamplingParams(), 60), sink)
    h.step(6)
    assert [seq.id for seq in h.scheduler.running] == ["r1"]
    h.drain()
    assert mate.ids() == oracle(stream(20, 2), 20)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("lost", [False, True])
def test_failing_sinks_of_a_step_that_failed_end_nobody_else(overlap: bool, lost: bool) -> None:
    """All choices of a request have left at once when the first cannot be told."""
    h = Harness(overlap=overlap)
    prompt = stream(20, 1)
    deaf, mate = h.send(prompt, 60, n=3), h.send(stream(20, 2), 60)
    h.step(6)
    deaf.gone = True
    if lost:
        h.engine.device_lost("it is gone", returns=True)
        h.engine.device_back()
    else:
        h.device.fail_next = True
    h.drain()
    assert mate.finished().reason == "error"
    assert h.ask(prompt, 4).ids() == oracle(prompt, 4)
    at_rest(h, failed=int(not lost))


def test_a_failing_sink_at_the_end_keeps_nobody_waiting() -> None:
    """Even where the scheduler is not to be trusted any more."""
    h = Harness()
    deaf, mate = h.send(stream(20, 1), 60, n=3), h.send(stream(20, 2), 60)
    h.step(6)
    deaf.gone = True
    for sequence in list(h.scheduler.running):
        h.scheduler.leave(sequence)
    h.engine.broken = "it cannot be trusted"
    h.engine._close()
    assert (mate.finished().reason, mate.finished().error) == ("error", "it cannot be trusted")

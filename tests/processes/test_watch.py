"""Who is silent, and who only was not listened to: clocks are the test's."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest
import zmq

from merestone.engine.ranks import attention
from merestone.engine.ranks.attention import Attention
from merestone.engine.ranks.messages import Pulse
from merestone.engine.ranks.watch import Watch
from processes.ranked import eventually


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(attention, "time", clock)
    return clock


def test_of_a_gap_little_counts(clock: Clock) -> None:
    listening = Attention(0.5)
    for clock.now, heard in ((0.25, 0.25), (0.5, 0.5), (60.5, 1.0), (60.75, 1.25)):
        assert listening.look() == heard


@pytest.fixture
def watch(tmp_path: Path, clock: Clock) -> Iterator[Watch]:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    watch = Watch(context, f"ipc://{tmp_path}/pulse", 3.0, lambda reason: None)
    watch.begin("session", SimpleNamespace(dead=lambda: None))  # type: ignore[arg-type]
    yield watch
    watch.close()
    context.destroy(linger=0)


def pass_by(watch: Watch, clock: Clock, seconds: float) -> None:
    """Let time pass, and the watch look at its clock."""
    looked = watch.attention.now
    clock.now += seconds
    eventually(lambda: watch.attention.now > looked)


def test_a_watch_that_stood_still_does_not_blame_a_rank(watch: Watch, clock: Clock) -> None:
    """It may wake before it can read what came meanwhile: here nothing comes at all."""
    with watch.socket.context.socket(zmq.DEALER) as line:
        line.connect(watch.endpoint)
        line.send(msgspec.msgpack.encode(Pulse(0, "session")))
        eventually(watch.ages)

    def look_after(seconds: float) -> None:
        pass_by(watch, clock, seconds)
        hear = len(heard)
        eventually(lambda: len(heard) > hear + 1)  # and the loss, if there is one, was looked for

    heard: list[None] = []
    once = watch._hear
    watch._hear = lambda: (heard.append(None), once())[1]  # type: ignore[method-assign]
    look_after(100.0)
    for _ in range(4):
        look_after(0.5)
        assert watch.lost is None
    look_after(0.5)
    assert watch.lost == "rank 0 was silent for 3 s"


def test_a_rank_that_never_said_a_word_is_silent(watch: Watch, clock: Clock) -> None:
    """It may freeze between its report for work and its first sign of life."""
    watch.ready([0])
    for _ in range(6):
        pass_by(watch, clock, 0.6)
    eventually(lambda: watch.lost)
    assert watch.lost == "rank 0 was silent for 3 s"

"""What any thread may ask of an engine, while it ends and afterwards."""

from __future__ import annotations

import threading

import pytest

from engine.harness import Harness
from merestone.engine.api import STOPPED, CacheBusy, EngineRefusal
from merestone.sched.outside import Nothing


class SlowToClose(Nothing):
    def __init__(self) -> None:
        self.closing, self.may_close = threading.Event(), threading.Event()

    def close(self) -> None:
        self.closing.set()
        assert self.may_close.wait(60)


def test_a_question_to_an_engine_that_ends_waits_for_its_thread() -> None:
    h, store = Harness(), SlowToClose()
    engine = h.engine
    h.scheduler.outside = store
    engine.start()
    thread = engine.thread
    assert thread is not None
    stopping = threading.Thread(target=engine.stop)
    stopping.start()
    assert store.closing.wait(60)
    seen: list[bool] = []
    asking = threading.Thread(target=lambda: seen.append(engine.ask(thread.is_alive)))
    asking.start()
    asking.join(0.2)  # were it answered beside the thread, then now
    assert engine.health()["reason"] == "the engine is not running"
    store.may_close.set()
    asking.join(60)
    stopping.join(60)
    assert seen == [False]


def test_an_engine_that_was_stopped_takes_nothing() -> None:
    h = Harness()
    h.engine.start()
    assert h.engine.health()["status"] == "ok"
    h.engine.stop()
    assert h.engine.health()["status"] == "failed"
    with pytest.raises(EngineRefusal) as refused:
        h.send([1, 2])
    assert refused.value.code == STOPPED
    with pytest.raises(CacheBusy, match="stopped"):
        h.engine.reset_cache()
    assert h.engine.stats()["requests_running"] == 0

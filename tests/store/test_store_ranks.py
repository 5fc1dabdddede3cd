"""Two ranks that share the tokens, drafts, and a store: a checkpoint comes back on both or none."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from engine.real import stream
from merestone.engine.api import TokenEvent
from merestone.engine.build import EngineOptions, build_engine
from merestone.engine.engine import LocalEngine
from merestone.engine.ranks.device import Ranks
from merestone.engine.ranks.messages import RankOptions
from merestone.models.tiny import write_tiny
from merestone.sched.plan import SamplingParams
from processes.ranked import LONG_S, GenerateRequest, Waiting, eventually

PROMPT = list(stream(150, 1))


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("store")


@contextmanager
def running(
    directory: Path, store: str, on_loss: str = "exit", device: str = "cpu"
) -> Iterator[LocalEngine]:
    write_tiny(directory / "tiny")
    options = EngineOptions(
        device=device, frames=600, poison=True, threads=1, speculate="mtp:3", stores=(store,),
        store_wait=LONG_S, ranks=RankOptions(tp=2, dcp=2, on_loss=on_loss),
    )  # fmt: skip
    engine = build_engine(directory / "tiny", options)
    engine.start()
    try:
        yield engine
    finally:
        engine.stop()


@pytest.fixture(scope="module")
def engine(directory: Path) -> Iterator[LocalEngine]:
    with running(directory, f"disk:{directory / 'kept'}:1GiB") as engine:
        yield engine


def ask(engine: LocalEngine, tokens: list[int], count: int, **options) -> Waiting:
    reply = Waiting(engine)
    params = SamplingParams(logprobs=2)
    name = f"q{time.monotonic()}"
    engine.submit(GenerateRequest(name, tuple(tokens), params, count, **options), reply.sink)
    reply.wait()
    return reply


def said(reply: Waiting) -> list[object]:
    return [event.logprob for event in reply.events if isinstance(event, TokenEvent)]


def forget(engine: LocalEngine) -> None:
    """Once stores have what memory has, empty the memory."""
    scheduler = engine.scheduler
    eventually(lambda: engine.ask(lambda: not scheduler.busy and scheduler.outside.rest() is None))
    assert engine.ask(engine.cache.reset) > 0


def comes_back(engine: LocalEngine) -> Waiting:
    """What left the ranks' own memory does, with its bits: a replay, and a turn behind the answer,
    which is returned."""
    first = ask(engine, PROMPT, 6)
    longer = [*PROMPT, *first.ids(), 9]
    control = ask(engine, longer, 4, salt="cold")
    assert control.restored == 0
    forget(engine)
    again = ask(engine, PROMPT, 6)
    assert (again.restored, said(again)) == (150, said(first))
    forget(engine)
    onward = ask(engine, longer, 4)
    assert (onward.restored, said(onward)) == (155, said(control))
    forget(engine)
    return first


@pytest.mark.multi_gpu
@pytest.mark.parametrize("store", ["memory:1GiB", "disk:{}:1GiB"])
def test_what_left_two_gpus_comes_back(tmp_path: Path, store: str) -> None:
    with running(tmp_path, store.format(tmp_path / "kept"), device="cuda") as engine:
        comes_back(engine)


def test_both_ranks_restore_or_none(engine: LocalEngine, directory: Path) -> None:
    first = comes_back(engine)
    kept = [path for path in (directory / "kept").glob("segments/*/*") if path.suffix == ".1"]
    assert kept, "the second rank has written nothing"
    for path in kept:
        path.write_bytes(path.read_bytes()[:-1])
    broken = ask(engine, PROMPT, 6)
    assert (broken.restored, broken.finished().cache.lost) == (0, "store_damaged")
    assert said(broken) == said(first)
    forget(engine)  # and what was broken has been written anew
    assert ask(engine, PROMPT, 6).restored == 150


def test_memory_of_both_ranks_and_none_of_ranks_that_are_gone(tmp_path: Path) -> None:
    """Each rank's memory has its own parts; it goes with the rank's process."""
    with running(tmp_path, "memory:64MiB", "restart") as engine:
        first = comes_back(engine)
        ranks = engine.device
        assert isinstance(ranks, Ranks)
        assert ranks.processes is not None
        os.kill(ranks.processes.running[1].pid, signal.SIGKILL)
        eventually(lambda: ranks.sessions == 2 and engine.health()["status"] == "ok")
        fresh = ask(engine, PROMPT, 6)
        assert fresh.restored == 0
        assert said(fresh) == said(first)
        forget(engine)
        assert ask(engine, PROMPT, 6).restored == 150

"""Two ranks that share the tokens, drafts, and a disk: a checkpoint comes back on both or none."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from engine.real import stream
from merestone.engine.api import TokenEvent
from merestone.engine.build import EngineOptions, build_engine
from merestone.engine.engine import LocalEngine
from merestone.engine.ranks.messages import RankOptions
from merestone.models.tiny import write_tiny
from merestone.sched.plan import SamplingParams
from processes.ranked import GenerateRequest, Waiting


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("store")


@pytest.fixture(scope="module")
def engine(directory: Path) -> Iterator[LocalEngine]:
    write_tiny(directory / "tiny")
    options = EngineOptions(
        frames=600, poison=True, threads=1, speculate="mtp:3", ranks=RankOptions(tp=2, dcp=2),
        stores=(f"disk:{directory / 'kept'}:1GiB",), store_wait=20.0,
    )  # fmt: skip
    engine = build_engine(directory / "tiny", options)
    engine.start()
    yield engine
    engine.stop()


def ask(engine: LocalEngine, tokens: list[int], count: int, **options) -> Waiting:
    reply = Waiting()
    params = SamplingParams(logprobs=2)
    name = f"q{time.monotonic()}"
    engine.submit(GenerateRequest(name, tuple(tokens), params, count, **options), reply.sink)
    reply.wait(60)
    return reply


def said(reply: Waiting) -> list[object]:
    return [event.logprob for event in reply.events if isinstance(event, TokenEvent)]


def forget(engine: LocalEngine) -> None:
    """Once stores have what memory has, empty the memory."""
    until = time.monotonic() + 30
    while engine.ask(engine.scheduler.outside.rest) is not None:
        assert time.monotonic() < until
        time.sleep(0.01)
    assert engine.ask(engine.cache.reset) > 0


def test_both_ranks_restore_or_none(engine: LocalEngine, directory: Path) -> None:
    prompt = list(stream(150, 1))
    first = ask(engine, prompt, 6)
    longer = [*prompt, *first.ids(), 9]
    forget(engine)
    assert ask(engine, prompt, 6).restored == 150
    again = ask(engine, longer, 4)
    assert again.restored == 155
    assert said(again) == said(ask(engine, longer, 4, salt="cold"))
    forget(engine)
    kept = [path for path in (directory / "kept").glob("segments/*/*") if path.suffix == ".1"]
    assert kept, "the second rank has written nothing"
    for path in kept:
        path.write_bytes(path.read_bytes()[:-1])
    broken = ask(engine, prompt, 6)
    assert (broken.restored, broken.finished().cache.lost) == (0, "store_damaged")
    assert said(broken) == said(first)
    forget(engine)  # and what was broken has been written anew
    assert ask(engine, prompt, 6).restored == 150

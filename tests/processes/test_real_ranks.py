"""Four real ranks, DCP 4, three drafts a step, a store: plans travel, pages are sharded, answers
are exact.

`tests/parallel` proves every layout with engines in lockstep; here the plans are sent, and a rank
is killed under load.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from engine.real import stream
from merestone.engine.api import GenerateRequest, TokenEvent
from merestone.engine.build import EngineOptions, build_engine
from merestone.engine.engine import LocalEngine
from merestone.engine.ranks.device import Ranks
from merestone.engine.ranks.messages import RankOptions
from merestone.models.tiny import write_tiny
from merestone.sched.plan import SamplingParams
from merestone.store.stores import Stores
from processes.ranked import LONG_S, Waiting, eventually

RANKS = RankOptions(tp=4, dcp=4, on_loss="restart", silence_s=20.0)


class Client:
    def __init__(self, engine: LocalEngine) -> None:
        self.engine = engine
        self.count = 0

    def send(self, tokens: Sequence[int], count: int = 4, **options) -> Waiting:
        reply = Waiting(self.engine)
        self.post(reply, tokens, count, **options)
        return reply

    def post(self, reply: Waiting, tokens: Sequence[int], count: int, **options) -> None:
        self.count += 1
        params = SamplingParams(logprobs=2)
        self.engine.submit(
            GenerateRequest(f"q{self.count}", tuple(tokens), params, count, **options), reply.sink
        )

    def ask(self, tokens: Sequence[int], count: int = 4, **options) -> Waiting:
        reply = self.send(tokens, count, **options)
        reply.wait()
        return reply

    def cold(self, tokens: Sequence[int], count: int = 4) -> Waiting:
        reply = self.ask(tokens, count, salt=f"cold {self.count}")
        assert reply.restored == 0
        return reply


class Striking(Waiting):
    """Kills a rank at its first token, on the engine's thread: no step comes between."""

    def __init__(self, engine: LocalEngine, process: int) -> None:
        super().__init__(engine)
        self.process = process

    def sink(self, events) -> None:
        if not self.ids() and any(isinstance(event, TokenEvent) for event in events):
            os.kill(self.process, signal.SIGKILL)
        super().sink(events)


def said(reply: Waiting) -> list[object]:
    """Every token with its log probabilities."""
    events = [event.logprob for event in reply.events if isinstance(event, TokenEvent)]
    assert events
    return events


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    directory: Path = tmp_path_factory.mktemp("ranks") / "tiny"
    write_tiny(directory)
    store = f"disk:{tmp_path_factory.mktemp('store')}:50MB"
    options = EngineOptions(
        frames=600, poison=True, threads=1, speculate="mtp:3", stores=(store,), store_wait=LONG_S,
        ranks=RANKS,
    )  # fmt: skip
    engine = build_engine(directory, options, "tiny")
    engine.start()
    yield Client(engine)
    engine.stop()


def test_replays_answers_and_shared_beginnings(client: Client) -> None:
    assert client.engine.retention.mode == "boundaries"
    for length in (1, 64, 150):
        prompt = stream(length, length)
        first = client.ask(prompt)
        again = client.ask(prompt)
        assert again.restored == length
        assert said(again) == said(first)
        longer = [*prompt, *first.ids(), 3, 5]
        onward = client.ask(longer)
        assert onward.restored == length + 3
        assert said(onward) == said(client.cold(longer))


def test_eight_at_once(client: Client) -> None:
    head = stream(75, 5)
    client.ask([*head, 3], 1, boundaries=((75, "instruction"),))
    texts = [[*head, *stream(9 + number, 20 + number)] for number in range(8)]
    replies = [client.send(text) for text in texts]
    for reply in replies:
        reply.wait()
        assert reply.restored == 75
    assert said(replies[6]) == said(client.cold(texts[6]))


def unwritten(engine: LocalEngine) -> int:
    """Checkpoints that are on their way to the store."""
    outside = engine.scheduler.outside
    assert isinstance(outside, Stores)
    return engine.ask(lambda: sum(desk.waiting for desk in outside.desks))


def test_a_rank_killed_in_decode_and_the_same_bits_from_its_successor(client: Client) -> None:
    """The ranks come back with an empty cache; each reads its part of what the store has."""
    prompt = stream(90, 90)
    before = client.ask(prompt)
    eventually(lambda: not (client.engine.scheduler.busy or unwritten(client.engine)))
    ranks = client.engine.device
    assert isinstance(ranks, Ranks)
    assert ranks.processes is not None
    reply = Striking(client.engine, ranks.processes.running[2].pid)
    client.post(reply, stream(30, 31), 2000)
    end = reply.wait()
    assert end.reason == "error"
    assert "rank 2" in str(end.error)
    waiting = client.send(prompt)
    waiting.wait()
    assert waiting.restored == 90
    assert said(waiting) == said(before)
    fresh = stream(70, 71)
    assert said(client.ask(fresh)) == said(client.cold(fresh))

"""The network tier against a real server: shared by replicas, stopped, killed, emptied."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import merestone.store.network as network
from engine.real import stream
from store.stored import Stored
from store.valkey import Server


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    running = Server(tmp_path_factory.mktemp("valkey"))
    yield running
    running.close()


@pytest.fixture(autouse=True)
def _patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that has to wait for a core is no dead one."""
    monkeypatch.setattr(network, "TIMEOUT_S", 300.0)


def test_a_second_replica_gets_the_same_bits(server: Server) -> None:
    prompt = list(stream(150, 1))
    first, second = Stored(server.url), Stored(server.url)
    reply = first.served(prompt, 6)
    assert second.served(prompt, 6).restored == 150
    assert second.served([*prompt, *reply.ids(), 7], 4).restored == 155
    # What one replica adds to a shared prompt, the other finds behind its own memory's part.
    assert first.served([*prompt, *reply.ids(), 7], 4).restored == 157
    keys = len(server.client.keys("*"))
    assert first.served(prompt, 6).restored == 150
    assert second.served(prompt, 6).restored == 150
    assert len(server.client.keys("*")) == keys
    # Salts are apart.
    assert second.served(prompt, 2, salt="another").restored == 0
    first.stop()
    second.stop()


def test_what_the_server_evicts_is_a_miss_and_written_again(server: Server) -> None:
    prompt = list(stream(100, 2))
    first = Stored(server.url)
    first.served(prompt, 3)
    segments = [k for k in server.client.keys("*") if k.endswith(b".0")]
    server.client.delete(*segments)
    second = Stored(server.url)
    assert second.served(prompt, 3).restored == 0
    assert second.stat("store_missed")["missing"] >= 1
    third = Stored(server.url)
    assert third.served(prompt, 3).restored == 100
    server.client.flushall()
    assert Stored(server.url).served(prompt, 1).restored == 0


def test_damaged_values_are_misses(server: Server) -> None:
    server.client.flushall()
    prompt = list(stream(100, 3))
    first = Stored(server.url)
    first.served(prompt, 1)
    for key in server.client.keys("*.0"):
        value = server.client.get(key)
        server.client.set(key, value[:-1] + bytes([value[-1] ^ 1]))
    second = Stored(server.url)
    assert second.served(prompt, 1).finished().cache.lost == "store_damaged"
    for key in server.client.keys("*.m"):
        server.client.set(key, b"nonsense that is longer than a checksum")
    third = Stored(server.url)
    assert third.served(prompt, 1).restored == 0
    assert third.stat("store_missed")["damaged"] >= 1


def test_a_stopped_server_stalls_nobody(server: Server) -> None:
    """It goes on only at the end: a step that waited for it would never be over."""
    known, prompt = list(stream(80, 4)), list(stream(80, 5))
    engine = Stored(server.url, store_wait=0.3, frames=3000)
    engine.served(known, 2)
    running = engine.send(list(stream(70, 6)), 3000)
    while not running.ids():  # it may wait for the store, too
        engine.step()
    server.pause()
    try:
        waits = engine.send(prompt, 2)
        while waits.finished() is None:
            tokens = len(running.ids())
            engine.step()
            time.sleep(0.002)
            assert len(running.ids()) > tokens, "a decode stood still"
        again = engine.send(known, 2)
        while again.finished() is None:
            engine.step()
    finally:
        server.resume()
    assert waits.finished().cache.lost == "store_slow"
    assert again.restored == 80
    engine.check(known, again)
    engine.engine.abort("q2")
    engine.served(list(stream(70, 9)), 1)
    other = Stored(server.url)
    assert other.served(known, 2).restored == 80


def test_a_server_that_does_not_answer_in_time(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(network, "TIMEOUT_S", 0.1)
    prompt = list(stream(60, 10))
    engine = Stored(server.url)
    server.pause()
    try:
        assert engine.served(prompt, 2).finished().cache.lost == "store_timeout"
    finally:
        server.resume()
    assert engine.served(prompt, 2).restored == 60
    engine.stop()


def test_a_server_that_comes_late_and_goes(tmp_path: Path) -> None:
    server = Server(tmp_path)
    server.stop()
    engine = Stored(server.url)
    prompt = list(stream(70, 7))
    assert engine.served(prompt, 2).finished().cache.lost == "store_unreachable"
    server.start()
    engine.outside.desks[0].reads.note("", 0.0)
    engine.outside.desks[0].writes.note("", 0.0)
    engine.served(list(stream(70, 8)), 2)  # and what could not be written before is
    assert Stored(server.url).served(prompt, 2).restored == 70
    server.stop()
    assert engine.served(prompt, 2).restored == 70
    server.held.close()

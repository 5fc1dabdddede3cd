"""A real tiny model with a store on disk: what was served before is served again, bit for bit."""

from __future__ import annotations

from pathlib import Path

from engine.real import stream
from store.stored import Stored


def test_every_tier_has_each_checkpoint_once_and_gets_back_what_it_lacks(tmp_path: Path) -> None:
    stores = ("memory:1GiB", f"disk:{tmp_path}:1GiB")
    first = Stored(*stores)
    first.ask(list(stream(200, 2)), 0)
    assert first.stat("store_checkpoints") == {"memory": 1, "disk": 1}
    first.stop()
    second = Stored(*stores)
    assert second.stat("store_checkpoints") == {"memory": 0, "disk": 1}
    assert second.ask(list(stream(200, 2)), 0).restored == 200
    assert second.stat("store_checkpoints") == {"memory": 1, "disk": 1}
    second.engine.cache.reset()
    second.outside.desks[1].clerk.tier.get = None  # the faster one is asked
    assert second.served(list(stream(200, 2)), 2).restored == 200
    second.stop()


def test_a_restarted_engine_restores_everything(tmp_path: Path) -> None:
    store = f"disk:{tmp_path}:1GiB"
    prompt = list(stream(300, 1))
    first = Stored(store)
    reply = first.served(prompt, 20)
    first.stop()
    second = Stored(store)
    assert second.served(prompt, 20).restored == 300
    assert second.served([*prompt, *reply.ids(), 1, 2, 3], 8).restored == 319
    second.stop()

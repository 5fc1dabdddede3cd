"""A real tiny model with a store on disk: what was served before is served again, bit for bit."""

from __future__ import annotations

from pathlib import Path

from engine.real import stream
from store.stored import Stored


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

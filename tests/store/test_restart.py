"""A real tiny model with a store on disk: what was served before is served again, bit for bit."""

from __future__ import annotations

import time
from pathlib import Path

from engine.real import Real, stream, tiny


class Stored(Real):
    """``drain`` also waits for what stores still do."""

    def __init__(self, *stores: str, **options) -> None:
        super().__init__(tiny(), stores=stores, **options)
        self.stores = self.engine.scheduler.outside

    def drain(self) -> None:
        scheduler = self.engine.scheduler
        while scheduler.busy or self.engine.inbox or self.stores.rest() is not None:
            self.step()
            time.sleep(0.0005)

    def stats(self):
        return self.engine.stats()


def test_a_restarted_engine_restores_everything(tmp_path: Path) -> None:
    store = f"disk:{tmp_path}:1GiB"
    prompt = list(stream(300, 1))
    first = Stored(store)
    reply = first.ask(prompt, 20)
    first.check(prompt, reply)
    first.engine.stop()
    second = Stored(store)
    again = second.ask(prompt, 20)
    assert second.check(prompt, again).cache.restored == 300
    longer = [*prompt, *reply.ids(), 1, 2, 3]
    third = second.ask(longer, 8)
    assert second.check(longer, third).cache.restored == 319
    second.engine.stop()

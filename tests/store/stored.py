"""An engine over a real tiny model with stores, stepped by hand."""

from __future__ import annotations

import time

from engine.harness import Reply
from engine.real import Real, tiny
from merestone.models.interface import Model


class Stored(Real):
    """``drain`` also waits for what stores still do, but not for tiers that have failed. A request
    waits for them as long as it takes, unless ``store_wait`` says otherwise."""

    def __init__(self, *stores: str, model: Model | None = None, **options) -> None:
        options.setdefault("store_wait", 300.0)
        super().__init__(model or tiny(), stores=stores, **options)
        self.outside = self.engine.scheduler.outside

    def drain(self) -> None:
        scheduler = self.engine.scheduler
        while scheduler.busy or self.engine.inbox or self.outside.rest() not in (None, 0.5):
            self.step()
            time.sleep(0.0005)
        # What is erased or touched is not reported, and nobody else waits for it.
        porter = self.engine.device.porter
        clerks = [desk.clerk._lane for desk in self.outside.desks]
        for lane in (*porter.writers, *porter.readers, *clerks):
            lane._pool.submit(_nothing).result()

    def served(self, tokens, max_tokens: int = 8, **options) -> Reply:
        """Ask, with equal bits."""
        reply = self.ask(tokens, max_tokens, **options)
        self.check(tokens, reply)
        return reply

    def stat(self, name: str):
        return self.engine.stats()[name]

    def stop(self) -> None:
        self.engine.stop()


def _nothing() -> None: ...

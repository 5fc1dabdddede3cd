"""What comes back from a store is drafted from as if it had never left: the same proposals."""

from __future__ import annotations

import time

import pytest

from engine.real import stream
from spec_models.test_drafted_engine import Drafting


def settle(engine: Drafting) -> None:
    """Until stores have what memory has, and nothing runs."""
    scheduler = engine.engine.scheduler
    while scheduler.busy or engine.engine.inbox or scheduler.outside.rest() is not None:
        engine.step()
        time.sleep(0.0005)


@pytest.mark.parametrize(("name", "kind"), [("sparse", "mtp:3"), ("dense", "dflash")])
def test_drafts_after_a_restore_are_the_cold_ones(name: str, kind: str) -> None:
    engine = Drafting(name, kind, frames=900, stores=("memory:1GiB",), store_wait=300.0)
    tokens = list(stream(150, 4))
    first = engine.say(tokens, 12)
    settle(engine)
    longer = [*tokens, *first.ids(), 5]
    made = len(engine.recorder.made)
    for prompt, count, restored in ((tokens, 12, 150), (longer, 8, 161)):
        assert engine.engine.cache.reset() > 0
        reply = engine.say(prompt, count)
        settle(engine)
        # The recorder compares every proposal with the one made there before.
        assert engine.check(prompt, reply).cache.restored == restored
    assert made > 3
    assert len(engine.recorder.made) > made
    engine.engine.stop()

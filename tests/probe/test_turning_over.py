"""Filling a pool whose size is not told: when it is called too large, and when it is not."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from merestone.probe.client import Server
from merestone.probe.context import Probe
from merestone.probe.reply import Reply, Unsupported

EACH = 5
"""Frames and, so that a pool is counted in one number, checkpoints of a prompt."""


class Pool(Server):
    """A server that only counts. ``late``: batches whose last requests are counted with the next.
    ``left``: frames that requests before the first batch still hold when it begins."""

    def __init__(self, frames: int, late: Sequence[int] = (), left: int = 0) -> None:
        super().__init__("http://none")
        self.frames, self.late, self.left = frames, late, left
        self.asked, self.reads = 0, 0

    async def complete(self, *_: object, **__: object) -> Reply:
        self.asked += 1
        return Reply()

    async def metrics(self) -> dict[str, float]:
        batch, self.reads = self.reads, self.reads + 1
        counted = (self.asked - (7 if batch in self.late else 0)) * EACH
        kept = min(counted, self.frames)
        left = self.left if batch == 0 else 0
        return {
            "merestone_checkpoints": float(kept),
            'merestone_checkpoints_evicted_total{kind="prompt"}': float(counted - kept),
            "merestone_frames_used": float(min(kept + left, self.frames)),
            "merestone_frames_total": float(self.frames),
        }


def turned(pool: Pool, fill_limit: int) -> int:
    probe = Probe(pool, False, 0, 320, frozenset({"metrics"}), fill_limit=fill_limit)
    return asyncio.run(probe.overturn())


def needed(frames: int) -> int:
    """Requests that evict twice what the pool holds, in batches of eight."""
    return -(-3 * frames // (8 * EACH)) * 8


@pytest.mark.parametrize("frames", [7, 40, 333, 1003])
@pytest.mark.parametrize("late", [(), (1,), (2, 5)], ids=str)
def test_a_pool_is_filled_however_its_growth_is_counted(frames: int, late: Sequence[int]) -> None:
    """The last batches before a pool is full make it grow by a frame or none."""
    pool = Pool(frames, late, left=3)
    assert needed(frames) <= turned(pool, fill_limit=needed(frames) + 8) <= needed(frames) + 8


def test_a_pool_too_large_is_said_early() -> None:
    pool = Pool(100_000)
    with pytest.raises(Unsupported, match="a pool of 100000 frames is too large to fill"):
        turned(pool, fill_limit=4000)
    assert pool.asked == 16


def test_a_pool_that_never_turns_over_ends_at_the_limit() -> None:
    class Stuck(Pool):
        async def metrics(self) -> dict[str, float]:
            return {"merestone_checkpoints": 9.0}

    with pytest.raises(Unsupported, match="40 requests evicted 0 checkpoints"):
        turned(Stuck(1), fill_limit=40)

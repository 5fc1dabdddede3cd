"""One small cache of four groups, and whole requests in one line."""

from __future__ import annotations

import numpy as np

from merestone.core.cache import Cache, CacheSpec
from merestone.core.checkpoint import Checkpoint, Kind
from merestone.core.geometry import GroupSpec

GROUPS = (
    GroupSpec("full", 8),
    GroupSpec("open", 4, open=True),
    GroupSpec("mtp", 8, lag=1),
    GroupSpec("window", 4, window=6),
)


def tokens(count: int, first: int = 0) -> np.ndarray:
    return np.arange(first, first + count, dtype=np.int32)


def make(frames: int = 100, groups: tuple[GroupSpec, ...] = GROUPS) -> Cache:
    return Cache(CacheSpec(frames, 1000, groups, 16, 2, 4))


def run(cache: Cache, rows: int, first: int = 0, kind: Kind = Kind.PROMPT) -> Checkpoint:
    """A request of ``rows`` tokens from nothing to its published end, released."""
    lease = cache.lease("r", None, 0)
    cache.extend(lease, rows, rows // 16 * 16, 0)
    checkpoint = cache.seal(lease, tokens(rows, first), rows, kind, 0)
    assert checkpoint is not None
    cache.release(lease)
    cache.publish(checkpoint, 0)
    return checkpoint

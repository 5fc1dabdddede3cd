"""What an engine says of itself: its checkpoints and its counts, between two steps.

Knows the cache and the scheduler, reads only. Must not know HTTP.
"""

from __future__ import annotations

from collections import Counter

from merestone.core.cache import Cache
from merestone.core.checkpoint import Checkpoint, State
from merestone.engine.api import Stats
from merestone.sched.scheduler import Scheduler


class Ages:
    """When checkpoints were first seen, in seconds of the engine's clock."""

    def __init__(self) -> None:
        self.seen: dict[int, float] = {}

    def note(self, cache: Cache, now: float) -> None:
        """Call once a step that may have made checkpoints."""
        live = {checkpoint.id for checkpoint in cache.checkpoints()}
        self.seen = {key: self.seen.get(key, now) for key in sorted(live)}

    def of(self, checkpoint: Checkpoint, now: float) -> float:
        return now - self.seen.get(checkpoint.id, now)


def cache_view(cache: Cache, step: int, ages: Ages, now: float) -> list[dict[str, object]]:
    """One entry a published checkpoint, oldest first. ``bytes`` are those that only it holds."""
    return [
        {
            "id": checkpoint.id,
            "kind": str(checkpoint.kind),
            "tokens": checkpoint.at,
            "bytes": int(cache.own_bytes(checkpoint)),
            "age_steps": step - checkpoint.born,
            "age_s": round(ages.of(checkpoint, now), 3),
            "hits": checkpoint.hits,
            "leases": checkpoint.leases,
            "token_ids": cache.tokens(checkpoint).tolist(),
        }
        for checkpoint in cache.checkpoints()
        if checkpoint.state is State.PUBLISHED
    ]


def engine_stats(cache: Cache, scheduler: Scheduler, counters: Counter[str]) -> Stats:
    """Counters and gauges by the names that `serve/metrics.py` documents."""
    published = [c for c in cache.checkpoints() if c.state is State.PUBLISHED]
    held = [c.anchor_frames for c in published]
    held += [seq.lease.anchor_frames for seq in scheduler.running if seq.lease is not None]
    anchors = {frame for frames in held for frame in frames}
    counts = cache.counters
    return {
        "checkpoints_sealed": _labels(counts.sealed),
        "checkpoints_published": _labels(counts.published),
        "checkpoints_discarded": _labels(counts.discarded),
        "checkpoints_restored": _labels(counts.restored),
        "checkpoints_evicted": _labels(counts.evicted),
        "seals_duplicate": float(counts.duplicate),
        "seals_no_room": float(counts.no_room),
        "tokens_computed": float(scheduler.counters["rows"]),
        "steps": float(scheduler.step),
        "failed_steps": float(counters["failed_steps"]),
        "preemptions": float(scheduler.counters["preemptions"]),
        "states_not_finite": float(scheduler.counters["not_finite"]),
        "requests_running": float(len(scheduler.running)),
        "requests_waiting": float(len(scheduler.waiting)),
        "checkpoints": _labels(Counter(str(c.kind) for c in published)),
        "frames_total": float(cache.spec.frames),
        "frames_free": float(cache.free),
        "frames_used": float(cache.spec.frames - cache.free),
        "frames_anchors": float(len(anchors)),
        "frame_bytes": float(cache.spec.frame_bytes),
    }


def _labels(counts: object) -> dict[str, float]:
    assert isinstance(counts, dict)
    return {str(key): float(value) for key, value in counts.items()}

"""What an engine says of itself: its condition, its checkpoints and its counts, between two steps.

Knows the cache and the scheduler, reads only. Must not know HTTP.
"""

from __future__ import annotations

from collections import Counter
from hashlib import blake2b

from merestone.core.cache import Cache
from merestone.core.checkpoint import Root, State
from merestone.engine.api import CachePage, CacheQuery, Stats
from merestone.sched.scheduler import Scheduler

LOST_STEPS = 3
"""Failed steps in a row from which on an engine calls itself failed; a good one takes it back."""


def condition(
    broken: str | None, down: str | None, failures: int, *, runs: bool, returns: bool
) -> tuple[str, str]:
    """(status, reason) of ``/health``: why the engine is gone for good, why it has no device for
    now, how many steps failed in a row, whether its thread takes requests, and whether it has a
    device that can be lost and come back."""
    reason = broken or down or ("" if runs else "the engine is not running")
    if not reason and failures >= LOST_STEPS:
        reason = f"the last {failures} steps failed"
    if returns and (broken or down):
        return ("lost" if broken else "restarting"), reason
    return ("failed" if reason else "ok"), reason


def cache_view(cache: Cache, query: CacheQuery, step: int, now: float) -> CachePage:
    """One entry a checkpoint that ``query`` asks for. ``bytes`` are those that only it holds,
    ``parent`` is the deepest checkpoint above it, ``root`` tells salts apart without naming them.
    """
    found = [
        c
        for c in cache.checkpoints()
        if c.state is State.PUBLISHED
        and c.id > query.after
        and c.at >= query.min_tokens
        and query.kind in (None, str(c.kind))
        and (query.salt is None or c.root == ("", query.salt))
    ]
    entries = []
    for checkpoint in found[: query.limit]:
        above = cache.shelf.index.ancestor(checkpoint)
        entry: dict[str, object] = {
            "id": checkpoint.id,
            "parent": above.id if above else None,
            "root": root_name(checkpoint.root),
            "kind": str(checkpoint.kind),
            "tokens": checkpoint.at,
            "bytes": int(cache.own_bytes(checkpoint)),
            "age_steps": step - checkpoint.born,
            "age_s": round(now - checkpoint.born_s, 3),
            "spared_s": round(max(0.0, checkpoint.until_s - now), 3),
            "hits": checkpoint.hits,
            "leases": checkpoint.leases,
        }
        if query.token_ids:
            entry["token_ids"] = cache.tokens(checkpoint).tolist()
        entries.append(entry)
    return CachePage(entries, len(found) > query.limit)


def root_name(root: Root) -> str:
    """Empty for prompts without a salt; else eight letters that only tell roots apart."""
    return "" if root == ("", "") else blake2b(repr(root).encode(), digest_size=4).hexdigest()


def engine_stats(cache: Cache, scheduler: Scheduler, counters: Counter[str]) -> Stats:
    """Counters and gauges by the names that `serve/metrics.py` documents."""
    published = [c for c in cache.checkpoints() if c.state is State.PUBLISHED]
    held = [c.anchor_frames for c in published]
    held += [seq.lease.anchor_frames for seq in scheduler.running if seq.lease is not None]
    held_bytes: Counter[str] = Counter()
    for checkpoint in published:
        held_bytes[str(checkpoint.kind)] += int(cache.own_bytes(checkpoint))
    anchors = {frame for frames in held for frame in frames}
    counts = cache.counters
    drafts = scheduler.depth.tally
    return {
        "checkpoints_sealed": _labels(counts.sealed),
        "checkpoints_published": _labels(counts.published),
        "checkpoints_discarded": _labels(counts.discarded),
        "checkpoints_restored": _labels(counts.restored),
        "checkpoints_evicted": _labels(counts.evicted),
        "saved_tokens": _labels(counts.saved_tokens),
        "seals_duplicate": float(counts.duplicate),
        "seals_no_room": float(counts.no_room),
        "tokens_computed": float(scheduler.counters["rows"]),
        "steps": float(scheduler.step),
        "failed_steps": float(counters["failed_steps"]),
        "devices_lost": float(counters["devices_lost"]),
        "preemptions": float(scheduler.counters["preemptions"]),
        "draft_steps": float(drafts.steps),
        "drafts_verified": _places(drafts.drafted),
        "drafts_accepted": _places(drafts.accepted),
        "states_not_finite": float(scheduler.counters["not_finite"]),
        "states_changed": float(scheduler.counters["checksum"]),
        "requests_running": float(len(scheduler.running)),
        "requests_waiting": float(len(scheduler.waiting)),
        "checkpoints": _labels(Counter(str(c.kind) for c in published)),
        "checkpoint_bytes": _labels(held_bytes),
        "checkpoints_spared": float(len(cache.shelf.spared())),
        "frames_total": float(cache.spec.frames),
        "frames_free": float(cache.free),
        "frames_used": float(cache.spec.frames - cache.free),
        "frames_anchors": float(len(anchors)),
        "frame_bytes": float(cache.spec.frame_bytes),
        **scheduler.outside.stats(),
    }


def _places(counts: list[int]) -> dict[str, float]:
    return {str(place): float(count) for place, count in enumerate(counts, 1)}


def _labels(counts: object) -> dict[str, float]:
    assert isinstance(counts, dict)
    return {str(key): float(value) for key, value in counts.items()}

"""Times to live: what eviction leaves for last, for how long, and how much of it."""

from __future__ import annotations

import pytest
from small_caches import make, tokens

from merestone.core.audit import audit
from merestone.core.cache import Cache
from merestone.core.checkpoint import Checkpoint, Kind, State
from merestone.core.shelf import OutOfFrames


def run(cache: Cache, first: int, ttl_s: float = 0.0, rows: int = 20) -> Checkpoint:
    lease = cache.lease("r", None, 0)
    cache.extend(lease, rows, rows // 16 * 16, 0)
    made = cache.seal(lease, tokens(rows, first), rows, Kind.MARK, 0, ttl_s)
    assert made is not None
    cache.release(lease)
    cache.publish(made, 0)
    audit(cache, [])
    return made


def fill(cache: Cache, rounds: int = 30) -> None:
    for number in range(rounds):
        run(cache, 1000 + 100 * number)


def test_marks_outlive_everything_else_for_their_time() -> None:
    cache = make(frames=60)
    cache.tick(10.0)
    marked = run(cache, 0, ttl_s=5.0)
    plain = run(cache, 100)
    fill(cache)
    assert (marked.state, plain.state) == (State.PUBLISHED, State.DROPPED)
    cache.tick(14.9)
    fill(cache)
    assert marked.state is State.PUBLISHED
    cache.tick(15.0)
    fill(cache)
    assert marked.state is State.DROPPED
    assert not cache.shelf.marked


def test_a_hit_begins_the_time_anew() -> None:
    cache = make(frames=60)
    marked = run(cache, 0, ttl_s=5.0)
    cache.tick(4.0)
    cache.release(cache.lease("r", marked, 1))
    cache.tick(8.0)
    assert cache.shelf.spared() == {marked.id}
    cache.mark("r", tokens(20), 1.0)  # no shorter than it was promised
    assert marked.until_s == 13.0
    cache.tick(13.0)
    assert not cache.shelf.spared()
    cache.mark("r", tokens(20), 1.0)
    assert marked.until_s == 18.0


def test_one_that_is_not_published_yet_can_be_marked() -> None:
    cache = make(frames=60)
    lease = cache.lease("r", None, 0)
    cache.extend(lease, 20, 16, 0)
    made = cache.seal(lease, tokens(20), 20, Kind.PROMPT, 0)
    assert made is not None
    cache.mark("r", tokens(20), 5.0)
    cache.publish(made, 1)
    assert cache.shelf.spared() == {made.id}


def test_a_share_of_the_pool_is_all_that_marks_keep() -> None:
    cache = make(frames=60)
    held = run(cache, 5000).frames().size
    room = int(cache.spec.mark_share * 60)
    made = [run(cache, 100 * n, ttl_s=50.0) for n in range(1, 9)]
    fill(cache)
    kept = [mark for mark in made if mark.state is State.PUBLISHED]
    assert kept == made[: room // held], "the first ones, and no more than fit"
    assert 0 < len(kept) < len(made)


def test_marks_share_what_they_have_in_common() -> None:
    """Two boundaries in one chunk hold little more than one."""
    cache = make(frames=60)
    lease = cache.lease("r", None, 0)
    cache.extend(lease, 24, 16, 0)
    pair = [cache.seal(lease, tokens(24), at, Kind.MARK, 0, 9.0) for at in (20, 24)]
    cache.release(lease)
    for made in pair:
        assert made is not None
        cache.publish(made, 0)
    assert len(cache.shelf.spared()) == 2


@pytest.mark.parametrize("hold", ["lease", "nothing"])
def test_a_request_that_needs_all_frames_gets_them(hold: str) -> None:
    """Spared is not held: a running request comes first, as it would be preempted for ever."""
    cache = make(frames=60)
    marked = run(cache, 0, ttl_s=50.0)
    lease = cache.lease("r", marked if hold == "lease" else None, 1)
    longest = max(n for n in range(1, 2000) if cache.frames_needed(n) <= 60)
    for rows in range(21, longest, 7):
        cache.extend(lease, rows, rows // 16 * 16, 1)
        cache.settle(lease)
    audit(cache, [lease])
    assert cache.available() >= 0


def test_what_is_spared_goes_when_nothing_else_is_left() -> None:
    cache = make(frames=60)
    marked = run(cache, 0, ttl_s=50.0)
    lease = cache.lease("r", None, 1)
    for rows in range(8, 4000, 8):
        try:
            cache.extend(lease, rows, rows // 16 * 16, 1)
        except OutOfFrames:
            break
        cache.settle(lease)
    audit(cache, [lease])
    assert marked.state == "dropped"


def test_a_duplicate_gets_the_time_that_it_was_sealed_with() -> None:
    cache = make(frames=60)
    plain = run(cache, 0)
    lease = cache.lease("r", None, 1)
    cache.extend(lease, 20, 16, 1)
    assert cache.seal(lease, tokens(20), 20, Kind.MARK, 1, 7.0) is None
    assert cache.shelf.spared() == {plain.id}
    cache.release(lease)

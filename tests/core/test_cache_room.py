"""Room for a lone request, and the audit's own eyes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from cache_strategies import PROFILE, cache_specs
from hypothesis import given, settings
from hypothesis import strategies as st
from small_caches import make, run, tokens

from merestone.core.audit import audit
from merestone.core.cache import Cache, CacheSpec
from merestone.core.checkpoint import Checkpoint, Kind, Lease


@settings(PROFILE, max_examples=300)
@given(spec=cache_specs(), data=st.data())
def test_a_lone_request_within_capacity_always_finds_room(spec: CacheSpec, data: st.DataObject):
    """However it is cut into passes, whatever it seals, wherever it is restored."""
    asked = data.draw(st.integers(1, 60))
    needed = Cache(spec).frames_needed(asked)
    cache = Cache(replace(spec, frames=needed, hidden_rows=1))
    assert cache.capacity() >= asked
    lease = cache.lease("r", None, 0)
    now = 0
    while lease.rows < asked:
        now += 1
        if data.draw(st.integers(0, 3)) == 0:
            # Preempted, and restored from the best that is left.
            cache.release(lease)
            origin = cache.match("r", tokens(asked)).checkpoint
            lease = cache.lease("r", origin, now)
        rows = min(asked, lease.rows + data.draw(st.integers(1, 24)))
        anchor = rows // spec.chunk * spec.chunk
        # Only decoding verifies drafts, and no more than may still be wanted. The anchor swallows
        # the rows of those that were right with the next pass.
        drafts = min(spec.drafts, asked - rows) if rows - lease.rows <= 1 else 0
        cache.extend(lease, rows, anchor, now, drafts, spec.drafts)
        cache.settle(lease)
        rows += data.draw(st.integers(0, drafts))
        cache.commit(lease, rows)
        checkpoint = cache.seal(lease, tokens(asked), rows, Kind.PROMPT, now)
        if checkpoint is not None:
            cache.publish(checkpoint, now)
        audit(cache, [lease])


@settings(PROFILE, max_examples=300)
@given(spec=cache_specs(), data=st.data())
def test_from_a_checkpoint_no_more_is_taken_than_was_said(spec: CacheSpec, data: st.DataObject):
    """With every other frame in other hands, and what it starts from held by somebody else, too."""
    at, more = data.draw(st.integers(1, 60)), data.draw(st.integers(1, 60))
    cache = Cache(replace(spec, frames=1000, hidden_rows=1))
    lease, anchor = cache.lease("r", None, 0), at // spec.chunk * spec.chunk
    cache.extend(lease, at, anchor, 0)
    origin = cache.seal(lease, tokens(at), at, Kind.PROMPT, 0)
    assert origin is not None
    cache.release(lease)
    cache.publish(origin, 0)
    lease = cache.lease("r", origin, 1)
    needed = cache.frames_needed(at + more, origin)
    cache.pool.take(cache.free - needed, -1)
    while lease.rows < at + more:
        rows = min(at + more, lease.rows + data.draw(st.integers(1, 24)))
        anchor = max(lease.anchor, rows // spec.chunk * spec.chunk)
        decoding = rows == lease.rows + 1
        drafts = min(spec.drafts, at + more - rows) if decoding else 0
        cache.extend(lease, rows, anchor, 1, drafts, spec.drafts)
        cache.settle(lease)
        cache.commit(lease, rows + data.draw(st.integers(0, drafts)))
        checkpoint = cache.seal(lease, tokens(at + more), lease.rows, Kind.PROMPT, 1)
        if checkpoint is not None:
            cache.publish(checkpoint, 1)


def test_what_a_continuation_takes_does_not_depend_on_what_lies_before_it() -> None:
    spec = make().spec
    for more in range(100):
        near, far = ((base + 20, base + 16) for base in (16, 1600))
        assert spec.frames_needed(near[0] + more, near) == spec.frames_needed(far[0] + more, far)
    assert spec.frames_needed(1621, (1620, 1616)) < spec.frames_needed(100)


def test_capacity_is_the_largest_that_fits() -> None:
    cache = make(frames=64)
    most = cache.capacity()
    assert cache.frames_needed(most) <= 64 < cache.frames_needed(most + 1)
    needs = [cache.frames_needed(count) for count in range(400)]
    assert needs == sorted(needs)
    checkpoint = run(cache, 20)
    assert cache.frames_needed(40, checkpoint) < cache.frames_needed(40)


@pytest.mark.parametrize(
    "spoil",
    [
        lambda cache, lease, kept: cache.pool.refs.__setitem__(0, 9),
        lambda cache, lease, kept: cache.pool.soft.__setitem__(0, 1),
        lambda cache, lease, kept: cache.pool.appender.__setitem__(0, 77),
        lambda cache, lease, kept: cache.pool.appender.__setitem__(90, lease.id),
        lambda cache, lease, kept: cache.pool.sole.__setitem__(kept.id, 5),
        lambda cache, lease, kept: cache.pool.take(1, lease.id),
        lambda cache, lease, kept: cache.hidden.take(),
        lambda cache, lease, kept: cache.hidden.spare.clear(),
        lambda cache, lease, kept: setattr(kept, "leases", 0),
        lambda cache, lease, kept: setattr(kept, "protected", -1),
        lambda cache, lease, kept: setattr(kept, "evictable", True),
        lambda cache, lease, kept: setattr(kept, "at", 19),
        lambda cache, lease, kept: setattr(kept, "anchor", 0),
        lambda cache, lease, kept: setattr(kept, "anchor_frames", ()),
        lambda cache, lease, kept: setattr(kept, "root", "other"),
        lambda cache, lease, kept: kept.pages.update(full=(0, kept.pages["full"][1][:-1])),
        lambda cache, lease, kept: lease.pages.update(full=(0, kept.pages["full"][1][:-1])),
        lambda cache, lease, kept: lease.retired.append(kept.pages["full"][1]),
        lambda cache, lease, kept: cache.shelf.index.remove(kept),
        lambda cache, lease, kept: cache.shelf.evictable.clear(),
        lambda cache, lease, kept: setattr(cache.shelf.index.nodes[kept.id], "checkpoint", None),
    ],
)
def test_the_audit_sees_what_is_wrong(spoil: Callable[[Cache, Lease, Checkpoint], None]) -> None:
    cache = make()
    kept, other = run(cache, 20), run(cache, 9, 50)
    lease = cache.lease("r", kept, 1)
    cache.extend(lease, 23, 16, 1)
    audit(cache, [lease])
    assert other.evictable
    spoil(cache, lease, kept)
    with pytest.raises(AssertionError, match=r"\w+ .+"):
        audit(cache, [lease])

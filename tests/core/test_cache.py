"""The cache's verbs, one at a time."""

from __future__ import annotations

import numpy as np
import pytest
from small_caches import GROUPS, make, run, tokens

from merestone.core.audit import audit
from merestone.core.cache import Cache, CacheSpec, OutOfFrames
from merestone.core.checkpoint import Kind, State
from merestone.core.geometry import GroupSpec
from merestone.core.orders import CopyRows, PageDelta


def test_copy_on_write_is_decided_per_group() -> None:
    """At 24 tokens the full pages are full, and the lagging group's last page lacks one row."""
    cache = make()
    checkpoint = run(cache, 24)
    lease = cache.lease("r", checkpoint, 1)
    extension = cache.extend(lease, 25, 16, 1)
    ((first, mtp),) = [checkpoint.pages["mtp"]]
    assert first == 0
    assert [(copy.group, copy.source, copy.rows) for copy in extension.copies] == [
        ("mtp", int(mtp[-1]), 7)
    ]
    deltas = {delta.group: (delta.first, len(delta.frames)) for delta in extension.deltas}
    assert deltas == {"full": (3, 1), "open": (6, 1), "mtp": (2, 1), "window": (6, 1)}
    audit(cache, [lease])


def test_the_appender_copies_nothing() -> None:
    """A request goes on in pages that its own checkpoints share."""
    cache = make()
    lease = cache.lease("r", None, 0)
    for rows in range(1, 40):
        extension = cache.extend(lease, rows, rows // 16 * 16, rows)
        assert extension.copies == ()
        cache.settle(lease)
        checkpoint = cache.seal(lease, tokens(rows), rows, Kind.TURN, rows)
        assert checkpoint is not None
        audit(cache, [lease])
    with_appender = cache.pool.appender[lease.pages["full"][1][-1]]
    assert with_appender == lease.id
    cache.release(lease)
    assert not cache.pool.appender.any()


def test_after_a_release_nobody_appends() -> None:
    """Not even the request that goes on at once from its own last boundary."""
    cache = make()
    checkpoint = run(cache, 21)
    lease = cache.lease("r", checkpoint, 1)
    copies = cache.extend(lease, 22, 16, 1).copies
    assert {copy.group: copy.rows for copy in copies} == {
        "full": 5,
        "open": 1,
        "mtp": 4,
        "window": 1,
    }
    assert cache.extend(lease, 23, 16, 2).copies == ()


def test_an_exact_hit_takes_no_frame() -> None:
    cache = make()
    checkpoint = run(cache, 21)
    free = cache.free
    lease = cache.lease("r", checkpoint, 1)
    extension = cache.extend(lease, 21, 16, 1)
    assert (extension.copies, extension.deltas, extension.advance_frames) == ((), (), ())
    assert cache.free == free
    bound = {delta.group: (delta.first, len(delta.frames)) for delta in cache.deltas(lease)}
    assert bound == {"full": (0, 3), "open": (4, 2), "mtp": (0, 3), "window": (3, 3)}


def test_open_rows_start_at_the_anchor() -> None:
    cache = make()
    lease = cache.lease("r", None, 0)
    extension = cache.extend(lease, 48, 48, 0)
    assert "open" not in {delta.group for delta in extension.deltas}
    assert len(extension.advance_frames) == 2
    extension = cache.extend(lease, 77, 64, 1)
    opened = {d.group: (d.first, len(d.frames)) for d in extension.deltas}["open"]
    assert opened == (16, 4)


def test_an_anchor_of_ones_own_is_rewritten_in_place() -> None:
    cache = make()
    lease = cache.lease("r", None, 0)
    first = cache.extend(lease, 16, 16, 0).advance_frames
    assert cache.extend(lease, 32, 32, 1).advance_frames == first
    cache.settle(lease)
    checkpoint = cache.seal(lease, tokens(32), 32, Kind.TURN, 1)
    assert checkpoint is not None
    second = cache.extend(lease, 48, 48, 2).advance_frames
    assert not set(second) & set(first)
    assert checkpoint.anchor_frames == first


def test_what_a_plan_gives_up_it_does_not_hand_out() -> None:
    """Old pages and anchors stay referenced until the step has settled."""
    cache = make()
    lease = cache.lease("r", None, 0)
    cache.extend(lease, 31, 16, 0)
    old = {int(frame) for frame in lease.pages["open"][1]}
    extension = cache.extend(lease, 47, 32, 1)
    fresh = {frame for delta in extension.deltas for frame in delta.frames}
    assert not fresh & old
    free = cache.free
    cache.settle(lease)
    assert cache.free == free + len(old) + 4, "the open pages and four of the window's"
    cache.settle(lease)
    audit(cache, [lease])


def test_a_window_is_kept_for_every_boundary_of_the_chunk() -> None:
    cache = make()
    lease = cache.lease("r", None, 0)
    cache.extend(lease, 31, 16, 0)
    for at in range(16, 32):
        assert cache.seal(lease, tokens(at), at, Kind.MARK, 0) is not None
    audit(cache, [lease])


@pytest.mark.parametrize(
    ("at", "reason"),
    [(0, "empty"), (15, "anchor_elsewhere"), (33, "not_computed"), (32, "anchor_elsewhere")],
)
def test_impossible_seals_are_refused_and_counted(at: int, reason: str) -> None:
    """In particular nothing is ever kept at 0 tokens."""
    cache = make()
    lease = cache.lease("r", None, 0)
    cache.extend(lease, 32, 16, 0)
    free = cache.free
    assert cache.seal(lease, tokens(40), at, Kind.PROMPT, 0) is None
    assert cache.counters.discarded == {f"prompt {reason}": 1}
    assert cache.free == free


def test_accepted_drafts_may_run_past_the_anchor_of_their_boundary() -> None:
    """As far as one step can have verified, and no further: no boundary is lost to them."""
    cache = Cache(CacheSpec(100, 1000, GROUPS, 16, 2, 4, drafts=3))
    lease = cache.lease("r", None, 0)
    cache.extend(lease, 15, 0, 0, drafts=3)
    cache.commit(lease, 18)
    for at in (16, 18):
        assert cache.seal(lease, tokens(18), at, Kind.TURN, 0) is not None
    audit(cache, [lease])


def test_a_hole_in_the_window_refuses_the_seal() -> None:
    """A request restored at 24 has no window for 20, though the anchor would do."""
    cache = make()
    lease = cache.lease("r", run(cache, 24), 1)
    assert cache.seal(lease, tokens(24), 17, Kind.MARK, 1) is None
    assert cache.counters.discarded == {"mark window_hole": 1}


def test_a_duplicate_refreshes_what_is_there() -> None:
    cache = make()
    kept = run(cache, 20, kind=Kind.ALIGNED)
    lease = cache.lease("r", None, 5)
    cache.extend(lease, 20, 16, 5)
    assert cache.seal(lease, tokens(20), 20, Kind.TURN, 7) is None
    assert cache.counters.duplicate == 1
    assert (kept.used, kept.kind) == (7, Kind.TURN)
    assert cache.seal(lease, tokens(20), 20, Kind.MARK, 8) is None
    assert kept.kind is Kind.TURN


def test_a_request_that_runs_keeps_its_origin_recent() -> None:
    """Whether it takes pages or writes into those that it has."""
    cache = make()
    origin = run(cache, 20)
    lease = cache.lease("r", origin, 1)
    assert cache.extend(lease, 21, 16, 5).deltas
    assert origin.used == 5
    assert not cache.extend(lease, 22, 16, 6).deltas
    assert origin.used == 6


def test_a_checkpoint_is_as_young_as_its_publication() -> None:
    cache = make()
    lease = cache.lease("r", None, 0)
    cache.extend(lease, 20, 16, 0)
    checkpoint = cache.seal(lease, tokens(20), 20, Kind.PROMPT, 0)
    assert checkpoint is not None
    cache.publish(checkpoint, 9)
    assert (checkpoint.born, checkpoint.used) == (0, 9)


def test_relatives_are_those_that_can_be_found() -> None:
    """One that shares frames but is not published yet is its own step's to judge."""
    cache = make()
    origin, _ = run(cache, 20), run(cache, 20, 500)
    lease = cache.lease("r", origin, 1)
    cache.extend(lease, 23, 16, 1)
    sealed = cache.seal(lease, tokens(23), 23, Kind.TURN, 1)
    assert sealed is not None
    assert cache.relatives(origin) == [origin]
    cache.publish(sealed, 2)
    assert cache.relatives(origin) == [origin, sealed]


def test_no_room_for_a_hidden_row_is_no_failure() -> None:
    cache = Cache(CacheSpec(2, 1000, (GroupSpec("full", 8),), 16, 2, 1))
    lease = cache.lease("r", None, 0)
    cache.extend(lease, 12, 0, 0)
    assert cache.seal(lease, tokens(12), 12, Kind.PROMPT, 0) is None
    assert cache.counters.no_room == 1
    audit(cache, [lease])


def test_slabs_come_and_go_with_their_rows() -> None:
    cache = make()
    lease = cache.lease("r", None, 0)
    cache.extend(lease, 10, 0, 0)
    free = cache.free
    made = [cache.seal(lease, tokens(at), at, Kind.MARK, 0) for at in range(1, 6)]
    assert free - cache.free == 2
    rows = [checkpoint.hidden for checkpoint in made if checkpoint is not None]
    assert [row for _, row in rows] == [0, 1, 2, 3, 0]
    for checkpoint in made:
        assert checkpoint is not None
        cache.discard(checkpoint, "step_failed")
    assert cache.free == free
    assert cache.counters.discards("step_failed") == 5


def test_a_refused_extension_changes_nothing() -> None:
    cache = make(frames=20)
    kept = run(cache, 20)
    lease = cache.lease("r", kept, 1)
    with pytest.raises(OutOfFrames, match=r"\d+ frames needed, \d+ free") as caught:
        cache.extend(lease, 400, 400, 1)
    assert caught.value.needed > caught.value.free == cache.available()
    assert (lease.rows, lease.anchor, lease.retired) == (20, 16, [])
    audit(cache, [lease])


def test_only_evictable_ones_make_room() -> None:
    """Leased and protected checkpoints stay; the caller drops protections and tries again."""
    cache = make(frames=40)
    made = [run(cache, 20, first) for first in (0, 100, 200)]
    cache.protect(made[0])
    lease = cache.lease("r", made[1], 1)
    wanted = cache.available() + 1
    with pytest.raises(OutOfFrames):
        cache.shelf.make_room(wanted)
    assert [c.state for c in made] == [State.PUBLISHED] * 3, "nothing was evicted in vain"
    cache.unprotect(made[0])
    cache.shelf.make_room(wanted)
    assert made[1].state is State.PUBLISHED
    audit(cache, [lease])


def test_a_reset_reaches_what_is_sealed_later() -> None:
    cache = make()
    lease = cache.lease("r", None, 0)
    cache.extend(lease, 20, 16, 0)
    early = cache.seal(lease, tokens(20), 20, Kind.PROMPT, 0)
    assert early is not None
    other = run(cache, 9, 500)
    assert cache.reset() == 1
    assert other.state is State.DROPPED
    assert cache.match("r", tokens(20)).lost == "unknown"
    again = cache.seal(lease, tokens(20), 20, Kind.PROMPT, 1)
    assert again is not None, "a doomed one is no duplicate"
    audit(cache, [lease])
    cache.publish(early, 2)
    cache.publish(again, 2)
    assert (early.state, again.state) == (State.DROPPED, State.PUBLISHED)
    assert cache.counters.discards("reset") == 2
    audit(cache, [lease])


def test_a_lease_outlives_its_origin() -> None:
    """Pages, anchor and the hidden row that it may still have to load."""
    cache = make()
    origin = run(cache, 21)
    lease = cache.lease("r", origin, 1)
    assert cache.reset("r") == 1
    audit(cache, [lease])
    assert int(cache.pool.refs[origin.hidden[0]]) == 1
    assert cache.extend(lease, 22, 16, 1).copies
    cache.release(lease)
    audit(cache, [])
    assert cache.free == cache.spec.frames


def test_counters_tell_the_story() -> None:
    cache = make()
    checkpoint = run(cache, 20, kind=Kind.INSTRUCTION)
    cache.release(cache.lease("r", checkpoint, 3))
    assert cache.counters.sealed == cache.counters.published == {"instruction": 1}
    assert cache.counters.restored == {"instruction": 1}
    assert (checkpoint.hits, checkpoint.used) == (1, 3)
    cache.shelf.make_room(cache.spec.frames)
    assert cache.counters.evicted == {"instruction": 1}


def test_near_identical_prompts_cost_what_is_theirs() -> None:
    """Fifty ends of one prompt, a few tokens each: memory grows by their own pages alone."""
    cache = make(frames=2000)
    shared = run(cache, 40)
    before = cache.free
    for number in range(50):
        text = np.concatenate([tokens(40), tokens(3, 1000 * (number + 1))])
        lease = cache.lease("r", cache.match("r", text).checkpoint, number)
        assert lease.origin is shared
        cache.extend(lease, 43, 32, number)
        checkpoint = cache.seal(lease, text, 43, Kind.PROMPT, number)
        assert checkpoint is not None
        cache.publish(checkpoint, number)
        cache.release(lease)
    pages = 4 + 2  # at most: one page a group, and a copied part-filled one of mtp and window
    assert before - cache.free <= 50 * pages + 13
    audit(cache, [])
    cache.reset()
    assert cache.free == cache.spec.frames


@pytest.mark.parametrize(
    "broken",
    [{"frames": 0}, {"hidden_rows": 0}, {"anchor_frames": -1}, {"groups": (GROUPS[0], GROUPS[0])}],
)
def test_impossible_caches_are_refused(broken: dict[str, object]) -> None:
    good = {
        "frames": 9, "frame_bytes": 9, "groups": GROUPS, "chunk": 16, "anchor_frames": 1,
        "hidden_rows": 1,
    }  # fmt: skip
    with pytest.raises(ValueError, match=r"\w+"):
        CacheSpec(**(good | broken))  # type: ignore[arg-type]


def test_the_extension_names_what_changed() -> None:
    """A restore of 12 tokens of one group, page 8: copy four rows, replace entry 1, add 2."""
    cache = make(groups=(GroupSpec("full", 8),))
    kept = run(cache, 12)
    source = int(kept.pages["full"][1][1])
    lease = cache.lease("r", kept, 1)
    extension = cache.extend(lease, 20, 0, 1)
    (delta,) = extension.deltas
    assert delta == PageDelta("full", 1, delta.frames)
    assert len(delta.frames) == 2
    assert extension.copies == (CopyRows("full", source, delta.frames[0], 4),)

"""The cache: match -> lease -> extend -> seal -> publish or discard -> release.

Knows references: who holds which page, anchor and hidden row, and what must be copied before a row
is written. Must not know requests, slots, devices or time (``now`` is the number of a step).
One thread calls it. Nothing here depends on the order of a set or on chance.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from merestone.core.checkpoint import Checkpoint, Kind, Lease, Match, PageRun, Root, State
from merestone.core.frames import FramePool, Frames, HiddenRows
from merestone.core.geometry import GroupSpec
from merestone.core.index import Tokens
from merestone.core.orders import CopyRows, PageDelta
from merestone.core.runs import Extension, Move, plan_move, run_at, run_end, unwritten
from merestone.core.shelf import Counters, OutOfFrames, Shelf, count
from merestone.core.spec import CacheSpec

__all__ = ["Cache", "CacheSpec", "Counters", "Extension", "Lease", "Match", "OutOfFrames"]


class Cache:
    """Checkpoints and leases over one pool of frames."""

    def __init__(self, spec: CacheSpec) -> None:
        self.spec = spec
        self.pool = FramePool(spec.frames)
        self.hidden = HiddenRows(self.pool, spec.hidden_rows)
        self.shelf = Shelf(self.pool, self.hidden, spec.frame_bytes, spec.cost, spec.mark_share)
        self.counters = self.shelf.counters
        self._last_id = 0

    @property
    def free(self) -> int:
        """Frames that nobody holds."""
        return self.pool.free

    def available(self) -> int:
        """Frames that are free or would be if all unleased, unprotected checkpoints went."""
        return self.pool.reachable()

    def tick(self, seconds: float) -> None:
        """Tell the time, which never runs backwards: nothing here looks at a clock."""
        self.shelf.seconds = seconds

    def checkpoints(self) -> Iterable[Checkpoint]:
        """Sealed and published checkpoints, oldest first."""
        return self.shelf.live.values()

    def tokens(self, checkpoint: Checkpoint) -> Tokens:
        """The token ids of a checkpoint of ``checkpoints()`` that no reset has doomed."""
        return self.shelf.index.tokens(checkpoint)

    def own_bytes(self, checkpoint: Checkpoint) -> float:
        """Bytes that only ``checkpoint`` holds, its share of a slab included."""
        return self.shelf.own_bytes(checkpoint)

    def match(self, root: Root, tokens: Tokens, limit: int | None = None) -> Match:
        """What is known of ``tokens`` [n], int32, restoring at most ``limit`` of them (all).

        Changes nothing, not even recency.
        """
        if limit is None:
            limit = tokens.size
        known, path = self.shelf.index.walk(root, tokens)
        usable = [c for c in path if c.at <= limit]
        ready = [c for c in usable if c.state is State.PUBLISHED]
        best = ready[-1] if ready else None
        pending = usable[-1] if usable and usable[-1] is not best else None
        if known == 0:
            lost = "unknown"
        elif best is not None and best.at >= min(known, limit):
            lost = ""
        elif pending is not None:
            lost = "not_published"
        elif len(usable) < len(path):
            lost = "limit"
        else:
            lost = "no_boundary"
        return Match(best, known, pending, lost)

    def lease(self, root: Root, origin: Checkpoint | None, now: int) -> Lease:
        """Start a request at ``origin`` (published, of ``root``), or from nothing."""
        if origin is not None:
            self.shelf.odds.meet(origin.kind, origin.hits)
            origin.hits += 1
            self.shelf.touch(origin, now)
            self.shelf.mark(origin, 0.0)
            count(self.counters.restored, origin.kind)
            count(self.counters.saved_tokens, origin.kind, origin.at)
        return self.follow(root, origin)

    def follow(self, root: Root, origin: Checkpoint | None) -> Lease:
        """A lease as of ``lease`` that does not count as a use of ``origin``."""
        if origin is None:
            pages = {g.name: (0, np.empty(0, np.int32)) for g in self.spec.groups}
            return Lease(self._next_id(), root, 0, 0, (), pages, None)
        assert origin.state is State.PUBLISHED, f"a {origin.state} checkpoint was leased"
        assert origin.root == root, "a checkpoint was leased under another root"
        lease = Lease(
            self._next_id(), root, origin.at, origin.anchor, origin.anchor_frames,
            dict(origin.pages), origin,
        )  # fmt: skip
        self.pool.hold(lease.frames(), lease.id)
        origin.leases += 1
        self.shelf.recount(origin)
        return lease

    def extend(
        self, lease: Lease, rows: int, anchor: int, now: int, drafts: int = 0, propose: int = 0
    ) -> Extension:
        """Give ``lease`` the pages of ``rows`` tokens and an anchor at ``anchor``.

            0 ....... lease.anchor ....... lease.rows ....... anchor ....... rows ... + drafts
            | shared or own pages         |     written by this step       | verified |
                                          ^ copy-on-write of this page, per group (lag)

        Drafts that turn out to be right are added by ``commit``. ``propose``: tokens that the step
        is then to propose, for which no group may lag. What the lease gives up here it holds until
        ``settle``, so no frame is both read and handed out again in one plan.

        Raises:
            OutOfFrames: no room; the lease is as before (evictions made may stay).
        """
        assert lease.live
        assert lease.rows <= rows
        assert lease.anchor <= anchor <= rows
        assert anchor % self.spec.chunk == 0
        if anchor == lease.anchor and rows + drafts <= lease.room:
            lease.rows = rows
            if lease.origin is not None:
                self.shelf.touch(lease.origin, now)
            return Extension((), (), (), drafts, propose)
        moves: list[tuple[GroupSpec, Move]] = []
        # Once it is the appender of all that it will write to, it stays so.
        owns, writes = lease.room > 0, True
        for group in self.spec.groups:
            reach = group.reach(rows, drafts, propose > 0)
            if owns and anchor == lease.anchor and reach <= run_end(group, lease):
                continue
            writes &= reach > unwritten(group, lease)
            move = plan_move(group, lease, reach, anchor, owns or self._appends(lease, group))
            if move is not None:
                moves.append((group, move))
        needed = sum(move.end - move.changed for _, move in moves)
        moved = anchor > lease.anchor
        self._make_room(needed, self._fresh_anchor(lease) if moved else 0, lease)
        copies: list[CopyRows] = []
        deltas: list[PageDelta] = []
        for group, move in moves:
            self._apply(lease, group, move, copies, deltas)
        lease.rows = rows
        if owns or writes:
            lease.room = min(run_end(group, lease) for group in self.spec.groups)
        if moved:
            lease.anchor = anchor
            if self._fresh_anchor(lease):
                self._retire(lease, np.array(lease.anchor_frames, np.int32))
                fresh = self.pool.take(self.spec.anchor_frames, lease.id)
                lease.anchor_frames = tuple(fresh.tolist())
        if lease.origin is not None:
            self.shelf.touch(lease.origin, now)
        fresh_anchor = lease.anchor_frames if moved else ()
        return Extension(tuple(copies), tuple(deltas), fresh_anchor, drafts, propose)

    def commit(self, lease: Lease, rows: int) -> None:
        """Drafts below ``rows`` tokens were accepted: what the step wrote there is for good."""
        assert lease.live
        assert lease.rows <= rows <= lease.rows + self.spec.drafts
        lease.rows = rows

    def settle(self, lease: Lease) -> None:
        """The steps planned so far need not be waited for any more: drop what was retired.

        Plans run in order, so it is enough that the plan which retired a frame is complete before
        another hands it out.
        """
        retired, lease.retired = lease.retired, []
        for frames in retired:
            self.pool.drop(frames, lease.id)

    def seal(
        self, lease: Lease, tokens: Tokens, at: int, kind: Kind, now: int, ttl_s: float = 0.0
    ) -> Checkpoint | None:
        """Make a checkpoint of ``lease`` at ``at``, for its ``tokens`` [>= at], int32. Eviction
        spares it for ``ttl_s`` seconds after its last use.

        The caller orders the copy of one hidden row, and publishes or discards. None, counted, if
        that is impossible (``discarded``), needless (``duplicate``) or has no frame (``no_room``).
        """
        assert lease.live
        reason = self._unsealable(lease, at)
        if reason:
            count(self.counters.discarded, f"{kind} {reason}")
            if reason == "window_hole":
                self.shelf.graves.bury(lease.root, tokens[:at], reason, kind)
            return None
        assert tokens.size >= at
        same = self.shelf.index.find(lease.root, tokens[:at])
        if same is not None:
            self.counters.duplicate += 1
            self.shelf.touch(same, now)
            self.shelf.mark(same, ttl_s)
            if same.kind is Kind.ALIGNED:
                same.kind = kind
            return None
        try:
            self.shelf.make_room(int(self.hidden.full))
        except OutOfFrames:
            self.counters.no_room += 1
            self.shelf.graves.bury(lease.root, tokens[:at], "no_room", kind)
            return None
        pages: dict[str, PageRun] = {}
        for group in self.spec.groups:
            run = run_at(group, lease, at)
            assert run is not None
            pages[group.name] = run
        checkpoint = Checkpoint(
            self._next_id(), lease.root, at, kind, State.SEALED,
            lease.anchor, lease.anchor_frames, pages,
            self.hidden.take(), born=now, used=now, base=self.shelf.inflation,
            born_s=self.shelf.seconds,
        )  # fmt: skip
        self.shelf.add(checkpoint, tokens[:at])
        self.shelf.mark(checkpoint, ttl_s)
        return checkpoint

    def mark(self, root: Root, tokens: Tokens, ttl_s: float) -> None:
        """Spare the checkpoint of exactly ``tokens``, if there is one, for ``ttl_s`` seconds."""
        found = self.shelf.index.find(root, tokens)
        if found is not None:
            self.shelf.mark(found, ttl_s)

    def publish(self, checkpoint: Checkpoint, now: int) -> None:
        """Every rank has done the copies of a sealed checkpoint: let it be found.

        One that a reset has met meanwhile is dropped instead.
        """
        assert checkpoint.state is State.SEALED
        if checkpoint.doomed:
            self.discard(checkpoint, "reset")
            return
        checkpoint.state = State.PUBLISHED
        self.shelf.touch(checkpoint, now)
        self.shelf.recount(checkpoint)
        count(self.counters.published, checkpoint.kind)

    def discard(self, checkpoint: Checkpoint, reason: str) -> None:
        """Drop a sealed or published checkpoint that must not be used (any more)."""
        if reason != "reset" and not checkpoint.doomed:
            tokens = self.tokens(checkpoint)
            self.shelf.graves.bury(checkpoint.root, tokens, reason, checkpoint.kind)
        self.shelf.drop(checkpoint)
        count(self.counters.discarded, f"{checkpoint.kind} {reason}")

    def relatives(self, origin: Checkpoint) -> list[Checkpoint]:
        """Published checkpoints that hold a frame of ``origin``, itself among them."""
        frames = origin.frames()
        return [
            other
            for other in self.checkpoints()
            if other.state is State.PUBLISHED and bool(np.isin(other.frames(), frames).any())
        ]

    def release(self, lease: Lease) -> None:
        """End a lease. Its pages have no appender any more."""
        assert lease.live
        lease.live = False
        frames = lease.frames()
        self.pool.disown(frames, lease.id)
        self.pool.drop(frames, lease.id)
        lease.retired = []
        origin = lease.origin
        if origin is not None:
            origin.leases -= 1
            self.shelf.recount(origin)
            self.shelf.forget_hidden(origin)

    def protect(self, checkpoint: Checkpoint) -> None:
        """A queued request wants ``checkpoint``: do not evict it (counted, see ``unprotect``)."""
        checkpoint.protected += 1
        self.shelf.recount(checkpoint)

    def unprotect(self, checkpoint: Checkpoint) -> None:
        """Take one ``protect`` back, of a checkpoint in any state."""
        assert checkpoint.protected > 0
        checkpoint.protected -= 1
        self.shelf.recount(checkpoint)

    def reset(self, root: Root | None = None) -> int:
        """Drop all published checkpoints (of ``root``); returns how many.

        Sealed ones are not found any more and are dropped when they would be published.
        """
        dropped = 0
        for checkpoint in list(self.shelf.live.values()):
            if root is not None and checkpoint.root != root:
                continue
            if checkpoint.state is State.PUBLISHED:
                self.discard(checkpoint, "reset")
                dropped += 1
            elif not checkpoint.doomed:
                self.shelf.hide(checkpoint)
        return dropped

    def deltas(self, lease: Lease) -> tuple[PageDelta, ...]:
        """The whole page tables of ``lease``, to bind it to a fresh slot."""
        return tuple(
            PageDelta(name, first, tuple(frames.tolist()))
            for name, (first, frames) in lease.pages.items()
            if frames.size
        )

    def frames_needed(self, tokens: int, origin: Checkpoint | None = None) -> int:
        """As ``CacheSpec.frames_needed``, from a checkpoint."""
        return self.spec.frames_needed(tokens, (origin.at, origin.anchor) if origin else None)

    def capacity(self) -> int:
        """As ``CacheSpec.capacity``."""
        return self.spec.capacity()

    def _appends(self, lease: Lease, group: GroupSpec) -> bool:
        """Whether ``lease`` is the appender of the page of its first unwritten row of ``group``."""
        first, frames = lease.pages[group.name]
        place = unwritten(group, lease) // group.span - first
        return 0 <= place < frames.size and bool(self.pool.appender[frames[place]] == lease.id)

    def _apply(
        self,
        lease: Lease,
        group: GroupSpec,
        move: Move,
        copies: list[CopyRows],
        deltas: list[PageDelta],
    ) -> None:
        first, frames = lease.pages[group.name]
        kept = slice(move.begin - first, move.changed - first)
        fresh = self.pool.take(move.end - move.changed, lease.id, appender=lease.id)
        if move.copied:
            source = int(frames[move.changed - first])
            copies.append(CopyRows(group.name, source, int(fresh[0]), move.copied))
        if fresh.size:
            deltas.append(PageDelta(group.name, move.changed, tuple(fresh.tolist())))
        if kept.start or kept.stop < frames.size:
            for gone in (frames[: kept.start], frames[kept.stop :]):
                self._retire(lease, gone)
        lease.pages[group.name] = move.begin, np.concatenate([frames[kept], fresh])

    def _retire(self, lease: Lease, frames: Frames) -> None:
        if frames.size:
            self.pool.disown(frames, lease.id)
            lease.retired.append(frames)

    def _fresh_anchor(self, lease: Lease) -> int:
        """Frames that an advance takes: none if it may rewrite the old anchor, held by no other."""
        old = lease.anchor_frames
        if old and int(self.pool.refs[list(old)].max()) == 1:
            return 0
        return self.spec.anchor_frames

    def _unsealable(self, lease: Lease, at: int) -> str:
        """Why ``lease`` cannot be resumed at ``at``; empty if it can."""
        if at < 1:
            return "empty"
        if at > lease.rows:
            return "not_computed"
        if not 0 <= at - lease.anchor < self.spec.chunk + self.spec.drafts:
            return "anchor_elsewhere"
        if any(run_at(group, lease, at) is None for group in self.spec.groups):
            return "window_hole"
        return ""

    def _make_room(self, pages: int, anchor: int, lease: Lease) -> None:
        """Free ``pages + anchor`` frames. If only the new anchor is too much, let ``lease``'s old
        one be held by nobody else: it is then rewritten in place."""
        try:
            self.shelf.make_room(pages + anchor)
        except OutOfFrames as error:
            if not anchor or pages > error.free:
                raise
            if not self.shelf.evict_anchor(lease.anchor_frames):
                raise
            self.shelf.make_room(pages)

    def _next_id(self) -> int:
        self._last_id += 1
        return self._last_id

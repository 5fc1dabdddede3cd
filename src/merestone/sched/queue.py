"""Who waits, for what, and which checkpoints are spared for them meanwhile.

Knows the order of waiting sequences, single flight and soft protection. Must not know slots,
budgets or plans.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterable

import numpy as np

from merestone.core.cache import Cache, Match
from merestone.core.checkpoint import Checkpoint, State
from merestone.core.runs import whole
from merestone.sched.request import Sequence

OVERTAKES = 64
"""Exact hits that may start before one that waits for frames."""
LOOKAHEAD = 64
"""Waiting sequences, from the head, whose matches are protected from eviction."""

NO_MATCH = Match(checkpoint=None, known=0, pending=None, lost="disabled")


class WaitingQueue:
    """Waiting sequences in rank order."""

    def __init__(self, cache: Cache) -> None:
        self.cache = cache
        self.items: list[Sequence] = []

    def __len__(self) -> int:
        return len(self.items)

    def add(self, seq: Sequence) -> None:
        insort(self.items, seq, key=lambda s: s.rank)

    def remove(self, seq: Sequence) -> None:
        self.items.remove(seq)
        self.unprotect(seq)
        seq.waits_for, seq.looked_up = None, False

    @staticmethod
    def may_overtake(blocked: Sequence, seq: Sequence) -> bool:
        """Whether ``seq`` may start before one that waits for frames: an exact hit, in turn."""
        exact = seq.protects is not None and seq.protects.at == seq.known
        if not exact or blocked.overtaken >= OVERTAKES:
            return False
        blocked.overtaken += 1
        return True

    def fits(self, seq: Sequence, origin: Checkpoint | None, promised: int) -> bool:
        """Whether its prompt and a page fit beside the frames that running ones were promised."""
        wanted = promised + self.cache.frames_needed(seq.known + 1, origin)
        return wanted <= self.cache.free or wanted <= self.cache.available()

    def find(self, seq: Sequence) -> Match:
        """What it may start from. A checkpoint with a hole in a window is dropped, and counted."""
        if not seq.matches:
            return NO_MATCH
        while True:
            found = self.cache.match(seq.root, seq.tokens)
            best = found.checkpoint
            if best is None or all(whole(group, best) for group in self.cache.spec.groups):
                return found
            self.cache.discard(best, "window_hole")

    # -- soft protection ------------------------------------------------------------------------

    def protect(self) -> None:
        """Spare the matches of the first waiting sequences. One look-up each, when it arrives and
        when what it found was dropped; deeper ones are offered as they are published."""
        for seq in self.items[:LOOKAHEAD]:
            if seq.protects is not None and seq.protects.state is State.DROPPED:
                self.unprotect(seq)
                seq.looked_up = False
            if not seq.looked_up:
                seq.looked_up = True
                self._protect(seq, self.find(seq).checkpoint)

    def offer(self, published: Checkpoint, owner: Sequence) -> None:
        """A checkpoint was published: spare it for those who will start from it."""
        at = published.at
        for seq in self.items[:LOOKAHEAD]:
            deeper = seq.protects is None or seq.protects.at < at
            if (
                (deeper and seq.matches and seq.looked_up and seq.root == published.root)
                and at <= seq.known
                and np.array_equal(owner.buffer[:at], seq.buffer[:at])
            ):
                self.unprotect(seq)
                self._protect(seq, published)

    def _protect(self, seq: Sequence, found: Checkpoint | None) -> None:
        if found is not None:
            self.cache.protect(found)
            seq.protects = found

    def unprotect(self, seq: Sequence) -> None:
        if seq.protects is not None:
            self.cache.unprotect(seq.protects)
            seq.protects = None

    def drop_protection(self) -> bool:
        """Give up the protection nearest the tail. False if there was none."""
        for seq in reversed(self.items):
            if seq.protects is not None:
                self.unprotect(seq)
                return True
        return False

    # -- single flight --------------------------------------------------------------------------

    def inherit(self, running: Iterable[Sequence]) -> None:
        """Let leaders run at the best priority of those who still wait for them."""
        for leader in running:
            leader.inherited = None
        for seq in self.items:
            if self.still_waits(seq):
                self._lend(seq)

    def must_wait(self, seq: Sequence, found: Match, running: Iterable[Sequence]) -> bool:
        """Whether something worth waiting for is about to be sealed or published.

        A boundary counts if it is already planned in a running leader, is a prefix of this
        prompt, and is deeper than the match. The leader then runs at this sequence's priority.
        """
        if found.pending is not None:
            return True
        if not seq.matches:
            return False
        for leader in running:
            if leader.root != seq.root:
                continue
            depth = self._shared_boundary(leader, seq, found.at)
            if depth:
                seq.waits_for = (leader, depth)
                self._lend(seq)
                return True
        seq.waits_for = None
        return False

    @staticmethod
    def still_waits(seq: Sequence) -> bool:
        """Whether the leader found earlier is still on its way to the boundary."""
        if seq.waits_for is None:
            return False
        leader, depth = seq.waits_for
        return leader.lease is not None and depth in leader.planned()

    @staticmethod
    def _lend(seq: Sequence) -> None:
        assert seq.waits_for is not None
        leader, priority = seq.waits_for[0], seq.rank[0]
        if priority < leader.rank[0]:
            leader.inherited = priority

    @staticmethod
    def _shared_boundary(leader: Sequence, seq: Sequence, above: int) -> int:
        for at in reversed(leader.planned()):
            if above < at <= seq.known and np.array_equal(leader.buffer[:at], seq.buffer[:at]):
                return at
        return 0

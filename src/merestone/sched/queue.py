"""Who waits, for what, and which checkpoints are spared for them meanwhile.

Knows the order of waiting sequences, single flight and soft protection. Must not know slots,
budgets or plans.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterable

import numpy as np

from merestone.core.cache import Cache, Match
from merestone.sched.request import Sequence

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
        seq.waits_for = None

    def match(self, seq: Sequence) -> Match:
        if not seq.matches:
            return NO_MATCH
        return self.cache.match(seq.root, seq.tokens)

    def protect(self) -> None:
        """Spare the matches of the first waiting sequences: one look-up each, when it arrives."""
        for seq in self.items[:LOOKAHEAD]:
            if seq.protects is None and seq.matches:
                found = self.match(seq).checkpoint
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

    def must_wait(self, seq: Sequence, found: Match, running: Iterable[Sequence]) -> bool:
        """Single flight: whether a running leader is about to seal something worth waiting for.

        The boundary must already be planned in the leader, be a prefix of this prompt, and be
        deeper than the match. The leader then runs at this sequence's priority.
        """
        if found.pending is not None:
            return True
        if not seq.matches:
            return False
        for leader in running:
            if leader.root != seq.root or not leader.seals:
                continue
            depth = self._shared_boundary(leader, seq, found.at)
            if depth:
                seq.waits_for = (leader, depth)
                priority = seq.rank[0]
                if priority < leader.rank[0]:
                    leader.inherited = priority
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
    def _shared_boundary(leader: Sequence, seq: Sequence, above: int) -> int:
        for at in reversed(leader.planned()):
            if above < at <= seq.known and np.array_equal(leader.buffer[:at], seq.buffer[:at]):
                return at
        return 0

"""Which boundaries a step's rows reach, and how their hidden rows are saved.

Knows sequences' boundaries, the cache's seal and plans in the making. Must not know budgets.

    0 .... start ........ end .... computed      a pass over rows [start, end), and its drafts
           |  sealed by the  | sealed by the
           |  plan itself    | next plan: accepted drafts ran past them
"""

from __future__ import annotations

from merestone.core.cache import Cache
from merestone.core.checkpoint import Checkpoint, Kind
from merestone.core.orders import SaveHidden
from merestone.sched.flight import Flight
from merestone.sched.request import Sequence


class Seals:
    """``late`` checkpoints wait for the next plan to save their hidden rows."""

    def __init__(self, cache: Cache) -> None:
        self.cache = cache
        self.late: list[tuple[Sequence, int, Checkpoint]] = []

    def by_plan(self, flight: Flight, seq: Sequence, start: int, end: int) -> None:
        """Seal the boundaries inside the pass's last open chunk, by truncation.

        Those of a grid that drafts ran past had to wait for this pass to write their anchor.
        """
        assert seq.lease is not None
        for at, kind in seq.above(seq.passed):
            if at <= end:
                ttl_s = seq.lives.get(at, 0.0)
                sealed = self.cache.seal(seq.lease, seq.tokens, at, kind, flight.now, ttl_s)
                if sealed is not None:
                    saves = flight.after if at > start else flight.saves
                    saves.append(SaveHidden(seq.slot, at, *sealed.hidden))
                    flight.sealed.append((seq, sealed))
        seq.passed = end

    def overtaken(self, seq: Sequence, now: int) -> None:
        """Seal the boundaries that accepted drafts ran past, before the anchor does."""
        if seq.grid:
            return
        for at, kind in seq.above(seq.passed):
            if at <= seq.computed:
                self.here(seq, at, kind, now)
        seq.passed = seq.computed

    def here(self, seq: Sequence, at: int, kind: Kind, now: int) -> None:
        """Seal rows that exist already."""
        assert seq.lease is not None
        ttl_s = seq.lives.get(at, 0.0)
        sealed = self.cache.seal(seq.lease, seq.tokens, at, kind, now, ttl_s)
        if sealed is not None:
            self.late.append((seq, seq.slot, sealed))

    def order(self, flight: Flight) -> None:
        """Have the plan save what is late."""
        for seq, slot, sealed in self.late:
            flight.saves.append(SaveHidden(slot, sealed.at, *sealed.hidden))
            flight.sealed.append((seq, sealed))
        self.late.clear()

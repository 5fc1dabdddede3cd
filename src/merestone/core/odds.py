"""Odds: how likely a checkpoint is to be met again, learned from what was met so far.

Knows kinds and counts of hits. Must not know frames or time.
"""

from __future__ import annotations

from merestone.core.checkpoint import Kind

MOST_HITS = 2
"""Hits are told apart up to here: none, one (a turn that its conversation has left behind), and
more (where conversations meet)."""
PRIOR = 4
"""Checkpoints that what is known beforehand counts as much as."""
MEMORY = 512
"""Checkpoints of a sort after which what was learned counts half."""


class Odds:
    """Of those of a kind that had been hit h times, how many were hit once more before they went.

    Beforehand: one half for those that were never hit, and a hit changes nothing.
    """

    def __init__(self) -> None:
        self._met: dict[tuple[Kind, int], int] = {}
        self._lost: dict[tuple[Kind, int], int] = {}

    def meet(self, kind: Kind, hits: int) -> None:
        """One that had so many ``hits`` is hit again."""
        self._learn(self._met, kind, hits)

    def lose(self, kind: Kind, hits: int) -> None:
        """One that had so many ``hits`` is evicted."""
        self._learn(self._lost, kind, hits)

    def miss(self, kind: Kind, hits: int) -> None:
        """One that was evicted would have been hit."""
        sort = kind, min(hits, MOST_HITS)
        self._lost[sort] = max(0, self._lost.get(sort, 0) - 1)
        self._learn(self._met, kind, hits)

    def of(self, kind: Kind, hits: int) -> float:
        """How likely one that had so many ``hits`` is to be hit again, between 0 and 1."""
        odds = 0.5
        for count in range(min(hits, MOST_HITS) + 1):
            met, lost = self._met.get((kind, count), 0), self._lost.get((kind, count), 0)
            odds = (met + PRIOR * odds) / (met + lost + PRIOR)
        return odds

    def _learn(self, counter: dict[tuple[Kind, int], int], kind: Kind, hits: int) -> None:
        sort = kind, min(hits, MOST_HITS)
        counter[sort] = counter.get(sort, 0) + 1
        if self._met.get(sort, 0) + self._lost.get(sort, 0) >= MEMORY:
            for each in (self._met, self._lost):
                each[sort] = each.get(sort, 0) // 2

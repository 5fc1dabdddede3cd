"""How many drafts a step verifies and asks for.

Knows counters of sequences. Must not know ids, frames or drafters. Whatever it decides changes the
number of steps, never a token.
"""

from __future__ import annotations

from collections.abc import Sequence as Rows

from merestone.sched.request import Sequence
from merestone.sched.tally import Tally

WEIGHT = 0.25
"""Weight of the newest step in a sequence's mean of accepted drafts."""


class Depth:
    """At most ``most`` drafts a step; with ``adaptive`` about as many as were accepted lately."""

    def __init__(self, most: int = 0, *, adaptive: bool = False) -> None:
        self.most = most
        self.adaptive = adaptive
        self.tally = Tally()

    def trim(self, decodes: Rows[Sequence], rows: int) -> int:
        """Drop drafts that cannot be needed, or that do not fit into ``rows``, deepest first.

        Returns the rows that the sequences then take.
        """
        for seq in decodes:
            seq.drafts = min(seq.drafts, seq.left - 1)
        deepest = max((seq.drafts for seq in decodes), default=0)
        while deepest and len(decodes) + sum(seq.drafts for seq in decodes) > rows:
            deepest -= 1
            for seq in decodes:
                seq.drafts = min(seq.drafts, deepest)
        return len(decodes) + sum(seq.drafts for seq in decodes)

    def wanted(self, seq: Sequence) -> int:
        """Drafts to ask for in a step that draws at least one token for ``seq``."""
        most = self.most
        if self.adaptive and seq.acceptance is not None:
            most = min(most, 1 + round(seq.acceptance))
        return max(0, min(most, seq.left - 2))

    def note(self, seq: Sequence, drafted: int, accepted: int) -> None:
        """A step verified ``drafted`` drafts of ``seq`` and accepted some."""
        if drafted == 0:
            return
        self.tally.note(drafted, accepted)
        seq.tally.note(drafted, accepted)
        # All of them: one more might have been.
        reach = accepted + (accepted == drafted)
        mean = reach if seq.acceptance is None else seq.acceptance
        seq.acceptance = mean + WEIGHT * (reach - mean)

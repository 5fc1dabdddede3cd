"""What became of drafts, counted by their place behind the newest token.

Knows counts. Must not know ids.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class Tally:
    """``steps`` that verified drafts; ``drafted[i]`` of them had a draft at place i, and
    ``accepted[i]`` accepted it."""

    steps: int = 0
    drafted: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)

    def note(self, drafted: int, accepted: int) -> None:
        """One step verified ``drafted`` drafts, more than none, and accepted the first of them."""
        self.steps += 1
        missing = [0] * (drafted - len(self.drafted))
        self.drafted += missing
        self.accepted += missing
        for place in range(drafted):
            self.drafted[place] += 1
            self.accepted[place] += place < accepted

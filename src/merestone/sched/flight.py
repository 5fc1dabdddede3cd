"""A plan in the making, and what its result meant.

Knows orders and works, and what must be remembered until the result arrives. Decides nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from merestone.core.checkpoint import Checkpoint
from merestone.core.orders import CopyRows, LoadHidden, SaveHidden, StoreOrder, check_disjoint
from merestone.sched.plan import Admit, StepPlan, Work, WorkResult
from merestone.sched.request import Sequence


@dataclass(slots=True)
class Flight:
    """A plan in the making, and what must be remembered until its result arrives."""

    now: int
    saves: list[SaveHidden] = field(default_factory=list)
    frees: list[int] = field(default_factory=list)
    admits: list[Admit] = field(default_factory=list)
    before: list[CopyRows | LoadHidden] = field(default_factory=list)
    works: list[Work] = field(default_factory=list)
    after: list[SaveHidden] = field(default_factory=list)
    stores: list[StoreOrder] = field(default_factory=list)
    poll: bool = False
    sequences: list[Sequence] = field(default_factory=list)
    sealed: list[tuple[Sequence, Checkpoint]] = field(default_factory=list)
    restored: list[tuple[Sequence, Checkpoint]] = field(default_factory=list)

    def unbind(self, slot: int) -> None:
        """Undo what this plan says about a slot, if it admits it."""
        self.admits = [admit for admit in self.admits if admit.slot != slot]
        self.before = [
            order
            for order in self.before
            if not (isinstance(order, LoadHidden) and order.slot == slot)
        ]

    def freeze(self) -> StepPlan:
        check_disjoint((*self.saves,))
        check_disjoint((*self.before,))
        check_disjoint((*self.after,))
        return StepPlan(
            step=self.now,
            saves=tuple(self.saves),
            frees=tuple(self.frees),
            admits=tuple(self.admits),
            before=tuple(self.before),
            works=tuple(self.works),
            after=tuple(self.after),
            stores=tuple(self.stores),
            poll=self.poll,
        )


class Outcome(NamedTuple):
    """What a step meant for one sequence: sampled tokens, or a failure."""

    sequence: Sequence
    result: WorkResult | None
    error: str | None = None

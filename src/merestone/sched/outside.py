"""The scheduler's view of stores: whom to hold back for them, and what to add to a plan.

Must not know what a store is. Without one, nothing is held back and nothing is added.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from merestone.core.cache import Match
from merestone.core.checkpoint import Checkpoint
from merestone.sched.plan import StepResult
from merestone.sched.request import Sequence

if TYPE_CHECKING:
    from merestone.sched.flight import Flight


class Outside(Protocol):
    """Whatever keeps checkpoints outside of the cache. Called between two steps only."""

    def tick(self, now: float) -> None:
        """The time in seconds, before each plan."""
        ...

    def rest(self) -> float | None:
        """Seconds until another plan may be worth making without a new request; None for ever."""
        ...

    def holds(self, seq: Sequence, found: Match) -> bool:
        """Whether a waiting sequence should wait on, for something deeper than ``found``."""
        ...

    def leaves(self, seq: Sequence) -> str:
        """A sequence waits no longer: why it did not get what a store has; mostly empty."""
        ...

    @property
    def holding(self) -> bool:
        """Whether any sequence is being held back. It never is for long."""
        ...

    def orders(self, flight: Flight) -> None:
        """Add store orders to a plan that is otherwise made."""
        ...

    def published(self, checkpoint: Checkpoint) -> None:
        """A checkpoint of a running request can be found from now on."""
        ...

    def apply(self, result: StepResult) -> list[tuple[Checkpoint, Sequence]]:
        """Take a step's result. Returns what was imported and published, and for whom."""
        ...

    def failed(self) -> None:
        """The step in flight was lost."""
        ...

    def yields(self) -> bool:
        """Frames are short: give up a hold on some. False if there is none."""
        ...

    def reset(self) -> None:
        """Forget whatever is kept for this engine alone."""
        ...

    def stats(self) -> dict[str, float | dict[str, float]]:
        """Counters and gauges by name, or by name and label."""
        ...

    def close(self) -> None:
        """No call follows."""
        ...


class Verifier(Protocol):
    """Whatever looks at the bytes of checkpoints when they are sealed and restored."""

    def orders(self, flight: Flight) -> None:
        """Add what it wants to know to a plan that is otherwise made."""
        ...

    def judge(self, flight: Flight, result: StepResult) -> dict[int, str]:
        """Ids of the flight's checkpoints that are not what they should be, and why."""
        ...


class Nothing:
    """No store."""

    holding = False

    def tick(self, now: float) -> None: ...

    def rest(self) -> float | None:
        return None

    def holds(self, seq: Sequence, found: Match) -> bool:
        return False

    def leaves(self, seq: Sequence) -> str:
        return ""

    def orders(self, flight: Flight) -> None: ...

    def published(self, checkpoint: Checkpoint) -> None: ...

    def apply(self, result: StepResult) -> list[tuple[Checkpoint, Sequence]]:
        return []

    def failed(self) -> None: ...

    def yields(self) -> bool:
        return False

    def reset(self) -> None: ...

    def stats(self) -> dict[str, float | dict[str, float]]:
        return {}

    def close(self) -> None: ...

"""All stores of an engine, as its scheduler sees them: implements ``sched.outside.Outside``.

Knows desks (out) and imports (in). Must not know tiers or threads.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from merestone.core.cache import Cache, Match
from merestone.core.checkpoint import Checkpoint, Kind, Root
from merestone.sched.plan import StepResult
from merestone.sched.request import Sequence as Waiting
from merestone.store.desk import Desk, Identity, StoreSettings
from merestone.store.fetches import Fetches
from merestone.store.imports import Imports
from merestone.store.lane import Bell

if TYPE_CHECKING:
    from merestone.sched.flight import Flight

POLL_S = 0.005
"""How often ranks are asked what their stores have done, when nothing else says that they have."""
RETRY_S = 0.5
"""How often a tier that failed is thought of, while there is something to write to it."""


class Stores:
    """``kinds``: the boundaries that are written. ``shared`` says whether a root is more than one
    request's; only those are."""

    def __init__(
        self,
        cache: Cache,
        desks: Sequence[Desk],
        identity: Identity,
        settings: StoreSettings,
        kinds: frozenset[Kind],
        bell: Bell,
        tickets: Iterator[int],
    ) -> None:
        self.desks = desks
        self.fetches = Fetches(cache, identity, tickets)
        self.imports = Imports(self.fetches, desks, identity, settings, cache.spec.chunk)
        self.bell = bell
        self.shared: Callable[[Root], bool] = _everyone
        self.closing: list[Callable[[], None]] = []
        """What else ends with it, in order."""
        self._settings = settings
        self._kinds = kinds
        self._now = self._polled = 0.0
        self._heard = False
        self._step = 0

    def tick(self, now: float) -> None:
        """Before each plan: the time in seconds."""
        self._now = self.imports.now = now
        for desk in self.desks:
            desk.now = now
        self._heard = self.bell.answer() or self._heard

    def rest(self) -> float | None:
        if self.bell.rung:
            return 0.0
        if self.holding or self.fetches.pending or any(desk.pending for desk in self.desks):
            return POLL_S
        return RETRY_S if any(desk.queue for desk in self.desks) else None

    # -- what the scheduler asks ----------------------------------------------------------------

    @property
    def holding(self) -> bool:
        return self.imports.holding

    def holds(self, seq: Waiting, found: Match) -> bool:
        return seq.matches and self.shared(seq.root) and self.imports.holds(seq, found)

    def leaves(self, seq: Waiting) -> str:
        return self.imports.leaves(seq)

    def orders(self, flight: Flight) -> None:
        """Imports first: somebody waits for them."""
        self._step = flight.now
        room = self._settings.step_bytes
        flight.stores += self.fetches.orders(room, flight.now)
        for desk in self.desks:
            flight.stores += desk.orders(room)
        due = self._heard or self._now - self._polled >= POLL_S
        if due and (self.fetches.reading or any(desk.writing for desk in self.desks)):
            flight.poll, self._heard, self._polled = True, False, self._now

    def published(self, checkpoint: Checkpoint) -> None:
        if checkpoint.kind in self._kinds and self.shared(checkpoint.root):
            for desk in self.desks:
                desk.offer(checkpoint)

    def apply(self, result: StepResult) -> list[tuple[Checkpoint, Waiting]]:
        for desk in self.desks:
            desk.stepped()
        done = self.fetches.stepped(self._step)
        for checkpoint, _ in done:
            # Other tiers may lack it; its own notes that it is in use.
            self.published(checkpoint)
        for report in result.reports:
            if not any(desk.report(report) for desk in self.desks):
                self.fetches.report(report)
        return done

    def failed(self) -> None:
        for desk in self.desks:
            desk.failed()
        self.fetches.failed()

    def yields(self) -> bool:
        return any(desk.yields() for desk in self.desks) or self.fetches.yields()

    def reset(self) -> None:
        """Others' checkpoints in shared tiers stay."""
        self.imports.reset()
        for desk in self.desks:
            desk.reset()

    def close(self) -> None:
        for desk in self.desks:
            desk.clerk.close()
        for close in self.closing:
            close()

    # -- what people ask ------------------------------------------------------------------------

    def stats(self) -> dict[str, float | dict[str, float]]:
        """Counters and gauges. Labels are tiers, or reasons."""
        lost: Counter[str] = Counter()
        for desk in self.desks:
            lost.update(desk.lost)
        return {
            "store_checkpoints": {d.name: float(len(d.catalog.stored)) for d in self.desks},
            "store_bytes": {d.name: float(d.catalog.total) for d in self.desks},
            "store_written_bytes": {d.name: float(d.counters["written_bytes"]) for d in self.desks},
            "store_written": {d.name: float(d.counters["stored"]) for d in self.desks},
            "store_evicted": {d.name: float(d.catalog.evicted) for d in self.desks},
            "store_waiting": {d.name: float(d.waiting) for d in self.desks},
            "store_failing": {d.name: float(d.failing) for d in self.desks},
            "store_not_written": {reason: float(n) for reason, n in lost.items()},
            "store_imported": float(self.fetches.counters["imported"]),
            "store_imported_tokens": float(self.fetches.counters["imported_tokens"]),
            "store_missed": {reason: float(n) for reason, n in self.fetches.missed.items()},
        }


def _everyone(root: Root) -> bool:
    return True

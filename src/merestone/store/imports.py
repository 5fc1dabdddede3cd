"""Imports: waiting requests that a store may serve are held back for a bounded time.

Decides only. Meanwhile others run.

    arrives -> shared tiers asked -> the deepest checkpoint of all tiers fetched -> over:
    the cache has it; or nothing is left to try, or the time is up
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from merestone.core.cache import Match
from merestone.sched.request import Sequence as Waiting
from merestone.store.chain import Chain
from merestone.store.desk import Desk, Identity, StoreSettings
from merestone.store.fetches import Fetches, Fetching, Stage
from merestone.store.manifest import Manifest

BROKEN = ("damaged", "foreign")
"""Errors that are a manifest's and not its tier's."""


@dataclass(slots=True, eq=False)
class Visit:
    """One waiting request: what stores answered, and what is fetched for it."""

    chain: Chain
    deadline: float
    asking: int = 0
    answers: list[tuple[Desk, Manifest]] = field(default_factory=list)
    fetching: Fetching | None = None
    over: bool = False
    reason: str = ""


class Imports:
    """All visits. ``now`` is the time in seconds, set by the caller; ``chunk`` the cache's."""

    def __init__(
        self,
        fetches: Fetches,
        desks: Sequence[Desk],
        identity: Identity,
        settings: StoreSettings,
        chunk: int,
    ) -> None:
        self.fetches = fetches
        self.desks = desks
        self.identity = identity
        self.settings = settings
        self.chunk = chunk
        self.now = 0.0
        self.visits: dict[Waiting, Visit] = {}

    @property
    def holding(self) -> bool:
        """Whether somebody still waits. Who is not asked about any more does, too, for a while."""
        return any(not v.over and self.now < v.deadline for v in self.visits.values())

    def holds(self, seq: Waiting, found: Match) -> bool:
        """Whether ``seq`` should wait on for something deeper than ``found``."""
        visit = self.visits.get(seq)
        if visit is None:
            visit = self.visits[seq] = self._arrive(seq, found)
        if visit.over:
            return False
        if self.now >= visit.deadline:
            self._leave(visit)
            visit.over, visit.reason = True, "slow"
            self.fetches.missed["slow"] += 1
            return False
        visit.over = not self._advance(seq, visit, found)
        return not visit.over

    def leaves(self, seq: Waiting) -> str:
        visit = self.visits.pop(seq, None)
        if visit is None:
            return ""
        self._leave(visit)
        return visit.reason

    def _arrive(self, seq: Waiting, found: Match) -> Visit:
        chain = Chain(self.identity.digest, seq.root, seq.tokens, self.chunk)
        visit = Visit(chain, self.now + self.settings.wait_s)
        if found.checkpoint is not None:
            self._touch(chain.at(found.at))
        if found.at == seq.known:
            visit.over = True
            return visit
        for desk in self.desks:
            if desk.clerk.shared is None:
                continue
            if not desk.reads.good(self.now):
                visit.reason = "down"
                continue
            visit.asking += 1
            self._ask(desk, visit, found.at)
        return visit

    def _touch(self, address: str) -> None:
        """What memory serves is in use on disk, too."""
        for desk in self.desks:
            if address in desk.catalog.stored:
                desk.catalog.touch(address)
                desk.clerk.touch(address)

    def _ask(self, desk: Desk, visit: Visit, above: int) -> None:
        def answer(manifest: Manifest | None, error: str) -> None:
            visit.asking -= 1
            if error not in BROKEN:
                desk.reads.note(error, self.now)
            if error:
                visit.reason = error
                self.fetches.missed[error] += 1
            elif manifest is not None:
                visit.answers.append((desk, manifest))

        desk.clerk.find(visit.chain, above, answer)

    def _advance(self, seq: Waiting, visit: Visit, found: Match) -> bool:
        """Whether there is something to wait for."""
        fetching = visit.fetching
        if fetching is not None:
            if fetching.active:
                return True
            self._leave(visit)
            if fetching.stage is Stage.DONE:
                return False
            visit.reason = fetching.reason
            if fetching.reason in ("no_room", "duplicate"):
                return False
            self._drop(visit, fetching.desk, fetching.manifest, found.at)
        if visit.asking:
            return True
        best = self._best(visit, found.at)
        if best is None:
            return False
        desk, manifest = best
        if not self.fetches.has_room(manifest, self.settings.staging_bytes):
            return True
        fetching = self.fetches.fetch(seq, visit.chain, desk, manifest, found.checkpoint)
        if fetching is None:
            visit.reason = "foreign"
            self._drop(visit, desk, manifest, found.at)
            return self._advance(seq, visit, found)
        fetching.visits += 1
        visit.fetching = fetching
        return True

    def _best(self, visit: Visit, above: int) -> tuple[Desk, Manifest] | None:
        """The deepest checkpoint that any tier has; of equal ones the first tier's."""
        found = [
            (desk, manifest)
            for desk in self.desks
            if desk.clerk.shared is None and desk.reads.good(self.now)
            for manifest in [desk.catalog.find(visit.chain, above)]
            if manifest is not None
        ]
        found += [(desk, m) for desk, m in visit.answers if above < m.at]
        return max(found, key=lambda pair: (pair[1].at, -pair[0].index), default=None)

    def _drop(self, visit: Visit, desk: Desk, manifest: Manifest, above: int) -> None:
        """An answer was of no use: is there another, now that the tier has lost that one?"""
        before = len(visit.answers)
        visit.answers = [answer for answer in visit.answers if answer[1] is not manifest]
        if len(visit.answers) < before and desk.reads.good(self.now):
            visit.asking += 1
            self._ask(desk, visit, above)

    def _leave(self, visit: Visit) -> None:
        if visit.fetching is not None:
            self.fetches.leave(visit.fetching)
            visit.fetching = None

    def reset(self) -> None:
        """Nothing that was stored before is wanted."""
        self.fetches.fail_all("reset")
        for visit in self.visits.values():
            visit.answers.clear()

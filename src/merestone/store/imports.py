"""Imports: what waiting requests get from stores, and how it takes its place in the cache.

Decides only. A request that a store may serve is held back for a bounded time; meanwhile others
run. Requests that want the same checkpoint share one import.

    visit:    asked -> chosen -> held back while it is fetched -> over (the cache has it, or not)
    fetching: reading (all ranks) -> ready -> writing (frames taken) -> done
                          any rank fails, no room, nobody waits -> failed
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum

from merestone.core.adopt import adopt
from merestone.core.cache import Cache, Match, OutOfFrames
from merestone.core.checkpoint import Checkpoint, Kind, Root, State
from merestone.core.index import Tokens
from merestone.core.orders import Fetch, Forget, Import, Segment, StoreOrder
from merestone.sched.plan import StoreReport
from merestone.sched.request import Sequence as Waiting
from merestone.store.chain import Chain, Part, parts_of, place
from merestone.store.desk import Desk, Identity, StoreSettings
from merestone.store.manifest import Manifest


class Stage(Enum):
    READING = "reading"
    READY = "ready"
    WRITING = "writing"
    DONE = "done"
    FAILED = "failed"


@dataclass(slots=True, eq=False)
class Fetching:
    """One checkpoint on its way in. ``parts`` by address, those that ``base`` shares left out."""

    desk: Desk
    manifest: Manifest
    root: Root
    tokens: Tokens
    base: Checkpoint | None
    parts: dict[str, Part]
    ticket: int
    seq: Waiting
    ordered: bool = False
    stage: Stage = Stage.READING
    reason: str = ""
    reports: list[StoreReport] = field(default_factory=list)
    checkpoint: Checkpoint | None = None
    todo: list[Segment] = field(default_factory=list)
    visits: int = 0

    @property
    def active(self) -> bool:
        return self.stage not in (Stage.DONE, Stage.FAILED)


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
    """All visits and fetchings. ``now`` is the time in seconds, set by the caller."""

    def __init__(
        self,
        cache: Cache,
        desks: Sequence[Desk],
        identity: Identity,
        settings: StoreSettings,
        tickets: Iterator[int],
    ) -> None:
        self.cache = cache
        self.desks = desks
        self.identity = identity
        self.settings = settings
        self.now = 0.0
        self.visits: dict[Waiting, Visit] = {}
        self.fetchings: dict[str, Fetching] = {}
        self.missed: Counter[str] = Counter()
        """Imports that did not happen, by reason."""
        self.counters: Counter[str] = Counter()
        self._tickets = tickets
        self._orders: list[StoreOrder] = []
        self._written: list[Fetching] = []

    @property
    def holding(self) -> bool:
        return any(not visit.over for visit in self.visits.values())

    @property
    def pending(self) -> bool:
        return bool(self._orders) or any(f.active for f in self.fetchings.values())

    @property
    def reading(self) -> bool:
        """Whether ranks will have something to report."""
        return any(f.stage is Stage.READING for f in self.fetchings.values())

    # -- visits ---------------------------------------------------------------------------------

    def holds(self, seq: Waiting, found: Match) -> bool:
        """Whether ``seq`` should wait on for something deeper than ``found``."""
        visit = self.visits.get(seq)
        if visit is None:
            if found.at == seq.known:
                return False
            visit = self.visits[seq] = self._arrive(seq, found)
        if visit.over:
            return False
        if self.now >= visit.deadline:
            self._leave_fetching(visit)
            visit.over, visit.reason = True, "slow"
            self.missed["slow"] += 1
            return False
        visit.over = not self._advance(seq, visit, found)
        return not visit.over

    def leaves(self, seq: Waiting) -> str:
        visit = self.visits.pop(seq, None)
        if visit is None:
            return ""
        self._leave_fetching(visit)
        return visit.reason

    def _arrive(self, seq: Waiting, found: Match) -> Visit:
        chain = Chain(self.identity.digest, seq.root, seq.tokens, self.cache.spec.chunk)
        visit = Visit(chain, self.now + self.settings.wait_s)
        if found.checkpoint is not None:
            self._touch(chain.at(found.at))
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
            desk.reads.note(error, self.now)
            if error:
                visit.reason = error
                self.missed[error] += 1
            elif manifest is not None:
                visit.answers.append((desk, manifest))

        desk.clerk.find(visit.chain, above, answer)

    def _advance(self, seq: Waiting, visit: Visit, found: Match) -> bool:
        """Whether there is something to wait for."""
        fetching = visit.fetching
        if fetching is not None:
            if fetching.active:
                return True
            self._leave_fetching(visit)
            if fetching.stage is Stage.DONE:
                return False
            visit.reason = fetching.reason
            visit.answers = [a for a in visit.answers if a[1] is not fetching.manifest]
            if fetching.reason == "no_room":
                return False
        if visit.asking:
            return True
        best = self._best(visit, found.at)
        if best is None:
            return False
        fetching = self.fetchings.get(best[1].address)
        if fetching is None or not fetching.active:
            fetching = self._fetch(seq, visit.chain, best, found)
            if fetching is None:
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

    def _leave_fetching(self, visit: Visit) -> None:
        fetching, visit.fetching = visit.fetching, None
        if fetching is None:
            return
        fetching.visits -= 1
        # Once frames are taken it is nearly done: whoever asks next will find it.
        if not fetching.visits and fetching.stage in (Stage.READING, Stage.READY):
            self._fail(fetching, "abandoned")

    # -- fetchings ------------------------------------------------------------------------------

    def _fetch(
        self, seq: Waiting, chain: Chain, best: tuple[Desk, Manifest], found: Match
    ) -> Fetching | None:
        """Start to read; None if the manifest is none of this configuration's."""
        desk, manifest = best
        parts = {part.address(chain): part for part in parts_of(self.cache.spec, manifest.at)}
        if not self._own(manifest, chain, list(parts)):
            self._lose(desk, manifest, "foreign")
            return None
        base = found.checkpoint
        if base is not None:
            for part in parts_of(self.cache.spec, base.at):
                parts.pop(part.address(chain), None)
            self.cache.protect(base)
        fetching = Fetching(
            desk, manifest, seq.root, seq.tokens[: manifest.at].copy(), base, parts,
            next(self._tickets), seq,
        )  # fmt: skip
        sums = {entry.address: entry.sums for entry in manifest.segments}
        self._orders.append(
            Fetch(
                fetching.ticket,
                desk.index,
                tuple(Segment(a, p.name, -1, _first(p), p.last) for a, p in parts.items()),
                tuple(tuple(sums[a][rank] for a in parts) for rank in range(self.identity.ranks)),
            )
        )
        self.fetchings[manifest.address] = fetching
        return fetching

    def _own(self, manifest: Manifest, chain: Chain, addresses: list[str]) -> bool:
        """Whether a manifest is what this very configuration would have written."""
        ranks = self.identity.ranks
        return (
            manifest.identity == self.identity.digest
            and manifest.at <= chain.size
            and manifest.address == chain.at(manifest.at)
            and manifest.ranks == ranks
            and manifest.kind in tuple(Kind)
            and [entry.address for entry in manifest.segments] == addresses
            and all(len(entry.sums) == ranks for entry in manifest.segments)
        )

    def _lose(self, desk: Desk, manifest: Manifest, reason: str) -> None:
        """What a tier holds is not usable: let it go, so that it can be written again."""
        self.missed[reason] += 1
        for visit in self.visits.values():
            visit.answers = [a for a in visit.answers if a[1].address != manifest.address]
        if manifest.address in desk.catalog.stored:
            desk.clear(desk.catalog.remove(manifest.address))
        desk.clerk.erase([manifest.address])

    def report(self, report: StoreReport) -> None:
        """One rank has read what it was to read, or could not."""
        fetching = next((f for f in self.fetchings.values() if f.ticket == report.ticket), None)
        if fetching is None or fetching.stage is not Stage.READING:
            return
        fetching.reports.append(report)
        if len(fetching.reports) < self.identity.ranks:
            return
        desk = fetching.desk
        errors = [r for r in fetching.reports if r.error]
        if not errors:
            desk.reads.note("", self.now)
            fetching.stage = Stage.READY
            return
        self._fail(fetching, errors[0].error)
        broken = [report.segment for report in errors if report.segment]
        if not broken:
            desk.reads.note(errors[0].error, self.now)
            return
        # A broken segment breaks whatever consists of it; it is written anew with the next export.
        desk.erase(desk.catalog.lose(broken))
        desk.clear(broken)
        desk.clerk.erase([fetching.manifest.address])

    def _fail(self, fetching: Fetching, reason: str) -> None:
        assert fetching.active
        if fetching.checkpoint is not None:
            self.cache.discard(fetching.checkpoint, reason)
            fetching.checkpoint = None
        fetching.stage, fetching.reason = Stage.FAILED, reason
        self.missed[reason] += 1
        self._retire(fetching)
        self._orders.append(Forget(fetching.ticket))

    def _retire(self, fetching: Fetching) -> None:
        if fetching.base is not None:
            self.cache.unprotect(fetching.base)
            fetching.base = None
        del self.fetchings[fetching.manifest.address]

    # -- plans ----------------------------------------------------------------------------------

    def orders(self, room: int, now: int) -> Iterable[StoreOrder]:
        """Orders for the next plan, which is step ``now``, that copy about ``room`` bytes."""
        orders, self._orders = self._orders, []
        yield from orders
        frame = self.cache.spec.frame_bytes
        for fetching in list(self.fetchings.values()):
            if fetching.stage is Stage.READY:
                self._adopt(fetching, now)
            if fetching.stage is Stage.WRITING and room > 0:
                count = max(room // frame, 1)
                taken, fetching.todo = fetching.todo[:count], fetching.todo[count:]
                room -= len(taken) * frame
                if not fetching.todo:
                    self._written.append(fetching)
                yield Import(fetching.ticket, tuple(taken), not fetching.todo)
        orders, self._orders = self._orders, []
        yield from orders

    def _adopt(self, fetching: Fetching, now: int) -> None:
        """Take frames for what has been read."""
        base, tokens = fetching.base, fetching.tokens
        if base is not None and base.state is not State.PUBLISHED:
            self._fail(fetching, "reset")
            return
        try:
            kind = Kind(fetching.manifest.kind)
            checkpoint = adopt(self.cache, fetching.root, base, tokens, kind, now)
        except OutOfFrames:
            self._fail(fetching, "no_room")
            return
        if checkpoint is None:
            self._fail(fetching, "duplicate")
            return
        fetching.checkpoint, fetching.stage = checkpoint, Stage.WRITING
        fetching.todo = [place(part, a, checkpoint) for a, part in fetching.parts.items()]

    def stepped(self, now: int) -> list[tuple[Checkpoint, Waiting]]:
        """The plan with the last orders was executed: publish what it completed."""
        done = []
        for fetching in self._written:
            checkpoint, fetching.checkpoint = fetching.checkpoint, None
            assert checkpoint is not None
            self.cache.publish(checkpoint, now)
            fetching.stage = Stage.DONE
            self._retire(fetching)
            if checkpoint.state is State.PUBLISHED:
                self.counters["imported"] += 1
                self.counters["imported_tokens"] += checkpoint.at
                done.append((checkpoint, fetching.seq))
        self._written.clear()
        return done

    def failed(self) -> None:
        """A plan was lost, and with it perhaps a read or a write."""
        self._written.clear()
        for fetching in list(self.fetchings.values()):
            self._fail(fetching, "step_failed")

    def yields(self) -> bool:
        """Let go of a base that is held for its frames."""
        for fetching in list(self.fetchings.values()):
            if fetching.base is not None:
                self._fail(fetching, "no_room")
                return True
        return False


def _first(part: Part) -> int:
    """``first`` of a segment that has no place yet."""
    return part.number if part.name == "anchor" else part.first

"""Fetches: checkpoints on their way from a tier into frames.

Decides only: orders for plans go out, reports come back. Whoever wants the same one shares it.

    reading (all ranks) -> ready -> writing (frames taken) -> done
       any rank fails, no room, nobody waits any more -> failed
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from enum import Enum

from merestone.core.adopt import adopt
from merestone.core.cache import Cache, OutOfFrames
from merestone.core.checkpoint import Checkpoint, Kind, Root, State
from merestone.core.index import Tokens
from merestone.core.orders import Fetch, Forget, Import, Segment, StoreOrder
from merestone.sched.plan import StoreReport
from merestone.sched.request import Sequence as Waiting
from merestone.store.chain import ANCHOR, HIDDEN, Chain, Part, parts_of, place
from merestone.store.desk import Desk, Identity
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
    stage: Stage = Stage.READING
    reason: str = ""
    reports: list[StoreReport] = field(default_factory=list)
    checkpoint: Checkpoint | None = None
    todo: list[Segment] = field(default_factory=list)
    visits: int = 0

    @property
    def active(self) -> bool:
        return self.stage not in (Stage.DONE, Stage.FAILED)


class Fetches:
    """All fetchings, by the address of what is fetched."""

    def __init__(self, cache: Cache, identity: Identity, tickets: Iterator[int]) -> None:
        self.cache = cache
        self.identity = identity
        self.missed: Counter[str] = Counter()
        """Imports that did not happen, by reason."""
        self.counters: Counter[str] = Counter()
        self.by_address: dict[str, Fetching] = {}
        self._tickets = tickets
        self._orders: list[StoreOrder] = []
        self._forgets: list[StoreOrder] = []
        """What the plan in flight has ranks forget."""
        self._written: list[Fetching] = []

    @property
    def pending(self) -> bool:
        return bool(self._orders) or any(f.active for f in self.by_address.values())

    @property
    def reading(self) -> bool:
        """Whether ranks will have something to report."""
        return any(f.stage is Stage.READING for f in self.by_address.values())

    def has_room(self, manifest: Manifest, most: int) -> bool:
        """Whether host memory may hold one more, if all that is on its way shall be ``most``
        bytes. One always may; what is on its way already is no more."""
        if not self.by_address or manifest.address in self.by_address:
            return True
        manifests = [manifest, *(fetching.manifest for fetching in self.by_address.values())]
        return sum(entry.size for m in manifests for entry in m.segments) <= most

    def fetch(
        self, seq: Waiting, chain: Chain, desk: Desk, manifest: Manifest, base: Checkpoint | None
    ) -> Fetching | None:
        """Get what a tier has of ``seq``'s tokens, all but what ``base`` shares, or join whoever
        does. None if it is none of this configuration's; the tier then has it no longer."""
        fetching = self.by_address.get(manifest.address)
        if fetching is not None:
            return fetching
        parts = self._parts(manifest, chain)
        if not parts:
            self.missed["foreign"] += 1
            if manifest.address in desk.catalog.stored:
                desk.clear(desk.catalog.remove(manifest.address))
            desk.clerk.erase([manifest.address])
            return None
        if base is not None and base.anchor > manifest.anchor:
            base = None  # rare: accepted drafts ran past the one and not past the other
        if base is not None:
            parts = {a: part for a, part in parts.items() if not self._shares(base, part)}
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
        self.by_address[manifest.address] = fetching
        return fetching

    def _shares(self, base: Checkpoint, part: Part) -> bool:
        """Whether a deeper checkpoint takes the frame of ``part`` over from ``base``: its anchor,
        if it is the same, and pages that are complete there."""
        theirs = next(
            (p for p in parts_of(self.cache.spec, base.at, base.anchor) if p[:2] == part[:2]),
            None,
        )
        if theirs is None or part.name == HIDDEN:
            return False
        if part.name == ANCHOR:
            return theirs.tokens == part.tokens
        (group,) = (g for g in self.cache.spec.groups if g.name == part.name)
        return theirs.last == group.span

    def _parts(self, manifest: Manifest, chain: Chain) -> dict[str, Part]:
        """What a manifest names, by address; nothing if this very configuration would not have
        written it."""
        spec, ranks, at = self.cache.spec, self.identity.ranks, manifest.at
        if not (
            manifest.identity == self.identity.digest
            and manifest.address == (chain.at(at) if 0 < at <= chain.size else "")
            and 0 <= at - manifest.anchor < spec.chunk + spec.drafts
            and manifest.anchor >= 0 == manifest.anchor % spec.chunk
            and manifest.ranks == ranks
            and manifest.kind in tuple(Kind)
            and all(len(entry.sums) == ranks for entry in manifest.segments)
        ):
            return {}
        parts = {part.address(chain): part for part in parts_of(spec, at, manifest.anchor)}
        return parts if [entry.address for entry in manifest.segments] == list(parts) else {}

    def leave(self, fetching: Fetching) -> None:
        """Somebody does not wait for it any more."""
        fetching.visits -= 1
        # Once frames are taken it is nearly done: whoever asks next will find it.
        if not fetching.visits and fetching.stage in (Stage.READING, Stage.READY):
            self._fail(fetching, "abandoned")

    def report(self, report: StoreReport) -> None:
        """One rank has read what it was to read, or could not."""
        fetching = next((f for f in self.by_address.values() if f.ticket == report.ticket), None)
        if fetching is None or fetching.stage is not Stage.READING:
            return
        fetching.reports.append(report)
        if len(fetching.reports) < self.identity.ranks:
            return
        desk = fetching.desk
        errors = [r for r in fetching.reports if r.error]
        if not errors:
            desk.reads.note("", desk.now)
            fetching.stage = Stage.READY
            return
        self._fail(fetching, errors[0].error)
        broken = [address for report in errors for address in report.broken]
        if not broken:
            desk.reads.note(errors[0].error, desk.now)
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
        del self.by_address[fetching.manifest.address]

    # -- plans ----------------------------------------------------------------------------------

    def orders(self, room: int, now: int) -> Iterable[StoreOrder]:
        """Orders for the next plan, which is step ``now``, that copy about ``room`` bytes."""
        yield from self._ordered()
        frame = self.cache.spec.frame_bytes
        for fetching in list(self.by_address.values()):
            if fetching.stage is Stage.READY:
                self._adopt(fetching, now)
            if fetching.stage is Stage.WRITING and room > 0:
                count = max(room // frame, 1)
                taken, fetching.todo = fetching.todo[:count], fetching.todo[count:]
                room -= len(taken) * frame
                if not fetching.todo:
                    self._written.append(fetching)
                yield Import(fetching.ticket, tuple(taken), not fetching.todo)
        yield from self._ordered()

    def _ordered(self) -> list[StoreOrder]:
        orders, self._orders = self._orders, []
        self._forgets += [order for order in orders if isinstance(order, Forget)]
        return orders

    def _adopt(self, fetching: Fetching, now: int) -> None:
        """Take frames for what has been read."""
        base, tokens = fetching.base, fetching.tokens
        if base is not None and base.state is not State.PUBLISHED:
            self._fail(fetching, "reset")
            return
        try:
            kind, anchor = Kind(fetching.manifest.kind), fetching.manifest.anchor
            checkpoint = adopt(self.cache, fetching.root, base, tokens, anchor, kind, now)
        except OutOfFrames:
            self._fail(fetching, "no_room")
            return
        if checkpoint is None:
            self._fail(fetching, "duplicate")
            return
        fetching.checkpoint, fetching.stage = checkpoint, Stage.WRITING
        fetching.todo = [place(part, a, checkpoint) for a, part in fetching.parts.items()]
        shared = set(base.frames().tolist()) if base else set()
        fresh = set(checkpoint.frames().tolist()) - shared
        written = {segment.frame for segment in fetching.todo if segment.part != HIDDEN}
        assert written == fresh, "each fresh frame is written, and no other"

    def stepped(self, now: int) -> list[tuple[Checkpoint, Waiting]]:
        """The plan with the last orders was executed: publish what it completed."""
        done = []
        self._forgets.clear()
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
        """A plan was lost, and with it perhaps a read or a write. What it had ranks forget is said
        again: they would hold it for ever."""
        self._orders += self._forgets
        self._forgets.clear()
        self.fail_all("step_failed")

    def fail_all(self, reason: str) -> None:
        """Nothing that is on its way is wanted."""
        self._written.clear()
        for fetching in list(self.by_address.values()):
            self._fail(fetching, reason)

    def yields(self) -> bool:
        """Let go of a base that is held for its frames."""
        for fetching in list(self.by_address.values()):
            if fetching.base is not None:
                self._fail(fetching, "no_room")
                return True
        return False


def _first(part: Part) -> int:
    """``first`` of a segment that has no place yet."""
    return part.number if part.name == ANCHOR else part.first

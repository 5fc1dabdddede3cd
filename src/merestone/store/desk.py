"""The desk of a tier: which published checkpoints are written to it, when, and at what pace.

Decides only: orders for plans go out, reports come back. Must not touch frames, files or clocks.

    offered -> begun (holds the checkpoint) -> copied (lets it go) -> written -> manifest -> stored
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from merestone.core.cache import Cache
from merestone.core.checkpoint import Checkpoint, State
from merestone.core.geometry import anchor_of
from merestone.core.orders import Erase, Export, Segment, StoreOrder
from merestone.sched.plan import StoreReport
from merestone.store.catalog import Catalog, Waste, blank
from merestone.store.chain import ANCHOR, HIDDEN, Chain, Part, parts_of, place
from merestone.store.clerk import Clerk
from merestone.store.manifest import FORMAT, Manifest

PASSING = ("unreachable", "timeout")
"""Failures of a tier after which a checkpoint, if it is still there, is written later."""
REMEMBERED = 4096
"""Checkpoints written to a shared tier that are remembered, not to be written again."""


@dataclass(frozen=True, slots=True)
class StoreSettings:
    """Bounds. ``wait_s``: how long a request waits for stores. ``step_bytes``: copied out of or
    into frames in one step. ``staging_bytes``: host memory that copies wait in, a tier.
    ``queue``: checkpoints that wait to be written to a tier."""

    wait_s: float = 2.0
    step_bytes: int = 16 << 20
    staging_bytes: int = 256 << 20
    queue: int = 256


@dataclass(frozen=True, slots=True)
class Identity:
    """Whose checkpoints these are. ``digest`` covers whatever bits may depend on: model, dtype,
    layout, device, versions; ``about`` says it to people. ``ranks`` hold a part each."""

    digest: str
    about: str
    ranks: int = 1


class Health:
    """Whether it is worth asking a tier: after a failure not at once, and ever less often."""

    FIRST_S, LAST_S = 0.5, 30.0

    def __init__(self) -> None:
        self._until, self._pause = 0.0, self.FIRST_S

    def good(self, now: float) -> bool:
        return now >= self._until

    def note(self, error: str, now: float) -> None:
        if error:
            self._until, self._pause = now + self._pause, min(2 * self._pause, self.LAST_S)
        else:
            self._until, self._pause = 0.0, self.FIRST_S


@dataclass(slots=True, eq=False)
class Job:
    """A checkpoint on its way: ``todo`` is still to be copied, ``written`` has been reported."""

    checkpoint: Checkpoint
    draft: Manifest
    todo: list[Segment]
    written: dict[str, tuple[int, tuple[bytes, ...]]] = field(default_factory=dict)
    tickets: dict[int, tuple[Segment, ...]] = field(default_factory=dict)
    error: str = ""


class Desk:
    """One tier's exports. ``tickets`` gives numbers that no other order has."""

    def __init__(
        self,
        index: int,
        cache: Cache,
        catalog: Catalog,
        clerk: Clerk,
        identity: Identity,
        settings: StoreSettings,
        tickets: Iterator[int],
    ) -> None:
        self.index = index
        self.name = clerk.tier.name
        self.cache = cache
        self.catalog = catalog
        self.clerk = clerk
        self.identity = identity
        self.settings = settings
        self.now = 0.0
        self.queue: deque[Checkpoint] = deque()
        self.job: Job | None = None
        self.finishing = 0
        self.staged = 0
        self.writes, self.reads = Health(), Health()
        self.counters: Counter[str] = Counter()
        self.lost: Counter[str] = Counter()
        """Checkpoints that were not written, by reason."""
        self._tickets = tickets
        self._reports: dict[int, list[StoreReport]] = {}
        self._erasing: list[str] = []
        self._erased: list[str] = []
        self._held: Checkpoint | None = None
        # Manifests being written when a reset came.
        self._doomed: set[str] = set()

    @property
    def pending(self) -> bool:
        """Whether something will still happen without a new request."""
        return bool(self.job or self.finishing or self._erasing) or self._ready

    @property
    def waiting(self) -> int:
        """Checkpoints that are not stored yet."""
        return len(self.queue) + (self.job is not None) + self.finishing

    @property
    def failing(self) -> bool:
        """Whether the tier is left alone for now."""
        return not (self.writes.good(self.now) and self.reads.good(self.now))

    @property
    def writing(self) -> bool:
        """Whether ranks will have something to report."""
        return self.job is not None and bool(self.job.tickets)

    @property
    def _ready(self) -> bool:
        return bool(self.queue) and self.writes.good(self.now)

    def offer(self, checkpoint: Checkpoint) -> None:
        """A checkpoint was published: write it, in its turn."""
        if len(self.queue) >= self.settings.queue:
            self.queue.popleft()
            self.lost["queue_full"] += 1
        self.queue.append(checkpoint)

    def orders(self, room: int) -> Iterable[StoreOrder]:
        """Orders for the next plan that copy at most about ``room`` bytes."""
        while self.job is None and self._ready:
            self._begin(self.queue.popleft())
        if self._erasing:
            self._erased, self._erasing = self._erasing, []
            yield Erase(self.index, tuple(self._erased))
        if self._held is not None and self._held.state is not State.PUBLISHED:
            self._give_up("reset")
        job = self.job
        frame = self.cache.spec.frame_bytes
        while job is not None and job.todo and room > 0:
            free = (self.settings.staging_bytes - self.staged) // frame
            # At least one, so that a frame larger than the bounds does not stop everything.
            count = min(max(room // frame, 1), max(free, int(self.staged == 0)))
            if count < 1:
                return
            taken, job.todo = job.todo[:count], job.todo[count:]
            ticket = next(self._tickets)
            job.tickets[ticket] = tuple(taken)
            self.staged += len(taken) * frame
            room -= len(taken) * frame
            yield Export(ticket, self.index, tuple(taken))

    def stepped(self) -> None:
        """The plan with the last orders was executed: what it copied need not be held."""
        self._erased = []
        if self.job is not None and not self.job.todo:
            self._let_go()

    def report(self, report: StoreReport) -> bool:
        """Take a report. False if it is not about an order of this desk."""
        job = self.job
        if job is None or report.ticket not in job.tickets:
            return False
        reports = self._reports.setdefault(report.ticket, [])
        reports.append(report)
        if len(reports) == self.identity.ranks:
            self._complete(job, report.ticket, self._reports.pop(report.ticket))
        return True

    def failed(self) -> None:
        """A plan was lost, and with it perhaps an export. What it erased is erased again."""
        self._erased, self._erasing = [], self._erased + self._erasing
        if self.job is not None and self.job.tickets:
            self._give_up("step_failed")

    def yields(self) -> bool:
        """Let go of the checkpoint being copied, for its frames."""
        if self._held is None:
            return False
        self._give_up("no_room")
        return True

    def reset(self) -> None:
        """Keep nothing of what was published so far; a shared tier is not ours to empty."""
        self.queue.clear()
        if self.job is not None:
            self._give_up("reset")
        if self.clerk.shared is None:
            self._doomed |= set(self.catalog.writing)
            self.erase(self.catalog.clear())

    def erase(self, waste: Waste) -> None:
        self.clerk.erase(waste.manifests)
        self.clear(waste.segments)

    def clear(self, segments: Iterable[str]) -> None:
        """Have segments erased, before whatever the next plan writes."""
        self._erasing += segments

    # -- one job --------------------------------------------------------------------------------

    def _begin(self, checkpoint: Checkpoint) -> None:
        if checkpoint.state is not State.PUBLISHED:
            self.lost["evicted"] += 1
            return
        spec, at = self.cache.spec, checkpoint.at
        tokens = self.cache.tokens(checkpoint)
        chain = Chain(self.identity.digest, checkpoint.root, tokens, spec.chunk)
        if chain.at(at) in self.catalog:
            self.catalog.touch(chain.at(at))
            self.clerk.touch(chain.at(at))
            return
        parts = {part.address(chain): part for part in parts_of(spec, at, checkpoint.anchor)}
        draft = Manifest(
            format=FORMAT,
            address=chain.at(at),
            bucket=chain.at(anchor_of(at, spec.chunk)),
            identity=self.identity.digest,
            about=self.identity.about,
            at=at,
            anchor=checkpoint.anchor,
            kind=str(checkpoint.kind),
            ranks=self.identity.ranks,
            segments=blank(
                [(address, self._most(part)) for address, part in parts.items()],
                self.identity.ranks,
            ),
        )
        begun = self.catalog.begin(draft)
        if begun is None:
            self.lost["too_large"] += 1
            return
        missing, waste = begun
        self.erase(waste)
        todo = [place(part, a, checkpoint) for a, part in parts.items() if a in missing]
        self.job = Job(checkpoint, draft, todo)
        if todo:
            self.cache.protect(checkpoint)
            self._held = checkpoint
        else:
            self._finish(self.job)

    def _most(self, part: Part) -> int:
        """The most bytes that a part may take, over all ranks."""
        spec = self.cache.spec
        if part.name == HIDDEN:
            share = spec.frame_bytes // spec.hidden_rows
        elif part.name == ANCHOR:
            share = spec.frame_bytes
        else:
            span = next(group.span for group in spec.groups if group.name == part.name)
            share = -(-spec.frame_bytes * (part.last - part.first) // span)
        return share * self.identity.ranks

    def _complete(self, job: Job, ticket: int, reports: list[StoreReport]) -> None:
        """All ranks have written one slice, or not."""
        segments = job.tickets.pop(ticket)
        self.staged -= len(segments) * self.cache.spec.frame_bytes
        errors = [report.error for report in reports if report.error]
        self.writes.note(errors[0] if errors else "", self.now)
        if errors:
            job.error = job.error or errors[0]
            job.todo.clear()
        else:
            reports.sort(key=lambda report: report.rank)
            for number, segment in enumerate(segments):
                size = sum(report.sizes[number] for report in reports)
                sums = tuple(report.sums[number] for report in reports)
                job.written[segment.address] = size, sums
                self.counters["written_segments"] += 1
                self.counters["written_bytes"] += size
        if not job.todo and not job.tickets:
            if job.error:
                self._give_up(job.error)
            else:
                self._finish(job)

    def _finish(self, job: Job) -> None:
        """Everything is written but the manifest. The next job need not wait for that."""
        self._let_go()
        self.job = None
        manifest = self.catalog.complete(job.draft, job.written)
        self.finishing += 1

        def done(error: str) -> None:
            self.finishing -= 1
            self.writes.note(error, self.now)
            if not error and manifest.address in self._doomed:
                error = "reset"
                self.clerk.erase([manifest.address])
            self._doomed.discard(manifest.address)
            if error:
                self.lost[error] += 1
                self._erasing += self.catalog.cancel(manifest.address)
            else:
                self.counters["stored"] += 1
                self.catalog.commit(manifest.address)
                if self.clerk.shared is not None and len(self.catalog.stored) > REMEMBERED:
                    self.catalog.remove(next(iter(self.catalog.stored)))

        self.clerk.write(manifest, done)

    def _give_up(self, reason: str) -> None:
        job, self.job = self.job, None
        assert job is not None
        self._let_go()
        if reason in PASSING:
            self.queue.appendleft(job.checkpoint)
        else:
            self.lost[reason] += 1
        self.staged -= sum(len(s) for s in job.tickets.values()) * self.cache.spec.frame_bytes
        for ticket in job.tickets:
            self._reports.pop(ticket, None)
        self._erasing += self.catalog.cancel(job.draft.address)

    def _let_go(self) -> None:
        if self._held is not None:
            self.cache.unprotect(self._held)
            self._held = None

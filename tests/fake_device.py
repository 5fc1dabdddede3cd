"""A device double without tensors: its rows hold hashes of the token prefix that wrote them.

Whatever a plan says is checked: every row that a work reads must hold exactly the prefix of the
sequence that reads it, no work writes what another reads or writes, and copies follow launch
order. Its tokens are a function of the prefix, so a wrong restore also shows as a wrong answer.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from merestone.core.cache import CacheSpec
from merestone.core.geometry import GroupSpec
from merestone.core.orders import CopyRows, LoadHidden, PageDelta, SaveHidden
from merestone.sched.plan import StepPlan, StepResult, TokenLogprob, Work, WorkResult
from merestone.spec.accept import accept

VOCAB = 50


def extend_hash(prefix: int, token: int) -> int:
    return hash((prefix, token, 1))


def prefix_hashes(tokens) -> list[int]:
    """[len + 1]: the hash of every prefix."""
    hashes = [hash((0, 0, 0))]
    for token in tokens:
        hashes.append(extend_hash(hashes[-1], int(token)))
    return hashes


def propose(prefix: int, count: int, accuracy: float, choice: int = 0) -> list[int]:
    """Drafts that continue a prefix; each is the oracle's with the probability ``accuracy``."""
    drafts = []
    for _ in range(count):
        token = next_token(prefix, choice)
        if hash((prefix, choice, 3)) % 1000 >= 1000 * accuracy:
            token = (token + 1) % VOCAB
        drafts.append(token)
        prefix = extend_hash(prefix, token)
    return drafts


def next_token(prefix: int, choice: int = 0) -> int:
    return hash((prefix, choice, 2)) % VOCAB


def oracle(tokens, count: int, choice: int = 0) -> list[int]:
    """What any correct engine answers, computed without one."""
    prefix = prefix_hashes(tokens)[-1]
    answer = []
    for _ in range(count):
        answer.append(next_token(prefix, choice))
        prefix = extend_hash(prefix, answer[-1])
    return answer


def small_spec(
    frames: int = 64,
    chunk: int = 8,
    page: int = 4,
    open_page: int = 2,
    anchor_frames: int = 2,
    drafts: int = 0,
) -> CacheSpec:
    """With ``drafts`` there are a lagging group and a window, as if of two drafters."""
    groups = (GroupSpec("full", page=page), GroupSpec("open", page=open_page, open=True))
    if drafts:
        groups += (
            GroupSpec("mtp", page=page, lag=1),
            GroupSpec("window", page=open_page, window=5),
        )
    return CacheSpec(
        frames=frames,
        frame_bytes=1024,
        groups=groups,
        chunk=chunk,
        anchor_frames=anchor_frames,
        hidden_rows=4,
        drafts=drafts,
    )


@dataclass
class FakeSlot:
    hashes: list[int]
    choice: int
    tables: dict[str, dict[int, int]] = field(default_factory=dict)
    hidden: dict[int, int] = field(default_factory=dict)
    drafts: list[int] = field(default_factory=list)

    def bind(self, delta: PageDelta) -> None:
        table = self.tables.setdefault(delta.group, {})
        table.update(enumerate(delta.frames, delta.first))


class FakeDevice:
    """Runs plans against ``spec``. ``rows``: rows computed so far; ``plans``: all plans run.

    It proposes drafts of which ``accuracy`` are right. ``proposed``: what it proposed for which
    prefix and choice.
    """

    def __init__(self, spec: CacheSpec, accuracy: float = 0.5) -> None:
        self.spec = spec
        self.groups = {group.name: group for group in spec.groups}
        self.draft_groups = [g for g in spec.groups if g.name not in ("full", "open")]
        self.memory: dict[tuple[int, object], object] = {}
        self.slots: dict[int, FakeSlot] = {}
        self.rows = 0
        self.plans: list[StepPlan] = []
        self.fail_next = False
        self.bad_slots: set[int] = set()
        self.bad_saves = False
        self.accuracy = accuracy
        self.proposed: dict[tuple[int, int], list[int]] = {}

    def run(self, plan: StepPlan) -> StepResult:
        self.plans.append(plan)
        bad = [self._save(order) for order in plan.saves]
        for slot in plan.frees:
            self.slots.pop(slot, None)
        for admit in plan.admits:
            assert admit.slot not in self.slots, f"slot {admit.slot} is taken"
            self.slots[admit.slot] = slot = FakeSlot(
                prefix_hashes(np.frombuffer(admit.tokens, np.int32)), admit.choice
            )
            for delta in admit.pages:
                slot.bind(delta)
        for order in plan.before:
            self._before(order)
        if self.fail_next:
            self.fail_next = False
            raise RuntimeError("injected")
        self._check_apart(plan.works)
        for work in plan.works:
            self._compute(work)
        bad += [self._save(order) for order in plan.after]
        bad_slots = tuple(sorted(self.bad_slots & {work.slot for work in plan.works}))
        self.bad_slots = set()
        results = tuple(self._result(work, work.slot in bad_slots) for work in plan.works)
        saves = tuple(key for key in bad if key is not None) if self.bad_saves else ()
        self.bad_saves = False
        return StepResult(plan.step, results, saves, bad_slots)

    def _drawn(self, work: Work) -> bool:
        """Whether the last plan drew the id of the work's row."""
        last = self.plans[-1].works if self.plans else ()
        return any(w.slot == work.slot and w.sample and w.end == work.start for w in last)

    def _save(self, order: SaveHidden) -> tuple[int, int]:
        slot = self.slots[order.slot]
        assert order.at in slot.hidden, f"slot {order.slot} has no hidden row of {order.at}"
        self.memory[order.frame, ("hidden", order.row)] = slot.hidden[order.at]
        return order.frame, order.row

    def _before(self, order: CopyRows | LoadHidden) -> None:
        if isinstance(order, LoadHidden):
            value = self.memory[order.frame, ("hidden", order.row)]
            self.slots[order.slot].hidden = {order.at: value}
            return
        assert 0 < order.rows <= self.groups[order.group].span
        for row in range(self.groups[order.group].span):
            key = (order.target, (order.group, row))
            self.memory.pop(key, None)
            if row < order.rows:
                self.memory[key] = self.memory[order.source, (order.group, row)]

    def _cell(self, slot: FakeSlot, group: str, position: int) -> tuple[int, object]:
        page = self.groups[group].span
        frame = slot.tables.get(group, {}).get(position // page)
        assert frame is not None, f"no {group} page for row {position}"
        return frame, (group, position % page)

    def _reads(self, slot: FakeSlot, work: Work) -> dict[tuple[int, object], object]:
        """What the work reads, and what must be there."""
        cells = {}
        if work.start < work.end:
            for p in range(work.start):
                cells[self._cell(slot, "full", p)] = slot.hashes[p + 1]
            for p in range(work.anchor, work.start):
                cells[self._cell(slot, "open", p)] = slot.hashes[p + 1]
        if work.start < work.end or work.propose:
            for group in self.draft_groups:
                # Proposals read the window as it stands after the step's own rows.
                for p in range(group.rows(work.end)[0], work.start - group.lag):
                    cells[self._cell(slot, group.name, p)] = slot.hashes[p + 1 + group.lag]
        if work.start < work.end:
            for part, frame in enumerate(work.anchor_frames):
                cells[frame, "anchor"] = ("anchor", part, slot.hashes[work.anchor])
        return cells

    def _writes(self, slot: FakeSlot, work: Work) -> dict[tuple[int, object], object]:
        cells = {}
        for p in range(work.start, work.end):
            cells[self._cell(slot, "full", p)] = slot.hashes[p + 1]
        for p in range(max(work.start, work.advance), work.end):
            cells[self._cell(slot, "open", p)] = slot.hashes[p + 1]
        for part, frame in enumerate(work.advance_frames):
            cells[frame, "anchor"] = ("anchor", part, slot.hashes[work.advance])
        for group in self.draft_groups:
            floor = group.floor(work.advance)
            for p in range(max(floor, work.start - group.lag, 0), work.end - group.lag):
                cells[self._cell(slot, group.name, p)] = slot.hashes[p + 1 + group.lag]
        return cells | dict.fromkeys(self._uncertain(slot, work), "draft")

    def _uncertain(self, slot: FakeSlot, work: Work) -> list[tuple[int, object]]:
        """Where the rows of drafts under verification go, and those of draft passes."""
        end = work.end + work.drafts
        cells = [
            self._cell(slot, name, p) for name in ("full", "open") for p in range(work.end, end)
        ]
        for group in self.draft_groups:
            first = max(0, work.end - group.lag, group.floor(work.advance))
            last = group.reach(work.end, work.drafts, work.propose > 0)
            cells += [self._cell(slot, group.name, p) for p in range(first, last)]
        return cells

    def _check_apart(self, works: tuple[Work, ...]) -> None:
        read_by: dict[object, int] = {}
        written_by: dict[object, int] = {}
        for work in works:
            slot = self.slots[work.slot]
            for delta in work.pages:
                slot.bind(delta)
            assert len(slot.hashes) > work.end, "a plan runs ahead of the known ids"
            assert work.drafts <= min(len(slot.drafts), self.spec.drafts)
            assert work.sample or not (work.drafts or work.propose)
            chunk = self.spec.chunk
            assert work.anchor % chunk == 0 == work.advance % chunk
            assert work.anchor <= work.start
            assert work.anchor <= work.advance <= work.end
            assert work.end - work.advance < chunk
            assert work.start - work.anchor < chunk + self.spec.drafts
            wanted = self.spec.anchor_frames
            assert len(work.anchor_frames) == (wanted if work.anchor else 0)
            assert len(work.advance_frames) == (wanted if work.advance > work.anchor else 0)
            for cell in self._reads(slot, work):
                read_by.setdefault(cell, work.slot)
            for cell in self._writes(slot, work):
                assert cell not in written_by, f"{cell} is written twice"
                written_by[cell] = work.slot
        for cell, writer in written_by.items():
            assert read_by.get(cell, writer) == writer, f"{cell} is read and written"

    def _compute(self, work: Work) -> None:
        slot = self.slots[work.slot]
        for cell, wanted in self._reads(slot, work).items():
            found = self.memory.get(cell)
            assert found == wanted, f"{cell} holds {found}, not the row of its reader"
        self.memory.update(self._writes(slot, work))
        if work.start < work.end:
            first = max(work.start, work.advance - 1)
            if any(group.lag for group in self.draft_groups):
                assert work.start in (0, *slot.hidden), "the row before the pass is not at hand"
            rows = {p + 1: slot.hashes[p + 1] for p in range(first, work.end)}
            slot.hidden = self._kept(slot, work) | rows
            self.rows += work.end - work.start + work.drafts

    def _kept(self, slot: FakeSlot, work: Work) -> dict[int, int]:
        """Hidden rows that a pass leaves in place."""
        return {}

    def _result(self, work: Work, bad: bool) -> WorkResult:
        slot = self.slots[work.slot]
        scored = tuple(TokenLogprob(target, -1.0) for target in work.targets)
        if not work.sample:
            return WorkResult(work.slot, (), (), scored)
        assert len(slot.hashes) == work.end + 1
        if bad:  # what it draws, and may feed itself, means nothing
            slot.hashes.append(extend_hash(slot.hashes[-1], -1))
            return WorkResult(work.slot, (), (), scored)

        def draw(place: int) -> int:
            token = next_token(slot.hidden[work.end + place], slot.choice)
            slot.hashes.append(extend_hash(slot.hashes[-1], token))
            # The row of the draft, which turns out to be that of the token.
            slot.hidden[work.end + place + 1] = slot.hashes[-1]
            return token

        tokens = accept(slot.drafts[: work.drafts], draw)
        del slot.hidden[work.end + len(tokens)]
        self._observe(slot, work, work.end + len(tokens) - 1)
        slot.drafts = propose(slot.hashes[-1], work.propose, self.accuracy, slot.choice)
        if work.propose:
            self.proposed[slot.hashes[-1], slot.choice] = slot.drafts
        return WorkResult(work.slot, tokens, (), scored)

    def _observe(self, slot: FakeSlot, work: Work, committed: int) -> None:
        """Accepted rows are what they should be, and a lagging group catches up to propose."""
        for p in range(work.end, committed):
            for name in ("full", "open"):
                self.memory[self._cell(slot, name, p)] = slot.hashes[p + 1]
        for group in self.draft_groups:
            last = committed if work.propose else committed - group.lag
            for p in range(max(0, work.end - group.lag, group.floor(work.advance)), last):
                cell = self._cell(slot, group.name, p)
                self.memory[cell] = slot.hashes[p + 1 + group.lag]


class LeadingFake(FakeDevice):
    """Takes a plan before the result of the last one, which it then feeds itself."""

    def __init__(self, spec: CacheSpec, accuracy: float = 0.5) -> None:
        super().__init__(spec, accuracy)
        self.flying: list[StepPlan] = []
        self.lost = False

    def _kept(self, slot: FakeSlot, work: Work) -> dict[int, int]:
        """The row before one that runs ahead: the answer may have ended there."""
        ahead = len(self.flying) > 1 and work.start in slot.hidden
        return {work.start: slot.hidden[work.start]} if ahead else {}

    def launch(self, plan: StepPlan) -> Callable[[], StepResult]:
        assert len(self.flying) < 2, "a plan is two ahead"
        if self.flying:
            rows_only = StepPlan(plan.step, before=plan.before, works=plan.works)
            assert plan == rows_only, "a plan ahead has more than rows"
        for work in plan.works:
            in_flight = bool(self.flying) and self._drawn(work)
            assert work.fed == in_flight, "the host cannot know what is not drawn yet"
            assert not work.fed or work.advance == work.anchor, "an anchor before its ids"
            if not work.fed:
                hashes = self.slots[work.slot].hashes if work.slot in self.slots else []
                for place, token in enumerate(work.tokens, work.start):
                    if place + 1 < len(hashes) and not plan.admits:
                        assert hashes[place + 1] == extend_hash(hashes[place], token)
        self.flying.append(plan)
        result: StepResult | None = None
        if not self.lost:
            try:
                result = self.run(plan)
            except RuntimeError:
                self.lost = True

        def land() -> StepResult:
            assert self.flying[0] is plan, "results are taken in order"
            del self.flying[0]
            if result is None:
                self.flying.clear()
                self.lost = False
                raise RuntimeError("injected")
            return result

        return land

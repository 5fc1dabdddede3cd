"""A model of what lies in frames: it executes plans as a device does and remembers who wrote what.

Every row carries a digest of the tokens that determine it, so a wrong sharing shows as a wrong
digest and a missing copy as poison.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from merestone.core.cache import Cache, Extension, OutOfFrames
from merestone.core.checkpoint import Checkpoint, Lease
from merestone.core.geometry import GroupSpec
from merestone.core.orders import LoadHidden, Order, PageDelta, SaveHidden, check_disjoint

POISON = -1


def digests(root: object, tokens: Sequence[int]) -> list[int]:
    """Digest i stands for the first i tokens under ``root``."""
    found = [hash(("merestone", root))]
    for token in tokens:
        found.append(hash((found[-1], token)))
    return found


@dataclass(eq=False)
class Run:
    """A request: its tokens, and how many of them are computed for good (``done``)."""

    lease: Lease
    tokens: list[int]
    done: int
    sealed: int = 0
    digest: list[int] = field(default_factory=list)
    table: dict[str, dict[int, int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.digest = digests(self.lease.root, self.tokens)

    def array(self) -> np.ndarray:
        return np.array(self.tokens, np.int32)

    def replace_tail(self, keep: int, tail: Sequence[int]) -> None:
        self.tokens = [*self.tokens[:keep], *tail]
        self.digest = digests(self.lease.root, self.tokens)


@dataclass(frozen=True)
class Planned:
    """One work of the plan: rows [start, end) of ``run``, and ``drafts`` more of which the first
    ``accepted`` turn out to be right."""

    run: Run
    start: int
    end: int
    old_anchor: int
    old_anchor_frames: tuple[int, ...]
    extension: Extension
    drafts: int
    accepted: int


class FrameContents:
    """Frames' contents and the plan being made."""

    def __init__(self, cache: Cache) -> None:
        self.cache = cache
        self.rows: dict[tuple[int, int], object] = {}
        self.works: list[Planned] = []
        self.loads: list[Run] = []
        self.saves: list[tuple[Checkpoint, int]] = []
        self.digest_of: dict[int, list[int]] = {}

    def bind(self, run: Run) -> None:
        """The request takes a slot; a restored one loads its hidden row in the same plan."""
        run.table = {group.name: {} for group in self.cache.spec.groups}
        self._apply(run, self.cache.deltas(run.lease))
        if run.lease.origin is not None:
            self.loads.append(run)

    def plan(
        self, run: Run, end: int, anchor: int, now: int, drafts: int = 0, accepted: int = 0
    ) -> tuple[Extension | None, OutOfFrames | None]:
        """Extend the lease and plan its work, or say why there is no room."""
        lease = run.lease
        old = lease.anchor, lease.anchor_frames
        try:
            extension = self.cache.extend(lease, max(lease.rows, end), anchor, now, drafts, drafts)
        except OutOfFrames as refusal:
            return None, refusal
        self.works.append(Planned(run, run.done, end, *old, extension, drafts, accepted))
        run.done = end
        return extension, None

    def save(self, checkpoint: Checkpoint, run: Run) -> None:
        self.saves.append((checkpoint, run.digest[checkpoint.at]))
        self.digest_of[checkpoint.id] = run.digest[: checkpoint.at + 1]

    def busy(self, run: Run) -> bool:
        return run in self.loads or any(work.run is run for work in self.works)

    def execute(self) -> list[Checkpoint]:
        """Run the plan; returns the checkpoints whose hidden rows were saved."""
        before: list[Order] = [copy for work in self.works for copy in work.extension.copies]
        for slot, run in enumerate(self.loads):
            origin = run.lease.origin
            assert origin is not None
            before.append(LoadHidden(slot, origin.at, *origin.hidden))
            assert self.rows[origin.hidden] == ("hidden", run.digest[origin.at])
        check_disjoint(tuple(before))
        old_tables = [{name: dict(t) for name, t in work.run.table.items()} for work in self.works]
        for work in self.works:
            self._admit_pages(work)
        for work, table in zip(self.works, old_tables, strict=True):
            self._check_before(work, table)
        for work in self.works:
            self._write(work)
            self.cache.commit(work.run.lease, work.run.lease.rows + work.accepted)
            work.run.done = work.end + work.accepted
        for work, table in zip(self.works, old_tables, strict=True):
            # Whatever ran first: nobody wrote over what another work of this plan reads.
            self._check_before(work, table)
            self.check_run(work.run)
        check_disjoint(tuple(SaveHidden(i, c.at, *c.hidden) for i, (c, _) in enumerate(self.saves)))
        for checkpoint, digest in self.saves:
            self.rows[checkpoint.hidden] = ("hidden", digest)
        saved = [checkpoint for checkpoint, _ in self.saves]
        self.works, self.loads, self.saves = [], [], []
        return saved

    def check_run(self, run: Run) -> None:
        """The device's tables lead to what the request has computed so far."""
        lease = run.lease
        self._check_rows(run.table, run.digest, run.done, lease.anchor)
        self._check_anchor(lease.anchor, lease.anchor_frames, run.digest)

    def check_checkpoint(self, checkpoint: Checkpoint) -> None:
        """Everything that a restore of ``checkpoint`` would read is right."""
        digest = self.digest_of[checkpoint.id]
        table = {
            name: {first + i: frame for i, frame in enumerate(frames.tolist())}
            for name, (first, frames) in checkpoint.pages.items()
        }
        self._check_rows(table, digest, checkpoint.at, checkpoint.anchor)
        self._check_anchor(checkpoint.anchor, checkpoint.anchor_frames, digest)
        assert self.rows[checkpoint.hidden] == ("hidden", digest[checkpoint.at])

    def _admit_pages(self, work: Planned) -> None:
        """Copies, then poison in the other rows of fresh pages, then the new table entries."""
        spans = {group.name: group.span for group in self.cache.spec.groups}
        kept = {copy.target: copy.rows for copy in work.extension.copies}
        for copy in work.extension.copies:
            assert 1 <= copy.rows < spans[copy.group]
            for row in range(copy.rows):
                self.rows[copy.target, row] = self.rows.get((copy.source, row), POISON)
        for delta in work.extension.deltas:
            for frame in delta.frames:
                for row in range(kept.get(frame, 0), spans[delta.group]):
                    self.rows[frame, row] = POISON
        self._apply(work.run, work.extension.deltas)

    def _apply(self, run: Run, deltas: Sequence[PageDelta]) -> None:
        for delta in deltas:
            for number, frame in enumerate(delta.frames, delta.first):
                run.table[delta.group][number] = frame

    def _write(self, work: Planned) -> None:
        """Rows of every group, as late as its lag says and from the floor of the new anchor on."""
        run, lease = work.run, work.run.lease
        for group in self.cache.spec.groups:
            start = max(0, work.start - group.lag, group.floor(lease.anchor))
            known = work.end + work.accepted - group.lag
            for row in range(start, group.reach(work.end, work.drafts, work.drafts > 0)):
                frame = run.table[group.name][row // group.span]
                tag = self._tag(group, row, run.digest) if row < known else POISON
                self.rows[frame, row % group.span] = tag
        for part, frame in enumerate(work.extension.advance_frames):
            self.rows[frame, 0] = ("anchor", part, run.digest[lease.anchor])

    def _check_before(self, work: Planned, table: dict[str, dict[int, int]]) -> None:
        """What the step reads of earlier steps: by the old table, and the old anchor."""
        self._check_rows(table, work.run.digest, work.start, work.old_anchor)
        if work.extension.advance_frames != work.old_anchor_frames:
            self._check_anchor(work.old_anchor, work.old_anchor_frames, work.run.digest)

    def _check_rows(
        self, table: dict[str, dict[int, int]], digest: list[int], at: int, anchor: int
    ) -> None:
        for group in self.cache.spec.groups:
            for row in range(*group.rows(at, anchor)):
                frame = table[group.name][row // group.span]
                found = self.rows.get((frame, row % group.span))
                assert found == self._tag(group, row, digest), (
                    f"row {row} of {group} under {at} tokens, anchor {anchor}: {found}"
                )

    def _check_anchor(self, anchor: int, frames: tuple[int, ...], digest: list[int]) -> None:
        for part, frame in enumerate(frames):
            assert self.rows.get((frame, 0)) == ("anchor", part, digest[anchor])

    @staticmethod
    def _tag(group: GroupSpec, row: int, digest: list[int]) -> object:
        return (group.name, row, digest[row + 1 + group.lag])

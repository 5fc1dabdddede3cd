"""A small paged arena for tests of layers: hostile memory, many sequences, any legal schedule.

Everything is NaN before it is written and again after it is given up; frames are handed out in a
random order; a sequence may be forked, its pages shared up to a boundary and copied where it
writes. Legal anchors: multiples of the chunk, advanced at once or late. One arena is one rank's:
with several, each makes the same choices.
"""

from __future__ import annotations

import math
from collections.abc import Sequence as Rows
from dataclasses import dataclass, field

import torch
from torch import Tensor

from merestone.core.geometry import GroupSpec
from merestone.layers.state import Batch, Field, Segment
from merestone.models.interface import CHUNK, Model
from merestone.parallel.tokens import Shards

PAGES = {"open": 16, "full": 32}
GROUPS = ("open", "full")
RUN = 8
"""Tokens that follow each other on a rank, where ranks share them."""


class Arena:
    """StateViews over ``frames`` frames of each home. Frame 0 is nobody's and stays NaN.

    ``ranks`` of them share the rows of full attention, this is number ``rank``."""

    def __init__(
        self, fields: Rows[Field], frames: int, seed: int = 0, ranks: int = 1, rank: int = 0
    ) -> None:
        self._shards = {
            "open": Shards(GroupSpec("open", PAGES["open"])),
            "full": Shards(GroupSpec("full", PAGES["full"], ranks, RUN), rank),
        }
        self.source = torch.Generator().manual_seed(seed)
        self._rows: dict[tuple[int, str], Tensor] = {}
        self._home: dict[tuple[int, str], str] = {}
        for f in fields:
            shape = f.shape if f.home == "anchor" else (PAGES[f.home] // f.every, *f.shape)
            self._home[f.layer, f.name] = f.home
            self._rows[f.layer, f.name] = torch.full((frames, *shape), math.nan, dtype=f.dtype)
        self._free = {
            home: (torch.randperm(frames - 1, generator=self.source) + 1).tolist()
            for home in ("anchor", *GROUPS)
        }

    def page(self, group: str) -> int:
        return PAGES[group]

    def span(self, group: str) -> int:
        return self._shards[group].spec.span

    def shards(self, group: str) -> Shards:
        return self._shards[group]

    def rows(self, layer: int, name: str) -> Tensor:
        return self._rows[layer, name]

    def read_anchor(self, layer: int, name: str, frames: Tensor) -> Tensor:
        return self._rows[layer, name][frames[:, 0]]

    def write_anchor(self, layer: int, name: str, frames: Tensor, value: Tensor) -> None:
        assert len(set(frames[:, 0].tolist())) == frames.shape[0]
        self._rows[layer, name][frames[:, 0]] = value

    def take(self, home: str) -> int:
        frame: int = self._free[home].pop()
        return frame

    def give(self, home: str, frame: int) -> None:
        self._free[home].insert(0, frame)
        for key in self._of(home):
            self._rows[key][frame] = math.nan

    def copy(self, home: str, frame: int, rows: int) -> int:
        """A new frame with the first ``rows`` tokens of a page and NaN after them."""
        target = self.take(home)
        shards = self._shards[home]
        own = shards.spec.local_count(rows, shards.rank)
        for key in self._of(home):
            pages = self._rows[key]
            count = own * pages.shape[1] // PAGES[home]  # complete rows of a pooled field
            pages[target, :count] = pages[frame, :count]
        return target

    def _of(self, home: str) -> list[tuple[int, str]]:
        return [key for key, own in self._home.items() if own == home]


@dataclass(slots=True)
class Sequence:
    """One sequence: its ids, how far it is computed, and what it holds. ``shared`` frames are
    another's to write, ``lent`` ones its own, but read by others: neither may be given up."""

    ids: list[int]
    length: int = 0
    anchor: int = 0
    anchor_frame: int | None = None
    shared: set[tuple[str, int]] = field(default_factory=set)
    lent: set[tuple[str, int]] = field(default_factory=set)
    pages: dict[str, dict[int, int]] = field(default_factory=lambda: {g: {} for g in GROUPS})


def fork(parent: Sequence, ids: list[int]) -> Sequence:
    """A sequence with the same past; ``ids`` is the whole new text. Frames are shared."""
    assert ids[: parent.length] == parent.ids[: parent.length]
    pages = {group: dict(table) for group, table in parent.pages.items()}
    shared = {(group, frame) for group, table in pages.items() for frame in table.values()}
    parent.lent |= shared
    return Sequence(ids, parent.length, parent.anchor, parent.anchor_frame, shared, pages=pages)


def step(
    model: Model, arena: Arena, work: Rows[tuple[Sequence, int]], late: Rows[bool] | None = None
) -> list[Tensor]:
    """Compute the next ``n`` rows of each sequence in one batch; hidden rows [n, D] of each.

    ``late``: leave this sequence's anchor where it is, although it could move.
    """
    segments: list[Segment] = []
    row = 0
    for i, (sequence, count) in enumerate(work):
        end = sequence.length + count
        advance = sequence.anchor if late and late[i] else end // CHUNK * CHUNK
        segments.append(_segment(arena, sequence, row, end, advance))
        row += count
    batch = Batch(
        tokens=torch.tensor([t for s, n in work for t in s.ids[s.length : s.length + n]]),
        positions=torch.cat([torch.arange(s.length, s.length + n) for s, n in work]),
        segments=tuple(segments),
        chunk=CHUNK,
        scratch={},
    )
    hidden = model.forward(batch, arena)
    for (sequence, _), segment in zip(work, segments, strict=True):
        _commit(arena, sequence, segment)
    return list(torch.split(hidden, [count for _, count in work]))


def _segment(arena: Arena, s: Sequence, row: int, end: int, advance: int) -> Segment:
    first = {"open": max(s.length, advance), "full": s.length}
    tables = {}
    for group in GROUPS:
        page, table = arena.span(group), s.pages[group]
        for number in range(first[group] // page, -(-end // page)):
            if number not in table:
                table[number] = arena.take(group)
            elif (group, table[number]) in s.shared:
                table[number] = arena.copy(group, table[number], s.length - number * page)
        full = [table.get(number, -1) for number in range(-(-end // page))]
        tables[group] = torch.tensor(full)
    target = [arena.take("anchor")] if advance > s.anchor else []
    source = [] if s.anchor_frame is None else [s.anchor_frame]
    return Segment(
        row=row,
        start=s.length,
        end=end,
        pages=tables,
        anchor=s.anchor,
        anchor_frames=torch.tensor(source, dtype=torch.int64),
        advance=advance,
        advance_frames=torch.tensor(target, dtype=torch.int64),
    )


def _commit(arena: Arena, s: Sequence, segment: Segment) -> None:
    s.length = segment.end
    if segment.advance == s.anchor:
        return
    table = s.pages["open"]
    for number in [n for n in table if (n + 1) * PAGES["open"] <= segment.advance]:
        frame = table.pop(number)
        if ("open", frame) not in s.shared | s.lent:
            arena.give("open", frame)
    s.anchor, s.anchor_frame = segment.advance, int(segment.advance_frames[0])

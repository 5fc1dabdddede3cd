"""Drafters without a target or an engine: made-up hidden rows, hostile pages, any schedule.

Pages are NaN until they are written, frames are handed out in a random order, and several texts
share them. What a drafter says of a text must depend on the text alone.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from merestone.core.geometry import GroupSpec
from merestone.layers.state import Batch, Segment
from merestone.models.interface import CHUNK
from merestone.parallel.tokens import Shards
from merestone.sched.plan import SamplingParams
from merestone.spec.interface import Continuation, Drafter, DraftRows

PAGE = 16


class Pages:
    """StateViews over a drafter's fields. Frame 0 is nobody's and stays NaN."""

    def __init__(self, drafter: Drafter, frames: int = 256, seed: int = 0) -> None:
        self._fields = {(f.layer, f.name): f for f in drafter.fields()}
        self._rows = {
            key: torch.full((frames, PAGE // f.every, *f.shape), math.nan, dtype=f.dtype)
            for key, f in self._fields.items()
        }
        source = torch.Generator().manual_seed(seed)
        self._free = (torch.randperm(frames - 1, generator=source) + 1).tolist()
        self.windows = {group.name: group.window for group in drafter.groups}
        self.groups = tuple(self.windows)

    def page(self, group: str) -> int:
        assert group in self.groups
        return PAGE

    def shards(self, group: str) -> Shards:
        return Shards(GroupSpec(group, self.page(group)))

    def rows(self, layer: int, name: str) -> Tensor:
        return self._rows[layer, name]

    def read_anchor(self, layer: int, name: str, frames: Tensor) -> Tensor:
        raise AssertionError("a drafter has no anchors")

    def write_anchor(self, layer: int, name: str, frames: Tensor, value: Tensor) -> None:
        raise AssertionError("a drafter has no anchors")

    def bytes(self) -> list[Tensor]:
        """A copy of everything, to compare."""
        return [rows.view(torch.uint8).clone() for rows in self._rows.values()]

    def spoil(self, frame: int) -> None:
        """Somebody else has the frame now."""
        for rows in self._rows.values():
            rows[frame] = math.nan

    def take(self) -> int:
        frame: int = self._free.pop()
        return frame

    def copy(self, frame: int, rows: int) -> int:
        """A new frame with the first ``rows`` tokens of a page, NaN after them."""
        target = self.take()
        for key, f in self._fields.items():
            self._rows[key][target, : rows // f.every] = self._rows[key][frame, : rows // f.every]
        return target


@dataclass(slots=True)
class Text:
    """A sequence that a target is supposed to have computed: ids [L + 1], hidden [L, D], features
    [L, F] or None. ``done`` rows are observed."""

    ids: list[int]
    hidden: Tensor
    features: Tensor | None
    done: int = 0
    tables: dict[str, list[int]] = field(default_factory=dict)
    params: SamplingParams = field(default_factory=SamplingParams)

    def pages(self, windows: Mapping[str, int | None], anchor: int) -> dict[str, Tensor]:
        """Page tables, without the pages that no boundary from ``anchor`` on has in its window."""
        tables = {}
        for group, window in windows.items():
            gone = 0 if window is None else max(anchor - window, 0) // PAGE
            frames = [-1] * gone + self.tables[group][gone:]
            tables[group] = torch.tensor(frames + [-1] * (64 - len(frames)))
        return tables


def make_text(length: int, seed: int, vocab: int, hidden: int, features: int, dtype: torch.dtype):
    source = torch.Generator().manual_seed(seed)
    ids = torch.randint(1, vocab, (length + 1,), generator=source).tolist()
    rows = torch.randn(length, hidden + features, generator=source).to(dtype)
    return Text(ids, rows[:, :hidden], rows[:, hidden:] if features else None)


def fork(text: Text, at: int, pages: Pages) -> Text:
    """The same text again, restored with ``at`` rows: full pages shared, the last one copied."""
    tables = {}
    for group, frames in text.tables.items():
        whole, rest = divmod(at, PAGE)
        tables[group] = frames[:whole] + ([pages.copy(frames[whole], rest)] if rest else [])
    return Text(text.ids, text.hidden, text.features, at, tables, text.params)


def step(
    drafter: Drafter, pages: Pages, work: Sequence[tuple[Text, int, bool]], depth: int
) -> list[list[int]]:
    """Observe rows [done, end) of each text; proposals of those that want some, after row end - 1.

    A text that has observed everything up to ``end`` observes nothing where the drafter has no
    lag, else its last row once more.
    """
    segments, tokens, hidden, features, wanting = [], [], [], [], []
    row = 0
    for text, end, wants in work:
        for group in pages.groups:
            frames = text.tables.setdefault(group, [])
            while len(frames) < -(-end // PAGE):
                frames.append(pages.take())
        start = min(text.done, end - drafter.lag)
        anchor, advance = start // CHUNK * CHUNK, end // CHUNK * CHUNK
        table = text.pages(pages.windows, advance)
        if start < end:
            none = torch.zeros(0, dtype=torch.int64)
            segments.append(Segment(row, start, end, table, anchor, none, advance, none))
            tokens += text.ids[start + 1 : end + 1]
            hidden.append(text.hidden[start:end])
            if text.features is not None:
                features.append(text.features[start:end])
        if wants:
            last = row + end - start - 1 if start < end else -1
            wanting.append(Continuation(end, text.ids[end], depth, last, table, text.params, 0))
        row += max(end - start, 0)
        text.done = end
    positions = [torch.arange(s.start, s.end) for s in segments]
    empty = torch.zeros(0, dtype=torch.int64)
    width = work[0][0].hidden
    batch = Batch(
        torch.tensor(tokens, dtype=torch.int64),
        torch.cat([empty, *positions]),
        tuple(segments),
        CHUNK,
        {},
    )
    wide = work[0][0].features
    rows = DraftRows(
        batch,
        torch.cat([width[:0], *hidden]),
        None if wide is None else torch.cat([wide[:0], *features]),
        tuple(wanting),
    )
    drafter.observe(rows, pages)
    if not wanting:
        return []
    return drafter.propose(rows, pages).ids.tolist()


def everywhere(
    drafter: Drafter, pages: Pages, text: Text, positions: Sequence[int]
) -> list[list[int]]:
    """All of a text observed at once, then proposals after each of ``positions``."""
    length, none = len(text.hidden), torch.zeros(0, dtype=torch.int64)
    for group in pages.groups:
        text.tables[group] = [pages.take() for _ in range(-(-length // PAGE))]
    table = {group: torch.tensor(frames) for group, frames in text.tables.items()}
    wanting = [
        Continuation(p, text.ids[p], drafter.depth, p - 1, table, text.params, 0) for p in positions
    ]
    batch = Batch(
        torch.tensor(text.ids[1 : length + 1]),
        torch.arange(length),
        (Segment(0, 0, length, table, 0, none, 0, none),),
        CHUNK,
        {},
    )
    rows = DraftRows(batch, text.hidden, text.features, ())
    drafter.observe(rows, pages)
    found: list[list[int]] = []
    for first in range(0, len(wanting), 32):
        rows.continuations = tuple(wanting[first : first + 32])
        found += drafter.propose(rows, pages).ids.tolist()
    return found

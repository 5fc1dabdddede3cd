"""Slots: the dense state of each running request on the device.

Knows page tables, ids and the last hidden row of a slot. Must not know frames' owners.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from merestone.core.orders import PageDelta
from merestone.layers.state import Segment
from merestone.ops.sampler import Draft
from merestone.sched.plan import Admit, SamplingParams, TokenLogprob, Work


@dataclass(slots=True)
class Slot:
    """One running request: ids, page tables and last hidden rows.

    ``ids`` [capacity] int64, the first ``known`` of them valid, ``prompt`` of those the prompt.
    ``hidden`` [n, hidden_size] are the rows of positions below ``hidden_at``, since the anchor,
    those of rejected drafts included; ``before`` is the row before the last pass. ``drafts`` are
    ids proposed for the positions from ``known`` on, ``chances`` the candidates [n, M] and
    probabilities [n, M] that they were drawn with.
    """

    ids: Tensor
    known: int
    prompt: int
    choice: int
    params: SamplingParams
    tables: dict[str, Tensor] = field(default_factory=dict)
    hidden: Tensor | None = None
    hidden_at: int = -1
    before: Tensor | None = None
    drafts: list[int] = field(default_factory=list)
    chances: tuple[Tensor, Tensor] | None = None
    scored: tuple[TokenLogprob, ...] = ()

    @classmethod
    def admit(cls, admit: Admit, groups: tuple[str, ...]) -> Slot:
        tables = {group: torch.full((16,), -1, dtype=torch.int64) for group in groups}
        ids = torch.from_numpy(np.frombuffer(admit.tokens, np.int32).astype(np.int64))
        slot = cls(ids, len(ids), admit.prompt, admit.choice, admit.params, tables)
        for delta in admit.pages:
            slot.bind(delta)
        return slot

    def append(self, token: int) -> None:
        """One more id; the buffer grows by doubling."""
        if self.known == len(self.ids):
            self.ids = torch.cat([self.ids, torch.zeros_like(self.ids)])
        self.ids[self.known] = token
        self.known += 1

    def hidden_row(self, at: int) -> Tensor:
        """[hidden_size], the row of position ``at - 1``."""
        assert self.hidden is not None
        place = len(self.hidden) - 1 - (self.hidden_at - at)
        assert 0 <= place < len(self.hidden), f"no hidden row of position {at - 1}"
        return self.hidden[place]

    def next_ids(self, first: int, end: int) -> Tensor:
        """The ids that follow positions [first, end), -1 where it is not known."""
        ids = torch.full((end - first,), -1, dtype=torch.int64)
        known = self.ids[first + 1 : min(end + 1, self.known)]
        ids[: len(known)] = known
        return ids

    def draft(self, place: int) -> Draft:
        """A proposed id, and how it was drawn."""
        if self.chances is None:
            return Draft(self.drafts[place])
        candidates, probabilities = self.chances
        return Draft(self.drafts[place], candidates[place], probabilities[place])

    def bind(self, delta: PageDelta) -> None:
        """Take over changed entries of a page table; tables grow by doubling."""
        table = self.tables[delta.group]
        end = delta.first + len(delta.frames)
        if end > len(table):
            grown = torch.full((max(end, 2 * len(table)),), -1, dtype=torch.int64)
            grown[: len(table)] = table
            self.tables[delta.group] = table = grown
        table[delta.first : end] = torch.tensor(delta.frames, dtype=torch.int64)

    def segment(self, work: Work, row: int) -> Segment:
        return Segment(
            row=row,
            start=work.start,
            end=work.end + work.drafts,
            pages=self.tables,
            anchor=work.anchor,
            anchor_frames=torch.tensor(work.anchor_frames, dtype=torch.int64),
            advance=work.advance,
            advance_frames=torch.tensor(work.advance_frames, dtype=torch.int64),
        )

    def draft_segment(self, work: Work, row: int, start: int, end: int) -> Segment:
        """Rows [start, end) of a drafter, which has no anchors: those of the target say which of
        its pages are there."""
        none = torch.zeros(0, dtype=torch.int64)
        return Segment(row, start, end, self.tables, work.anchor, none, work.advance, none)

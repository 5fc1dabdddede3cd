"""Slots: the dense state of each running request on the device.

Knows page tables, ids and the last hidden row of a slot. Must not know frames' owners.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from merestone.core.orders import PageDelta
from merestone.layers.state import Segment
from merestone.sched.plan import Admit, SamplingParams, TokenLogprob, Work


@dataclass(slots=True)
class Slot:
    """One running request: ids, page tables and last hidden rows.

    ``ids`` [capacity] int64, the first ``known`` of them valid, ``prompt`` of those the prompt.
    ``hidden`` [n, hidden_size] are the rows of positions below ``hidden_at``, since the anchor.
    """

    ids: Tensor
    known: int
    prompt: int
    choice: int
    params: SamplingParams
    tables: dict[str, Tensor] = field(default_factory=dict)
    hidden: Tensor | None = None
    hidden_at: int = -1
    scored: tuple[TokenLogprob, ...] = ()

    @classmethod
    def admit(cls, admit: Admit, groups: tuple[str, ...]) -> Slot:
        tables = {group: torch.full((16,), -1, dtype=torch.int64) for group in groups}
        ids, known = torch.tensor(admit.tokens, dtype=torch.int64), len(admit.tokens)
        slot = cls(ids, known, admit.prompt, admit.choice, admit.params, tables)
        for delta in admit.pages:
            slot.bind(delta)
        return slot

    def append(self, token: int) -> None:
        """One more id; the buffer grows by doubling."""
        if self.known == len(self.ids):
            self.ids = torch.cat([self.ids, torch.zeros_like(self.ids)])
        self.ids[self.known] = token
        self.known += 1

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
            end=work.end,
            pages=self.tables,
            anchor=work.anchor,
            anchor_frames=torch.tensor(work.anchor_frames, dtype=torch.int64),
            advance=work.advance,
            advance_frames=torch.tensor(work.advance_frames, dtype=torch.int64),
        )

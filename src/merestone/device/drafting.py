"""Drafting: after a step's tokens are drawn, the drafter observes what they committed and proposes.

Knows the drafter, slots and works. Must not know how drafts are verified.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from merestone.device.slots import Slot
from merestone.layers.state import Batch, Segment, StateViews
from merestone.sched.plan import Work
from merestone.spec.interface import Continuation, Drafter, DraftRows


@dataclass(frozen=True, slots=True)
class Drawn:
    """A work after its step: its first batch row, and the ids that are final afterwards.

    ``committed`` target rows are for good. ``proposing``: a token was drawn, and drafts are wanted.
    """

    work: Work
    slot: Slot
    row: int
    committed: int
    proposing: bool


class Drafting:
    """Runs ``drafter`` behind the target, and leaves its drafts in the slots."""

    def __init__(self, drafter: Drafter, state: StateViews, chunk: int) -> None:
        assert not (drafter.lag and drafter.features), "features of a row that came before"
        self.drafter = drafter
        self.groups = tuple(group.name for group in drafter.groups)
        self._state = state
        self._chunk = chunk

    def step(self, drawn: list[Drawn], target: Batch, hidden: Tensor) -> None:
        """``hidden`` [N, D] are the rows of the batch ``target``; either may be empty."""
        rows = self._rows(drawn, target, hidden)
        if rows.batch.segments:
            self.drafter.observe(rows, self._state)
        if rows.continuations:
            asking = [entry for entry in drawn if entry.proposing]
            drafts = self.drafter.propose(rows, self._state)
            candidates, probabilities = drafts.candidates, drafts.probabilities
            for place, (entry, ids) in enumerate(zip(asking, drafts.ids.tolist(), strict=True)):
                entry.slot.drafts = ids[: entry.work.propose]
                if candidates is not None and probabilities is not None:
                    entry.slot.chances = candidates[place], probabilities[place]

    def _bounds(self, entry: Drawn) -> tuple[int, int]:
        """Rows [first, end) to observe: with a lag from the one that had to wait for its next id,
        up to the one that has to."""
        lag = self.drafter.lag
        end = entry.committed if entry.proposing else entry.committed - lag
        return max(0, entry.work.start - lag), max(0, end)

    def _rows(self, drawn: list[Drawn], target: Batch, hidden: Tensor) -> DraftRows:
        segments: list[Segment] = []
        continuations: list[Continuation] = []
        tokens, kept, features, count = [], [], [], 0
        for entry in drawn:
            slot, work = entry.slot, entry.work
            first, end = self._bounds(entry)
            if first < end:
                segments.append(slot.draft_segment(work, count, first, end))
                tokens.append(slot.next_ids(first, end))
                if first < work.start:
                    assert slot.before is not None
                    kept.append(slot.before[None])
                own = slice(entry.row, entry.row + end - max(first, work.start))
                kept.append(hidden[own])
                taps = [target.features[layer][own] for layer in self.drafter.features]
                features += [torch.cat(taps, 1)] if taps else []
                count += end - first
            if entry.proposing:
                continuations.append(
                    Continuation(
                        position=entry.committed,
                        token=int(slot.ids[entry.committed]),
                        depth=work.propose,
                        row=count - 1 if first < end else -1,
                        pages=slot.tables,
                        params=slot.params,
                        choice=slot.choice,
                    )
                )
        positions = [torch.arange(s.start, s.end) for s in segments]
        none = torch.zeros(0, dtype=torch.int64)
        batch = Batch(
            tokens=torch.cat([none, *tokens]),
            positions=torch.cat([none, *positions]),
            segments=tuple(segments),
            chunk=self._chunk,
            scratch={},
        )
        return DraftRows(
            batch=batch,
            hidden=torch.cat([hidden[:0], *kept]),
            features=torch.cat(features) if features else None,
            continuations=tuple(continuations),
        )

"""The runner obeys a plan: copies, one pass of the model, seals, samples.

Knows the model, the arena and the slots. Must not decide anything: what a plan does not say, it
does not do.
"""

from __future__ import annotations

import torch
from torch import Tensor

from merestone.core.orders import CopyRows, LoadHidden, SaveHidden
from merestone.device.arena import Arena
from merestone.device.slots import Slot
from merestone.layers.state import Batch
from merestone.models.interface import CHUNK, Model
from merestone.ops.sampler import greedy, logprob, plain_greedy, sample
from merestone.sched.plan import StepPlan, StepResult, TokenLogprob, Work, WorkResult

LOGIT_ROWS = 64
"""Prompt rows whose logits exist at once."""


class Runner:
    """Executes plans on one device, one after another."""

    def __init__(self, model: Model, arena: Arena) -> None:
        self.model = model
        self.arena = arena
        self.slots: dict[int, Slot] = {}
        self.groups = tuple(arena.groups)

    @torch.inference_mode()
    def run(self, plan: StepPlan) -> StepResult:
        bad_saves = [key for order in plan.saves for key in self._save(order)]
        for slot in plan.frees:
            self.slots.pop(slot, None)
        for admit in plan.admits:
            self.slots[admit.slot] = Slot.admit(admit, self.groups)
        for order in plan.before:
            self._before(order)
        bad_slots = self._forward(plan.works)
        bad_saves += [key for order in plan.after for key in self._save(order)]
        results = self._sample(plan.works, bad_slots)
        return StepResult(plan.step, tuple(results), tuple(bad_saves), tuple(sorted(bad_slots)))

    # -- copies ---------------------------------------------------------------------------------

    def _before(self, order: CopyRows | LoadHidden) -> None:
        if isinstance(order, CopyRows):
            self.arena.copy_rows(order)
        else:
            slot = self.slots[order.slot]
            slot.hidden = self.arena.hidden[order.frame, order.row][None].clone()
            slot.hidden_at = order.at

    def _save(self, order: SaveHidden) -> list[tuple[int, int]]:
        """Store a hidden row; its (frame, row) comes back if it is not finite."""
        slot = self.slots[order.slot]
        assert slot.hidden is not None
        row = slot.hidden[len(slot.hidden) - 1 - (slot.hidden_at - order.at)]
        self.arena.hidden[order.frame, order.row] = row
        return [] if bool(torch.isfinite(row).all()) else [(order.frame, order.row)]

    # -- the pass -------------------------------------------------------------------------------

    def _forward(self, works: tuple[Work, ...]) -> set[int]:
        """One pass over all rows; returns the slots whose states are not finite."""
        tokens: list[int] = []
        segments = []
        for work in works:
            slot = self.slots[work.slot]
            for delta in work.pages:
                slot.bind(delta)
            if work.start < work.end:
                segments.append(slot.segment(work, len(tokens)))
                tokens += work.tokens
        if not segments:
            return set()
        positions = torch.cat([torch.arange(s.start, s.end) for s in segments])
        batch = Batch(torch.tensor(tokens), positions, tuple(segments), CHUNK, {})
        hidden = self.model.forward(batch, self.arena)
        bad: set[int] = set()
        computed = [work for work in works if work.start < work.end]
        for work, segment in zip(computed, segments, strict=True):
            slot = self.slots[work.slot]
            # Rows since the new anchor: a boundary sealed from this pass lies among them.
            first = max(work.start, work.advance - 1)
            offset = segment.row - work.start
            slot.hidden = hidden[offset + first : offset + work.end].clone()
            slot.hidden_at = work.end
            if work.advance_frames and not self.arena.anchor_finite(segment.advance_frames):
                bad.add(work.slot)
            if work.prompt_logprobs is not None:
                rows = hidden[segment.row : segment.row + len(work.targets)]
                slot.scored = self._score(rows, work)
        return bad

    def _score(self, hidden: Tensor, work: Work) -> tuple[TokenLogprob, ...]:
        """Log probabilities of the given next ids, a block of rows at a time."""
        assert work.prompt_logprobs is not None
        scored: list[TokenLogprob] = []
        for start in range(0, len(work.targets), LOGIT_ROWS):
            logits = self.model.logits(hidden[start : start + LOGIT_ROWS])
            targets = work.targets[start : start + LOGIT_ROWS]
            for row, target in zip(logits, targets, strict=True):
                scored.append(logprob(row, target, work.prompt_logprobs))
        return tuple(scored)

    # -- sampling -------------------------------------------------------------------------------

    def _sample(self, works: tuple[Work, ...], bad: set[int]) -> list[WorkResult]:
        """Logits of all sampling rows in one product, restored rows beside computed ones."""
        sampling = [work for work in works if work.sample]
        rows = []
        for work in sampling:
            hidden = self.slots[work.slot].hidden
            assert hidden is not None
            assert self.slots[work.slot].hidden_at == work.end
            rows.append(hidden[-1])
        results: dict[int, WorkResult] = {}
        if rows:
            logits = self.model.logits(torch.stack(rows))
            finite = torch.isfinite(logits).all(1).tolist()
            best = greedy(logits).tolist()
            for index, work in enumerate(sampling):
                if finite[index]:
                    results[work.slot] = self._draw(logits[index], best[index], work)
                else:
                    bad.add(work.slot)
        return [self._result(work, results) for work in works]

    def _draw(self, row: Tensor, best: int, work: Work) -> WorkResult:
        """The token of position ``work.end``; ``best`` is that of the raw logits."""
        slot = self.slots[work.slot]
        params, token = slot.params, best
        if not plain_greedy(params):
            token = sample(
                row,
                params,
                prompt=slot.ids[: slot.prompt],
                output=slot.ids[slot.prompt : slot.known],
                position=work.end,
                choice=slot.choice,
            )
        entry = None if params.logprobs is None else logprob(row, token, params.logprobs)
        slot.append(token)
        return WorkResult(work.slot, token, entry)

    def _result(self, work: Work, results: dict[int, WorkResult]) -> WorkResult:
        slot = self.slots[work.slot]
        result = results.get(work.slot, WorkResult(work.slot))
        if not slot.scored:
            return result
        scored, slot.scored = slot.scored, ()
        return WorkResult(work.slot, result.token, result.logprob, scored)

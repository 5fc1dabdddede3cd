"""The runner obeys a plan: copies, one pass of the model, seals, samples.

Knows the model, the arena and the slots. Must not decide anything: what a plan does not say, it
does not do.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from merestone.core.orders import CopyRows, LoadHidden, SaveHidden
from merestone.device.arena import Arena
from merestone.device.drafting import Drafting, Drawn
from merestone.device.porter import Porter
from merestone.device.slots import Slot
from merestone.layers.state import Batch
from merestone.models.interface import CHUNK, Model
from merestone.ops.sampler import greedy, logprob, plain_greedy, sample
from merestone.sched.plan import StepPlan, StepResult, TokenLogprob, Work, WorkResult
from merestone.spec.accept import accept
from merestone.spec.interface import Drafter

LOGIT_ROWS = 64
"""Prompt rows whose logits exist at once."""


@dataclass(frozen=True, slots=True)
class Pass:
    """One pass of the model: its batch and hidden rows [N, D], the first batch row of each work,
    and the slots whose states (and, later, logits) are not finite."""

    batch: Batch
    hidden: Tensor
    rows: list[int]
    bad: set[int]


class Runner:
    """Executes plans on one device, one after another. Without ``drafter`` no plan has drafts.

    ``rejecting``: sampled drafts are accepted by their chances, see :func:`ops.sampler.sample`.
    """

    def __init__(
        self,
        model: Model,
        arena: Arena,
        drafter: Drafter | None = None,
        *,
        rejecting: bool = False,
    ) -> None:
        self.model = model
        self.arena = arena
        self.drafting = Drafting(drafter, arena, CHUNK) if drafter else None
        self.rejecting = rejecting
        self.slots: dict[int, Slot] = {}
        self.groups = tuple(arena.groups)
        self.porter: Porter | None = None

    @torch.inference_mode()
    def run(self, plan: StepPlan) -> StepResult:
        bad_saves = [key for order in plan.saves for key in self._save(order)]
        for slot in plan.frees:
            self.slots.pop(slot, None)
        for admit in plan.admits:
            self.slots[admit.slot] = Slot.admit(admit, self.groups)
        for order in plan.before:
            self._before(order)
        done = self._forward(plan.works)
        bad_saves += [key for order in plan.after for key in self._save(order)]
        results = self._sample(plan.works, done.bad)
        self._draft(plan.works, results, done)
        reports = self.porter.obey(plan.stores) if self.porter else ()
        bad_slots = tuple(sorted(done.bad))
        return StepResult(plan.step, tuple(results), tuple(bad_saves), bad_slots, reports)

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
        row = self.slots[order.slot].hidden_row(order.at)
        self.arena.hidden[order.frame, order.row] = row
        return [] if bool(torch.isfinite(row).all()) else [(order.frame, order.row)]

    # -- the pass -------------------------------------------------------------------------------

    def _forward(self, works: tuple[Work, ...]) -> Pass:
        """One pass over all rows, those of drafts included."""
        tokens: list[int] = []
        segments = []
        first_rows = []
        for work in works:
            slot = self.slots[work.slot]
            for delta in work.pages:
                slot.bind(delta)
            first_rows.append(len(tokens))
            if work.start < work.end:
                segments.append(slot.segment(work, len(tokens)))
                tokens += (*work.tokens, *slot.drafts[: work.drafts])
            if self.drafting and slot.hidden is not None:
                slot.before = slot.hidden_row(work.start).clone()
        none = torch.zeros(0, dtype=torch.int64)
        positions = torch.cat([none, *(torch.arange(s.start, s.end) for s in segments)])
        taps = self.drafting.drafter.features if self.drafting else ()
        batch = Batch(
            torch.tensor(tokens, dtype=torch.int64), positions, tuple(segments), CHUNK, {}, taps
        )
        if not segments:
            return Pass(batch, self.arena.hidden[:0, 0], first_rows, set())
        hidden = self.model.forward(batch, self.arena)
        bad: set[int] = set()
        computed = [work for work in works if work.start < work.end]
        for work, segment in zip(computed, segments, strict=True):
            slot = self.slots[work.slot]
            # Rows since the new anchor: a boundary sealed from this pass lies among them.
            first = max(work.start, work.advance - 1)
            offset = segment.row - work.start
            slot.hidden = hidden[offset + first : offset + segment.end].clone()
            slot.hidden_at = segment.end
            if work.advance_frames and not self.arena.anchor_finite(segment.advance_frames):
                bad.add(work.slot)
            if work.prompt_logprobs is not None:
                rows = hidden[segment.row : segment.row + len(work.targets)]
                slot.scored = self._score(rows, work)
        return Pass(batch, hidden, first_rows, bad)

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
            slot = self.slots[work.slot]
            assert slot.hidden_at == work.end + work.drafts
            rows += [slot.hidden_row(work.end + place) for place in range(work.drafts + 1)]
        results: dict[int, WorkResult] = {}
        if rows:
            logits = self.model.logits(torch.stack(rows))
            finite = torch.isfinite(logits).all(1).tolist()
            best = greedy(logits).tolist()
            first = 0
            for work in sampling:
                own = slice(first, first + work.drafts + 1)
                result = self._draw(logits[own], best[own], work)
                if all(finite[own][: len(result.tokens)]):
                    results[work.slot] = result
                else:
                    bad.add(work.slot)
                first = own.stop
        return [self._result(work, results) for work in works]

    def _draw(self, logits: Tensor, best: list[int], work: Work) -> WorkResult:
        """The tokens from position ``work.end`` on, as far as the drafts are what is drawn.

        logits [drafts + 1, V]; ``best`` are the ids of the raw ones.
        """
        slot = self.slots[work.slot]
        params = slot.params
        entries: list[TokenLogprob] = []

        def draw(place: int) -> int:
            token = best[place]
            if not plain_greedy(params):
                token = sample(
                    logits[place],
                    params,
                    prompt=slot.ids[: slot.prompt],
                    output=slot.ids[slot.prompt : slot.known],
                    position=work.end + place,
                    choice=slot.choice,
                    draft=slot.draft(place) if self.rejecting and place < work.drafts else None,
                )
            if params.logprobs is not None:
                entries.append(logprob(logits[place], token, params.logprobs))
            slot.append(token)
            return token

        return WorkResult(work.slot, accept(slot.drafts[: work.drafts], draw), tuple(entries))

    def _result(self, work: Work, results: dict[int, WorkResult]) -> WorkResult:
        slot = self.slots[work.slot]
        result = results.get(work.slot, WorkResult(work.slot))
        if not slot.scored:
            return result
        scored, slot.scored = slot.scored, ()
        return WorkResult(work.slot, result.tokens, result.logprobs, scored)

    def _draft(self, works: tuple[Work, ...], results: list[WorkResult], done: Pass) -> None:
        """Let the drafter see what the step committed, and propose."""
        if self.drafting is None:
            return
        drawn = []
        for work, result, row in zip(works, results, done.rows, strict=True):
            if work.slot not in done.bad:
                committed = work.end + max(0, len(result.tokens) - 1)
                proposing = bool(result.tokens) and work.propose > 0
                drawn.append(Drawn(work, self.slots[work.slot], row, committed, proposing))
        self.drafting.step(drawn, done.batch, done.hidden)

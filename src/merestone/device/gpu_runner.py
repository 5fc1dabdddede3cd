"""The runner on a GPU: copies, passes, seals and samples, in the order that a plan gives.

Knows the model's passes, the arena and the slots. Must not decide anything: what a plan does not
say, it does not do. The host waits once a step, for the sampled ids and the verdicts on what was
computed; rows of logits come to the host only where a request asks for more than the best id.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from merestone.core.orders import Order, PageDelta, SaveHidden
from merestone.device.gpu_passes import Passes, Sampled, rows_of
from merestone.device.gpu_state import RING, GpuState
from merestone.device.gpu_tables import rebuild_tables
from merestone.device.porter import Porter
from merestone.models.gpu import GpuModel, rebuild
from merestone.ops.sampler import logprob, penalised, plain_greedy, sample
from merestone.ops.triton.draw import draw, draws
from merestone.ops.triton.judge import bad_anchors, bad_rows
from merestone.ops.triton.pages import set_entries
from merestone.sched.plan import (
    Admit,
    SamplingParams,
    StepPlan,
    StepResult,
    TokenLogprob,
    Work,
    WorkResult,
)

LOGIT_ROWS = 64
"""Prompt rows whose logits exist at once."""


def drawable(params: SamplingParams) -> bool:
    """Can the device draw the token by itself? Not where tokens so far change the logits."""
    return params.temperature > 0.0 and not (
        params.logit_bias or params.banned or penalised(params)
    )


@dataclass(slots=True)
class GpuSlot:
    """The host's part of a slot. ``cached``: up to which position the recurrent layers' caches of
    open rows are good; a slot starts with none."""

    tokens: tuple[int, ...]
    prompt: int
    choice: int
    params: SamplingParams
    output: list[int] = field(default_factory=list)
    cached: int = 0

    @classmethod
    def admit(cls, admit: Admit) -> GpuSlot:
        return cls(admit.tokens, admit.prompt, admit.choice, admit.params)

    def history(self) -> tuple[Tensor, Tensor]:
        """Ids of the prompt, and of what follows it, int64."""
        later = [*self.tokens[self.prompt :], *self.output]
        return torch.tensor(self.tokens[: self.prompt]), torch.tensor(later, dtype=torch.int64)


class GpuRunner:
    """Executes plans on one GPU, one after another."""

    def __init__(self, model: GpuModel, state: GpuState, passes: Passes) -> None:
        self.model, self.state, self.passes = model, state, passes
        self.arena = state.arena
        self.porter: Porter | None = None
        self.slots: dict[int, GpuSlot] = {}
        self._states = state.states()
        self._nothing = torch.zeros(1, dtype=torch.int32, device=state.device)

    @torch.inference_mode()
    def run(self, plan: StepPlan) -> StepResult:
        verdicts: list[Tensor] = [self._copy(plan.saves)]
        for slot in plan.frees:
            self.slots.pop(slot, None)
        for admit in plan.admits:
            self.slots[admit.slot] = GpuSlot.admit(admit)
        self._bind(plan)
        self._copy(plan.before)
        computed = [work for work in plan.works if work.start < work.end]
        scored = self._forward(computed)
        moved = [work for work in computed if work.advance_frames]
        verdicts += [self._judge_anchors(moved), self._copy(plan.after)]
        sampling = [work for work in plan.works if work.sample]
        sampled = (
            self.passes.sample([(work.slot, work.end) for work in sampling]) if sampling else None
        )
        if sampled is not None:
            verdicts += [sampled.ids, sampled.bad, self._drawn(sampling, sampled)]
        # The one wait of a step; without a verdict, too, or its buffers would be written again.
        verdicts.append(self._nothing)
        found = torch.cat(verdicts).tolist()[:-1]
        saves, anchors, after, rest = _cut(found, len(plan.saves), len(moved), len(plan.after))
        bad_slots = {work.slot for work, bad in zip(moved, anchors, strict=True) if bad}
        bad_saves = [
            (order.frame, order.row)
            for order, bad in zip((*plan.saves, *plan.after), (*saves, *after), strict=True)
            if bad
        ]
        tokens: dict[int, WorkResult] = {}
        if sampled is not None:
            tokens = self._draw(sampling, sampled, rest, bad_slots)
        results = tuple(self._result(work, tokens, scored) for work in plan.works)
        reports = self.porter.obey(plan.stores) if self.porter else ()
        return StepResult(plan.step, results, tuple(bad_saves), tuple(sorted(bad_slots)), reports)

    # -- copies ---------------------------------------------------------------------------------

    def _device(self, values: np.ndarray) -> Tensor:
        return torch.from_numpy(values).to(self.state.device, non_blocking=True)

    def _copy(self, orders: Sequence[Order]) -> Tensor:
        """Launch orders; for hidden rows saved among them, 1 where a value is not finite."""
        state = self.state
        saved = [order for order in orders if isinstance(order, SaveHidden)]
        bad = torch.empty(len(saved), dtype=torch.int32, device=state.device)
        if orders:
            state.copier.run(state.copier.encode(tuple(orders), len(orders)).to(state.device))
        if saved:
            rows = [order.slot * RING + (order.at - 1) % RING for order in saved]
            ring = state.ring.view(-1, state.ring.shape[2])
            bad_rows(ring, self._device(np.array(rows, np.int32)), bad)
        return bad

    def _bind(self, plan: StepPlan) -> None:
        """Take over changed entries of page tables, the last change of an entry."""
        changed: dict[int, int] = {}
        for admit in plan.admits:
            self._collect(admit.slot, admit.pages, changed)
        for work in plan.works:
            self._collect(work.slot, work.pages, changed)
        if changed:
            both = np.array([list(changed), list(changed.values())], np.int32)
            at, values = self._device(both)
            set_entries(self.state.table_memory, at, values)

    def _collect(self, slot: int, deltas: Iterable[PageDelta], changed: dict[int, int]) -> None:
        state = self.state
        for delta in deltas:
            entries = state.entries[delta.group]
            assert delta.first + len(delta.frames) <= entries, (delta, entries)
            first = state.first_entry[delta.group] + slot * entries + delta.first
            changed.update(zip(range(first, first + len(delta.frames)), delta.frames, strict=True))

    # -- the pass -------------------------------------------------------------------------------

    def _forward(self, works: Sequence[Work]) -> dict[int, tuple[TokenLogprob, ...]]:
        """Compute all rows; log probabilities of prompt ids where a work asks for them."""
        if not works:
            return {}
        stale = [w for w in works if w.start > max(w.anchor, self.slots[w.slot].cached)]
        if stale:
            frames = self.state.layout.anchor_frames
            rebuild(self.model, rebuild_tables(stale, frames, self.state), self.state)
        hidden = self.passes.forward(works)
        scored = {}
        for work, row in zip(works, rows_of(works), strict=True):
            self.slots[work.slot].cached = work.end
            if work.prompt_logprobs is not None:
                scored[work.slot] = self._score(hidden[row : row + len(work.targets)], work)
        return scored

    def _score(self, hidden: Tensor, work: Work) -> tuple[TokenLogprob, ...]:
        """Log probabilities of the given next ids, a block of rows at a time."""
        assert work.prompt_logprobs is not None
        scored: list[TokenLogprob] = []
        for start in range(0, len(work.targets), LOGIT_ROWS):
            logits = self.model.logits(hidden[start : start + LOGIT_ROWS]).cpu()
            targets = work.targets[start : start + LOGIT_ROWS]
            for row, target in zip(logits, targets, strict=True):
                scored.append(logprob(row, target, work.prompt_logprobs))
        return tuple(scored)

    def _judge_anchors(self, works: Sequence[Work]) -> Tensor:
        """1 for each work whose new anchor holds a value that is not finite."""
        bad = torch.empty(len(works), dtype=torch.int32, device=self.state.device)
        if works:
            frames = np.array([work.advance_frames for work in works], np.int32)
            bad_anchors(*self._states, self._device(frames), bad)
        return bad

    # -- sampling -------------------------------------------------------------------------------

    def _drawn(self, works: Sequence[Work], sampled: Sampled) -> Tensor:
        """Tokens of the works whose noise and cuts the device can do, in their order."""
        wanted = [
            (index, self.slots[work.slot].params, work.end, self.slots[work.slot].choice)
            for index, work in enumerate(works)
            if drawable(self.slots[work.slot].params)
        ]
        if not wanted:
            return sampled.ids[:0]
        return draw(sampled.logits, draws(wanted, sampled.logits.shape[1]))

    def _draw(
        self, works: Sequence[Work], sampled: Sampled, found: Sequence[int], bad: set[int]
    ) -> dict[int, WorkResult]:
        """The token of each work; ``found``: best ids, then 1 where logits are not finite, then
        the tokens that were drawn."""
        results: dict[int, WorkResult] = {}
        drawn = iter(found[2 * len(works) :])
        for index, work in enumerate(works):
            params = self.slots[work.slot].params
            token = next(drawn) if drawable(params) else found[index]
            if found[len(works) + index]:
                bad.add(work.slot)
                continue
            slot, wanted = self.slots[work.slot], params.logprobs
            here = plain_greedy(params) or drawable(params)
            entries: tuple[TokenLogprob, ...] = ()
            if not here or wanted is not None:
                row = sampled.logits[index].cpu()
                if not here:
                    token = self._sample(row, slot, work.end)
                if wanted is not None:
                    entries = (logprob(row, token, wanted),)
            slot.output.append(token)
            results[work.slot] = WorkResult(work.slot, (token,), entries)
        return results

    @staticmethod
    def _sample(row: Tensor, slot: GpuSlot, position: int) -> int:
        prompt, output = slot.history()
        return sample(
            row, slot.params, prompt=prompt, output=output, position=position, choice=slot.choice
        )

    @staticmethod
    def _result(
        work: Work,
        tokens: dict[int, WorkResult],
        scored: dict[int, tuple[TokenLogprob, ...]],
    ) -> WorkResult:
        result = tokens.get(work.slot, WorkResult(work.slot))
        if work.slot not in scored:
            return result
        return WorkResult(work.slot, result.tokens, result.logprobs, scored[work.slot])


def _cut(values: list[int], *lengths: int) -> list[list[int]]:
    """``values`` in parts of ``lengths``, and the rest."""
    parts = []
    for length in lengths:
        parts.append(values[:length])
        values = values[length:]
    return [*parts, values]

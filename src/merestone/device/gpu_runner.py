"""The runner on a GPU: copies, passes, seals and samples, in the order that a plan gives.

Knows the model's passes, the arena and the slots. Must not decide anything: what a plan does not
say, it does not do. The host waits once a step, for the sampled ids and the verdicts on what was
computed, and may launch the next plan before; rows of logits come to the host only where a request
asks for more than the best id.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from msgspec.structs import replace
from torch import Tensor

from merestone.core.orders import Order, PageDelta, SaveHidden
from merestone.device.drafting import Drafting, Drawn
from merestone.device.gpu_dflash import GpuDFlashDrafting
from merestone.device.gpu_drafting import GpuDrafting
from merestone.device.gpu_passes import Fed, Passed, Passes, rows_of
from merestone.device.gpu_sampling import GpuSlot, Sampling
from merestone.device.gpu_state import RING, GpuState, current, sent, sent_both
from merestone.device.gpu_tables import rebuild_tables
from merestone.device.gpu_turn import Told, Turn
from merestone.device.porter import Porter
from merestone.device.slots import Slot
from merestone.layers.state import Batch
from merestone.models.gpu import GpuModel, rebuild
from merestone.models.interface import CHUNK
from merestone.ops.sampler import logprob
from merestone.ops.triton.judge import bad_anchors, bad_rows
from merestone.ops.triton.pages import set_entries
from merestone.sched.plan import Admit, StepPlan, StepResult, TokenLogprob, Work, WorkResult
from merestone.spec.interface import Drafter

OnDevice = GpuDrafting | GpuDFlashDrafting
"""Drafting with kernels of its own."""

LOGIT_ROWS = 64
"""Prompt rows whose logits exist at once."""


class Arriving:
    """Values int32 [n] on their way to the host."""

    def __init__(self, values: Tensor) -> None:
        self._host = torch.empty(values.shape, dtype=values.dtype, pin_memory=values.is_cuda)
        self._host.copy_(values, non_blocking=True)
        self._there: torch.cuda.Event | None = None
        if values.is_cuda:
            self._there = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._there.record()

    def values(self) -> list[int]:
        """Wait for them."""
        if self._there is not None:
            self._there.synchronize()
        found: list[int] = self._host.tolist()
        return found


@dataclass(frozen=True, slots=True)
class _Launched:
    """A plan that runs, and what its result is made of: ``found``, from its ``known``-th value on
    that of ``sampling``; before, what is ``told`` of drafts."""

    plan: StepPlan
    moved: list[Work]
    passed: Passed | None
    scored: dict[int, tuple[TokenLogprob, ...]]
    sampling: Sampling
    known: int
    told: Told
    found: Arriving


class GpuRunner:
    """Executes plans on one GPU, one after another. Without ``drafter`` no plan has drafts.
    ``rejecting``: sampled drafts are accepted by their chances, see :func:`ops.sampler.sample`."""

    def __init__(
        self,
        model: GpuModel,
        state: GpuState,
        passes: Passes,
        drafter: Drafter | OnDevice | None = None,
        *,
        rejecting: bool = False,
    ) -> None:
        self.model, self.state, self.passes = model, state, passes
        self.rejecting = rejecting
        self.arena = state.arena
        self.porter: Porter | None = None
        self.slots: dict[int, GpuSlot] = {}
        self.drafter = drafter if isinstance(drafter, OnDevice) else None
        self.drafting: Drafting | None = None
        if drafter is not None and not isinstance(drafter, OnDevice):
            self.drafting = Drafting(drafter, state.arena, CHUNK)
        self._states = state.states()
        self._drawn: tuple[Tensor, int, Sampling] | None = None
        """What the last step left for the host, where its ids begin in it, and whose they are."""
        self._nothing = torch.zeros(1, dtype=torch.int32, device=state.device)

    def run(self, plan: StepPlan) -> StepResult:
        return self.launch(plan)()

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> Callable[[], StepResult]:
        """Start a plan; what is returned waits for its result. Before that call one more plan may
        be launched, of rows alone: those without an id are fed what this one draws."""
        with current(self.state.device):
            launched = self._launch(plan)
        return partial(self._land, launched)

    def _launch(self, plan: StepPlan) -> _Launched:
        verdicts = self._copy(plan.saves)
        proposed = self.drafter.proposed() if self.drafter else None
        drafted = proposed.places if proposed else {}
        told = proposed.told(self.slots) if proposed else Told()
        for slot in plan.frees:
            self.slots.pop(slot, None)
        for admit in plan.admits:
            self.slots[admit.slot] = self._admit(admit)
        self._bind(plan)
        self._copy(plan.before)
        computed = [
            self._with_drafts(work, drafted) for work in plan.works if work.start < work.end
        ]
        self._remember(plan.works)
        fed = proposed.feed(computed) if proposed else self._fed(plan)
        passed = self._forward(computed, fed)
        scored = self._score_prompts(computed, passed)
        moved = [work for work in computed if work.advance_frames]
        verdicts += [*self._judge_anchors(moved), *self._copy(plan.after)]
        if passed is not None:
            passed = self._held(passed)
        verdicts += told.parts
        known = sum(part.shape[0] for part in verdicts)
        sampled = [work for work in plan.works if work.sample]
        sampling = Sampling(sampled, self.slots, rejecting=self.rejecting)
        if sampling.rows:
            verdicts += sampling.launch(self.passes.sample(sampling.rows))
        # Without a verdict, too, a step is waited for, or its buffers would be written again.
        verdicts.append(self._nothing)
        found = torch.cat(verdicts)
        self._drawn = found, known, sampling
        return _Launched(plan, moved, passed, scored, sampling, known, told, Arriving(found))

    @torch.inference_mode()
    def _land(self, launched: _Launched) -> StepResult:
        with current(self.state.device):
            return self._result(launched)

    def _result(self, launched: _Launched) -> StepResult:
        plan, moved, sampling = launched.plan, launched.moved, launched.sampling
        passed = launched.passed
        found = launched.found.values()[:-1]
        saves, anchors, after, drafts = _cut(
            found[: launched.known], len(plan.saves), len(moved), len(plan.after)
        )
        launched.told.land(drafts)
        bad_slots = {work.slot for work, bad in zip(moved, anchors, strict=True) if bad}
        bad_saves = [
            (order.frame, order.row)
            for order, bad in zip((*plan.saves, *plan.after), (*saves, *after), strict=True)
            if bad
        ]
        tokens = sampling.results(found[launched.known :], bad_slots)
        results = tuple(_result(work, tokens, launched.scored) for work in plan.works)
        if self.drafter is not None:
            self._turn(plan.works, results, passed, bad_slots)
        self._draft(plan.works, results, passed, bad_slots)
        reports = self.porter.obey(plan.stores) if self.porter else ()
        return StepResult(plan.step, results, tuple(bad_saves), tuple(sorted(bad_slots)), reports)

    def _admit(self, admit: Admit) -> GpuSlot:
        slot = GpuSlot.admit(admit)
        if self.drafting:
            own = tuple(d for d in admit.pages if d.group in self.drafting.groups)
            with torch.device(self.state.device):
                slot.drafted = Slot.admit(replace(admit, pages=own), self.drafting.groups)
        return slot

    # -- copies ---------------------------------------------------------------------------------

    def _device(self, values: np.ndarray) -> Tensor:
        return sent(values, self.state.device)

    def _copy(self, orders: Sequence[Order]) -> list[Tensor]:
        """Launch orders; if hidden rows are saved among them, 1 where a value is not finite."""
        if not orders:
            return []
        state = self.state
        state.copier.run(self._device(state.copier.encode(tuple(orders), len(orders)).numpy()))
        saved = [order for order in orders if isinstance(order, SaveHidden)]
        if not saved:
            return []
        bad = torch.empty(len(saved), dtype=torch.int32, device=state.device)
        rows = [order.slot * RING + (order.at - 1) % RING for order in saved]
        ring = state.ring.view(-1, state.ring.shape[2])
        bad_rows(ring, self._device(np.array(rows, np.int32)), bad)
        return [bad]

    def _bind(self, plan: StepPlan) -> None:
        """Take over changed entries of page tables, the last change of an entry."""
        changed: dict[int, int] = {}
        for admit in plan.admits:
            self._collect(admit.slot, admit.pages, changed)
        for work in plan.works:
            if not work.pages:
                continue
            self._collect(work.slot, work.pages, changed)
            drafted = self.slots[work.slot].drafted
            if drafted is not None:
                with torch.device(self.state.device):
                    for delta in work.pages:
                        if delta.group in drafted.tables:
                            drafted.bind(delta)
        if changed:
            at, values = sent_both(list(changed), list(changed.values()), self.state.device)
            set_entries(self.state.table_memory, at, values)

    def _collect(self, slot: int, deltas: Iterable[PageDelta], changed: dict[int, int]) -> None:
        state = self.state
        for delta in deltas:
            entries = state.entries[delta.group]
            assert delta.first + len(delta.frames) <= entries, (delta, entries)
            first = state.first_entry[delta.group] + slot * entries + delta.first
            changed.update(zip(range(first, first + len(delta.frames)), delta.frames, strict=True))

    # -- the pass -------------------------------------------------------------------------------

    def _with_drafts(self, work: Work, drafted: Mapping[int, object]) -> Work:
        """``work`` as the pass computes it: with rows for its drafts. ``drafted``: slots whose
        drafts are on the device alone."""
        if not work.drafts:
            return work
        drafts = (0,) * work.drafts
        if work.slot not in drafted:
            drafts = tuple(self.slots[work.slot].drafts[: work.drafts])
        return replace(work, end=work.end + work.drafts, tokens=(*work.tokens, *drafts))

    def _fed(self, plan: StepPlan) -> Fed | None:
        """Where the ids of rows without one are, in what the step before this one left."""
        if not any(work.fed for work in plan.works):
            return None
        assert self._drawn is not None
        drawn, first, sampling = self._drawn
        places = sampling.places()
        computed = [work for work in plan.works if work.start < work.end]
        fed = [
            (row, first + places[work.slot])
            for work, row in zip(computed, rows_of(computed), strict=True)
            if work.fed
        ]
        return Fed(drawn, [row for row, _ in fed], [place for _, place in fed])

    def _forward(self, works: Sequence[Work], fed: Fed | None) -> Passed | None:
        """Compute all rows."""
        if not works:
            return None
        stale = [w for w in works if w.start > max(w.anchor, self.slots[w.slot].cached)]
        if stale:
            frames = self.state.layout.anchor_frames
            rebuild(self.model, rebuild_tables(stale, frames, self.state), self.state)
        passed = self.passes.forward(works, fed) if fed else self.passes.forward(works)
        for work in works:
            self.slots[work.slot].cached = work.end
        return passed

    def _score_prompts(
        self, works: Sequence[Work], passed: Passed | None
    ) -> dict[int, tuple[TokenLogprob, ...]]:
        """Log probabilities of prompt ids, where a work asks for them."""
        if passed is None:
            return {}
        return {
            work.slot: self._score(passed.hidden[row : row + len(work.targets)], work)
            for work, row in zip(works, rows_of(works), strict=True)
            if work.prompt_logprobs is not None
        }

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

    def _judge_anchors(self, works: Sequence[Work]) -> list[Tensor]:
        """1 for each work, if any, whose new anchor holds a value that is not finite."""
        if not works:
            return []
        bad = torch.empty(len(works), dtype=torch.int32, device=self.state.device)
        frames = np.array([work.advance_frames for work in works], np.int32)
        bad_anchors(*self._states, self._device(frames), bad)
        return [bad]

    # -- drafting -------------------------------------------------------------------------------

    def _remember(self, works: Sequence[Work]) -> None:
        """Keep the hidden row before each work: a drafter that lags reads it after the pass."""
        if self.drafter is not None:
            self.drafter.keep(works)
        if self.drafting is None:
            return
        for work in works:
            drafted = self.slots[work.slot].drafted
            if drafted is not None and work.start > 0:
                drafted.before = self.state.ring[work.slot, (work.start - 1) % RING].clone()

    def _held(self, passed: Passed) -> Passed:
        """Rows as a drafter needs them, after other graphs have written where these lie."""
        if self.drafter is not None:
            return self.drafter.held(passed)
        if self.drafting is None:
            return passed
        features = {layer: rows.clone() for layer, rows in passed.features.items()}
        return Passed(passed.hidden.clone(), features)

    def _turn(
        self,
        works: Sequence[Work],
        results: Sequence[WorkResult],
        passed: Passed | None,
        bad: set[int],
    ) -> None:
        """Let the device's drafter see what the step committed, and propose."""
        assert self.drafter is not None
        turns, row, lag = [], 0, self.drafter.lag
        for work, result in zip(works, results, strict=True):
            slot = self.slots[work.slot]
            if work.slot not in bad:
                proposing = bool(result.tokens) and work.propose > 0
                end = work.end + max(0, len(result.tokens) - 1) - lag * (not proposing)
                first = slot.observed if slot.observed >= 0 else max(0, work.start - lag)
                ids = slot.ids(first + 1, end + 1) if lag else ()
                newest = slot.ids(end, end + 1)[0] if proposing else 0
                how = slot.params, slot.choice
                turns.append(Turn(work, first, end, row, ids, proposing, newest, *how))
                slot.observed = max(first, end)
            row += work.end + work.drafts - work.start if work.start < work.end else 0
        self.drafter.step(turns, works, passed)

    def _draft(
        self,
        works: Sequence[Work],
        results: Sequence[WorkResult],
        passed: Passed | None,
        bad: set[int],
    ) -> None:
        """Let the drafter see what the step committed, and propose."""
        if self.drafting is None:
            return
        drawn = []
        row = 0
        for work, result in zip(works, results, strict=True):
            drafted = self.slots[work.slot].drafted
            if work.slot not in bad and drafted is not None:
                committed = work.end + max(0, len(result.tokens) - 1)
                proposing = bool(result.tokens) and work.propose > 0
                drawn.append(Drawn(work, drafted, row, committed, proposing))
            row += work.end + work.drafts - work.start if work.start < work.end else 0
        none = torch.zeros(0, dtype=torch.int64)
        batch = Batch(none, none, (), CHUNK, {}, features=passed.features if passed else {})
        hidden = passed.hidden if passed else self.state.ring[0, :0]
        with torch.device(self.state.device):
            self.drafting.step(drawn, batch, hidden)


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

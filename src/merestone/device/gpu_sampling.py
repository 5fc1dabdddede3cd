"""From the logits of a step to its tokens: on the device where it can, row by row on the host else.

Knows slots, rows of logits and the host's sampler. Must not know the model. A work with drafts has
a row for each of them and one more; all are drawn at once, as if the drafts before them were
accepted, and the host keeps those that are. Drafts that are accepted by their chances are judged on
the host, from the rows themselves.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from merestone.device.gpu_passes import Sampled
from merestone.device.gpu_tables import Ints
from merestone.device.slots import Slot
from merestone.ops.sampler import Draft, logprob, penalised, plain_greedy, sample
from merestone.ops.triton.draw import draw, draws
from merestone.sched.plan import Admit, SamplingParams, TokenLogprob, Work, WorkResult
from merestone.spec.accept import accept


@dataclass(slots=True)
class GpuSlot:
    """The host's part of a slot. ``cached``: up to which position the recurrent layers' caches of
    open rows are good; a slot starts with none. ``drafted``: the view of a drafter of the CPU's
    seam. ``proposed``: what a drafter of the device proposed last, ``chances``: the candidates
    [n, C] and probabilities [n, C] that they were drawn with, if they are accepted by them;
    ``observed``: rows that it has seen, -1 before the slot's first step.
    """

    tokens: Ints
    prompt: int
    choice: int
    params: SamplingParams
    output: list[int] = field(default_factory=list)
    cached: int = 0
    drafted: Slot | None = None
    proposed: list[int] = field(default_factory=list)
    chances: tuple[Tensor, Tensor] | None = None
    observed: int = -1
    drawable: bool = field(init=False)
    """Whether the device draws its tokens by itself."""
    judged: bool = field(init=False)
    """Whether the device chooses its tokens, the host no more than reads them."""

    def __post_init__(self) -> None:
        self.drawable = drawable(self.params)
        self.judged = self.drawable or plain_greedy(self.params)

    @classmethod
    def admit(cls, admit: Admit) -> GpuSlot:
        tokens = np.frombuffer(admit.tokens, np.int32)
        return cls(tokens, admit.prompt, admit.choice, admit.params)

    @property
    def drafts(self) -> list[int]:
        """Ids proposed for the positions after the known ones."""
        return self.drafted.drafts if self.drafted else self.proposed

    def draft(self, place: int) -> Draft:
        """A proposed id, and how it was drawn."""
        if self.drafted:
            return self.drafted.draft(place)
        assert self.chances is not None, "drafts are accepted by chances that nobody knows"
        candidates, probabilities = self.chances
        return Draft(self.proposed[place], candidates[place], probabilities[place])

    def ids(self, first: int, end: int) -> tuple[int, ...]:
        """Known ids of positions [first, end)."""
        known = len(self.tokens)
        if first >= known:
            return tuple(self.output[first - known : end - known])
        later = self.output[max(first - known, 0) : max(end - known, 0)]
        return (*self.tokens[first:end].tolist(), *later)

    def append(self, token: int) -> None:
        self.output.append(token)
        if self.drafted:
            self.drafted.append(token)

    def history(self) -> tuple[Tensor, Tensor]:
        """Ids of the prompt, and of what follows it, int64."""
        known = torch.from_numpy(self.tokens.astype(np.int64))
        later = torch.tensor(self.output, dtype=torch.int64)
        return known[: self.prompt], torch.cat([known[self.prompt :], later])


def drawable(params: SamplingParams) -> bool:
    """Can the device draw the token by itself? Not where tokens so far change the logits."""
    return params.temperature > 0.0 and not (
        params.logit_bias or params.banned or penalised(params)
    )


class _NotFiniteError(Exception):
    """A token was to be drawn from values that are not finite."""


class Sampling:
    """The rows that the works of one step are sampled from, in their order. ``rejecting``: sampled
    drafts are accepted by their chances, see :func:`ops.sampler.sample`."""

    def __init__(
        self, works: Sequence[Work], slots: dict[int, GpuSlot], *, rejecting: bool = False
    ) -> None:
        self._rejecting = rejecting
        self._works = [(work, slots[work.slot]) for work in works]
        self.rows = [
            (work.slot, work.end + place) for work in works for place in range(work.drafts + 1)
        ]
        """(slot, tokens so far) of each row."""
        self._sampled: Sampled | None = None

    def launch(self, sampled: Sampled) -> list[Tensor]:
        """What the host must know to choose: best ids and bad rows [M], drawn tokens; int32."""
        self._sampled = sampled
        wanted = []
        row = 0
        for work, slot in self._works:
            if slot.drawable:
                for place in range(self._weighed(work, slot), work.drafts + 1):
                    wanted.append((row + place, slot.params, work.end + place, slot.choice))
            row += work.drafts + 1
        verdicts = [sampled.ids, sampled.bad]
        if wanted:
            verdicts.append(draw(sampled.logits, draws(wanted, sampled.logits.shape[1])))
        return verdicts

    def _weighed(self, work: Work, slot: GpuSlot) -> int:
        """Of how many drafts chances decide, not what the target draws."""
        return work.drafts if self._rejecting and slot.params.temperature > 0.0 else 0

    def places(self) -> dict[int, int]:
        """Where, in what :meth:`launch` gave, the id of each slot is that the device chose."""
        places = {work.slot: row for row, (work, _) in enumerate(self._works)}
        drawn = [work.slot for work, slot in self._works if slot.drawable]
        assert len(places) == len(self.rows), "drafts are judged by the host"
        return places | {slot: 2 * len(places) + i for i, slot in enumerate(drawn)}

    def results(self, found: Sequence[int], bad_slots: set[int]) -> dict[int, WorkResult]:
        """Tokens by slot, from what :meth:`launch` gave, on the host. A work whose tokens were
        drawn from values that are not finite goes to ``bad_slots`` instead."""
        rows = len(self.rows)
        best, bad, drawn = list(found[:rows]), found[rows : 2 * rows], found[2 * rows :]
        done = 0
        results: dict[int, WorkResult] = {}
        first = 0
        for work, slot in self._works:
            own = slice(first, first + work.drafts + 1)
            first = own.stop
            if slot.drawable:
                here = slice(own.start + self._weighed(work, slot), own.stop)
                count = here.stop - here.start
                best[here] = drawn[done : done + count]
                done += count
            result = self._choose(work, slot, own.start, best[own], bad[own])
            if result is None:
                bad_slots.add(work.slot)
            else:
                results[work.slot] = result
        return results

    def _choose(
        self, work: Work, slot: GpuSlot, first: int, ids: Sequence[int], bad: Sequence[int]
    ) -> WorkResult | None:
        """Tokens from position ``work.end`` on, as far as the drafts are what is drawn; ``ids`` are
        the device's, rows begin at ``first``. None if one of them is of a bad row."""
        params, here = slot.params, slot.judged
        weighed = self._weighed(work, slot)
        if here and params.logprobs is None and not weighed:  # nothing to ask for but the ids
            tokens = accept(slot.drafts[: work.drafts], ids.__getitem__)
            if any(bad[: len(tokens)]):
                return None
            for token in tokens:
                slot.append(token)
            return WorkResult(work.slot, tokens)
        entries: list[TokenLogprob] = []

        def next_token(place: int) -> int:
            assert self._sampled is not None
            if bad[place]:
                # The id of such a row says nothing, and may not even be one.
                raise _NotFiniteError
            token = ids[place]
            draft = slot.draft(place) if place < weighed else None
            asked = draft is not None or not here
            if asked or params.logprobs is not None:
                row = self._sampled.logits[first + place].cpu()
                if asked:
                    token = _on_host(row, slot, work.end + place, draft)
                if params.logprobs is not None:
                    entries.append(logprob(row, token, params.logprobs))
            slot.append(token)
            return token

        try:
            tokens = accept(slot.drafts[: work.drafts], next_token)
        except _NotFiniteError:
            return None
        return WorkResult(work.slot, tokens, tuple(entries))


def _on_host(row: Tensor, slot: GpuSlot, position: int, draft: Draft | None) -> int:
    prompt, output = slot.history()
    return sample(
        row,
        slot.params,
        prompt=prompt,
        output=output,
        position=position,
        choice=slot.choice,
        draft=draft,
    )

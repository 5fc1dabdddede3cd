"""What a drafter on a device is told of a step, and how it brings that to the device.

Knows slots, rows and the keys of noise, and what comes back of drafts. Must not know drafters.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from merestone.device.gpu_passes import Fed, rows_of
from merestone.device.gpu_sampling import GpuSlot
from merestone.device.gpu_tables import Ints
from merestone.ops.triton.follow import Noise, Odds
from merestone.sched.plan import SamplingParams, Work

_GRID = 4
"""Parts start at multiples of so many entries: 16 bytes."""
_WORD = 1 << 64


class Turn(NamedTuple):
    """A slot after the step of ``work``: rows [first, end) of it are to be observed; their next
    ids, where the drafter needs them; the batch row of position ``start`` in what the step
    computed; whether drafts are wanted. ``newest``: the id at position ``end``, if they are.
    ``params`` and ``choice`` key the noise of what the target draws."""

    work: Work
    first: int
    end: int
    row: int
    next_ids: tuple[int, ...]
    proposing: bool
    newest: int
    params: SamplingParams
    choice: int

    @property
    def slot(self) -> int:
        return self.work.slot

    @property
    def start(self) -> int:
        return self.work.start


@dataclass(frozen=True, slots=True)
class Told:
    """Drafts on their way to the host, at their places for each slot: ``parts`` int32 [n], the ids
    and, if drafts are accepted by their chances, candidates [n C] and the bits of scores [n C]."""

    slots: Sequence[tuple[GpuSlot, list[int]]] = ()
    parts: Sequence[Tensor] = ()

    def land(self, values: Sequence[int]) -> None:
        """Leave them in the slots; ``values`` are those of all parts."""
        for slot, places in self.slots:
            slot.proposed = [values[place] for place in places]
        if len(self.parts) < 2:
            return
        count = self.parts[0].shape[0]
        candidates, bits = np.array(values[count:], np.int32).reshape(2, count, -1)
        scores = bits.view(np.float32)
        for slot, places in self.slots:
            if slot.params.temperature > 0.0:
                slot.chances = _chances(slot, candidates[places], scores[places])


def _chances(slot: GpuSlot, candidates: Ints, scores: NDArray[np.float32]) -> tuple[Tensor, Tensor]:
    """Candidates [n, C] int64 of a slot's drafts and their probabilities [n, C] fp64."""
    ids = torch.from_numpy(candidates.astype(np.int64))
    q = (torch.from_numpy(scores).double() / slot.params.temperature).softmax(1)
    # Of rows that were no numbers: the draft was certain.
    lost = ~q.isfinite().all(1) | (ids[:, 0] == ids[:, -1])
    drafts = torch.tensor(slot.proposed)[:, None]
    return ids.where(~lost[:, None], drafts), q.masked_fill(lost[:, None], 1.0)


@dataclass(frozen=True, slots=True)
class Proposed:
    """Drafts on the device: ``ids`` int32, flat, in which ``places`` has those of each slot. Where
    they are accepted by their chances, ``odds`` has a row for each."""

    ids: Tensor
    places: dict[int, list[int]]
    odds: Odds | None = None

    def told(self, slots: Mapping[int, GpuSlot]) -> Told:
        """What the host must know of them; of their odds, if one of ``slots`` is sampled."""
        own = [(slots[number], places) for number, places in self.places.items()]
        if self.odds is None or not any(slot.params.temperature > 0.0 for slot, _ in own):
            return Told(own, [self.ids])
        bits = self.odds.scores.view(torch.int32)
        return Told(own, [self.ids, self.odds.candidates.flatten(), bits.flatten()])

    def feed(self, works: Sequence[Work]) -> Fed | None:
        """Where rows of the pass over ``works`` take their ids from: those of these drafts."""
        rows: list[int] = []
        places: list[int] = []
        for work, row in zip(works, rows_of(works), strict=True):
            assert not work.fed, "a plan ahead has no drafts"
            if work.drafts and work.slot in self.places:
                end = row + work.end - work.start
                rows += range(end - work.drafts, end)
                places += self.places[work.slot][: work.drafts]
        return Fed(self.ids, rows, places) if rows else None


class Parts:
    """Named tables of int32 in one buffer of ``size`` entries; ``sizes``: entries of each."""

    def __init__(self, sizes: Mapping[str, int]) -> None:
        self._places: dict[str, tuple[int, int]] = {}
        self.size = 0
        for name, size in sizes.items():
            self._places[name] = self.size, self.size + size
            self.size += -(-size // _GRID) * _GRID

    def on_host(self, buffer: Ints) -> dict[str, Ints]:
        """The tables in ``buffer``, zero."""
        buffer[:] = 0
        return {name: buffer[first:end] for name, (first, end) in self._places.items()}

    def on_device(self, buffer: Tensor) -> dict[str, Tensor]:
        """The tables in ``buffer``."""
        return {name: buffer[first:end] for name, (first, end) in self._places.items()}


def noise_sizes(count: int) -> dict[str, int]:
    """The tables that :func:`fill_noise` writes for ``count`` sequences."""
    return {"seed": 2 * count, "at": count, "choice": count, "heat": count}


def fill_noise(parts: Mapping[str, Ints], asking: Sequence[Turn]) -> None:
    """Write the keys of the noise of those ``asking`` for drafts."""
    heats, seeds = parts["heat"].view(np.float32), parts["seed"].view(np.int64)
    for i, turn in enumerate(asking):
        parts["at"][i], parts["choice"][i] = turn.end, turn.choice
        heats[i] = turn.params.temperature
        word = turn.params.seed % _WORD
        seeds[i] = word - _WORD if word >= _WORD // 2 else word


def noise_of(parts: Mapping[str, Tensor]) -> Noise:
    """The same, on the device."""
    heats, seeds = parts["heat"].view(torch.float32), parts["seed"].view(torch.int64)
    return Noise(seeds, parts["at"], parts["choice"], heats)


def odds_of(drafts: int, among: int, device: str) -> Odds:
    """Memory for what so many drafts are drawn from, ``among`` candidates each."""
    candidates, scores = torch.zeros(2, drafts, among, dtype=torch.int32, device=device)
    return Odds(candidates, scores.view(torch.float32))

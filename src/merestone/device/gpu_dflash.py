"""Drafting on a GPU with a DFlash draft: after a step's tokens are drawn, observe and propose.

Knows rows, slots and the draft. Must not know how drafts are verified. The features of a decoding
step are kept in a memory of their own, so that their observation and the blocks replay as one CUDA
graph; those of a prefill are observed before it. The next step takes the drafts on the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from merestone.device.gpu_passes import MIXED, Passed, Passes, bucket, contexts, ladder, reach_of
from merestone.device.gpu_state import GpuState, peak
from merestone.device.gpu_tables import Ints
from merestone.device.gpu_turn import (
    Parts,
    Proposed,
    Turn,
    fill_noise,
    noise_of,
    noise_sizes,
    odds_of,
)
from merestone.layers.state import Field
from merestone.models.dflash import GROUP
from merestone.models.gpu import GpuModel
from merestone.models.gpu_dflash import GpuDFlash, Kept, Stands
from merestone.sched.plan import Work
from merestone.spec.draw import AMONG
from merestone.spec.interface import DraftGroup


@dataclass(frozen=True, slots=True)
class GpuDFlashDrafter:
    """A DFlash draft on a device as a drafter: what a :class:`merestone.spec.interface.Drafter`
    says of itself, without its calls."""

    draft: GpuDFlash
    groups: tuple[DraftGroup, ...]
    lag: int = 0
    chances: bool = False

    @property
    def depth(self) -> int:
        return self.draft.config.block - 1

    @property
    def features(self) -> tuple[int, ...]:
        return self.draft.config.taps

    def fields(self) -> tuple[Field, ...]:
        return self.draft.fields()


@dataclass(frozen=True, slots=True)
class _Key:
    """The size of a turn: ``sequences`` without that of padding, and ``longest``, a bound of
    positions."""

    sequences: int
    longest: int


class _Tables:
    """The tables of one key: rows that are observed, at most ``each`` a sequence, their sequences
    (and one of padding), and the blocks."""

    def __init__(self, key: _Key, each: int, reach: int | None) -> None:
        self.key, self._reach = key, reach
        s = self.sequences = key.sequences
        sizes = dict.fromkeys(("source", "sequence", "position"), s * each)
        sizes |= {"slot": s + 1, "floor": s + 1, "own": s, "token": s}
        self.parts = Parts(sizes | noise_sizes(s))
        self.size = self.parts.size

    def fill(self, host: Ints, turns: Sequence[Turn], asking: Sequence[Turn], padding: int) -> None:
        """Write the tables of ``turns``, whose rows are all observed, and of the blocks that some
        are ``asking`` for."""
        t = self.parts.on_host(host)
        t["slot"][:] = t["own"][:] = padding
        # What is not used: a row of padding's own sequence, into its own frame.
        t["sequence"][:] = self.sequences
        used = 0
        for i, turn in enumerate(turns):
            count = turn.end - turn.first
            rows, first = slice(used, used + count), turn.row + turn.first - turn.start
            t["source"][rows] = np.arange(first, first + count)
            t["position"][rows] = np.arange(turn.first, turn.end)
            t["sequence"][rows] = i
            t["slot"][i], t["floor"][i] = turn.slot, floor_of(turn.work.advance, self._reach)
            used += count
        fill_noise(t, asking)
        for i, turn in enumerate(asking):
            t["own"][i], t["token"][i] = turn.slot, turn.newest


def floor_of(advance: int, reach: int | None) -> int:
    """Below the window of an anchor no boundary to come has pages."""
    return 0 if reach is None else max(advance - reach, 0)


class GpuDFlashDrafting:
    """Runs ``drafter`` for at most ``slots`` sequences."""

    lag = 0

    def __init__(
        self,
        drafter: GpuDFlashDrafter,
        model: GpuModel,
        state: GpuState,
        passes: Passes,
        slots: int,
    ) -> None:
        config = drafter.draft.config
        self.depth = drafter.depth
        self._draft, self._model, self._state, self._passes = drafter.draft, model, state, passes
        self._config, self._slots = config, slots
        self._reach = config.context
        self._within = torch.arange(config.block, dtype=torch.int32, device=state.device)
        self._ids = torch.zeros(slots, self.depth, dtype=torch.int32, device=state.device)
        among = drafter.draft.among or min(AMONG, config.vocab_size)
        self._odds = odds_of(self._ids.numel(), among, state.device) if drafter.chances else None
        info = model.info
        # Graphs have at most so many rows; what they leave, the next one writes over.
        rows = max(MIXED[-1] if passes.graphs else 0, slots * config.block)
        self._features = torch.zeros(
            rows, len(config.taps) * info.hidden_size, dtype=info.dtype, device=state.device
        )
        self._graphs: dict[_Key, tuple[_Tables, torch.cuda.CUDAGraph]] = {}
        self._waiting: list[int] = []
        size = _Tables(_Key(slots, 0), config.block, self._reach).size
        self._host = torch.empty(size, dtype=torch.int32, pin_memory=state.device != "cpu")
        self._buffer = torch.zeros(size, dtype=torch.int32, device=state.device)

    # -- the host's side ------------------------------------------------------------------------

    def proposed(self) -> Proposed | None:
        """What the last step proposed, until the next one."""
        waiting, self._waiting = self._waiting, []
        if not waiting:
            return None
        each = range(self.depth)
        places = {slot: [i * self.depth + at for at in each] for i, slot in enumerate(waiting)}
        return Proposed(self._ids.flatten(), places, self._odds)

    def keep(self, works: Sequence[Work]) -> None:
        """Before a pass: nothing of what came before it is needed."""

    def held(self, passed: Passed) -> Passed:
        """A pass's features, as ``step`` needs them after other graphs have run. Those of a pass
        that is too large for a graph stay where they are."""
        count = passed.hidden.shape[0]
        if count > self._features.shape[0]:
            return passed
        kept = {}
        for i, layer in enumerate(self._config.taps):
            rows = passed.features[layer]
            own = self._features[:count, i * rows.shape[1] : (i + 1) * rows.shape[1]]
            kept[layer] = own.copy_(rows)
        return Passed(passed.hidden, kept)

    def step(self, turns: Sequence[Turn], works: Sequence[Work], passed: Passed | None) -> None:
        """Observe and propose. ``passed``: what was ``held`` of the pass over ``works``."""
        fits = passed is None or passed.hidden.shape[0] <= self._features.shape[0]
        short = []
        for turn in turns:
            if fits and turn.end - turn.first <= self._config.block:
                short += [turn] if turn.first < turn.end else []
            elif passed is not None:
                self._observe_long(turn, passed)
        asking = [turn for turn in turns if turn.proposing]
        self._waiting = [turn.slot for turn in asking]
        if short or asking:
            self._decode(short, asking)

    def _observe_long(self, turn: Turn, passed: Passed) -> None:
        """Observe the rows of one turn by themselves, a block at a time."""
        first = max(turn.first, floor_of(turn.work.advance, self._reach))
        table = self._table(turn.slot)
        for at in range(first, turn.end, MIXED[-1]):
            count = min(turn.end - at, MIXED[-1])
            row = turn.row + at - turn.start
            taps = [passed.features[layer][row : row + count] for layer in self._config.taps]
            device = self._state.device
            zeros = torch.zeros(count, dtype=torch.int32, device=device)
            positions = torch.arange(at, at + count, dtype=torch.int32, device=device)
            kept = Kept(zeros, positions, table, zeros[:1])
            self._draft.keep(torch.cat(taps, 1), kept, self._state)

    def _table(self, slot: int) -> Tensor:
        """A slot's page table [1, n], a copy: it begins on the grid of 16 bytes, whichever slot
        it is of, and no other kernel is compiled for it."""
        return self._state.tables[GROUP][slot : slot + 1].clone()

    def _decode(self, turns: Sequence[Turn], asking: Sequence[Turn]) -> None:
        longest = max(turn.end for turn in (*turns, *asking))
        key = self._key_of(max(len(turns), len(asking)), longest)
        if self._passes.graphs and key not in self._graphs:
            self._capture(key)
        graphed = self._graphs.get(key)
        tables = graphed[0] if graphed else _Tables(key, self._config.block, self._reach)
        self._fill(tables, turns, asking)
        if graphed:
            graphed[1].replay()
        else:
            self._compute(tables)

    def _key_of(self, sequences: int, longest: int) -> _Key:
        size = bucket(sequences, ladder(self._slots))
        assert size is not None, (sequences, self._slots)
        # With a window the length of a context changes nothing.
        return _Key(size, reach_of(longest) if self._reach is None else self._reach)

    def _fill(self, tables: _Tables, turns: Sequence[Turn], asking: Sequence[Turn]) -> None:
        host: Ints = self._host.numpy()[: tables.size]
        tables.fill(host, turns, asking, self._state.padding_slot)
        self._buffer[: tables.size].copy_(self._host[: tables.size], non_blocking=True)

    def capture_all(self, longest: int) -> int:
        """Capture every graph for contexts of up to ``longest`` tokens, at start-up; returns how
        many."""
        if self._passes.graphs:
            for key in self.keys(longest):
                self._capture(key)
        return len(self._graphs)

    def keys(self, longest: int) -> list[_Key]:
        """Of all graphs for such contexts, the largest first."""
        sizes = ladder(self._slots)[::-1]
        found = [self._key_of(size, sees) for sees in contexts(longest)[::-1] for size in sizes]
        return list(dict.fromkeys(found))

    def measure(self, rows: int, longest: int) -> int:
        """Bytes that steps take at most: one that observes rows of a pass of ``rows``, and one that
        observes and proposes for all."""
        return peak(lambda: self._largest(rows, longest))

    def _largest(self, rows: int, longest: int) -> None:
        features, count = self._features, min(rows, MIXED[-1])
        zeros = torch.zeros(count, dtype=torch.int32, device=self._state.device)
        kept = Kept(zeros, zeros, self._table(self._state.padding_slot), zeros[:1])
        self._draft.keep(features.new_zeros(count, features.shape[1]), kept, self._state)
        tables = _Tables(self._key_of(self._slots, longest), self._config.block, self._reach)
        self._fill(tables, (), ())
        self._compute(tables)

    # -- the device's side ----------------------------------------------------------------------

    def _compute(self, tables: _Tables) -> Tensor:
        """Observe the short rows, and propose."""
        t = tables.parts.on_device(self._buffer)
        pages, state, config = self._state.tables[GROUP], self._state, self._config
        kept = Kept(t["sequence"], t["position"], pages.index_select(0, t["slot"]), t["floor"])
        self._draft.keep(self._features.index_select(0, t["source"]), kept, state)
        count = tables.sequences
        ids = t["token"][:, None].expand(-1, config.block).clone()
        ids[:, 1:] = config.mask_id
        rows = (t["at"][:, None] + self._within).flatten()
        stands = Stands(t["at"], pages.index_select(0, t["own"]), rows, tables.key.longest)
        hidden = self._draft.forward(self._model.embed(ids.flatten()), stands, state)
        hidden = hidden.view(count, config.block, -1)[:, 1:].flatten(0, 1)
        out = self._ids[:count]
        odds = None if self._odds is None else self._odds.rows(0, out.numel())
        logits = self._model.logits(hidden)
        self._draft.choose(hidden, logits, t["token"], noise_of(t), out, odds)
        return out

    def _capture(self, key: _Key) -> None:
        # Padding alone, as in a pass of the target.
        tables = _Tables(key, self._config.block, self._reach)
        self._fill(tables, (), ())
        graph, _ = self._passes.capture(lambda: self._compute(tables), f"drafting {key}")
        self._graphs[key] = tables, graph

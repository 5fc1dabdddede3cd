"""Drafting on a GPU with the MTP layer: after a step's tokens are drawn, observe and propose.

Knows rows, slots and the layer. Must not know how drafts are verified. Hidden rows of a decoding
step are read from the slots' rings, so that observation and all passes replay as one CUDA graph;
those of a prefill come from the pass itself. The next step takes the drafts on the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from merestone.device.gpu_passes import Passed, Passes, bucket, contexts, ladder, reach_of
from merestone.device.gpu_state import RING, GpuState, peak, sent
from merestone.device.gpu_tables import Key, Tables
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
from merestone.models.glm5_next_mtp import GROUP
from merestone.models.gpu import GpuModel
from merestone.models.gpu_mtp import GpuMtp, Scratch
from merestone.models.interface import CHUNK
from merestone.ops.triton.attention import SPAN
from merestone.ops.triton.follow import Noise, add_noise, among
from merestone.ops.triton.judge import best
from merestone.sched.plan import Work
from merestone.spec.draw import AMONG
from merestone.spec.interface import DraftGroup


@dataclass(frozen=True, slots=True)
class GpuMtpDrafter:
    """The MTP layer on a device as a drafter: what a :class:`merestone.spec.interface.Drafter` says
    of itself, without its calls."""

    layer: GpuMtp
    depth: int
    groups: tuple[DraftGroup, ...]
    lag: int = 1
    features: tuple[int, ...] = ()
    chances: bool = False

    def fields(self) -> tuple[Field, ...]:
        return self.layer.fields()


class GpuDrafting:
    """Runs ``drafter`` for at most ``slots`` sequences."""

    lag = 1

    def __init__(
        self,
        drafter: GpuMtpDrafter,
        model: GpuModel,
        state: GpuState,
        passes: Passes,
        slots: int,
    ) -> None:
        depth, layer = drafter.depth, drafter.layer
        self.depth = depth
        self._layer, self._model, self._state, self._passes = layer, model, state, passes
        self._slots = slots
        self._scratch = Scratch(layer.attention, slots, depth, state.device)
        self._ids = torch.zeros(depth, slots, dtype=torch.int32, device=state.device)
        among = min(AMONG, model.info.vocab_size)
        self._odds = odds_of(self._ids.numel(), among, state.device) if drafter.chances else None
        self._bad = torch.zeros(slots, dtype=torch.int32, device=state.device)
        self._graphs: dict[Key, tuple[Tables, torch.cuda.CUDAGraph]] = {}
        self._before: Tensor | None = None
        self._waiting: list[int] = []
        size = _size(self._of(self._key_of(slots, 1)))
        self._host = torch.empty(size, dtype=torch.int32, pin_memory=state.device != "cpu")
        self._buffer = torch.zeros(size, dtype=torch.int32, device=state.device)

    # -- the host's side ------------------------------------------------------------------------

    def proposed(self) -> Proposed | None:
        """What the last step proposed, until the next one."""
        waiting, self._waiting = self._waiting, []
        if not waiting:
            return None
        each = range(0, self._ids.numel(), self._slots)
        places = {slot: [at + i for at in each] for i, slot in enumerate(waiting)}
        return Proposed(self._ids.flatten(), places, self._odds)

    def keep(self, works: Sequence[Work]) -> None:
        """Before a pass: keep the hidden rows that come before its own."""
        self._before = None
        if any(work.end - work.start > self.depth + 1 for work in works):
            at = [w.slot * RING + (w.start - 1) % RING for w in works]
            self._before = self._rings().index_select(0, self._ints(at))

    def held(self, passed: Passed) -> Passed:
        """A pass's rows, as ``step`` needs them after other graphs have run."""
        return passed if self._before is None else Passed(passed.hidden.clone(), {})

    def step(self, turns: Sequence[Turn], works: Sequence[Work], passed: Passed | None) -> None:
        """Observe and propose. ``passed``: what was ``held`` of the pass over ``works``."""
        turns = [turn for turn in turns if turn.next_ids]
        if not turns:
            return
        self._waiting = [turn.slot for turn in turns if turn.proposing]
        longest = max(turn.end for turn in turns)
        short = all(len(turn.next_ids) <= self.depth + 1 for turn in turns)
        if short and self._before is None:
            self._decode(turns, self._key_of(len(turns), longest))
            return
        rows = sum(len(turn.next_ids) for turn in turns)
        key = Key(rows, len(turns), -(-longest // SPAN) * SPAN, False)
        tables, buffer = self._sent(key, turns)
        place = {work.slot: i for i, work in enumerate(works)}
        at = [
            place[turn.slot] if p < turn.start else len(works) + turn.row + p - turn.start
            for turn in turns
            for p in range(turn.first, turn.end)
        ]
        assert passed is not None
        assert self._before is not None
        sources = torch.cat([self._before, passed.hidden]).index_select(0, self._ints(at))
        self._compute(tables, buffer, sources, bool(self._waiting))

    def _decode(self, turns: Sequence[Turn], key: Key) -> None:
        if self._passes.graphs and key not in self._graphs:
            self._capture(key)
        tables = self._graphs[key][0] if self._passes.graphs else self._of(key)
        size = _size(tables)
        self._fill(self._host.numpy()[:size], tables, turns)
        self._buffer[:size].copy_(self._host[:size], non_blocking=True)
        if self._passes.graphs:
            self._graphs[key][1].replay()
        else:
            self._compute(tables, self._buffer[:size], None)

    def _key_of(self, sequences: int, longest: int) -> Key:
        """The key of a step in which every sequence decodes."""
        size = bucket(sequences, ladder(self._slots))
        assert size is not None, (sequences, self._slots)
        return Key(size * (self.depth + 1), size, reach_of(longest), False)

    def _of(self, key: Key) -> Tables:
        # Every rank has all rows of the layer's group: it computes its own heads alone.
        return Tables(
            key, chunk=CHUNK, heads=self._layer.attention.shape.heads, pool=self._model.pool,
            frames=self._state.layout.anchor_frames,
        )  # fmt: skip

    def _sent(self, key: Key, turns: Sequence[Turn]) -> tuple[Tables, Tensor]:
        """Tables of a pass that no graph is for, filled and on the device."""
        tables = self._of(key)
        host = np.zeros(_size(tables), np.int32)
        self._fill(host, tables, turns)
        return tables, sent(host, self._state.device)

    def _fill(self, host: np.ndarray, tables: Tables, turns: Sequence[Turn]) -> None:
        """Tables of a pass over the turns' rows, and of the rows that drafts are made from."""
        key = tables.key
        padding = self._state.padding_slot
        works = [
            Work(t.slot, t.first, t.end, t.next_ids, (), 0, (), 0, (), sample=False) for t in turns
        ]
        tables.fill(host[: tables.size], works, padding)
        parts = _sources(key).on_host(host[tables.size :])
        asking = [turn for turn in turns if turn.proposing]
        at = [t.slot * RING + p % RING for t in turns for p in range(t.first, t.end)]
        parts["rings"][: len(at)], parts["rings"][len(at) :] = at, padding * RING
        ends = np.cumsum([len(t.next_ids) for t in turns])
        lasts = [int(e) - 1 for e, t in zip(ends, turns, strict=True) if t.proposing]
        # A sequence of padding drafts from a row of padding, or from anybody's: nobody looks.
        parts["last"][: len(lasts)], parts["last"][len(lasts) :] = lasts, key.rows - 1
        parts["slots"][: len(lasts)] = [turn.slot for turn in asking]
        parts["slots"][len(lasts) :] = padding
        fill_noise(parts, asking)

    def capture_all(self, longest: int) -> int:
        """Capture every graph for contexts of up to ``longest`` tokens, at start-up; returns how
        many."""
        if self._passes.graphs:
            for key in self.keys(longest):
                self._capture(key)
        return len(self._graphs)

    def keys(self, longest: int) -> list[Key]:
        """Of all graphs for such contexts, the largest first."""
        sizes = ladder(self._slots)[::-1]
        return [self._key_of(size, sees) for sees in contexts(longest)[::-1] for size in sizes]

    def measure(self, rows: int, longest: int) -> int:
        """Bytes that steps take at most: one that observes ``rows`` rows, and a decoding one."""
        return peak(lambda: self._largest(rows, longest))

    def _largest(self, rows: int, longest: int) -> None:
        long = Key(rows, self._slots, reach_of(longest), False)
        for key in (long, self._key_of(self._slots, longest)):
            tables, buffer = self._sent(key, ())
            # The pass's rows that are kept, and they again behind those that come before them.
            kept = self._rings().new_empty(2, key.rows, self._rings().shape[1])
            self._compute(tables, buffer, None)
            del kept

    # -- the device's side ----------------------------------------------------------------------

    def _rings(self) -> Tensor:
        ring = self._state.ring
        return ring.view(-1, ring.shape[2])

    def _ints(self, values: Sequence[int]) -> Tensor:
        return sent(np.array(values, np.int32), self._state.device)

    def _compute(
        self, tables: Tables, buffer: Tensor, hidden: Tensor | None, wanted: bool = True
    ) -> Tensor:
        """One pass over observed rows, and those that draft if drafts are ``wanted``; hidden rows
        from the rings if not given."""
        state, layer, key = self._state, self._layer, tables.key
        step = tables.step(buffer[: tables.size], state, rows=GROUP, raw=GROUP)
        sources = _sources(key).on_device(buffer[tables.size :])
        if hidden is None:
            hidden = self._rings().index_select(0, sources["rings"])
        out, chosen = layer.forward(self._model.embed(step.tokens), hidden, step, state)
        if not wanted:
            return self._ids
        last = out.index_select(0, sources["last"])
        count, ids, noise = key.sequences, self._ids, noise_of(sources)
        self._best(last, ids[0, :count], noise, 1)
        if self.depth > 1:
            picked = tuple(part.index_select(0, sources["last"]) for part in chosen)
            pages = state.tables[GROUP].index_select(0, sources["slots"])
            seen = layer.reach((picked[0], picked[1]), pages, self._scratch, state)
        for place in range(1, self.depth):
            embedded = self._model.embed(ids[place - 1, :count])
            last, seen = layer.recycle(embedded, last, seen, self._scratch)
            self._best(last, ids[place, :count], noise, place + 1)
        return ids

    def _best(self, hidden: Tensor, ids: Tensor, noise: Noise, ahead: int) -> None:
        """Into ``ids`` [S] the best id of each hidden row, with the noise that the target will add
        ``ahead`` of the newest token. Where logits are no numbers it is none: then any id will do
        for a draft."""
        logits = self._model.logits(hidden)
        if self._odds is not None:
            own = self._odds.rows((ahead - 1) * self._slots, ids.shape[0])
            among(logits, noise, 1, ahead, ids, own)
            return
        add_noise(logits, noise, 1, ahead)
        best(logits, ids, self._bad[: ids.shape[0]])
        ids.clamp_(max=self._model.info.vocab_size - 1)

    def _capture(self, key: Key) -> None:
        # Padding alone, as in a pass of the target.
        tables = self._of(key)
        size = _size(tables)
        self._fill(self._host.numpy()[:size], tables, ())
        buffer = self._buffer[:size]
        buffer.copy_(self._host[:size])
        graph, _ = self._passes.capture(
            lambda: self._compute(tables, buffer, None), f"drafting {key}"
        )
        self._graphs[key] = tables, graph


@lru_cache(maxsize=256)
def _sources(key: Key) -> Parts:
    """Tables beside those of a pass: where each row's hidden row lies in the rings [N], the rows
    from which drafts are made, their slots [S], and the keys of their noise."""
    sizes = {"rings": key.rows, "last": key.sequences, "slots": key.sequences}
    return Parts(sizes | noise_sizes(key.sequences))


def _size(tables: Tables) -> int:
    """Entries of a pass's tables and of :func:`_sources`."""
    return tables.size + _sources(tables.key).size

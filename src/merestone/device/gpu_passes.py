"""Passes over the model on a GPU: launched one kernel at a time, or replayed as CUDA graphs.

Knows keys, buffers and when a graph is worth having. Must not know plans. A graph is captured once
for a key, from the very calls that run without graphs, and replays them: the bits are the same.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TypeVar

import torch
from torch import Tensor

from merestone.device.gpu_state import RING, GpuState, peak, sent_both
from merestone.device.gpu_tables import SPLIT_ROWS, Ints, Key, Tables, rebuild_tables
from merestone.layers.gpu.mla import takes_wide
from merestone.models.gpu import GpuModel, rebuild
from merestone.models.interface import CHUNK
from merestone.ops.triton.attention import SPAN
from merestone.ops.triton.judge import best
from merestone.ops.triton.pages import feed, write_ring
from merestone.sched.plan import Work

log = logging.getLogger("merestone.device")
Result = TypeVar("Result")

MIXED = (64, 128, 256, 512, 1024)
"""Rows of graphs for steps with prefills."""
SHORTEST = 4096
"""Tokens that a row of the smallest graphs may see; each next size is four times that."""


def bucket(count: int, sizes: Sequence[int]) -> int | None:
    """The smallest of ``sizes`` that holds ``count``, None if none does."""
    return next((size for size in sizes if count <= size), None)


def ladder(most: int) -> list[int]:
    """Numbers of sequences that decoding graphs are made for: powers of two, and ``most``."""
    return [*(1 << i for i in range((most - 1).bit_length())), most]


def contexts(longest: int) -> list[int]:
    """Sizes of contexts that graphs are made for, the last one at least ``longest`` tokens."""
    sizes = [SHORTEST]
    while sizes[-1] < longest:
        sizes.append(4 * sizes[-1])
    return sizes


def reach_of(longest: int) -> int:
    """The size of contexts that ``longest`` tokens fall into."""
    return contexts(longest)[-1]


@dataclass(frozen=True, slots=True)
class Sampled:
    """Logits [M, V] fp32 of the rows that a step samples from, their best ids and whether a value
    is not finite, [M] int32."""

    logits: Tensor
    ids: Tensor
    bad: Tensor


@dataclass(frozen=True, slots=True)
class Fed:
    """Ids that the host does not know: ``rows`` of the batch take them from ``drawn`` [n] int32, on
    the device, at ``places``."""

    drawn: Tensor
    rows: list[int]
    places: list[int]


@dataclass(frozen=True, slots=True)
class Passed:
    """What a pass leaves until the next one: hidden rows [N, D] after the final norm, and those of
    the residual after each tapped layer."""

    hidden: Tensor
    features: dict[int, Tensor]


class Passes:
    """``graphs``: replay what fits one. ``rows`` of a step and ``slots`` at most; ``drafts`` that a
    sequence may have verified in a step; ``taps``: layers whose residuals a drafter reads."""

    def __init__(
        self,
        model: GpuModel,
        state: GpuState,
        *,
        rows: int,
        slots: int,
        graphs: bool,
        drafts: int = 0,
        taps: tuple[int, ...] = (),
    ) -> None:
        self._model, self._state = model, state
        self._slots = slots
        self._each = drafts + 1
        self._taps = taps
        self.graphs = graphs
        self._wide = takes_wide(model.attention, state)
        self._forwards: dict[Key, tuple[Tables, torch.cuda.CUDAGraph, Passed]] = {}
        self._samples: dict[int, tuple[torch.cuda.CUDAGraph, Sampled]] = {}
        self._pool = torch.cuda.graph_pool_handle() if graphs else None
        self.graph_bytes = 0
        most = max(bucket(rows, MIXED) or rows, slots * self._each)
        # Of few rows the items of attention are smaller: there may be more of them.
        sizes = (
            self._of(Key(n, slots, SHORTEST, True)).size for n in (most, min(most, SPLIT_ROWS))
        )
        size = max(sizes)
        pinned = state.device != "cpu"
        self._hosts = _two(size, pinned)
        self._buffer = torch.zeros(size, dtype=torch.int32, device=state.device)
        sampled = slots * self._each
        self._hosts_rows = _two(sampled, pinned)
        self._sample_rows = torch.zeros(sampled, dtype=torch.int32, device=state.device)
        self._found = torch.zeros(2, sampled, dtype=torch.int32, device=state.device)

    def _of(self, key: Key) -> Tables:
        return Tables(
            key, chunk=CHUNK, heads=self._model.heads, pool=self._model.pool,
            frames=self._state.layout.anchor_frames, wide=self._wide,
        )  # fmt: skip

    # -- the forward pass -----------------------------------------------------------------------

    def forward(self, works: Sequence[Work], fed: Fed | None = None) -> Passed:
        """Compute all rows of ``works``, one after another."""
        key, graphed = self._key_of(works)
        if not graphed:
            tables = self._of(key)
            self._fill(tables, works, fed)
            return self._compute(tables)
        if key not in self._forwards:
            self._capture_forward(key)
        tables, graph, passed = self._forwards[key]
        self._fill(tables, works, fed)
        graph.replay()
        return passed

    def _fill(self, tables: Tables, works: Sequence[Work], fed: Fed | None = None) -> None:
        host = self._hosts.popleft()
        self._hosts.append(host)
        tables.fill(host.numpy()[: tables.size], works, self._state.padding_slot)
        self._buffer[: tables.size].copy_(host[: tables.size], non_blocking=True)
        if fed is not None:
            at, source = sent_both(fed.rows, fed.places, self._state.device)
            size = self._model.info.vocab_size
            feed(tables.tokens(self._buffer[: tables.size]), at, fed.drawn, source, size)

    def _key_of(self, works: Sequence[Work]) -> tuple[Key, bool]:
        """The key of a step, and whether it is that of a graph."""
        lengths = [work.end - work.start for work in works]
        rows, most, longest = sum(lengths), max(lengths), max(work.end for work in works)
        sees = reach_of(longest)
        exactly = Key(rows, len(works), -(-longest // SPAN) * SPAN, most > 1), False
        if not self.graphs:
            return exactly
        if most <= self._each:
            # Decoding, and verification with as many rows for each as it may have.
            return self._small_key(len(works), 1 if most == 1 else self._each, sees), True
        size = bucket(rows, MIXED)
        if size is not None:
            return Key(size, self._slots, sees, True), True
        return exactly

    def _small_key(self, sequences: int, each: int, sees: int) -> Key:
        size = bucket(sequences, ladder(self._slots))
        assert size is not None, (sequences, self._slots)
        return Key(size * each, size, sees, False)

    def _compute(self, tables: Tables) -> Passed:
        state = self._state
        step = tables.step(self._buffer[: tables.size], state)
        hidden, features = self._model.forward(step, state, self._taps)
        write_ring(hidden, state.ring, step.row_sequence, step.row_position, step.slot, step.floor)
        return Passed(hidden, features)

    # -- the rows that are sampled from ---------------------------------------------------------

    def sample(self, rows: Sequence[tuple[int, int]]) -> Sampled:
        """Logits after ``at`` tokens of each ``(slot, at)``."""
        count = len(rows)
        size = count
        if self.graphs:
            size = bucket(count, ladder(self._slots * self._each)) or count
            if size not in self._samples:
                self._capture_sample(size)
        pinned = self._hosts_rows.popleft()
        self._hosts_rows.append(pinned)
        host: Ints = pinned.numpy()
        host[:count] = [slot * RING + (at - 1) % RING for slot, at in rows]
        host[count:size] = self._state.padding_slot * RING
        self._sample_rows[:size].copy_(pinned[:size], non_blocking=True)
        if self.graphs:
            graph, found = self._samples[size]
            graph.replay()
        else:
            found = self._judge(size)
        return Sampled(found.logits[:count], found.ids[:count], found.bad[:count])

    def _judge(self, size: int) -> Sampled:
        ring = self._state.ring
        hidden = ring.view(-1, ring.shape[2]).index_select(0, self._sample_rows[:size])
        logits = self._model.logits(hidden)
        ids, bad = self._found[0, :size], self._found[1, :size]
        best(logits, ids, bad)
        return Sampled(logits, ids, bad)

    # -- graphs ---------------------------------------------------------------------------------

    def capture_all(self, rows: int, longest: int) -> int:
        """Capture every graph for steps of up to ``rows`` rows and contexts of ``longest`` tokens,
        the largest (whose memory the others share) first. Returns how many.

        At start-up, so that no request waits for one.
        """
        if not self.graphs:
            return 0
        for key in self.keys(rows, longest):
            self._capture_forward(key)
        for size in reversed(ladder(self._slots * self._each)):
            self._capture_sample(size)
        self._warm_rebuild()
        return len(self._forwards) + len(self._samples)

    def _warm_rebuild(self) -> None:
        """Compile what makes caches again: otherwise the first request that resumes inside a chunk
        would wait for it."""
        state, frames = self._state, self._state.layout.anchor_frames
        padding = state.padding_slot
        works = [Work(padding, 2, 3, (0,), (), 0, (), 0, (), sample=False)]
        rebuild(self._model, rebuild_tables(works, frames, state), state)
        state.forget(padding)

    def keys(self, rows: int, longest: int) -> list[Key]:
        """Of all graphs for such steps, the largest first."""
        found = []
        for sees in reversed(contexts(longest)):
            mixed = [size for size in reversed(MIXED) if size <= rows]
            found += [Key(size, self._slots, sees, True) for size in mixed]
            for each in sorted({1, self._each}, reverse=True):
                sizes = reversed(ladder(self._slots))
                found += [self._small_key(size, each, sees) for size in sizes]
        return found

    def graph_count(self, rows: int, longest: int) -> int:
        """How many graphs :meth:`capture_all` makes."""
        return len(self.keys(rows, longest)) + len(ladder(self._slots * self._each))

    def measure(self, rows: int, longest: int) -> int:
        """Bytes that steps take at most: one of ``rows`` rows, a decoding one, and its logits."""
        return peak(lambda: self._largest(rows, reach_of(longest)))

    def _largest(self, rows: int, sees: int) -> None:
        small = Key(self._slots * self._each, self._slots, sees, False)
        for key in (Key(rows, self._slots, sees, True), small):
            tables = self._of(key)
            self._fill(tables, ())
            self._compute(tables)
        self._judge(self._slots * self._each)

    def _capture_forward(self, key: Key) -> None:
        # Padding alone: a pass may rewrite an anchor in place, so none may run twice.
        tables = self._of(key)
        self._fill(tables, ())
        graph, passed = self.capture(lambda: self._compute(tables), str(key))
        self._forwards[key] = tables, graph, passed

    def _capture_sample(self, size: int) -> None:
        self._samples[size] = self.capture(lambda: self._judge(size), f"sampling {size} rows")

    def capture(self, call: Callable[[], Result], name: str) -> tuple[torch.cuda.CUDAGraph, Result]:
        """``call`` as a graph, after one run that compiles and loads its kernels."""
        before = torch.cuda.memory_reserved()
        side: torch.cuda.Stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            call()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        # Threads of stores may lock memory and wait for copies meanwhile.
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            result = call()
        used = torch.cuda.memory_reserved() - before
        self.graph_bytes += used
        log.debug("graph of %s: %d bytes more", name, used)
        return graph, result


def _two(size: int, pinned: bool) -> deque[Tensor]:
    """Host memory [size] int32 for this step, and for the next: the copy out of this one may not be
    over when the next is filled. Used in turn; no step is two ahead."""
    return deque(torch.empty(size, dtype=torch.int32, pin_memory=pinned) for _ in range(2))


def rows_of(works: Sequence[Work]) -> list[int]:
    """The batch row at which each work's rows begin."""
    lengths = [work.end - work.start for work in works]
    return list(accumulate(lengths, initial=0))[:-1]

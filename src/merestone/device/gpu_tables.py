"""A step's tables: how many entries each has, where it lies in one buffer, and what goes in.

Knows works and shapes. Must not know the model's layers, nor tensors' contents. A key gives every
size, so two steps of one key have their tables in the same places: what a graph needs.
"""

from __future__ import annotations

from collections.abc import Sequence as Rows
from dataclasses import dataclass
from itertools import chain
from math import prod
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from merestone.device.gpu_state import GpuState, sent
from merestone.layers.gpu.ranks import hold
from merestone.layers.gpu.step import Rebuild, Step
from merestone.ops.triton.attention import NARROW, WIDE
from merestone.ops.triton.attention_wide import ROWS
from merestone.ops.triton.kda import Pass
from merestone.ops.triton.rows import Sequences
from merestone.sched.plan import Work

Ints = NDArray[np.int32]

_GRID = 4
"""Tables start at multiples of so many entries: 16 bytes."""
SPLIT_ROWS = 64
"""Up to so many rows a program for every span of keys; above, enough programs without."""
_FED = (0,)


@dataclass(frozen=True, slots=True)
class Key:
    """The size of a step: ``rows``, ``sequences`` without that of padding, ``longest``: tokens that
    a row may see. ``cut``: works may need two passes of the recurrence (see :func:`cut_at`)."""

    rows: int
    sequences: int
    longest: int
    cut: bool


def cut_at(work: Work, chunk: int) -> int | None:
    """Where a work's recurrence must be cut in two, None if one pass does.

    A pass with old rows in the cache may reach two chunks beyond its anchor. A longer one first
    completes the open chunk, and goes on from the state there, which it leaves in the new anchor.
    """
    if work.start == work.anchor or work.end - work.anchor <= 2 * chunk:
        return None
    at = (work.start // chunk + 1) * chunk
    assert at - work.anchor <= 2 * chunk, work
    assert at <= work.advance, work
    return at


@dataclass(frozen=True, slots=True)
class _Rows:
    """Rows of works one after another, from each one's ``first`` [S]: ``used`` in all; of each row
    the ``sequence`` [N] (padding's among them) and its place ``within`` [used] that; and the
    ``items`` [n, 3] of attention's work."""

    used: int
    first: Ints
    sequence: Ints
    within: Ints
    items: Ints


class Tables:
    """The tables of one key in a buffer of int32. ``heads`` and ``pool`` as in a GpuModel;
    ``frames`` of an anchor. ``wide``: attention of many rows may take the wide items of
    :mod:`merestone.ops.triton.attention_wide`."""

    def __init__(
        self, key: Key, *, chunk: int, heads: int, pool: int, frames: int, wide: bool = False
    ) -> None:
        self.key = key
        self._chunk, self._heads, self._pool, self._frames = chunk, heads, pool, frames
        self.split = key.rows <= SPLIT_ROWS
        self.wide = wide and not self.split
        self._height = ROWS if self.wide else NARROW if self.split else WIDE
        n, s = key.rows, key.sequences + 1
        shapes: dict[str, tuple[int, ...]] = dict.fromkeys(
            ("tokens", "row_sequence", "row_position", "seen"), (n,)
        )
        shapes |= dict.fromkeys(("first", "row", "anchor", "end", "advance", "floor", "slot"), (s,))
        shapes |= dict.fromkeys(("anchor_frames", "advance_frames"), (s, frames))
        if key.cut:
            cut = ("cut_end", "cut_advance", "rest_first", "rest_row", "rest_anchor")
            shapes |= dict.fromkeys((*cut, "rest_advance"), (s,))
            shapes |= dict.fromkeys(("cut_frames", "rest_frames"), (s, frames))
        shapes["pools"] = (2, -(-(n // pool + s) // _GRID) * _GRID) if pool else (2, 0)
        shapes["work"] = (self._most_items(n, s), 3)
        self._places: dict[str, tuple[int, int, tuple[int, ...]]] = {}
        self.size = 0
        for name, shape in shapes.items():
            entries = prod(shape)
            self._places[name] = self.size, self.size + entries, shape
            self.size += -(-entries // _GRID) * _GRID
        self._last: tuple[bytes, _Rows] | None = None

    def _most_items(self, rows: int, sequences: int) -> int:
        if self._pool:
            return rows * -(-self._heads // self._height)
        return rows * self._heads // self._height + sequences if self._heads else 0

    def _part(self, buffer: Any, name: str) -> Any:
        first, end, shape = self._places[name]
        return buffer[first:end].reshape(shape)

    # -- the host's side ------------------------------------------------------------------------

    def fill(self, buffer: Ints, works: Rows[Work], padding_slot: int) -> None:
        """Write the tables of ``works`` (at least one row each) into ``buffer`` [size]. Rows that
        are fed their ids later have none in their work: they are 0."""
        key, count = self.key, len(works)
        assert count <= key.sequences, (count, key)
        buffer[:] = 0
        t = {name: self._part(buffer, name) for name in self._places}
        limits = [(w.start, w.end, w.anchor, w.advance, w.slot) for w in works]
        start, end, anchor, advance, slot = np.array(limits, np.int32).reshape(-1, 5).T
        lengths = end - start
        rows = self._rows(lengths)
        t["first"][:count], t["end"][:count], t["row"][:count] = start, end, rows.first
        t["anchor"][:count], t["floor"][:count] = anchor, advance
        t["advance"][:count] = np.where(advance > anchor, advance, 0)
        t["slot"][:count], t["slot"][count:] = slot, padding_slot
        nowhere = (-1,) * self._frames
        for name in ("anchor_frames", "advance_frames"):
            t[name][:] = -1
            frames = [getattr(w, name) or nowhere for w in works]
            if any(own is not nowhere for own in frames):
                t[name][:count] = frames
        if key.cut:
            self._fill_cut(t, works)
        self._fill_rows(t, works, rows, start, lengths)
        if self._pool:
            self._fill_pools(t["pools"], start, end)

    def _rows(self, lengths: Ints) -> _Rows:
        """What the lengths alone say. Decoding steps have those of the step before."""
        same = lengths.tobytes()
        if self._last is None or self._last[0] != same:
            first = np.cumsum(lengths, dtype=np.int32) - lengths
            used = int(lengths.sum())
            assert used <= self.key.rows, (used, self.key)
            sequence = np.full(self.key.rows, self.key.sequences, np.int32)
            sequence[:used] = np.repeat(np.arange(len(lengths), dtype=np.int32), lengths)
            within = np.arange(used, dtype=np.int32) - np.repeat(first, lengths)
            items = self._items(sequence, lengths, first)
            self._last = same, _Rows(used, first, sequence, within, items)
        return self._last[1]

    def _fill_rows(
        self, t: dict[str, Ints], works: Rows[Work], rows: _Rows, start: Ints, lengths: Ints
    ) -> None:
        used = rows.used
        ids = chain.from_iterable(work.tokens or _FED for work in works)
        t["tokens"][:used] = np.fromiter(ids, np.int32, used)
        t["row_sequence"][:] = rows.sequence
        t["row_position"][:used] = rows.within + np.repeat(start, lengths)
        t["seen"][:used] = t["row_position"][:used] + 1
        t["work"][: len(rows.items)] = rows.items

    def _fill_cut(self, t: dict[str, Ints], works: Rows[Work]) -> None:
        """Two passes: up to the cut (nothing where there is none), and from there."""
        t["cut_frames"][:] = -1
        for name in ("first", "row", "anchor", "advance"):
            t[f"rest_{name}"][:] = t[name]
        t["rest_frames"][:] = t["anchor_frames"]
        for i, work in enumerate(works):
            at = cut_at(work, self._chunk)
            if at is None:
                continue
            t["cut_end"][i] = t["cut_advance"][i] = at
            t["cut_frames"][i] = t["rest_frames"][i] = work.advance_frames
            t["rest_first"][i] = t["rest_anchor"][i] = at
            t["rest_row"][i] += at - work.start
            t["rest_advance"][i] = work.advance if work.advance > at else 0

    def _fill_pools(self, pools: Ints, start: Ints, end: Ints) -> None:
        first = start // self._pool
        counts = end // self._pool - first
        used = int(counts.sum())
        pools[1, used:] = -1
        if not used:
            return
        before = np.cumsum(counts) - counts
        pools[0, :used] = np.repeat(np.arange(len(start)), counts)
        pools[1, :used] = np.arange(used) + np.repeat(first - before, counts)

    def _items(self, row_sequence: Ints, lengths: Ints, row: Ints) -> Ints:
        """Items of rows x heads: of each sequence, or (where rows select) of each row; [n, 3]."""
        heads, height, rows = self._heads, self._height, self.key.rows
        if not heads:
            return np.zeros((0, 3), np.int32)
        if self._pool:
            sequence, first = row_sequence, np.arange(rows) * heads
            count = np.full(rows, heads)
        else:
            used = int(lengths.sum())
            # The rows of padding are a part too: they see nothing, and are zero.
            sequence = np.append(np.arange(len(lengths), dtype=np.int32), self.key.sequences)
            first = np.append(row, used) * heads
            count = np.append(lengths, rows - used) * heads
        each = -(-count // height)
        within = (np.arange(int(each.sum())) - np.repeat(np.cumsum(each) - each, each)) * height
        sizes = np.minimum(height, np.repeat(count, each) - within)
        items = [np.repeat(sequence, each), np.repeat(first, each) + within, sizes]
        return np.stack(items, 1).astype(np.int32)

    # -- the device's side ----------------------------------------------------------------------

    def tokens(self, buffer: Tensor) -> Tensor:
        """The ids of the rows in ``buffer`` [size]."""
        part: Tensor = self._part(buffer, "tokens")
        return part

    def step(
        self, buffer: Tensor, state: GpuState, *, rows: str = "full", raw: str = "open"
    ) -> Step:
        """The tables in ``buffer`` [size] int32, on the device, with the page tables of its slots
        (gathered here: part of what a graph replays) in the groups of attention's ``rows`` and of
        ``raw`` ones."""
        t = {name: self._part(buffer, name) for name in self._places}
        slot = t["slot"]
        open_pages = state.tables[raw].index_select(0, slot)
        whole = Sequences(t["first"], t["row"], t["anchor"], open_pages, t["anchor_frames"])
        passes: tuple[tuple[Sequences, Pass], ...] = (
            (whole, Pass(t["end"], t["advance"], slot, t["advance_frames"])),
        )
        if self.key.cut:
            rest = Sequences(
                t["rest_first"], t["rest_row"], t["rest_anchor"], open_pages, t["rest_frames"]
            )
            passes = (
                (whole, Pass(t["cut_end"], t["cut_advance"], slot, t["cut_frames"])),
                (rest, Pass(t["end"], t["rest_advance"], slot, t["advance_frames"])),
            )
        return Step(
            tokens=t["tokens"],
            row_sequence=t["row_sequence"],
            row_position=t["row_position"],
            seen=t["seen"],
            sequences=whole,
            full_pages=state.tables[rows].index_select(0, slot),
            floor=t["floor"],
            slot=slot,
            passes=passes,
            advance=t["advance"],
            advance_frames=t["advance_frames"],
            pools=t["pools"],
            work=t["work"],
            split=self.split,
            wide=self.wide,
            longest=self.key.longest,
            held=hold(
                state.arena.shards(rows), t["row_position"], t["seen"], t["pools"][1],
                self._pool, self.key.longest,
            ),
        )  # fmt: skip


def rebuild_tables(works: Rows[Work], frames: int, state: GpuState) -> Rebuild:
    """The tables that make the caches of rows [anchor, start) of ``works`` again."""

    def ints(values: Rows[int]) -> Tensor:
        return sent(np.array(values, np.int32), state.device)

    start, anchor, slot = (
        ints([getattr(w, n) for w in works]) for n in ("start", "anchor", "slot")
    )
    anchors = ints([f for w in works for f in w.anchor_frames or (-1,) * frames]).view(-1, frames)
    lengths = [w.start - w.anchor for w in works]
    row = ints(np.cumsum([0, *lengths[:-1]]).tolist())
    open_pages = state.tables["open"].index_select(0, slot)
    zero = torch.zeros_like(slot)
    return Rebuild(
        row_sequence=ints([i for i, n in enumerate(lengths) for _ in range(n)]),
        row_position=ints([p for w in works for p in range(w.anchor, w.start)]),
        found=Sequences(start, zero, anchor, open_pages, anchors),
        sequences=Sequences(anchor, row, anchor, open_pages, anchors),
        again=Pass(start, zero, slot, torch.full_like(anchors, -1)),
    )

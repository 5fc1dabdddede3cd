"""The plain loop: a model run with no engine and no cache. What it says is right by definition.

One sequence, its own pages, the prompt in one pass, then token by token, greedy. Every engine test
compares with it bit for bit. Memory is hostile: NaN before it is written and after it is given up,
frame numbers differ from page numbers, and one step's anchor is never where the last one was.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence

import torch
from torch import Tensor

from merestone.core.geometry import GroupSpec
from merestone.layers.state import Batch, Field, Segment
from merestone.models.interface import CHUNK, Model
from merestone.parallel.tokens import Shards

PAGES = {"open": 16, "full": 64}
"""Tokens of a page. Others than an engine's, which must not matter."""


class PlainState:
    """StateViews over private dense memory for one sequence of at most ``length`` tokens."""

    def __init__(self, fields: Sequence[Field], length: int) -> None:
        self._length = length
        self._rows: dict[tuple[int, str], Tensor] = {}
        self.anchors: dict[tuple[int, str], Tensor] = {}
        self._open = [(field.layer, field.name) for field in fields if field.home == "open"]
        # Frame 0 belongs to nobody and stays poisoned. Open rows: less than a chunk of old ones
        # and less than a chunk of new ones at a time.
        frames = {"full": self._pages("full") + 1, "open": 2 * CHUNK // PAGES["open"] + 1}
        self._held: dict[int, int] = {}
        self._free = deque(range(1, frames["open"]))
        for field in fields:
            key = (field.layer, field.name)
            if field.home == "anchor":
                self.anchors[key] = _poison((2, *field.shape), field.dtype)
                continue
            page = PAGES[field.home]
            assert page % field.every == 0, f"{field.name}: a page holds no whole number of rows"
            shape = (frames[field.home], page // field.every, *field.shape)
            self._rows[key] = _poison(shape, field.dtype)

    def page(self, group: str) -> int:
        return PAGES[group]

    def shards(self, group: str) -> Shards:
        return Shards(GroupSpec(group, PAGES[group]))

    def rows(self, layer: int, name: str) -> Tensor:
        return self._rows[layer, name]

    def read_anchor(self, layer: int, name: str, frames: Tensor) -> Tensor:
        return self.anchors[layer, name][frames[:, 0]].clone()

    def write_anchor(self, layer: int, name: str, frames: Tensor, value: Tensor) -> None:
        self.anchors[layer, name][frames[:, 0]] = value

    def open_rows(self) -> list[Tensor]:
        """The memory of every open field, [frames, rows of a page, *shape]."""
        return [self._rows[key] for key in self._open]

    def full_table(self, end: int) -> Tensor:
        """Frames of the pages of rows [0, end), -1 after them. Pages run backwards in memory."""
        count = self._pages("full")
        table = torch.full((count,), -1, dtype=torch.int64)
        used = -(-end // PAGES["full"])
        table[:used] = count - torch.arange(used)
        return table

    def open_table(self, anchor: int, start: int, advance: int, end: int) -> Tensor:
        """Frames of the old rows [anchor, start) and of the new rows that stay, from ``advance``;
        -1 elsewhere."""
        table = torch.full((self._pages("open"),), -1, dtype=torch.int64)
        page = PAGES["open"]
        for number in range(anchor // page, -(-start // page)):
            table[number] = self._held[number]
        for number in range(max(start, advance) // page, -(-end // page)):
            if number not in self._held:
                self._held[number] = self._free.popleft()
            table[number] = self._held[number]
        return table

    def forget(self, before: int, anchor_frame: int | None) -> None:
        """Give up the open pages wholly below ``before`` and the anchor it replaces."""
        for number in [n for n in self._held if (n + 1) * PAGES["open"] <= before]:
            frame = self._held.pop(number)
            self._free.append(frame)
            for key in self._open:
                self._rows[key][frame] = math.nan
        if anchor_frame is not None:
            for value in self.anchors.values():
                value[anchor_frame] = math.nan

    def _pages(self, group: str) -> int:
        return -(-self._length // PAGES[group])


class PlainLoop:
    """Runs ``model`` for one sequence at a time, without an engine."""

    def __init__(self, model: Model) -> None:
        self.model = model

    def generate(self, prompt_ids: Sequence[int], n: int) -> tuple[list[int], Tensor]:
        """The ``n`` greedy tokens after the prompt, end tokens ignored, and their logits [n, V]."""
        assert n > 0, "nothing to generate"
        sequence = Run(self.model, len(prompt_ids) + n)
        row = self.model.logits(sequence.feed(prompt_ids)[-1:])[0]
        ids, logits = [greedy(row)], [row]
        while len(ids) < n:
            row = self.model.logits(sequence.feed(ids[-1:]))[0]
            ids.append(greedy(row))
            logits.append(row)
        return ids, torch.stack(logits)

    def hidden(self, prompt_ids: Sequence[int]) -> Tensor:
        """The hidden rows of the prompt after the final norm, [len, D], in one pass."""
        return Run(self.model, len(prompt_ids)).feed(prompt_ids)

    def logits(self, prompt_ids: Sequence[int]) -> Tensor:
        """The logits of every prompt position, [len, V] fp32."""
        hidden = self.hidden(prompt_ids)
        # In parts, to bound memory.
        return torch.cat([self.model.logits(rows) for rows in hidden.split(256)])


class Run:
    """One sequence under way: its state and how far it has come."""

    def __init__(self, model: Model, length: int) -> None:
        self.model = model
        self.state = PlainState(model.fields(), length)
        self.length = 0
        self.anchor = 0
        self.anchor_frame: int | None = None

    def feed(self, ids: Sequence[int]) -> Tensor:
        """Compute the rows of ``ids``, which follow what was fed before; hidden rows [len, D]."""
        start, end = self.length, self.length + len(ids)
        advance = end // CHUNK * CHUNK
        moves = advance > self.anchor
        target = 0 if self.anchor_frame != 0 else 1
        segment = Segment(
            row=0,
            start=start,
            end=end,
            pages={
                "full": self.state.full_table(end),
                "open": self.state.open_table(self.anchor, start, advance, end),
            },
            anchor=self.anchor,
            anchor_frames=_frames(self.anchor_frame),
            advance=advance,
            advance_frames=_frames(target if moves else None),
        )
        batch = Batch(
            tokens=torch.tensor(ids, dtype=torch.int64),
            positions=torch.arange(start, end),
            segments=(segment,),
            chunk=CHUNK,
            scratch={},
        )
        with torch.inference_mode():
            hidden = self.model.forward(batch, self.state)
        self.length = end
        if moves:
            self.state.forget(advance, self.anchor_frame)
            self.anchor, self.anchor_frame = advance, target
        return hidden


def greedy(row: Tensor) -> int:
    """The lowest id among the best of a row of logits [V]."""
    return int((row == row.max()).nonzero()[0])


def _frames(frame: int | None) -> Tensor:
    return torch.tensor([] if frame is None else [frame], dtype=torch.int64)


def _poison(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return torch.full(shape, math.nan, dtype=dtype)

"""Which rows of a step lie where: index tensors for the recurrent layers, built once a step.

Knows segments and page tables. Must not know what a row holds. A segment's rows since its anchor
come from three places, laid under one another as one table:

    row 0          zeros
    3 a sequence   the rows before the anchor (the convolution's tail), where a layer has them
    old            rows [anchor, start), read from the open pages, segment after segment
    new            rows [start, end), computed in this step
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from merestone.layers.state import Batch, Segment, StateViews


@dataclass(frozen=True, slots=True)
class Places:
    """Rows in pages: frame and row within the page, [n] each."""

    frames: Tensor
    rows: Tensor

    def read(self, view: Tensor) -> Tensor:
        """[n, *shape] from a field's pages."""
        return view[self.frames, self.rows]

    def write(self, view: Tensor, values: Tensor) -> None:
        """``values`` [n, *shape] into a field's pages."""
        view[self.frames, self.rows] = values


def places(segments: list[tuple[Segment, Tensor]], group: str, page: int) -> Places:
    """Where rows (positions [n] of each segment) of a paged group lie."""
    if not segments:
        none = torch.zeros(0, dtype=torch.int64)
        return Places(none, none)
    positions = torch.cat([at for _, at in segments])
    frames = torch.cat([segment.pages[group][at // page] for segment, at in segments])
    assert frames.numel() == 0 or int(frames.min()) >= 0, f"a row of {group} has no page"
    return Places(frames, positions % page)


@dataclass(frozen=True, slots=True)
class Chunks:
    """The chunks of a step, round by round over the sequences with most chunks first.

    ``counts`` as :func:`merestone.ops.kda.kda_chunks` takes them. ``packed`` [NC, tail + C]: table
    rows of each chunk with ``tail`` rows before it (row 0 past the sequence's end), ``inner``
    [NC, C] the same without them; ``unpack`` [N]: where the batch's rows lie among the NC * C.
    """

    counts: tuple[int, ...]
    packed: Tensor
    inner: Tensor
    unpack: Tensor


@dataclass(frozen=True, slots=True)
class Anchors:
    """Anchors read and written, for sequences in the order of :class:`Chunks`.

    ``sources`` [n, frames] are those of the sequences ``starts`` [n]; ``targets`` [m, frames] those
    of ``ends`` [m], whose tails are the table rows ``tails`` [m, tail]. ``advances``: for each
    sequence the number of chunks to the anchor written, or 0.
    """

    sources: Tensor | None
    starts: Tensor
    targets: Tensor | None
    ends: Tensor
    tails: Tensor
    advances: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ChunkRows:
    """All that a recurrent layer needs to know of a step. ``lead``: table rows before the old ones.
    ``reads``: where the old rows lie; ``kept`` [n]: batch rows that go to ``writes``."""

    lead: int
    reads: Places
    kept: Tensor
    writes: Places
    chunks: Chunks
    anchors: Anchors

    def table(self, lead: Tensor | None, old: Tensor, new: Tensor) -> Tensor:
        """All rows under one another; ``lead`` [sequences, tail, F], or None for zeros."""
        head = new.new_zeros(self.lead, new.shape[1])
        if lead is not None:
            head[1:] = lead.flatten(0, 1)
        return torch.cat([head, old, new])


def chunk_rows(batch: Batch, state: StateViews, tail: int) -> ChunkRows:
    """The step's chunk rows, from ``batch.scratch`` or built; ``tail`` rows before each chunk."""
    found = batch.scratch.get("chunk_rows")
    if found is None:
        found = batch.scratch["chunk_rows"] = _build(batch, state.page("open"), tail)
    assert isinstance(found, ChunkRows)
    return found


def kept_rows(segments: Sequence[Segment]) -> list[tuple[Segment, Tensor]]:
    """Positions of the new rows that go to the open pages: those above the anchor to come."""
    return [(s, torch.arange(max(s.start, s.advance), s.end)) for s in segments]


def batch_rows(parts: list[tuple[Segment, Tensor]]) -> Tensor:
    """The batch rows of positions, part after part."""
    return torch.cat([at + (s.row - s.start) for s, at in parts])


def _build(batch: Batch, page: int, tail: int) -> ChunkRows:
    size = batch.chunk
    for s in batch.segments:
        assert s.anchor % size == s.advance % size == 0, s
        assert s.anchor <= s.start < s.end, s
        assert s.anchor <= s.advance <= s.end, s
    segments = sorted(batch.segments, key=lambda s: -_count(s, size))
    tables = _tables(segments, tail)
    kept = kept_rows(segments)
    return ChunkRows(
        lead=1 + tail * len(segments),
        reads=places([(s, torch.arange(s.anchor, s.start)) for s in segments], "open", page),
        kept=batch_rows(kept),
        writes=places(kept, "open", page),
        chunks=_chunks(segments, tables, size, tail),
        anchors=_anchors(segments, tables, size, tail),
    )


def _count(segment: Segment, size: int) -> int:
    """Chunks from the anchor to the end."""
    return -(-(segment.end - segment.anchor) // size)


def _tables(segments: list[Segment], tail: int) -> list[Tensor]:
    """Of each sequence the table rows of positions [anchor - tail, end)."""
    first_tail, first_old = 1, 1 + tail * len(segments)
    first_new = first_old + sum(s.start - s.anchor for s in segments)
    tables = []
    for s in segments:
        old, new = s.start - s.anchor, first_new + s.row
        parts = (
            torch.arange(first_tail, first_tail + tail),
            torch.arange(first_old, first_old + old),
            torch.arange(new, new + s.end - s.start),
        )
        tables.append(torch.cat(parts))
        first_tail += tail
        first_old += old
    return tables


def _chunks(segments: list[Segment], tables: list[Tensor], size: int, tail: int) -> Chunks:
    counts = [_count(s, size) for s in segments]
    rounds = [0]  # where each round begins
    for turn in range(counts[0]):
        rounds.append(rounds[-1] + sum(count > turn for count in counts))
    packed = torch.zeros(rounds[-1], tail + size, dtype=torch.int64)
    unpack = torch.empty(sum(s.end - s.start for s in segments), dtype=torch.int64)
    for place, (s, table) in enumerate(zip(segments, tables, strict=True)):
        own = torch.tensor(rounds[: counts[place]]) + place
        padded = torch.zeros(counts[place] * size + tail, dtype=torch.int64)
        padded[: table.shape[0]] = table
        packed[own] = padded.unfold(0, tail + size, size)
        at = torch.arange(s.start - s.anchor, s.end - s.anchor)
        unpack[s.row : s.row + s.end - s.start] = own[at // size] * size + at % size
    return Chunks(tuple(counts), packed, packed[:, tail:].contiguous(), unpack)


def _anchors(segments: list[Segment], tables: list[Tensor], size: int, tail: int) -> Anchors:
    starts = [i for i, s in enumerate(segments) if s.anchor_frames.numel()]
    ends = [i for i, s in enumerate(segments) if s.advance_frames.numel()]
    tails = torch.zeros(len(ends), tail, dtype=torch.int64)
    advances = [0] * len(segments)
    for row, i in enumerate(ends):
        ahead = segments[i].advance - segments[i].anchor
        assert ahead > 0, segments[i]
        tails[row] = tables[i][ahead : ahead + tail]
        advances[i] = ahead // size
    return Anchors(
        sources=torch.stack([segments[i].anchor_frames for i in starts]) if starts else None,
        starts=torch.tensor(starts, dtype=torch.int64),
        targets=torch.stack([segments[i].advance_frames for i in ends]) if ends else None,
        ends=torch.tensor(ends, dtype=torch.int64),
        tails=tails,
        advances=tuple(advances),
    )

"""Which rows of a step lie where: index tensors for the recurrent layers, built once a step.

Knows segments and page tables. Must not know what a row holds. A segment's rows since its anchor
come from three places, laid under one another as one table:

    row 0          zeros
    3 a sequence   the rows before the anchor (the convolution's tail), where a layer has them
    old            rows [anchor, start), read from the open pages, segment after segment
    new            rows [start, end), computed in this step
"""

from __future__ import annotations

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
class ChunkRows:
    """The chunks of a step, round by round over the sequences with most chunks first.

    ``counts`` and ``advances`` as :func:`merestone.ops.kda.kda_chunks` takes them. ``packed``
    [NC, tail + C]: table rows of each chunk with ``tail`` rows before it (row 0 past the sequence's
    end), ``inner`` [NC, C] the same without them; ``unpack`` [N]: where the
    batch's rows lie among the NC * C; ``kept`` [n]: batch rows that go to the open pages at
    ``writes``. ``starts``: frames of the anchors read and the sequences they belong to; ``ends``:
    those written, with the table rows of their tails, [n, tail].
    """

    counts: tuple[int, ...]
    advances: tuple[int, ...]
    lead: int
    reads: Places
    packed: Tensor
    inner: Tensor
    unpack: Tensor
    kept: Tensor
    writes: Places
    start_frames: Tensor | None
    starts: Tensor
    end_frames: Tensor | None
    ends: Tensor
    end_tails: Tensor

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


def _build(batch: Batch, page: int, tail: int) -> ChunkRows:
    size = batch.chunk
    chunks = [-(-(s.end - s.anchor) // size) for s in batch.segments]
    order = sorted(range(len(chunks)), key=lambda i: -chunks[i])
    segments = [batch.segments[i] for i in order]
    counts = tuple(chunks[i] for i in order)
    lead = 1 + tail * len(segments)
    old_rows = sum(s.start - s.anchor for s in segments)

    tables: list[Tensor] = []  # of each sequence: table rows of positions [anchor - tail, end)
    first_old = lead
    for place, s in enumerate(segments):
        first = 1 + tail * place
        new = lead + old_rows + s.row
        tables.append(
            torch.cat(
                [
                    torch.arange(first, first + tail),
                    torch.arange(first_old, first_old + s.start - s.anchor),
                    torch.arange(new, new + s.end - s.start),
                ]
            )
        )
        first_old += s.start - s.anchor

    offsets = [0]
    for turn in range(counts[0]):
        offsets.append(offsets[-1] + sum(count > turn for count in counts))
    packed = torch.zeros(offsets[-1], tail + size, dtype=torch.int64)
    unpack = torch.empty(batch.tokens.shape[0], dtype=torch.int64)
    for place, (s, table) in enumerate(zip(segments, tables, strict=True)):
        own = torch.tensor([offsets[turn] + place for turn in range(counts[place])])
        padded = torch.zeros(counts[place] * size + tail, dtype=torch.int64)
        padded[: table.shape[0]] = table
        packed[own] = padded.unfold(0, tail + size, size)
        at = torch.arange(s.start - s.anchor, s.end - s.anchor)
        unpack[s.row : s.row + s.end - s.start] = own[at // size] * size + at % size
    return _with_anchors(segments, tables, counts, size, tail, page, lead, packed, unpack)


def _with_anchors(
    segments: list[Segment],
    tables: list[Tensor],
    counts: tuple[int, ...],
    size: int,
    tail: int,
    page: int,
    lead: int,
    packed: Tensor,
    unpack: Tensor,
) -> ChunkRows:
    """The part of :class:`ChunkRows` that is about pages and anchors."""
    for s in segments:
        assert s.anchor % size == s.advance % size == 0, s
        assert s.anchor <= s.start < s.end, s
        assert s.anchor <= s.advance <= s.end, s
    keep = [(s, torch.arange(max(s.start, s.advance), s.end)) for s in segments]
    kept = torch.cat([at + (s.row - s.start) for s, at in keep])
    starts = [i for i, s in enumerate(segments) if s.anchor_frames.numel()]
    ends = [i for i, s in enumerate(segments) if s.advance_frames.numel()]
    tails = [tables[i][segments[i].advance - segments[i].anchor :][:tail] for i in ends]
    return ChunkRows(
        counts=counts,
        advances=tuple(
            (s.advance - s.anchor) // size if s.advance_frames.numel() else 0 for s in segments
        ),
        lead=lead,
        reads=places([(s, torch.arange(s.anchor, s.start)) for s in segments], "open", page),
        packed=packed,
        inner=packed[:, tail:].contiguous(),
        unpack=unpack,
        kept=kept,
        writes=places(keep, "open", page),
        start_frames=torch.stack([segments[i].anchor_frames for i in starts]) if starts else None,
        starts=torch.tensor(starts, dtype=torch.int64),
        end_frames=torch.stack([segments[i].advance_frames for i in ends]) if ends else None,
        ends=torch.tensor(ends, dtype=torch.int64),
        end_tails=torch.stack(tails) if tails else torch.zeros(0, tail, dtype=torch.int64),
    )

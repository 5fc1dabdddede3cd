"""Which rows of a step attend to what: groups and index tensors for attention, built once a step.

Knows segments, page tables and the sparse index's geometry. Must not know what a key holds. How
rows are grouped decides only speed: a row's bits are the same in any group.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from merestone.layers.rows import Places, batch_rows, kept_rows, places
from merestone.layers.state import Batch, Homes, Segment, StateViews
from merestone.parallel.tokens import Shards

# A segment with at most this many rows shares a group with others of its kind.
_FEW = 8
_GROUP = 16


@dataclass(frozen=True, slots=True)
class Group:
    """Rows over the keys of G segments, the same number of rows for each.

    ``frames`` [G, pages] of the segments (0 past their ends), ``ends`` [G] their lengths.
    ``rows`` [G, R] batch rows, ``seen`` [G, R] tokens that each sees. ``real`` [G, R] or None: a
    segment with fewer rows repeats its last one. ``long``: one segment, with many rows. Where
    ranks share the rows of a sequence, ``ends`` and ``seen`` count those held here.
    """

    frames: Tensor
    ends: Tensor
    rows: Tensor
    seen: Tensor
    real: Tensor | None
    long: bool

    def put(self, target: Tensor, values: Tensor) -> None:
        """``values`` [G, R, ...] to rows of ``target`` [N, ...]."""
        if self.real is None:
            target[self.rows.flatten()] = values.flatten(0, 1)
        else:
            target[self.rows[self.real]] = values[self.real]

    def blocks(self, rows: int) -> list[Group]:
        """Groups of at most ``rows`` rows a segment."""
        if self.rows.shape[1] <= rows:
            return [self]
        parts = [slice(i, i + rows) for i in range(0, self.rows.shape[1], rows)]
        return [
            replace(
                self,
                rows=self.rows[:, part],
                seen=self.seen[:, part],
                real=None if self.real is None else self.real[:, part],
            )
            for part in parts
        ]


@dataclass(frozen=True, slots=True)
class Writes:
    """``places`` of the batch's rows that this rank holds: ``rows`` of it, or None for all."""

    rows: Tensor | None
    places: Places

    def write(self, view: Tensor, values: Tensor) -> None:
        """``values`` [N, *shape] into a field's pages, as far as they belong here."""
        self.places.write(view, values if self.rows is None else values[self.rows])


@dataclass(frozen=True, slots=True)
class Spans:
    """``seen`` [N]: tokens that each row of the batch sees. ``writes``: its pages. ``kept``: batch
    rows that go to the open pages at ``open_writes``. Pools completed by the step and held here:
    ``members`` [n, pool], rows of a table whose first rows are read at ``open_reads`` and whose
    others are the batch's; written at ``pool_writes``.

    ``dense``: rows that see all tokens before them. ``sparse``: rows that choose.
    """

    seen: Tensor
    writes: Writes
    kept: Tensor
    open_writes: Places
    open_reads: Places
    members: Tensor
    pool_writes: Places
    dense: tuple[Group, ...]
    sparse: tuple[Group, ...]


@dataclass(frozen=True, slots=True)
class DenseSpans:
    """Without an index: ``writes``, pages of all rows of the batch; ``groups``, rows that see all
    tokens before them: every row."""

    writes: Writes
    groups: tuple[Group, ...]


def dense_spans(batch: Batch, state: StateViews) -> DenseSpans:
    """The step's spans for attention without an index, from ``batch.scratch`` or built."""
    found = batch.scratch.get("dense_spans")
    if found is None:
        shards = state.shards("full")
        ordered = sorted(batch.segments, key=lambda s: s.row)
        found = batch.scratch["dense_spans"] = DenseSpans(
            writes=_writes(ordered, shards),
            groups=_groups([(s, s.start, s.end) for s in ordered], shards),
        )
    assert isinstance(found, DenseSpans)
    return found


def spans(batch: Batch, state: StateViews, pool: int, limit: int, homes: Homes) -> Spans:
    """The step's spans, from ``batch.scratch`` or built. A row that sees at most ``limit`` tokens
    is dense. All layers of a batch have the same ``homes``."""
    found = batch.scratch.get("spans")
    if found is None:
        found = batch.scratch["spans"] = _build(batch, state, pool, limit, homes)
    assert isinstance(found, Spans)
    return found


def _build(batch: Batch, state: StateViews, pool: int, limit: int, homes: Homes) -> Spans:
    shards = state.shards(homes.rows)
    page, run = shards.spec.page, shards.spec.interleave
    # A pool's rows lie in one page of one rank, and open rows begin with a pool.
    assert batch.chunk % pool == page % pool == 0, (batch.chunk, page, pool)
    assert shards.whole or run % pool == 0, (run, pool)
    ordered = sorted(batch.segments, key=lambda s: s.row)
    raw = state.shards(homes.raw)
    keep = _held(kept_rows(ordered), raw)
    dense = [(s, s.start, min(s.end, limit)) for s in ordered if s.start < limit]
    sparse = [(s, max(s.start, limit), s.end) for s in ordered if s.end > limit]
    open_reads, members, pool_writes = _pools(ordered, pool, shards, raw)
    return Spans(
        seen=torch.cat([torch.arange(s.start, s.end) for s in ordered]) + 1,
        writes=_writes(ordered, shards),
        kept=batch_rows(keep),
        open_writes=_own_places(keep, raw),
        open_reads=open_reads,
        members=members,
        pool_writes=pool_writes,
        dense=_groups(dense, shards),
        sparse=_groups(sparse, shards),
    )


def _writes(segments: list[Segment], shards: Shards) -> Writes:
    """Where the new rows of segments (in the batch's order) go."""
    held = _held([(s, torch.arange(s.start, s.end)) for s in segments], shards)
    return Writes(None if shards.whole else batch_rows(held), _own_places(held, shards))


def _held(parts: list[tuple[Segment, Tensor]], shards: Shards) -> list[tuple[Segment, Tensor]]:
    """The positions that this rank holds, part after part."""
    return parts if shards.whole else [(s, at[shards.mine(at)]) for s, at in parts]


def _own_places(parts: list[tuple[Segment, Tensor]], shards: Shards) -> Places:
    """Where rows that this rank holds lie."""
    own = [(s, shards.own(at)) for s, at in parts]
    return places(own, shards.spec.name, shards.spec.page)


def _pools(
    segments: list[Segment], pool: int, shards: Shards, raw: Shards
) -> tuple[Places, Tensor, Places]:
    """Pools that the step completes here: ``open_reads``, ``members``, ``pool_writes`` of Spans.

    Raw rows of the open chunk are on every rank: the recurrent layers, which share heads and not
    tokens, need the same pages. Where raw rows are shared, a pool's owner has all of its members.
    """
    old = [(s, torch.arange(s.start // pool * pool, s.start)) for s in segments]
    reads = _held(old, raw)
    first_old, first_new = 0, sum(at.shape[0] for _, at in reads)
    members, firsts = [], []
    for (s, begun), (_, read) in zip(old, reads, strict=True):
        # Table rows of positions [start // pool * pool, end); of those not read here, any.
        new = torch.arange(s.start, s.end) + (first_new + s.row - s.start)
        table = torch.cat([torch.arange(first_old, first_old + begun.shape[0]), new])
        first_old += read.shape[0]
        complete = table.shape[0] // pool
        first = (s.start // pool + torch.arange(complete)) * pool
        mine = shards.mine(first)
        members.append(table[: complete * pool].view(complete, pool)[mine])
        firsts.append((s, first[mine]))
    at = _own_places(firsts, shards)
    return _own_places(reads, raw), torch.cat(members), Places(at.frames, at.rows // pool)


def _frames(parts: list[tuple[Segment, int]], shards: Shards) -> Tensor:
    """Frames that hold the segments' first rows here, [segments, pages]; else 0."""
    counts = [-(-own // shards.spec.page) for _, own in parts]
    frames = torch.zeros(len(parts), max(counts, default=0), dtype=torch.int64)
    for i, ((segment, _), count) in enumerate(zip(parts, counts, strict=True)):
        frames[i, :count] = segment.pages[shards.spec.name][:count]
    return frames


def _groups(parts: list[tuple[Segment, int, int]], shards: Shards) -> tuple[Group, ...]:
    """Groups of (segment, first position, last position + 1)."""
    many = [[part] for part in parts if part[2] - part[1] > _FEW]
    # Neighbours in length share a group, so that little of its keys is padding.
    few = sorted((p for p in parts if p[2] - p[1] <= _FEW), key=lambda p: p[2])
    bundles = many + [few[i : i + _GROUP] for i in range(0, len(few), _GROUP)]
    groups = []
    for bundle in bundles:
        width = max(last - first for _, first, last in bundle)
        at = torch.stack(
            [torch.arange(first, first + width).clamp_(max=last - 1) for _, first, last in bundle]
        )
        shift = torch.tensor([s.row - s.start for s, _, _ in bundle])
        counts = torch.tensor([last - first for _, first, last in bundle])
        even = all(last - first == width for _, first, last in bundle)
        own = [shards.spec.local_count(last, shards.rank) for _, _, last in bundle]
        groups.append(
            Group(
                frames=_frames([(s, n) for (s, _, _), n in zip(bundle, own, strict=True)], shards),
                ends=torch.tensor(own),
                rows=at + shift[:, None],
                seen=shards.held(at + 1),
                real=None if even else torch.arange(width) < counts[:, None],
                long=width > _FEW,
            )
        )
    return tuple(groups)

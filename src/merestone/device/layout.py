"""How state lies in frames: page sizes, the frame size, the cells of an anchor.

Knows fields and bytes. Must not know frames' owners, requests or time.
"""

from __future__ import annotations

from dataclasses import dataclass

from merestone.core.geometry import GroupSpec
from merestone.layers.state import Field
from merestone.spec.interface import DraftGroup

ALIGN = 64
"""Every field of a page, and every frame, starts at a multiple of this many bytes."""
SMALLEST_PAGE, LARGEST_PAGE = 16, 4096
SLACK = 1.3
"""Larger pages mean fewer entries to keep; a boundary may pin this much more for them."""


@dataclass(frozen=True, slots=True)
class Run:
    """Cells of one anchor field that lie behind each other in one frame of the anchor."""

    frame: int
    offset: int
    first: int
    last: int


@dataclass(frozen=True, slots=True)
class Layout:
    """Sizes in bytes and tokens; ``offsets`` by (layer, field name)."""

    frame_bytes: int
    groups: tuple[GroupSpec, ...]
    anchor_frames: int
    hidden_rows: int
    hidden_bytes: int
    offsets: dict[tuple[int, str], int]
    cells: dict[tuple[int, str], tuple[Run, ...]]
    row_bytes: dict[str, int]
    anchor_bytes: int

    def explain(self) -> list[str]:
        """One line a group, for the start-up log."""
        lines = [f"frame {self.frame_bytes:,} B"]
        for group in self.groups:
            used = group.page * self.row_bytes[group.name]
            share = 100 * used / self.frame_bytes
            line = (
                f"group {group.name}: page {group.page} tokens x {self.row_bytes[group.name]:,} B"
                f" ({share:.0f}% of a frame)"
            )
            if group.shard > 1:
                line += (
                    f" on each of {group.shard} ranks, dealt in runs of {group.interleave}:"
                    f" {group.span:,} tokens"
                )
            lines.append(line)
        if self.anchor_frames:
            lines.append(f"anchor {self.anchor_bytes:,} B in {self.anchor_frames} frames")
        lines.append(f"hidden rows {self.hidden_bytes:,} B, {self.hidden_rows} a frame")
        return lines


def _aligned(count: int) -> int:
    return -(-count // ALIGN) * ALIGN


def _page_bytes(fields: list[Field], page: int) -> int:
    return sum(_aligned(page // field.every * field.bytes) for field in fields)


def _cell_bytes(field: Field) -> int:
    return field.bytes // field.shape[0]


def _pack(fields: list[Field], frame_bytes: int) -> tuple[dict[tuple[int, str], list[Run]], int]:
    """Lay the cells of all anchor fields into frames, first fit in order."""
    runs: dict[tuple[int, str], list[Run]] = {}
    frame, offset = 0, 0
    for field in fields:
        cell, done = _cell_bytes(field), 0
        mine = runs.setdefault((field.layer, field.name), [])
        while done < field.shape[0]:
            take = min((frame_bytes - offset) // cell, field.shape[0] - done)
            if take:
                mine.append(Run(frame, offset, done, done + take))
                done, offset = done + take, _aligned(offset + take * cell)
            if done < field.shape[0]:
                frame, offset = frame + 1, 0
    return runs, frame + 1 if fields else 0


@dataclass(frozen=True, slots=True)
class _Sizes:
    """A possible choice: page sizes in tokens, and the bytes that one boundary would pin."""

    page: int
    open_page: int
    frame_bytes: int
    pinned: int


def _sizes(homes: dict[str, list[Field]], page: int, chunk: int, floor: int) -> _Sizes:
    """A frame holds one full page of ``page`` tokens and as many open rows as fit."""
    frame = _aligned(max(_page_bytes(homes["full"], page), floor))
    open_page = chunk
    while _page_bytes(homes["open"], open_page) > frame:
        open_page //= 2
    anchors = _pack(homes["anchor"], frame)[1]
    pinned = frame * (anchors + -(-(chunk // 2) // open_page) + 1)
    return _Sizes(page, open_page, frame, pinned)


def _pages(wanted: int | None, multiple: int) -> list[int]:
    """Page sizes of the full group to choose from."""
    if wanted is None:
        sizes = [SMALLEST_PAGE << i for i in range(9) if SMALLEST_PAGE << i <= LARGEST_PAGE]
        return [page for page in sizes if page % multiple == 0]
    if wanted < 1 or wanted & (wanted - 1):
        raise ValueError(f"page size {wanted} is not a power of two")
    if wanted % multiple:
        raise ValueError(f"page size {wanted} is not a multiple of the index pool {multiple}")
    return [wanted]


def _draft_group(
    group: DraftGroup, lag: int, fields: list[Field], frame_bytes: int, dcp: int
) -> GroupSpec:
    """As many rows of a drafter's group as fit into a frame."""
    page = LARGEST_PAGE
    while page > group.multiple and _page_bytes(fields, page) > frame_bytes:
        page //= 2
    assert page % group.multiple == 0, group
    ranks, run = (dcp, group.multiple) if group.dealt and dcp > 1 else (1, 1)
    return GroupSpec(group.name, page, ranks, run, lag=lag, window=group.window)


def plan_layout(
    fields: tuple[Field, ...],
    *,
    hidden_bytes: int,
    chunk: int,
    page_multiple: int,
    full_page: int | None = None,
    draft_groups: tuple[DraftGroup, ...] = (),
    lag: int = 0,
    dcp: int = 1,
) -> Layout:
    """Choose the page of the ``full`` group (unless given) so that little of a frame is wasted.

    A frame holds exactly one full page; the open page is the largest power of two of rows that
    fits (at most a chunk). The choice minimises the bytes that one boundary pins on its own: its
    anchor, half a chunk of open rows, and one part-filled full page; of the sizes that come close
    to the least, the largest is taken. A drafter's groups (with its ``lag``) make do with that.

    ``dcp`` ranks share the tokens of the ``full`` group, in the shortest runs that keep an index
    pool on one of them. All sizes are those of one rank, and every rank has the same: a page then
    covers ``dcp`` times its tokens. So do drafts' groups that may be dealt; others are whole on
    each rank. Recurrent layers share heads, so their pages cover no more tokens; windows are short.

    Raises:
        ValueError: no page size fits, or ``full_page`` is not a usable one.
    """
    names = ("full", "open", "anchor", *(group.name for group in draft_groups))
    homes = {home: [f for f in fields if f.home == home] for home in names}
    largest_cell = max([_cell_bytes(f) for f in homes["anchor"]], default=0)
    smallest = [_page_bytes(homes[group.name], group.multiple) for group in draft_groups]
    floor = max(largest_cell, _page_bytes(homes["open"], 1), hidden_bytes, *smallest)
    choices = [_sizes(homes, p, chunk, floor) for p in _pages(full_page, page_multiple)]
    least = min(choice.pinned for choice in choices)
    best = max((c for c in choices if c.pinned <= SLACK * least), key=lambda c: c.page)

    full = GroupSpec("full", best.page, dcp, page_multiple if dcp > 1 else 1)
    groups = [full, GroupSpec("open", best.open_page, open=True)]
    groups = [group for group in groups if homes[group.name]]
    groups += [_draft_group(g, lag, homes[g.name], best.frame_bytes, dcp) for g in draft_groups]
    offsets: dict[tuple[int, str], int] = {}
    for group in groups:
        offset = 0
        for field in homes[group.name]:
            offsets[field.layer, field.name] = offset
            offset += _aligned(group.page // field.every * field.bytes)
    runs, anchor_frames = _pack(homes["anchor"], best.frame_bytes)
    return Layout(
        frame_bytes=best.frame_bytes,
        groups=tuple(groups),
        anchor_frames=anchor_frames,
        hidden_rows=best.frame_bytes // hidden_bytes,
        hidden_bytes=hidden_bytes,
        offsets=offsets,
        cells={key: tuple(value) for key, value in runs.items()},
        row_bytes={h: sum(f.bytes // f.every for f in homes[h]) for h in homes if h != "anchor"},
        anchor_bytes=sum(field.bytes for field in homes["anchor"]),
    )

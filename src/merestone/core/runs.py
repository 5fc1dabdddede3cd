"""Page runs: how the pages of one group follow a lease that grows, and what a checkpoint takes.

Knows one group's geometry and a run of pages. Must not know who else holds them.
"""

from __future__ import annotations

from typing import NamedTuple

from merestone.core.checkpoint import Checkpoint, Lease, PageRun
from merestone.core.geometry import GroupSpec
from merestone.core.orders import CopyRows, PageDelta


class Extension(NamedTuple):
    """What a step must know of a lease's growth.

    ``copies`` run before the step's rows are written; ``deltas`` are the page table entries that
    changed (dropped pages are not reported: the step still reads them, and nothing after it
    does). ``advance_frames``: where the new anchor goes, () if it stays. In each group the step
    writes rows from ``GroupSpec.floor(anchor)`` on: below, there may be no page for them.
    ``drafts`` and ``propose``: what there is room for.
    """

    copies: tuple[CopyRows, ...]
    deltas: tuple[PageDelta, ...]
    advance_frames: tuple[int, ...]
    drafts: int = 0
    propose: int = 0


class Move(NamedTuple):
    """How a run changes: pages [begin, changed) stay, [changed, end) get fresh frames.

    ``copied``: rows of page ``changed`` to bring along from the page that it replaces.
    """

    begin: int
    changed: int
    end: int
    copied: int


def plan_move(
    group: GroupSpec, lease: Lease, reach: int, anchor: int, appender: bool
) -> Move | None:
    """What it takes to hold rows below ``reach`` with an anchor at ``anchor``; None: the run stays.

    ``appender``: the lease is that of the page of the first row to be written, ``unwritten``. That
    row is decided per group: with a lag it may fall into a page that is full for the other groups.
    Pages that an earlier step held for drafts stay.
    """
    span = group.span
    first, frames = lease.pages[group.name]
    begin = group.floor(anchor) // span
    stop = first + frames.size
    if not frames.size:
        stop = begin
    elif begin < first:
        # A restored window starts at its boundary's, above the floor of its anchor.
        begin = first
    end = max(begin, -(-reach // span), stop if frames.size else 0)
    written = unwritten(group, lease)
    page, partial = divmod(written, span)
    if reach > written and partial and begin <= page < stop and not appender:
        # Also where a long pass leaves no row of it inside the window: the pass reads them.
        return Move(begin, page, end, partial)
    if end == stop and (begin == first or not frames.size):
        return None
    return Move(begin, max(begin, stop), end, 0)


def run_end(group: GroupSpec, lease: Lease) -> int:
    """The row at which its pages end, those of drafts included."""
    first, frames = lease.pages[group.name]
    return (first + frames.size) * group.span


def unwritten(group: GroupSpec, lease: Lease) -> int:
    """The first row of ``group`` that no step so far was sure to write for good."""
    return max(0, lease.rows - group.lag)


def run_at(group: GroupSpec, lease: Lease, at: int) -> PageRun | None:
    """The pages that a checkpoint at ``at`` needs; None if the lease misses one of them."""
    begin, end = group.pages(*group.rows(at, lease.anchor))
    first, frames = lease.pages[group.name]
    if begin == end:
        return begin, frames[:0]
    if not first <= begin < end <= first + frames.size:
        return None
    return begin, frames[begin - first : end - first]


def whole(group: GroupSpec, checkpoint: Checkpoint) -> bool:
    """Whether a checkpoint has every page of ``group`` that resuming from it reads."""
    begin, end = group.pages(*group.rows(checkpoint.at, checkpoint.anchor))
    first, frames = checkpoint.pages[group.name]
    return begin == end or (first, first + frames.size) == (begin, end)

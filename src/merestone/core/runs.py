"""Page runs: how the pages of one group follow a lease that grows, and what a checkpoint takes.

Knows one group's geometry and a run of pages. Must not know who else holds them.
"""

from __future__ import annotations

from typing import NamedTuple

from merestone.core.checkpoint import Lease, PageRun
from merestone.core.geometry import GroupSpec


class Move(NamedTuple):
    """How a run changes: pages [begin, changed) stay, [changed, end) get fresh frames.

    ``copied``: rows of page ``changed`` to bring along from the page that it replaces.
    """

    begin: int
    changed: int
    end: int
    copied: int


def plan_move(group: GroupSpec, lease: Lease, rows: int, anchor: int, owned: bool) -> Move | None:
    """What it takes to hold ``rows`` tokens with an anchor at ``anchor``; None: the run stays.

    ``owned``: the lease is the appender of its last page. The first row to be written is decided
    per group: with a lag it may fall into a page that is full for the other groups.
    """
    span, lag = group.span, group.lag
    first, frames = lease.pages[group.name]
    floor = group.floor(anchor)
    begin = floor // span
    stop = first + frames.size
    if not frames.size:
        stop = begin
    elif begin < first:
        # A restored window starts at its boundary's, above the floor of its anchor.
        begin = first
    present, last = max(0, lease.rows - lag), max(0, rows - lag)
    end = max(begin, -(-last // span))
    partial = present % span
    if last > present and partial and begin < stop and not owned:
        # If a long pass leaves no row of this page inside the window, there is nothing to copy.
        return Move(begin, stop - 1, end, partial if present > floor else 0)
    if end == stop and (begin == first or not frames.size):
        return None
    return Move(begin, max(begin, stop), end, 0)


def run_at(group: GroupSpec, lease: Lease, at: int) -> PageRun | None:
    """The pages that a checkpoint at ``at`` needs; None if the lease misses one of them."""
    begin, end = group.pages(*group.rows(at, lease.anchor))
    first, frames = lease.pages[group.name]
    if begin == end:
        return begin, frames[:0]
    if not first <= begin < end <= first + frames.size:
        return None
    return begin, frames[begin - first : end - first]

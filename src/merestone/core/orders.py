"""Copy orders: everything the cache core may ask of a device.

Knows frames, rows and slots as plain integers. Must not know tensors or ranks: a rank derives its
own part of a copy from the group's geometry.
"""

from __future__ import annotations

from msgspec import Struct


class CopyRows(Struct, frozen=True, array_like=True, tag=True):
    """Copy-on-write: the first ``rows`` tokens of one page of ``group``, frame to frame.

    ``rows`` counts tokens of the (virtual) page, 1 <= rows <= page tokens; rows above stay
    untouched in the target. A field that has one row per k tokens copies its complete ones.
    """

    group: str
    source: int
    target: int
    rows: int


class SaveHidden(Struct, frozen=True, array_like=True, tag=True):
    """Store the hidden row of position ``at - 1`` of ``slot`` in row ``row`` of frame ``frame``."""

    slot: int
    at: int
    frame: int
    row: int


class LoadHidden(Struct, frozen=True, array_like=True, tag=True):
    """Make a stored hidden row (of position ``at - 1``) the last hidden row of ``slot``."""

    slot: int
    at: int
    frame: int
    row: int


class PageDelta(Struct, frozen=True, array_like=True):
    """Entries ``first, first + 1, ...`` of the slot's page table of ``group`` become ``frames``."""

    group: str
    first: int
    frames: tuple[int, ...]


class Segment(Struct, frozen=True, array_like=True):
    """One part of a checkpoint, as stores keep it, and where it lies in the arena.

    ``address`` names its content. ``part`` is a group (of whose page tokens [first, last) are
    meant), "anchor" (its ``first``-th frame) or "hidden" (row ``first`` of a slab).
    """

    address: str
    part: str
    frame: int
    first: int
    last: int


class Export(Struct, frozen=True, array_like=True, tag=True):
    """Copy segments out of their frames and write to a tier what it lacks of them. The step's
    result, or a later one, reports under ``ticket``."""

    ticket: int
    tier: int
    segments: tuple[Segment, ...]


class Fetch(Struct, frozen=True, array_like=True, tag=True):
    """Read segments (of no frame yet) from a tier into host memory, kept there under ``ticket``.

    ``sums[rank]`` are the checksums that the segments of that rank must have.
    """

    ticket: int
    tier: int
    segments: tuple[Segment, ...]
    sums: tuple[tuple[bytes, ...], ...]


class Import(Struct, frozen=True, array_like=True, tag=True):
    """Write the next segments fetched under ``ticket`` into frames that nothing else in the plan
    touches. After the ``last`` of them nothing is kept in host memory any more."""

    ticket: int
    segments: tuple[Segment, ...]
    last: bool


class Forget(Struct, frozen=True, array_like=True, tag=True):
    """What was fetched under ``ticket``, or still is on its way, is not wanted any more."""

    ticket: int


class Erase(Struct, frozen=True, array_like=True, tag=True):
    """Delete segments from a tier, behind all that was ordered of it before."""

    tier: int
    addresses: tuple[str, ...]


class Digest(Struct, frozen=True, array_like=True, tag=True):
    """Say under ``ticket`` what segments hold: a checksum of their bytes, or that a value among
    them is not a finite number."""

    ticket: int
    segments: tuple[Segment, ...]


StoreOrder = Export | Fetch | Import | Forget | Erase | Digest
Order = CopyRows | SaveHidden | LoadHidden


def check_disjoint(orders: tuple[Order, ...]) -> None:
    """Assert that no destination in one launch is another order's source or destination.

    Raises:
        AssertionError: the orders could not run in any order with the same result.
    """
    targets: set[tuple[str, int, int]] = set()
    sources: set[tuple[str, int, int]] = set()
    for order in orders:
        match order:
            case CopyRows(source=source, target=target):
                into, outof = ("page", target, 0), ("page", source, 0)
            case SaveHidden(slot=slot, frame=frame, row=row):
                into, outof = ("hidden", frame, row), ("slot", slot, 0)
            case LoadHidden(slot=slot, frame=frame, row=row):
                into, outof = ("slot", slot, 0), ("hidden", frame, row)
        assert into not in targets, f"two orders write {into}"
        targets.add(into)
        sources.add(outof)
    both = targets & sources
    assert not both, f"an order's destination is another's source: {sorted(both)}"

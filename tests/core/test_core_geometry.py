"""Geometry: rows, pages and owners; copy-on-write under decode context parallelism."""

from __future__ import annotations

import numpy as np
import pytest

from merestone.core.cache import Cache, CacheSpec
from merestone.core.checkpoint import Kind, Lease
from merestone.core.geometry import GroupSpec
from merestone.core.orders import CopyRows

ENDPOINTS = (1, 8, 9, 16, 17, 32, 33)
FRAMES = 96


def tokens(count: int, start: int = 0) -> np.ndarray:
    return np.arange(start, start + count, dtype=np.int32)


def one_group(group: GroupSpec, chunk: int = 64) -> Cache:
    return Cache(CacheSpec(FRAMES, 1024, (group,), chunk, 0, 4))


class Ranks:
    """Every rank's frames [rank, frame, row]: a row holds the number of the token it is for."""

    def __init__(self, group: GroupSpec) -> None:
        self.group = group
        self.frames = np.full((group.shard, FRAMES, group.page), -1, np.int64)

    def write(self, lease: Lease, first: int, last: int, offset: int) -> None:
        begin, frames = lease.pages[self.group.name]
        for row in range(first, last):
            frame = frames[row // self.group.span - begin]
            place = self.group.owner(row), frame, self.group.local_row(row)
            self.frames[place] = row + offset

    def copy(self, order: CopyRows) -> None:
        """Every rank copies its own part of the page."""
        for rank in range(self.group.shard):
            count = self.group.local_count(order.rows, rank)
            self.frames[rank, order.target, :count] = self.frames[rank, order.source, :count]

    def read(self, lease: Lease, rows: int) -> list[int]:
        begin, frames = lease.pages[self.group.name]
        found = []
        for row in range(rows):
            frame = frames[row // self.group.span - begin]
            found.append(int(self.frames[self.group.owner(row), frame, self.group.local_row(row)]))
        return found


@pytest.mark.parametrize("endpoint", ENDPOINTS)
@pytest.mark.parametrize("page", [2, 8])
@pytest.mark.parametrize("shard", [1, 2, 4])
def test_a_restore_copies_exactly_the_rows_below_its_boundary(
    shard: int, page: int, endpoint: int
) -> None:
    """The producer goes on in the shared page; every rank copies its own rows, nothing else."""
    group = GroupSpec("full", page, shard, interleave=1 if page == 2 else 4)
    cache, ranks = one_group(group), Ranks(group)
    producer = cache.lease("r", None, 0)
    cache.extend(producer, endpoint, endpoint // 64 * 64, 0)
    ranks.write(producer, 0, endpoint, 0)
    checkpoint = cache.seal(producer, tokens(endpoint), endpoint, Kind.PROMPT, 0)
    assert checkpoint is not None
    cache.publish(checkpoint, 1)
    cache.extend(producer, endpoint + 5, 0, 1)
    ranks.write(producer, endpoint, endpoint + 5, 500)

    reader = cache.lease("r", checkpoint, 2)
    extension = cache.extend(reader, endpoint + 3, 0, 2)
    partial = endpoint % group.span
    assert len(extension.copies) == (1 if partial else 0)
    before = ranks.frames.copy()
    for order in extension.copies:
        assert order.rows == partial
        ranks.copy(order)
        # Outside the copied rows of the target nothing changed, on any rank.
        for rank in range(shard):
            count = group.local_count(order.rows, rank)
            own = sum(group.owner(row) == rank for row in range(order.rows))
            assert count == own
            before[rank, order.target, :count] = ranks.frames[rank, order.target, :count]
    np.testing.assert_array_equal(ranks.frames, before)
    ranks.write(reader, endpoint, endpoint + 3, 900)
    below = list(range(endpoint))
    assert ranks.read(reader, endpoint + 3) == below + [endpoint + i + 900 for i in range(3)]
    assert ranks.read(producer, endpoint + 5) == below + [endpoint + i + 500 for i in range(5)]


@pytest.mark.parametrize("offset", range(1, 33))
def test_a_part_page_is_rewound_at_every_offset(offset: int) -> None:
    """A boundary anywhere in a page is restored by one copy, and rewound again by another."""
    group = GroupSpec("full", 8, shard=4, interleave=2)
    cache, ranks = one_group(group), Ranks(group)
    producer = cache.lease("r", None, 0)
    end = 32 + offset
    cache.extend(producer, end, end // 64 * 64, 0)
    ranks.write(producer, 0, end, 0)
    checkpoint = cache.seal(producer, tokens(end), end, Kind.TURN, 0)
    assert checkpoint is not None
    cache.publish(checkpoint, 0)
    for attempt in (1, 2):
        reader = cache.lease("r", checkpoint, attempt)
        extension = cache.extend(reader, 32 + 40, 64, attempt)
        assert [copy.rows for copy in extension.copies] == ([offset] if offset < 32 else [])
        for order in extension.copies:
            ranks.copy(order)
        ranks.write(reader, end, 72, 1000 * attempt)
        assert ranks.read(reader, end) == list(range(end))
    assert ranks.read(producer, end) == list(range(end))


@pytest.mark.parametrize("shard", [1, 2, 4])
@pytest.mark.parametrize(("page", "interleave"), [(1, 1), (2, 1), (4, 2), (8, 1), (8, 8)])
def test_owners_deal_out_every_page(shard: int, page: int, interleave: int) -> None:
    """Each local row of each rank belongs to one token of the page, in order."""
    group = GroupSpec("g", page, shard, interleave)
    places = [(group.owner(row), group.local_row(row)) for row in range(group.span)]
    assert sorted(places) == [(rank, row) for rank in range(shard) for row in range(page)]
    for rows in range(group.span + 1):
        for rank in range(shard):
            held = sorted(row for owner, row in places[:rows] if owner == rank)
            assert held == list(range(group.local_count(rows, rank)))


@pytest.mark.parametrize(
    ("group", "at", "anchor", "rows", "pages"),
    [
        (GroupSpec("full", 8), 8, 0, (0, 8), (0, 1)),
        (GroupSpec("mtp", 8, lag=1), 9, 0, (0, 8), (0, 1)),
        (GroupSpec("mtp", 8, lag=1), 10, 0, (0, 9), (0, 2)),
        (GroupSpec("mtp", 8, lag=1), 1, 0, (0, 0), (0, 0)),
        (GroupSpec("mtp", 8, lag=1), 0, 0, (0, 0), (0, 0)),
        (GroupSpec("window", 4, window=6), 21, 16, (15, 21), (3, 6)),
        (GroupSpec("window", 4, window=6), 5, 0, (0, 5), (0, 2)),
        (GroupSpec("open", 4, open=True), 21, 16, (16, 21), (4, 6)),
        (GroupSpec("open", 4, open=True), 16, 16, (16, 16), (4, 4)),
        (GroupSpec("both", 4, lag=1, window=3, open=True), 23, 16, (19, 22), (4, 6)),
        (GroupSpec("both", 4, lag=1, open=True), 16, 16, (15, 15), (3, 3)),
    ],
)
def test_rows_and_pages(
    group: GroupSpec, at: int, anchor: int, rows: tuple[int, int], pages: tuple[int, int]
) -> None:
    assert group.rows(at, anchor) == rows
    assert group.pages(*rows) == pages


def test_where_the_rows_end_that_a_step_may_write() -> None:
    """A lagging group writes the row of its last draft only if it proposes, and so draws one."""
    plain, lags = GroupSpec("full", 4), GroupSpec("mtp", 4, lag=1)
    for proposes in (False, True):
        assert plain.reach(10, 3, proposes) == 13
        assert lags.reach(10, 3, proposes) == 12 + proposes
        assert lags.reach(0, 0, proposes) == 0


@pytest.mark.parametrize("window", [1, 5, 16])
@pytest.mark.parametrize("lag", [0, 1])
@pytest.mark.parametrize("opens", [False, True])
def test_the_floor_serves_every_boundary_of_the_chunk(window: int, lag: int, opens: bool) -> None:
    group = GroupSpec("g", 4, lag=lag, window=window, open=opens)
    for at in range(64, 128):
        first, last = group.rows(at, 64)
        assert first == last or group.floor(64) <= first


@pytest.mark.parametrize(
    "broken", [{"page": 3}, {"page": 0}, {"page": 4, "interleave": 3}, {"page": 4, "window": 0}]
)
def test_impossible_groups_are_refused(broken: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="group g"):
        GroupSpec("g", **broken)  # type: ignore[arg-type]


def test_open_pages_must_not_straddle_an_anchor() -> None:
    with pytest.raises(ValueError, match="straddles"):
        one_group(GroupSpec("open", 8, open=True), chunk=4)

"""The audit: re-derives every count of the cache from what refers to what.

Knows the raw data of pool, shelf, index, checkpoints and leases. Must not call what it checks: its
arithmetic is its own.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from merestone.core.cache import Cache
from merestone.core.checkpoint import Checkpoint, Lease, PageRun, Root, State
from merestone.core.geometry import GroupSpec
from merestone.core.index import Node


def audit(cache: Cache, leases: Sequence[Lease]) -> None:
    """Check ``cache`` against itself and against ``leases``, all the live ones.

    Raises:
        AssertionError: something does not add up; the message says what, where.
    """
    live = list(cache.shelf.live.values())
    for checkpoint in live:
        _checkpoint(cache, checkpoint)
    for lease in leases:
        _lease(cache, lease)
    _holds(cache, live, leases)
    _references(cache, live, leases)
    _slabs(cache, _rows_in_use(live, leases))
    _appenders(cache, live, leases)
    _index(cache, live)


def _needs(group: GroupSpec, at: int, anchor: int) -> tuple[int, int]:
    """First and last page number (inclusive) under a boundary; (0, -1) if it needs none."""
    top = at - group.lag
    low = anchor if group.open else 0
    if group.window is not None and top - group.window > low:
        low = top - group.window
    if top <= low:
        return 0, -1
    span = group.page * group.shard
    return low // span, (top - 1) // span


def _checkpoint(cache: Cache, checkpoint: Checkpoint) -> None:
    name, spec = f"checkpoint {checkpoint.id}", cache.spec
    assert checkpoint.state in (State.SEALED, State.PUBLISHED), f"{name} is {checkpoint.state}"
    assert checkpoint.at > 0, f"{name} is empty"
    assert not (checkpoint.doomed and checkpoint.state is State.PUBLISHED), f"{name}: doomed"
    assert checkpoint.anchor % spec.chunk == 0, f"{name}: anchor"
    assert 0 <= checkpoint.at - checkpoint.anchor < spec.chunk + spec.drafts, f"{name}: anchor"
    _anchor(cache, name, checkpoint.anchor, checkpoint.anchor_frames)
    assert list(checkpoint.pages) == [group.name for group in spec.groups], f"{name}: groups"
    for group in spec.groups:
        begin, end = _needs(group, checkpoint.at, checkpoint.anchor)
        first, frames = checkpoint.pages[group.name]
        held = (first, first + frames.size - 1) if frames.size else (0, -1)
        assert held == (begin, end), f"{name}: pages {held} of {group.name}, not {(begin, end)}"
    _distinct(name, [*_pages(checkpoint.pages), *checkpoint.anchor_frames])


def _lease(cache: Cache, lease: Lease) -> None:
    name = f"lease {lease.id}"
    assert lease.live, f"{name} was released"
    assert 0 <= lease.anchor <= lease.rows, f"{name}: anchor {lease.anchor}, rows {lease.rows}"
    assert lease.anchor % cache.spec.chunk == 0, f"{name}: anchor {lease.anchor}"
    _anchor(cache, name, lease.anchor, lease.anchor_frames)
    for group in cache.spec.groups:
        begin, end = _needs(group, lease.rows, lease.anchor)
        first, frames = lease.pages[group.name]
        last = first + frames.size - 1
        # Above what it needs there are the pages of drafts.
        above = lease.rows + cache.spec.drafts
        top = max(end, (above - 1) // (group.page * group.shard))
        assert end < begin or first <= begin <= end <= last <= top, (
            f"{name}: pages {first} to {last} of {group.name}, needs {begin} to {end}"
        )
        # It keeps what a boundary just above its anchor would need, and no page before.
        low = lease.anchor if group.open else 0
        if group.window is not None:
            low = max(low, lease.anchor - group.lag - group.window)
        useless = range(first, min(low // (group.page * group.shard), last + 1))
        assert not useless, f"{name}: pages {useless} of {group.name} lie before row {low}"
        if lease.room:
            page = max(lease.rows - group.lag, 0) // (group.page * group.shard)
            own = frames[max(page - first, 0) :]
            assert lease.room <= (last + 1) * group.page * group.shard, f"{name}: room"
            assert (cache.pool.appender[own] == lease.id).all(), f"{name}: room in others' pages"
    retired = [int(frame) for frames in lease.retired for frame in frames]
    _distinct(name, [*_pages(lease.pages), *lease.anchor_frames, *retired])


def _anchor(cache: Cache, name: str, anchor: int, frames: tuple[int, ...]) -> None:
    due = cache.spec.anchor_frames if anchor else 0
    assert len(frames) == due, f"{name}: {len(frames)} frames of an anchor at {anchor}, not {due}"


def _distinct(name: str, frames: list[int]) -> None:
    twice = [frame for frame, times in Counter(frames).items() if times > 1]
    assert not twice, f"{name} holds frames {twice} twice"


def _pages(pages: dict[str, PageRun]) -> list[int]:
    return [int(frame) for _, frames in pages.values() for frame in frames]


def _holds(cache: Cache, live: Iterable[Checkpoint], leases: Sequence[Lease]) -> None:
    """Leases, protections and what follows from them for eviction."""
    readers = Counter(lease.origin.id for lease in leases if lease.origin is not None)
    evictable: list[int] = []
    for checkpoint in live:
        name = f"checkpoint {checkpoint.id}"
        assert checkpoint.leases == readers[checkpoint.id], (
            f"{name}: {checkpoint.leases} leases counted, {readers[checkpoint.id]} live"
        )
        assert checkpoint.protected >= 0, f"{name}: {checkpoint.protected} protections"
        free = checkpoint.leases == 0 and checkpoint.protected == 0
        may_go = free and checkpoint.state is State.PUBLISHED
        assert checkpoint.evictable == may_go, f"{name}: evictable is {checkpoint.evictable}"
        if may_go:
            evictable.append(checkpoint.id)
    assert sorted(cache.shelf.evictable) == sorted(evictable), "the evictable checkpoints"
    due = {c.id for c in live if c.until_s > cache.shelf.seconds}
    assert due <= set(cache.shelf.marked) <= {c.id for c in live if c.ttl_s}, "the marked ones"


def _references(cache: Cache, live: Iterable[Checkpoint], leases: Sequence[Lease]) -> None:
    """Reference counts, soft ones, sole holders and the free list."""
    holders: dict[int, list[int]] = {frame: [] for frame in range(cache.spec.frames)}
    soft: Counter[int] = Counter()
    for checkpoint in live:
        for frame in [*_pages(checkpoint.pages), *checkpoint.anchor_frames]:
            holders[frame].append(checkpoint.id)
            soft[frame] += checkpoint.evictable
        soft[checkpoint.hidden[0]] += checkpoint.evictable
    for lease in leases:
        retired = [int(frame) for frames in lease.retired for frame in frames]
        for frame in [*_pages(lease.pages), *lease.anchor_frames, *retired]:
            holders[frame].append(lease.id)
    for frame, _ in _rows_in_use(live, leases):
        holders[frame].append(0)
    sole: Counter[int] = Counter()
    refs, softs = cache.pool.refs.tolist(), cache.pool.soft.tolist()
    for frame, ids in holders.items():
        assert refs[frame] == len(ids), f"frame {frame}: {refs[frame]} references, held by {ids}"
        assert softs[frame] == soft[frame], f"frame {frame}: {softs[frame]} soft, not {soft[frame]}"
        if len(ids) == 1 and ids[0]:
            sole[ids[0]] += 1
    assert dict(sole) == cache.pool.sole, f"sole holders {cache.pool.sole}, not {dict(sole)}"
    free = cache.pool.free_frames().tolist()
    idle = [frame for frame, ids in holders.items() if not ids]
    assert sorted(free) == idle, f"free list {sorted(free)}, unreferenced {idle}"
    assert cache.pool.free == len(idle), f"{cache.pool.free} free, not {len(idle)}"
    gone = [frame for frame, ids in holders.items() if ids and len(ids) == soft[frame]]
    assert cache.available() == len(idle) + len(gone), f"{cache.available()} frames available"


def _rows_in_use(live: Iterable[Checkpoint], leases: Sequence[Lease]) -> list[tuple[int, int]]:
    """Hidden rows of checkpoints, those of dropped ones included while somebody leases them."""
    dropped = {
        lease.origin.id: lease.origin
        for lease in leases
        if lease.origin is not None and lease.origin.state is State.DROPPED
    }
    return [checkpoint.hidden for checkpoint in [*live, *dropped.values()]]


def _slabs(cache: Cache, used: list[tuple[int, int]]) -> None:
    rows = cache.spec.hidden_rows
    assert len(set(used)) == len(used), f"two checkpoints share a hidden row: {sorted(used)}"
    expected: dict[int, list[int]] = {}
    for slab in sorted({frame for frame, _ in used}):
        idle = [row for row in range(rows) if (slab, row) not in used]
        if idle:
            expected[slab] = idle
    spare = {slab: sorted(idle) for slab, idle in sorted(cache.hidden.spare.items())}
    assert spare == expected, f"spare hidden rows {spare}, not {expected}"


def _appenders(cache: Cache, live: Iterable[Checkpoint], leases: Sequence[Lease]) -> None:
    """A page's appender has it in its table, and nobody reads rows above the appender's."""
    appender = {frame: int(by) for frame, by in enumerate(cache.pool.appender.tolist()) if by}
    tables = {lease.id: lease for lease in leases}
    for frame, by in appender.items():
        assert by in tables, f"frame {frame}: its appender {by} is gone"
        held = _pages(tables[by].pages)
        assert frame in held, f"frame {frame}: not in the tables of its appender {by}"
    readers = [(f"checkpoint {c.id}", c.at, c.pages) for c in live]
    for lease in leases:
        readers.append((f"lease {lease.id}", lease.rows, lease.pages))
    for name, at, pages in readers:
        for group in cache.spec.groups:
            first, frames = pages[group.name]
            for number, frame in enumerate(frames.tolist(), first):
                if frame not in appender:
                    continue
                span = group.page * group.shard
                rows = min((number + 1) * span, at - group.lag)
                written = tables[appender[frame]].rows - group.lag
                assert rows <= written, f"frame {frame}: {name} reads above its appender's rows"


def _index(cache: Cache, live: Iterable[Checkpoint]) -> None:
    """The tree is compressed, holds exactly the findable checkpoints, each at its depth."""
    found: dict[int, Node] = {}
    stack: list[tuple[Root, Node, int]] = []
    for root, top in cache.shelf.index.tops.items():
        assert top.parent is None, f"the top of {root!r} has a parent"
        assert top.checkpoint is None, f"a checkpoint of {root!r} at 0 tokens"
        assert top.children, f"the tree of {root!r} is empty"
        stack.append((root, top, 0))
    while stack:
        root, node, depth = stack.pop()
        for key, child in node.children.items():
            assert child.parent is node, f"{root!r}: wrong parent at depth {depth}"
            assert child.edge.size, f"{root!r}: an empty edge at depth {depth}"
            assert int(child.edge[0]) == key, f"{root!r}: an edge under the wrong key {key}"
            stack.append((root, child, depth + child.edge.size))
        checkpoint = node.checkpoint
        if checkpoint is None:
            assert depth == 0 or len(node.children) > 1, f"{root!r}: a needless node at {depth}"
            continue
        name = f"checkpoint {checkpoint.id}"
        assert checkpoint.at == depth, f"{name} of {checkpoint.at} tokens hangs at {depth}"
        assert checkpoint.root == root, f"{name} of {checkpoint.root!r} hangs under {root!r}"
        found[checkpoint.id] = node
    due = sorted(checkpoint.id for checkpoint in live if not checkpoint.doomed)
    assert sorted(found) == due, f"checkpoints {sorted(found)} indexed, not {due}"
    assert cache.shelf.index.nodes == found, "the index's way back to its nodes"

"""Policy: boundaries, ends of passes, the order of eviction."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from itertools import combinations

import numpy as np
import pytest

from merestone.core.audit import audit
from merestone.core.cache import Cache, CacheSpec, OutOfFrames
from merestone.core.checkpoint import Checkpoint, Kind, Lease
from merestone.core.geometry import GroupSpec
from merestone.core.policy import Cost, boundaries_to_seal, eviction_key, pass_end


@pytest.mark.parametrize(
    ("prompt", "wanted", "chosen"),
    [
        (0, [], ()),
        (0, [(0, Kind.TURN)], ()),
        (9, [], ((9, Kind.PROMPT),)),
        (9, [(9, Kind.INSTRUCTION)], ((9, Kind.PROMPT),)),
        (9, [(4, Kind.TURN), (4, Kind.INSTRUCTION)], ((4, Kind.INSTRUCTION), (9, Kind.PROMPT))),
        (9, [(4, Kind.MARK), (4, Kind.TURN)], ((4, Kind.TURN), (9, Kind.PROMPT))),
        (9, [(4, Kind.ALIGNED), (4, Kind.JUNCTION)], ((4, Kind.JUNCTION), (9, Kind.PROMPT))),
        (
            9,
            [
                (7, Kind.TURN),
                (3, Kind.INSTRUCTION),
                (0, Kind.TURN),
                (10, Kind.TURN),
                (-1, Kind.MARK),
            ],
            ((3, Kind.INSTRUCTION), (7, Kind.TURN), (9, Kind.PROMPT)),
        ),
        (
            9,
            [(7, Kind.INSTRUCTION), (1, Kind.TURN)],
            ((1, Kind.TURN), (7, Kind.INSTRUCTION), (9, Kind.PROMPT)),
        ),
        (1, [], ((1, Kind.PROMPT),)),
    ],
)
def test_boundaries_to_seal(
    prompt: int, wanted: list[tuple[int, Kind]], chosen: tuple[tuple[int, Kind], ...]
) -> None:
    assert boundaries_to_seal(prompt, wanted) == chosen


@pytest.mark.parametrize(("prompt", "chosen"), [(3, []), (4, [4]), (7, [4]), (8, [4, 8])])
def test_on_a_grid_its_multiples_are_all_there_are(prompt: int, chosen: list[int]) -> None:
    assert boundaries_to_seal(prompt, [(2, Kind.TURN)], 4) == tuple(
        (at, Kind.ALIGNED) for at in chosen
    )


def seals(start: int, end: int, chunk: int, boundaries: tuple[int, ...]) -> bool:
    """Whether a pass over rows [start, end) can seal every boundary that it meets."""
    return all(b // chunk == end // chunk for b in boundaries if start < b <= end)


@pytest.mark.parametrize("budget", [1, 3, 4, 5, 7, 9, 20])
@pytest.mark.parametrize("known", [1, 4, 7, 12, 14])
def test_passes_seal_every_boundary_and_are_few(known: int, budget: int) -> None:
    """Exhaustive for chunks of 4: against the best of all legal sequences of passes."""
    chunk = 4
    sets = [c for size in range(4) for c in combinations(range(1, known), size)]
    for chosen in sets:
        boundaries = (*chosen, known)

        def legal(start: int, bounds: tuple[int, ...] = boundaries) -> list[int]:
            limit = min(start + budget, known)
            ends = [e for e in range(start + 1, limit + 1) if seals(start, e, chunk, bounds)]
            aligned = limit // chunk * chunk
            free = not any(start < b <= limit for b in bounds)
            return [aligned] if free and limit < known and aligned > start else ends

        @cache
        def fewest(start: int) -> int:
            return 0 if start == known else 1 + min(fewest(end) for end in legal(start))

        start = passes = 0
        while start < known:
            end = pass_end(start, min(start + budget, known), known, chunk, boundaries)
            assert end in legal(start), (start, end, boundaries)
            start, passes = end, passes + 1
        assert passes == fewest(0), boundaries


@pytest.mark.parametrize(
    ("start", "limit", "known", "boundaries", "end"),
    [
        (0, 1000, 1000, [1000], 1000),
        (0, 1000, 1000, [990, 1000], 1000),
        (0, 1000, 1000, [100, 1000], 100),
        (0, 1000, 1000, [70, 100, 1000], 100),
        (0, 500, 1000, [1000], 448),
        (0, 50, 1000, [1000], 50),
        (0, 1000, 1000, [64, 1000], 64),
        (64, 1000, 1000, [64, 1000], 1000),
        (0, 512, 1000, [100, 1000], 127),
        (448, 512, 1000, [1000], 512),
        (490, 500, 1000, [1000], 500),
        (0, 500, 1000, [480, 1000], 500),
        # Not itself a boundary: outputs before it, or a request that keeps nothing.
        (0, 1000, 1000, [], 1000),
        (0, 1000, 1000, [970], 1000),
    ],
)
def test_where_a_pass_ends(
    start: int, limit: int, known: int, boundaries: list[int], end: int
) -> None:
    assert pass_end(start, limit, known, 64, boundaries) == end


def checkpoints(cache: Cache, texts: list[list[int]], kinds: list[Kind]) -> list[Checkpoint]:
    made = []
    for text, kind in zip(texts, kinds, strict=True):
        match = cache.match("r", np.array(text, np.int32))
        lease = cache.lease("r", match.checkpoint, 0)
        cache.extend(lease, len(text), len(text) // 8 * 8, 0)
        checkpoint = cache.seal(lease, np.array(text, np.int32), len(text), kind, len(made))
        assert checkpoint is not None
        cache.publish(checkpoint, len(made))
        cache.release(lease)
        made.append(checkpoint)
    return made


def small_cache(frames: int = 60) -> Cache:
    spec = CacheSpec(frames, 100, (GroupSpec("full", 4),), 8, 2, 4, cost=Cost(start=0.0))
    return Cache(spec)


def evicted_first(cache: Cache, made: list[Checkpoint], leases: Sequence[Lease] = ()) -> int:
    cache.shelf.make_room(cache.free + 1)
    audit(cache, leases)
    return next(number for number, c in enumerate(made) if c.state == "dropped")


def test_aligned_goes_first() -> None:
    """Even if it is the most expensive to recompute."""
    cache = small_cache()
    texts = [[1, 2], [3] * 40, [4, 5]]
    made = checkpoints(cache, texts, [Kind.PROMPT, Kind.ALIGNED, Kind.TURN])
    assert evicted_first(cache, made) == 1


def test_the_cheapest_to_recompute_goes_first() -> None:
    """One page each; the short one saves the fewest tokens a byte."""
    cache = small_cache()
    made = checkpoints(cache, [[1, 1, 1, 1], [2], [3, 3, 3]], [Kind.PROMPT] * 3)
    assert evicted_first(cache, made) == 1


def test_ties_go_to_the_least_recently_used() -> None:
    cache = small_cache()
    made = checkpoints(cache, [[1, 1], [2, 2], [3, 3]], [Kind.PROMPT] * 3)
    cache.release(cache.lease("r", made[0], 9))
    assert evicted_first(cache, made) == 1


def test_a_close_ancestor_makes_it_cheap() -> None:
    """Eleven tokens above one of eight cost three; a lone one of four costs four."""
    cache = small_cache()
    path = list(range(11))
    made = checkpoints(cache, [path[:8], path, [50] * 4], [Kind.TURN, Kind.PROMPT, Kind.PROMPT])
    assert evicted_first(cache, made) == 1


def test_an_evicted_ancestor_makes_its_descendant_dear() -> None:
    """In the same call: when the eight go, the eleven above them cost eleven, not three."""
    cache = small_cache()
    path = list(range(11))
    lease = cache.lease("r", None, 0)
    cache.extend(lease, 11, 8, 0)
    (above,) = checkpoints(cache, [path[:8]], [Kind.ALIGNED])
    below = cache.seal(lease, np.array(path, np.int32), 11, Kind.PROMPT, 0)
    assert below is not None
    cache.publish(below, 0)
    cache.release(lease)
    (other,) = checkpoints(cache, [[50]], [Kind.PROMPT])
    assert cache.own_bytes(below) == 525, "nothing is shared with its ancestor"
    cache.shelf.make_room(cache.free + 5)
    assert [c.state for c in (above, other, below)] == ["dropped", "dropped", "published"]


def test_what_a_sibling_shared_counts_once_it_is_gone() -> None:
    """Two boundaries of one page share it: when one goes, the other alone holds the bytes."""
    cache = small_cache()
    made = checkpoints(cache, [[1, 2, 3], [1, 2, 3, 4]], [Kind.TURN, Kind.ALIGNED])
    lease = cache.lease("r", None, 0)
    cache.extend(lease, 8, 0, 0)
    tokens = np.arange(8, dtype=np.int32)
    pair = [cache.seal(lease, tokens, at, Kind.TURN, 0) for at in (6, 7)]
    cache.release(lease)
    first, second = pair
    assert first is not None
    assert second is not None
    assert cache.own_bytes(first) == cache.own_bytes(second) == 25
    cache.discard(first, "aborted")
    assert cache.own_bytes(second) == 225
    assert made[0].state == made[1].state == "published"


def two_ends(cache: Cache, ends: dict[int, Kind]) -> list[Checkpoint]:
    """One request's boundaries in one chunk, published."""
    lease, rows = cache.lease("r", None, 0), max(ends)
    cache.extend(lease, rows, rows // 8 * 8, 0)
    made = [cache.seal(lease, np.arange(rows, dtype=np.int32), *end, 0) for end in ends.items()]
    cache.release(lease)
    for checkpoint in made:
        assert checkpoint is not None
        cache.publish(checkpoint, 0)
    return [checkpoint for checkpoint in made if checkpoint is not None]


@pytest.mark.parametrize(
    ("ends", "size"),
    [({6: Kind.ALIGNED, 7: Kind.PROMPT}, 4), ({9: Kind.PROMPT, 10: Kind.PROMPT}, 3)],
    ids=["a page", "an anchor"],
)
def test_neighbours_pay_for_what_they_share(ends: dict[int, Kind], size: int) -> None:
    """Both go before what is dearer. Left alone with a page, in the same call: seven tokens for
    their 225 bytes, which cost 25 beside the aligned six. An anchor: neither holds it alone, and
    both would seem to cost next to nothing, for ever."""
    cache = small_cache()
    pair = two_ends(cache, ends)
    (other,) = checkpoints(cache, [[50] * size], [Kind.PROMPT])
    cache.shelf.make_room(cache.free + 1)
    assert [c.state for c in (*pair, other)] == ["dropped", "dropped", "published"]


def test_an_anchor_of_ones_own_counts_once() -> None:
    """Nine tokens for 525 bytes are dearer than two for 125."""
    cache = small_cache()
    made = checkpoints(cache, [[1] * 9, [2] * 2], [Kind.PROMPT] * 2)
    assert evicted_first(cache, made) == 1


def test_an_anchor_is_rewritten_if_only_evictable_ones_share_it() -> None:
    """Where a fresh one finds no room: they go, and nobody else does."""
    cache = small_cache(9)
    lease, text = cache.lease("r", None, 0), np.arange(16, dtype=np.int32)
    cache.extend(lease, 8, 8, 0)
    kept = cache.seal(lease, text, 8, Kind.TURN, 0)
    assert kept is not None
    cache.publish(kept, 0)
    other, wanted = checkpoints(cache, [[50] * 4, [60] * 4], [Kind.PROMPT] * 2)
    cache.protect(wanted)
    cache.protect(kept)
    with pytest.raises(OutOfFrames):
        cache.extend(lease, 16, 16, 1)
    assert (kept.state, other.state) == ("published", "published")
    cache.unprotect(kept)
    old = lease.anchor_frames
    assert cache.extend(lease, 16, 16, 1).advance_frames == old
    assert (kept.state, other.state) == ("dropped", "published")
    audit(cache, [lease])


def test_use_outlives_value_only_for_a_while() -> None:
    """Inflation: an old, once valuable checkpoint goes at last if it is not used again."""
    cache = small_cache(16)
    (old,) = checkpoints(cache, [[99] * 12], [Kind.PROMPT])
    rounds = 0
    while old.state == "published":
        checkpoints(cache, [[rounds] * 7], [Kind.PROMPT])
        rounds += 1
        assert rounds < 60
    assert rounds > 3, "the old one is worth more a byte than they are"
    assert cache.shelf.inflation > 0


def test_protected_and_leased_ones_stay() -> None:
    cache = small_cache()
    made = checkpoints(cache, [[1], [2], [3, 3]], [Kind.PROMPT] * 3)
    cache.protect(made[0])
    lease = cache.lease("r", made[1], 1)
    assert evicted_first(cache, made, [lease]) == 2
    cache.unprotect(made[0])
    cache.release(lease)
    assert cache.available() == 60


def test_the_cost_of_attention_counts() -> None:
    assert Cost(1.0, 0.0).of(1000) == 1000
    assert Cost(1.0, 1e-3).of(1000) == 2000
    cache = small_cache()
    (checkpoint,) = checkpoints(cache, [[1] * 8], [Kind.PROMPT])
    low = eviction_key(checkpoint, 4, 100.0, Cost(1.0, 0.0, 0.0))
    high = eviction_key(checkpoint, 4, 100.0, Cost(1.0, 1.0, 0.0))
    assert low[2] == pytest.approx(0.04)
    assert high[2] == pytest.approx(0.04 + 0.48)


def test_a_pass_costs_something_however_short() -> None:
    """Else a prompt of one token would be dropped by its own answer in a full pool."""
    cache = small_cache()
    (checkpoint,) = checkpoints(cache, [[1] * 8], [Kind.PROMPT])
    assert eviction_key(checkpoint, 7, 100.0, Cost(1.0, 0.0, 64.0))[2] == pytest.approx(0.65)

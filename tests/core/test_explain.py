"""Why less was restored than the cache knows, or has known."""

from __future__ import annotations

import numpy as np
import pytest
from small_caches import make, run, tokens

from merestone.core.cache import Cache, CacheSpec
from merestone.core.checkpoint import Kind, State
from merestone.core.explain import explain
from merestone.core.geometry import GroupSpec
from merestone.core.graves import Graves
from merestone.core.odds import Odds


def why(cache: Cache, prompt: np.ndarray, root: str = "r") -> tuple[int, str]:
    return explain(cache, root, prompt, cache.match(root, prompt))


def test_evicted_ones_are_remembered() -> None:
    cache = make(frames=40)
    run(cache, 40)
    assert why(cache, tokens(50)) == (40, "")
    number = 0
    while why(cache, tokens(50))[1] != "evicted":
        number += 1
        run(cache, 30, first=1000 * number)
    assert why(cache, tokens(50)) == (40, "evicted")
    assert why(cache, tokens(39)) == (0, "unknown"), "it never lay on the way"
    assert why(cache, tokens(50, 7)) == (0, "unknown")


def test_a_hole_in_the_window_is_named() -> None:
    cache = make()
    lease = cache.lease("r", run(cache, 24), 1)
    assert cache.seal(lease, tokens(24), 17, Kind.MARK, 1) is None
    prompt = np.concatenate([tokens(17), tokens(9, 500)])
    assert why(cache, prompt) == (17, "window_hole")


def test_no_room_for_a_hidden_row_is_named() -> None:
    cache = Cache(CacheSpec(2, 1000, (GroupSpec("full", 8),), 16, 2, 1))
    lease = cache.lease("r", None, 0)
    cache.extend(lease, 12, 0, 0)
    assert cache.seal(lease, tokens(12), 12, Kind.PROMPT, 0) is None
    assert why(cache, tokens(15)) == (12, "no_room")


def test_discarded_ones_say_why_and_reset_ones_are_unknown() -> None:
    cache = make()
    cache.discard(run(cache, 24), "not_finite")
    assert why(cache, tokens(24)) == (24, "not_finite")
    run(cache, 20, first=50)
    cache.reset()
    assert why(cache, tokens(20, 50)) == (0, "unknown")


def test_another_salt_that_knows_at_least_a_chunk() -> None:
    cache = make()
    run(cache, 40)
    assert why(cache, tokens(50), "other") == (0, "other_salt")
    assert why(cache, tokens(15), "other") == (0, "unknown")


def test_no_boundary_where_prompts_part() -> None:
    cache = make()
    run(cache, 40)
    assert why(cache, np.concatenate([tokens(30), tokens(9, 500)])) == (30, "no_boundary")


def test_graves_are_bounded_and_forget_the_oldest() -> None:
    graves = Graves(limit=3)

    def along(root: str, count: int, above: int = 0) -> list[tuple[int, str]]:
        return [(grave.at, grave.why) for grave in graves.along(root, tokens(count), above)]

    for size in (4, 8, 4, 12):
        graves.bury("r", tokens(size), f"why{size}", Kind.MARK)
    assert along("r", 20) == [(4, "why4"), (8, "why8"), (12, "why12")]
    assert along("r", 20, above=4) == [(8, "why8"), (12, "why12")]
    graves.bury("s", tokens(8), "other", Kind.MARK)
    assert along("r", 20) == [(4, "why4"), (12, "why12")]
    assert along("r", 11) == [(4, "why4")]
    assert along("s", 20) == [(8, "other")]
    for size in (4, 5):
        graves.bury("s", tokens(size), "x", Kind.MARK)
    assert along("r", 20) == []


# -- what eviction learns -----------------------------------------------------------------------


def test_odds_are_one_half_until_something_is_known() -> None:
    odds = Odds()
    assert odds.of(Kind.TURN, 0) == 0.5
    for _ in range(36):
        odds.lose(Kind.RESPONSE, 0)
        odds.meet(Kind.TURN, 0)
    assert odds.of(Kind.RESPONSE, 0) == pytest.approx(0.05)
    assert odds.of(Kind.TURN, 0) == pytest.approx(0.95)
    assert odds.of(Kind.TURN, 1) == odds.of(Kind.TURN, 7) == odds.of(Kind.TURN, 0)
    for _ in range(36):
        odds.lose(Kind.TURN, 1)
    assert odds.of(Kind.TURN, 1) < 0.1 < odds.of(Kind.TURN, 0)


def test_odds_follow_a_change() -> None:
    odds = Odds()
    for learn in (odds.meet, odds.lose, odds.miss):
        for _ in range(2000):
            learn(Kind.TURN, 3)
    assert odds.of(Kind.TURN, 2) > 0.9
    for _ in range(2000):
        odds.lose(Kind.TURN, 2)
    assert odds.of(Kind.TURN, 5) < 0.1


def test_a_wanted_one_that_was_evicted_raises_the_odds_of_its_kind() -> None:
    cache = make(frames=40)
    run(cache, 40, kind=Kind.MARK)
    number = 0
    while why(cache, tokens(50))[1] != "evicted":
        number += 1
        run(cache, 30, first=1000 * number)
    before = cache.shelf.odds.of(Kind.MARK, 0)
    why(cache, tokens(50))
    assert cache.shelf.odds.of(Kind.MARK, 0) > before


def test_kinds_that_are_never_met_go_first() -> None:
    """The end of a response that no later prompt contains, against the turn that all contain."""
    cache = make(frames=200)
    for number in range(12):
        first = 1000 * number
        run(cache, 30, first, Kind.RESPONSE)
        lease = cache.lease("r", run(cache, 20, first + 500, Kind.TURN), 1)
        cache.release(lease)
    assert cache.shelf.odds.of(Kind.TURN, 0) > 0.5, "all were met again"
    small = make(frames=90)
    small.shelf.odds = cache.shelf.odds
    kept = [run(small, 20, 5000, Kind.TURN), run(small, 20, 6000, Kind.RESPONSE)]
    number = 0
    while all(checkpoint.state is State.PUBLISHED for checkpoint in kept):
        number += 1
        run(small, 20, 10000 + 1000 * number, Kind.TURN)
    assert kept[0].state is State.PUBLISHED

"""Why less was restored than the cache knows, or has known."""

from __future__ import annotations

import numpy as np
from small_caches import make, run, tokens

from merestone.core.cache import Cache
from merestone.core.checkpoint import Kind
from merestone.core.explain import explain
from merestone.core.graves import Graves


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
    for size in (4, 8, 4, 12):
        graves.bury("r", tokens(size), f"why{size}")
    graves.bury("s", tokens(8), "other")
    assert graves.deepest("r", tokens(20)) == (12, "why12")
    assert graves.deepest("r", tokens(11)) == (4, "why4")
    assert graves.deepest("s", tokens(20)) == (8, "other")
    graves.bury("s", tokens(4), "x")
    graves.bury("s", tokens(5), "x")
    assert graves.deepest("r", tokens(20)) == (0, "")

"""What a prompt finds, primitive by primitive."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pytest

from merestone.core.audit import audit
from merestone.core.cache import Cache, CacheSpec
from merestone.core.checkpoint import Checkpoint, Kind
from merestone.core.geometry import GroupSpec

GROUPS = (
    GroupSpec("full", 4),
    GroupSpec("open", 2, open=True),
    GroupSpec("mtp", 4, lag=1),
    GroupSpec("window", 2, window=3),
)


def ids(text: str) -> np.ndarray:
    return np.array([ord(letter) for letter in text], np.int32)


def seal(cache: Cache, text: str, kind: Kind = Kind.PROMPT, root: str = "r") -> Checkpoint:
    """Compute ``text`` in one pass and seal its end."""
    lease = cache.lease(root, None, 0)
    cache.extend(lease, len(text), len(text) // 8 * 8, 0)
    checkpoint = cache.seal(lease, ids(text), len(text), kind, 0)
    assert checkpoint is not None
    cache.release(lease)
    return checkpoint


@dataclass
class Case:
    """Texts are published (or only sealed), some dropped; then ``prompt`` asks."""

    name: str
    published: list[str]
    prompt: str
    at: int
    known: int
    lost: str = ""
    sealed: list[str] = field(default_factory=list)
    dropped: list[str] = field(default_factory=list)
    pending: int = 0
    limit: int | None = None


LONG = "abcdefghijklmnopqrstuvwxyz"
CASES = [
    Case("empty cache", [], "abc", 0, 0, "unknown"),
    Case("empty prompt", ["abc"], "", 0, 0, "unknown"),
    Case("exact", ["abcdef"], "abcdef", 6, 6),
    Case("exact, one token", ["a"], "a", 1, 1),
    Case("exact, an anchor's end", ["abcdefgh"], "abcdefgh", 8, 8),
    Case("exact, past an anchor", ["abcdefghi"], "abcdefghi", 9, 9),
    Case("extension", ["abc"], "abcdef", 3, 3),
    Case("extension by one", ["abc"], "abcd", 3, 3),
    Case("extension past several anchors", [LONG[:3]], LONG, 3, 3),
    Case("prefix of a sequence", ["abcdef"], "abc", 0, 3, "no_boundary"),
    Case("prefix short by one", ["abcdef"], "abcde", 0, 5, "no_boundary"),
    Case("first token differs", ["abcdef"], "xbcdef", 0, 0, "unknown"),
    Case("divergence inside an edge", ["abcdef"], "abcxyz", 0, 3, "no_boundary"),
    Case("last token differs", ["abcdef"], "abcdex", 0, 5, "no_boundary"),
    Case("divergence after a boundary", ["abc", "abcdef"], "abcdxy", 3, 4, "no_boundary"),
    Case("divergence at a boundary", ["abc", "abcdef"], "abcxyz", 3, 3),
    Case("two on a path", ["abc", "abcdef"], "abcdef", 6, 6),
    Case("two on a path, deeper first", ["abcdef", "abc"], "abcdef", 6, 6),
    Case("the shallow one of two", ["abc", "abcdef"], "abcd", 3, 4, "no_boundary"),
    Case("three on a path", ["ab", "abcd", "abcdef"], "abcdefgh", 6, 6),
    Case("split at a boundary", ["abcdef", "abc"], "abcd", 3, 4, "no_boundary"),
    Case("split at a divergence", ["abcdef", "abcxyz"], "abcxyz", 6, 6),
    Case("split, the other side", ["abcdef", "abcxyz"], "abcdef", 6, 6),
    Case("split, no boundary at the parting", ["abcdef", "abcxyz"], "abcq", 0, 3, "no_boundary"),
    Case("boundary at the parting", ["abcdef", "abcxyz", "abc"], "abcq", 3, 3),
    Case("boundary at the parting, first", ["abc", "abcdef", "abcxyz"], "abcq", 3, 3),
    Case("siblings by one token", ["aba", "abb", "abc"], "abb", 3, 3),
    Case("siblings at the top", ["a", "b", "c"], "bcd", 1, 1),
    Case("twice split edge", ["abcdefgh", "abcdxx", "abxx"], "abcdefgh", 8, 8),
    Case("twice split edge, the middle", ["abcdefgh", "abcdxx", "abxx"], "abcdxx", 6, 6),
    Case("one token chain", ["a", "ab", "abc", "abcd"], "abcx", 3, 3),
    Case("repeated tokens", ["aaa", "aaaaaa"], "aaaaa", 3, 5, "no_boundary"),
    Case("sealed only", [], "abc", 0, 3, "not_published", sealed=["abc"], pending=3),
    Case("sealed deeper", ["abc"], "abcdef", 3, 6, "not_published", sealed=["abcdef"], pending=6),
    Case("sealed shallower", ["abcdef"], "abcdef", 6, 6, sealed=["abc"]),
    Case("deepest of two sealed", [], "abcd", 0, 4, "not_published", sealed=["ab", "abcd"],
         pending=4),
    Case("sealed elsewhere", ["abc"], "abcd", 3, 3, sealed=["abxx"]),
    Case("sealed on a longer prompt", ["abc"], "abcd", 3, 4, "no_boundary", sealed=["abcdef"]),
    Case("limit at a boundary", ["abc"], "abcdef", 3, 3, limit=3),
    Case("limit below the only one", ["abcdef"], "abcdef", 0, 6, "limit", limit=5),
    Case("limit between two", ["abc", "abcdef"], "abcdef", 3, 6, "limit", limit=5),
    Case("limit of nothing", ["abc"], "abc", 0, 3, "limit", limit=0),
    Case("limit before what is pending", ["abc"], "abcdef", 3, 6, "limit", sealed=["abcdef"],
         limit=4),
    Case("dropped leaf", ["abc", "abcdef"], "abcdef", 3, 3, dropped=["abcdef"]),
    Case("dropped inner node", ["abc", "abcdef"], "abcd", 0, 4, "no_boundary", dropped=["abc"]),
    Case("dropped inner node, deeper stays", ["abc", "abcdef"], "abcdef", 6, 6, dropped=["abc"]),
    Case("dropped at the parting", ["abc", "abcd", "abcx"], "abcd", 4, 4, dropped=["abc"]),
    Case("dropped sibling", ["abcd", "abcx"], "abcx", 4, 4, dropped=["abcd"]),
    Case("dropped sibling is unknown", ["abcd", "abcx"], "abcd", 0, 3, "no_boundary",
         dropped=["abcd"]),
    Case("dropped to nothing", ["abc"], "abc", 0, 0, "unknown", dropped=["abc"]),
    Case("dropped middle of three", ["ab", "abcd", "abcdef"], "abcdx", 2, 4, "no_boundary",
         dropped=["abcd"]),
    Case("dropped sealed one", ["abc"], "abcdef", 3, 3, sealed=["abcdef"], dropped=["abcdef"]),
]  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_primitive(case: Case) -> None:
    cache = Cache(CacheSpec(200, 64, GROUPS, 8, 1, 4))
    made = {text: seal(cache, text) for text in [*case.published, *case.sealed]}
    for text in case.published:
        cache.publish(made[text], 1)
    for text in case.dropped:
        cache.discard(made[text], "aborted")
    audit(cache, [])
    match = cache.match("r", ids(case.prompt), case.limit)
    assert (match.at, match.known, match.lost) == (case.at, case.known, case.lost)
    assert (match.pending.at if match.pending else 0) == case.pending
    if match.checkpoint:
        assert cache.tokens(match.checkpoint).tolist() == ids(case.prompt[: match.at]).tolist()
    assert cache.match("other", ids(case.prompt)).known == 0, "roots are isolated"


def test_there_are_enough_primitives() -> None:
    assert len({case.name for case in CASES}) == len(CASES) >= 46


@pytest.mark.parametrize("root", ["", "salt", ("salt", "adapter", "image")])
def test_the_same_tokens_under_two_roots_are_two_checkpoints(root: object) -> None:
    cache = Cache(CacheSpec(100, 64, GROUPS, 8, 1, 4))
    first = seal(cache, "abcdef")
    cache.publish(first, 0)
    assert cache.match(root, ids("abcdef")).lost == "unknown"
    lease = cache.lease(root, None, 0)
    cache.extend(lease, 6, 0, 0)
    second = cache.seal(lease, ids("abcdef"), 6, Kind.PROMPT, 0)
    assert second is not None
    cache.publish(second, 0)
    assert cache.match(root, ids("abcdef")).checkpoint is second
    assert cache.match("r", ids("abcdef")).checkpoint is first
    assert cache.reset(root) == 1
    assert cache.match("r", ids("abcdef")).checkpoint is first
    audit(cache, [lease])


def test_a_match_changes_nothing() -> None:
    cache = Cache(CacheSpec(100, 64, GROUPS, 8, 1, 4))
    first, second = seal(cache, "abcdef"), seal(cache, "abcxyz")
    for checkpoint in (first, second):
        cache.publish(checkpoint, 3)
    before = [(c.used, c.base, c.hits, c.leases) for c in (first, second)]
    refs = cache.pool.refs.copy()
    for _ in range(3):
        assert cache.match("r", ids("abcdefgh")).checkpoint is first
    assert [(c.used, c.base, c.hits, c.leases) for c in (first, second)] == before
    np.testing.assert_array_equal(cache.pool.refs, refs)


def test_an_inner_node_evicted_leaves_its_descendants() -> None:
    """Room is made from the middle of a path; the deeper boundary is still found, bit for bit."""
    cache = Cache(CacheSpec(64, 64, GROUPS, 8, 1, 4))
    inner, outer = seal(cache, "abc", Kind.ALIGNED), seal(cache, "abcdef")
    for checkpoint in (inner, outer):
        cache.publish(checkpoint, 0)
    cache.shelf.make_room(cache.free + 1)
    assert inner.state == "dropped"
    assert cache.match("r", ids("abcdef")).checkpoint is outer
    assert cache.match("r", ids("abcq")).lost == "no_boundary"
    audit(cache, [])

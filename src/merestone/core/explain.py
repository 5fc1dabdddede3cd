"""Why a prompt restores less than the cache knows, or has known.

Knows a match, the graves and the tree of each root. All that it changes is what eviction learns
from a checkpoint that was wanted and had been evicted.
"""

from __future__ import annotations

from merestone.core.cache import Cache
from merestone.core.checkpoint import Match, Root
from merestone.core.index import Tokens

OTHER_ROOTS = 64
"""Roots, the youngest ones, that an explanation looks into."""


def explain(cache: Cache, root: Root, tokens: Tokens, found: Match) -> tuple[int, str]:
    """How many of ``tokens`` are known or were, and why ``found`` restores fewer ("": it does not).

    Beyond the reasons of a match: what became of the deepest boundary on the way ("evicted",
    "window_hole", "no_room", or why it was discarded), or "other_salt" if another root knows at
    least a chunk more.
    """
    if found.lost not in ("", "unknown", "no_boundary"):
        return found.known, found.lost
    graves = cache.shelf.graves.along(root, tokens, found.at)
    if graves:
        deepest = graves[-1]
        for grave in graves:  # any one of a chunk would have done
            if grave.why == "evicted" and grave.at > deepest.at - cache.spec.chunk:
                cache.shelf.odds.miss(grave.kind, grave.hits)
        return max(deepest.at, found.known), deepest.why
    wanted = found.known + cache.spec.chunk
    if found.lost and found.known < cache.spec.chunk:
        tops = cache.shelf.index.tops
        for other in [top for top in reversed(tops) if top != root][:OTHER_ROOTS]:
            if cache.shelf.index.walk(other, tokens)[0] >= wanted:
                return found.known, "other_salt"
    return found.known, found.lost

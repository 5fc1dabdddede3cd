"""Adoption: a checkpoint that comes from a store takes its place in the cache.

To the books it is a request whose rows somebody else computed: leased, extended, sealed, released.
Knows the cache's verbs. Must not know stores.
"""

from __future__ import annotations

from merestone.core.cache import Cache
from merestone.core.checkpoint import Checkpoint, Kind, Root
from merestone.core.index import Tokens


def adopt(
    cache: Cache,
    root: Root,
    base: Checkpoint | None,
    tokens: Tokens,
    anchor: int,
    kind: Kind,
    now: int,
) -> Checkpoint | None:
    """A sealed checkpoint of all of ``tokens`` with its anchor at ``anchor`` tokens.

    It shares with ``base`` (a published prefix, whose anchor is no higher) all that is complete
    there. Every other frame is fresh, and the caller has it written before it publishes. None if
    the cache has a checkpoint of these tokens, or no row for a hidden row.

    Raises:
        OutOfFrames: no room; nothing has changed but evictions made.
    """
    lease = cache.follow(root, base)
    try:
        # Its copies are left out: whatever they would bring is written from the store.
        cache.extend(lease, tokens.size, anchor, now)
        return cache.seal(lease, tokens, tokens.size, kind, now)
    finally:
        cache.release(lease)

"""Graves: where checkpoints were, or would have been, and why they are not there.

Knows token counts and digests, for explanations alone: nothing is ever restored on their word.
Must not know frames. Bounded; the oldest go first.
"""

from __future__ import annotations

from collections import Counter
from hashlib import blake2b

from merestone.core.checkpoint import Root
from merestone.core.index import Tokens

Place = tuple[Root, int, bytes]


class Graves:
    """At most ``limit`` places, each with the reason of its loss, one word."""

    def __init__(self, limit: int = 4096) -> None:
        self._limit = limit
        self._why: dict[Place, str] = {}
        self._depths: dict[Root, Counter[int]] = {}

    def bury(self, root: Root, tokens: Tokens, why: str) -> None:
        """No checkpoint of exactly ``tokens`` exists (any more)."""
        digest = blake2b(tokens.tobytes(), digest_size=16).digest()
        place = root, int(tokens.size), digest
        if place in self._why:
            self._remove(place)
        self._why[place] = why
        self._depths.setdefault(root, Counter())[place[1]] += 1
        if len(self._why) > self._limit:
            self._remove(next(iter(self._why)))

    def deepest(self, root: Root, tokens: Tokens) -> tuple[int, str]:
        """The deepest grave on the way of ``tokens`` and its reason; (0, "") if there is none."""
        found, done = (0, ""), 0
        hashed = blake2b(digest_size=16)
        for at in sorted(self._depths.get(root, ())):
            if at > tokens.size:
                break
            hashed.update(tokens[done:at].tobytes())
            done = at
            why = self._why.get((root, at, hashed.digest()))
            if why is not None:
                found = at, why
        return found

    def _remove(self, place: Place) -> None:
        del self._why[place]
        root, at, _ = place
        depths = self._depths[root]
        depths[at] -= 1
        if not depths[at]:
            del depths[at]
        if not depths:
            del self._depths[root]

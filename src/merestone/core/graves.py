"""Graves: where checkpoints were, or would have been, and why they are not there.

Knows token counts and digests, for explanations alone: nothing is ever restored on their word.
Must not know frames. Bounded; the oldest go first.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from hashlib import blake2b

from merestone.core.checkpoint import Kind, Root
from merestone.core.index import Tokens

Place = tuple[Root, int, bytes]


@dataclass(frozen=True, slots=True)
class Grave:
    """``why`` there is no checkpoint at ``at`` tokens, and of which ``kind``, hit how often, the
    one was that there might be."""

    at: int
    why: str
    kind: Kind
    hits: int = 0


class Graves:
    """At most ``limit`` places, each with the reason of its loss, one word."""

    def __init__(self, limit: int = 4096) -> None:
        self._limit = limit
        self._graves: dict[Place, Grave] = {}
        self._depths: dict[Root, Counter[int]] = {}

    def bury(self, root: Root, tokens: Tokens, why: str, kind: Kind, hits: int = 0) -> None:
        """No checkpoint of exactly ``tokens`` exists (any more)."""
        digest = blake2b(tokens.tobytes(), digest_size=16).digest()
        place = root, int(tokens.size), digest
        if place in self._graves:
            self._remove(place)
        self._graves[place] = Grave(place[1], why, kind, hits)
        self._depths.setdefault(root, Counter())[place[1]] += 1
        if len(self._graves) > self._limit:
            self._remove(next(iter(self._graves)))

    def along(self, root: Root, tokens: Tokens, above: int) -> list[Grave]:
        """The graves on the way of ``tokens`` that lie above ``above``, shallowest first."""
        found, done = [], 0
        hashed = blake2b(digest_size=16)
        depths = self._depths.get(root, ())
        for at in sorted(depth for depth in depths if above < depth <= tokens.size):
            hashed.update(tokens[done:at].tobytes())
            done = at
            grave = self._graves.get((root, at, hashed.digest()))
            if grave is not None:
                found.append(grave)
        return found

    def _remove(self, place: Place) -> None:
        del self._graves[place]
        root, at, _ = place
        depths = self._depths[root]
        depths[at] -= 1
        if not depths[at]:
            del depths[at]
        if not depths:
            del self._depths[root]

"""The shelf: sealed and published checkpoints, and room made by evicting them.

Knows which checkpoints exist, which may go and in which order. Must not know leases' pages.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field

import numpy as np

from merestone.core.checkpoint import Checkpoint, State
from merestone.core.frames import FramePool, HiddenRows
from merestone.core.graves import Graves
from merestone.core.index import PrefixIndex, Tokens
from merestone.core.odds import Odds
from merestone.core.policy import Cost, EvictionKey, eviction_key

MANY = 512
"""Evictable checkpoints beyond which eviction frees more than it is asked for."""


class OutOfFrames(Exception):
    """There is no room, even if everything evictable were evicted.

    ``needed`` frames were asked for; ``free`` are free or would be.
    """

    def __init__(self, needed: int, free: int) -> None:
        super().__init__(f"{needed} frames needed, {free} free or evictable")
        self.needed = needed
        self.free = free


@dataclass(slots=True)
class Counters:
    """What happened so far, by kind of checkpoint or by reason."""

    sealed: dict[str, int] = field(default_factory=dict)
    published: dict[str, int] = field(default_factory=dict)
    restored: dict[str, int] = field(default_factory=dict)
    evicted: dict[str, int] = field(default_factory=dict)
    discarded: dict[str, int] = field(default_factory=dict)
    """By kind and reason, one word each."""
    saved_tokens: dict[str, int] = field(default_factory=dict)
    duplicate: int = 0
    no_room: int = 0

    def discards(self, reason: str) -> int:
        """Discarded for ``reason``, of any kind."""
        return sum(n for key, n in self.discarded.items() if key.split()[1] == reason)


def count(counter: dict[str, int], key: str, more: int = 1) -> None:
    """One more of ``key``, or ``more``."""
    name = str(key)
    counter[name] = counter.get(name, 0) + more


class Shelf:
    """Checkpoints that are not dropped, oldest first, over ``pool`` and ``hidden``."""

    def __init__(
        self,
        pool: FramePool,
        hidden: HiddenRows,
        frame_bytes: int,
        cost: Cost,
        mark_share: float,
    ) -> None:
        self.pool = pool
        self.hidden = hidden
        self.index = PrefixIndex()
        self.counters = Counters()
        self.graves = Graves()
        self.odds = Odds()
        self.live: dict[int, Checkpoint] = {}
        self.evictable: dict[int, Checkpoint] = {}
        self.inflation = 0.0
        self.seconds = 0.0
        self.marked: dict[int, Checkpoint] = {}
        """Those with a time to live, in the order in which they got one."""
        self._spared: frozenset[int] = frozenset()
        self._spared_frames = int(mark_share * len(pool.refs))
        self._frame_bytes = frame_bytes
        self._cost = cost

    def add(self, checkpoint: Checkpoint, tokens: Tokens) -> None:
        """Hold the frames of a newly sealed checkpoint and index it."""
        self.pool.hold(checkpoint.frames(), checkpoint.id)
        self.index.insert(tokens, checkpoint)
        self.live[checkpoint.id] = checkpoint
        count(self.counters.sealed, checkpoint.kind)

    def touch(self, checkpoint: Checkpoint, now: int) -> None:
        """Note a use."""
        checkpoint.used = now
        checkpoint.base = self.inflation

    def mark(self, checkpoint: Checkpoint, ttl_s: float) -> None:
        """Spare it for ``ttl_s`` seconds from now, or for as long as it was promised before."""
        checkpoint.ttl_s = max(ttl_s, checkpoint.ttl_s)
        if checkpoint.ttl_s:
            checkpoint.until_s = self.seconds + checkpoint.ttl_s
            self.marked[checkpoint.id] = checkpoint

    def spared(self) -> frozenset[int]:
        """Ids of those that eviction leaves for last: marked, in time, and within the share of the
        pool that they may hold together; the first that was marked gets its part of it first."""
        room, seen = self._spared_frames, np.zeros(len(self.pool.refs), bool)
        chosen = []
        for checkpoint in list(self.marked.values()):
            if checkpoint.until_s <= self.seconds:
                del self.marked[checkpoint.id]
                continue
            frames = checkpoint.frames()
            fresh = frames[~seen[frames]]
            if fresh.size <= room:
                room -= fresh.size
                seen[fresh] = True
                chosen.append(checkpoint.id)
        return frozenset(chosen)

    def recount(self, checkpoint: Checkpoint) -> None:
        """Keep ``evictable`` and the soft reference counts true, after any change of a hold."""
        held = checkpoint.leases or checkpoint.protected
        evictable = checkpoint.state is State.PUBLISHED and not held
        if evictable == checkpoint.evictable:
            return
        checkpoint.evictable = evictable
        sign = 1 if evictable else -1
        self.pool.soften(checkpoint.frames(), sign)
        self.pool.soft[checkpoint.hidden[0]] += sign
        if evictable:
            self.evictable[checkpoint.id] = checkpoint
        else:
            del self.evictable[checkpoint.id]

    def hide(self, checkpoint: Checkpoint) -> None:
        """Let nobody find a sealed checkpoint any more; it is dropped instead of published."""
        checkpoint.doomed = True
        self.index.remove(checkpoint)

    def drop(self, checkpoint: Checkpoint) -> list[int]:
        """Give up a checkpoint's references; returns the ids that became sole holders thereby."""
        assert checkpoint.state is not State.DROPPED
        checkpoint.state = State.DROPPED
        self.recount(checkpoint)
        if not checkpoint.doomed:
            self.index.remove(checkpoint)
        del self.live[checkpoint.id]
        self.marked.pop(checkpoint.id, None)
        soled = self.pool.drop(checkpoint.frames(), checkpoint.id)
        self.forget_hidden(checkpoint)
        return soled

    def forget_hidden(self, checkpoint: Checkpoint) -> None:
        """Free a dropped checkpoint's hidden row, once no lease may still have to load it."""
        if checkpoint.state is State.DROPPED and checkpoint.leases == 0:
            self.hidden.give(*checkpoint.hidden)

    def own_bytes(self, checkpoint: Checkpoint) -> float:
        """Bytes that only ``checkpoint`` holds, its share of a slab included."""
        frames = self.pool.sole.get(checkpoint.id, 0) + 1 / self.hidden.rows
        return self._frame_bytes * frames

    def make_room(self, needed: int) -> None:
        """Evict, lowest key first, until ``needed`` frames are free.

        Raises:
            OutOfFrames: evicting everything would not do; nothing was evicted.
        """
        if needed <= self.pool.free:
            return
        available = self.pool.reachable()
        if needed > available:
            raise OutOfFrames(needed, available)
        self._spared = self.spared()
        heap = [(self._key(c), c) for c in self.evictable.values()]
        heapq.heapify(heap)
        goal = needed
        if len(heap) > MANY:
            # Ranking them all costs: make room for the next calls too.
            goal = min(available, needed + len(self.pool.refs) // 128)
        while self.pool.free < goal and heap:
            key, checkpoint = heapq.heappop(heap)
            if not checkpoint.evictable:
                continue
            # A key rises when an ancestor went; when it falls, a second entry was pushed (below).
            now = self._key(checkpoint)
            if now > key:
                heapq.heappush(heap, (now, checkpoint))
                continue
            for holder in self._evict(checkpoint, now):
                # What it shared it now holds alone: there is more to gain from it.
                sole = self.evictable.get(holder)
                if sole is not None:
                    heapq.heappush(heap, (self._key(sole), sole))

    def evict_anchor(self, frames: tuple[int, ...]) -> bool:
        """Evict those that share an anchor with one other holder, if they all can be."""
        refs, soft = self.pool.refs[list(frames)], self.pool.soft[list(frames)]
        if not frames or (refs - soft != 1).any():
            return False
        for checkpoint in [c for c in self.evictable.values() if c.anchor_frames == frames]:
            self._evict(checkpoint, self._key(checkpoint))
        return True

    def _key(self, checkpoint: Checkpoint) -> EvictionKey:
        above = self.index.ancestor(checkpoint)
        size = self.own_bytes(checkpoint) + self._shared_anchor(checkpoint)
        odds = self.odds.of(checkpoint.kind, checkpoint.hits)
        spared = checkpoint.id in self._spared
        return eviction_key(checkpoint, above.at if above else 0, size, self._cost, odds, spared)

    def _shared_anchor(self, checkpoint: Checkpoint) -> float:
        """Its part of an anchor that it does not hold alone: neighbours in one chunk would each
        seem to cost nothing, and keep each other for ever."""
        anchor = checkpoint.anchor_frames
        holders = int(self.pool.refs[anchor[0]]) if anchor else 1
        return self._frame_bytes * len(anchor) / holders if holders > 1 else 0.0

    def _evict(self, checkpoint: Checkpoint, key: EvictionKey) -> list[int]:
        self.inflation = max(self.inflation, key[2])
        count(self.counters.evicted, checkpoint.kind)
        self.odds.lose(checkpoint.kind, checkpoint.hits)
        tokens = self.index.tokens(checkpoint)
        self.graves.bury(checkpoint.root, tokens, "evicted", checkpoint.kind, checkpoint.hits)
        return self.drop(checkpoint)

"""Frames: reference counts, the free list, and rows of hidden states packed into frames.

Knows frame numbers and holders' ids. Must not know tokens, groups or what a frame holds.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Frames = NDArray[np.int32]

NOBODY = 0
"""The holder of slabs, whose rows belong to many. Holders' ids are positive."""


class FramePool:
    """All frames of a rank's arena, counted.

    ``refs[f]`` counts the holders of frame f, ``soft[f]`` those of them that could be evicted now;
    ``appender[f]`` is the lease that may still write rows into it (0: none). ``sole[h]`` counts the
    frames that holder h alone holds. The free list is a stack: the frame freed last is taken first,
    and a new pool hands out the lowest numbers first.
    """

    def __init__(self, count: int) -> None:
        self.refs = np.zeros(count, np.int32)
        self.soft = np.zeros(count, np.int32)
        self.appender = np.zeros(count, np.int64)
        self.sole: dict[int, int] = {}
        # The sum of the ids of a frame's holders: with one holder left, it names that one.
        self._holders = np.zeros(count, np.int64)
        self._stack = np.arange(count - 1, -1, -1, dtype=np.int32)
        self._free = count

    @property
    def free(self) -> int:
        return self._free

    def free_frames(self) -> Frames:
        """The free list, next frame last."""
        return self._stack[: self._free].copy()

    def reachable(self) -> int:
        """Frames that are free, or would be if everything evictable were evicted."""
        return self._free + int(np.count_nonzero((self.soft == self.refs) & (self.refs > 0)))

    def take(self, count: int, holder: int, appender: int = NOBODY) -> Frames:
        """``count`` free frames, now held by ``holder`` alone, for ``appender`` to write rows into;
        the caller has made room."""
        assert count <= self._free, f"{count} frames taken of {self._free} free"
        frames = self._stack[self._free - count : self._free][::-1].copy()
        self._free -= count
        # Of one frame, as decoding takes them, a plain index costs a twentieth.
        where = int(frames[0]) if count == 1 else frames
        self.refs[where] = 1
        self._holders[where] = holder
        self.appender[where] = appender
        self._credit(holder, count)
        return frames

    def hold(self, frames: Frames, holder: int) -> None:
        """One more reference to each of ``frames`` (distinct, in use, not yet this holder's)."""
        if not frames.size:
            return
        counts = self.refs[frames] + 1
        assert int(counts.min()) > 1, "a free frame cannot be shared"
        self.refs[frames] = counts
        self._credit_all(self._holders[frames[counts == 2]], -1)
        self._holders[frames] += holder

    def drop(self, frames: Frames, holder: int) -> list[int]:
        """One reference less; frames without any are free. Returns the holders that now hold
        alone what they shared, ascending."""
        if not frames.size:
            return []
        counts = self.refs[frames] - 1
        assert int(counts.min()) >= 0, "a free frame cannot be dropped"
        self.refs[frames] = counts
        self._holders[frames] -= holder
        gone = frames[counts == 0]
        if gone.size:
            self.appender[gone] = NOBODY
            self._stack[self._free : self._free + gone.size] = gone[::-1]
            self._free += int(gone.size)
            self._credit(holder, -int(gone.size))
        return self._credit_all(self._holders[frames[counts == 1]], 1)

    def soften(self, frames: Frames, sign: int) -> None:
        """Count one evictable reference more (1) or less (-1) to each of ``frames``."""
        self.soft[frames] += sign

    def disown(self, frames: Frames, lease: int) -> None:
        """``lease`` will append no more rows to those of ``frames`` that it may append to."""
        self.appender[frames[self.appender[frames] == lease]] = NOBODY

    def _credit_all(self, holders: NDArray[np.int64], sign: int) -> list[int]:
        if not holders.size:
            return []
        ids, counts = np.unique(holders, return_counts=True)
        for holder, count in zip(ids.tolist(), counts.tolist(), strict=True):
            self._credit(holder, sign * count)
        return [int(holder) for holder in ids.tolist()]

    def _credit(self, holder: int, count: int) -> None:
        if holder == NOBODY:
            return
        total = self.sole.get(holder, 0) + count
        if total:
            self.sole[holder] = total
        else:
            self.sole.pop(holder, None)


class HiddenRows:
    """Rows for saved hidden states, ``rows`` to a frame. A slab (such a frame) is taken when a row
    is needed and dropped with its last row; its reference count is the number of rows in use."""

    def __init__(self, pool: FramePool, rows: int) -> None:
        self.rows = rows
        # Free rows of the slabs that have any, next row last; slabs in the order they gained room.
        self.spare: dict[int, list[int]] = {}
        self._pool = pool

    @property
    def full(self) -> bool:
        """Whether the next row needs another frame."""
        return not self.spare

    def take(self) -> tuple[int, int]:
        """(frame, row) of a free row; the caller has made room for a frame if ``full``."""
        if self.full:
            frame = int(self._pool.take(1, NOBODY)[0])
            self.spare[frame] = list(range(self.rows - 1, -1, -1))
        else:
            frame = next(iter(self.spare))
            self._pool.hold(np.array([frame], np.int32), NOBODY)
        row = self.spare[frame].pop()
        if not self.spare[frame]:
            del self.spare[frame]
        return frame, row

    def give(self, frame: int, row: int) -> None:
        """A row of ``take`` is free again."""
        self._pool.drop(np.array([frame], np.int32), NOBODY)
        if self._pool.refs[frame] == 0:
            self.spare.pop(frame, None)
        else:
            self.spare.setdefault(frame, []).append(row)

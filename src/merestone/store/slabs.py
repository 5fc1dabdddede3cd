"""Slabs: memory taken in large parts and given out in pieces, valid while anybody holds them.

Knows addresses and sizes. Must not know where slabs come from, or what pieces are for.
"""

from __future__ import annotations

import logging
import threading
import weakref
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

log = logging.getLogger("merestone.store")

Allocate = Callable[[int], memoryview]
"""Memory of so many bytes, a power of two, writable. Raises MemoryError if there is none."""
SLAB = 64 << 20
"""Bytes taken at a time: all at once would take seconds where pages are locked."""
SHARE = 64
"""The last slabs of a budget are smaller, but not below this part of a whole one."""
ALIGN = 64
"""Pieces start at multiples of this many bytes."""


class Holes:
    """Free intervals of addresses. Neighbours join, but not across multiples of ``wall``."""

    def __init__(self, wall: int) -> None:
        self.free = 0
        self._wall = wall
        self._by_size: list[tuple[int, int]] = []  # (size, start), ascending
        self._sizes: dict[int, int] = {}  # by start
        self._starts: dict[int, int] = {}  # by end

    def give(self, start: int, size: int) -> None:
        """[start, start + size) is free."""
        self.free += size
        end = start + size
        if start % self._wall and start in self._starts:
            start = self._starts[start]
            self._remove(start)
        if end % self._wall and end in self._sizes:
            end += self._remove(end)
        self._add(start, end - start)

    def take(self, size: int) -> int | None:
        """The start of an interval that is free no longer, cut from the smallest hole that has it;
        None if none has."""
        place = bisect_left(self._by_size, (size, 0))
        if place == len(self._by_size):
            return None
        _, start = self._by_size[place]
        left = self._remove(start) - size
        if left:
            self._add(start + size, left)
        self.free -= size
        return start

    def _add(self, start: int, size: int) -> None:
        insort(self._by_size, (size, start))
        self._sizes[start] = size
        self._starts[start + size] = start

    def _remove(self, start: int) -> int:
        size = self._sizes.pop(start)
        del self._starts[start + size]
        del self._by_size[bisect_left(self._by_size, (size, start))]
        return size


class Slabs:
    """Pieces of at most ``budget`` bytes of memory, which ``allocate`` gives ``slab`` bytes (a
    power of two) at a time. Any thread may call."""

    def __init__(self, allocate: Allocate, budget: int, slab: int = SLAB) -> None:
        assert slab & (slab - 1) == 0, "a slab is a power of two"
        self.capacity = 0
        """Bytes of all slabs."""
        self._budget = budget
        self._slab = slab
        self._allocate = allocate
        self._slabs: list[NDArray[np.uint8]] = []
        self._holes = Holes(slab)
        self._lock, self._growing = threading.Lock(), threading.Lock()
        # Pieces that nobody holds any more. They come at any time and on any thread, be it while
        # that thread has the lock: hence not straight into the holes.
        self._back: deque[tuple[int, int]] = deque()

    @property
    def free(self) -> int:
        """Bytes of slabs that are no piece's."""
        with self._lock:
            self._take_back()
            return self._holes.free

    def take(self, size: int) -> memoryview | None:
        """A piece of ``size`` bytes; None if no slab has it (or ``size`` is 0). It is given back
        when the view, and whatever was made of it without a copy, is gone."""
        whole = -(-size // ALIGN) * ALIGN
        with self._lock:
            self._take_back()
            start = self._holes.take(whole) if size else None
        if start is None:
            return None
        number, offset = divmod(start, self._slab)
        piece = self._slabs[number][offset : offset + size]
        # The array is what views of its memory hold, however they are cut.
        weakref.finalize(piece, self._back.append, (start, whole)).atexit = False
        return piece.data

    def filled(self, data: bytes) -> memoryview | None:
        """A piece with ``data`` in it, of a further slab if need be; None if there is no room."""
        piece = self.take(len(data))
        while piece is None and 0 < len(data) <= self._slab and self._grow():
            piece = self.take(len(data))
        if piece is not None:
            piece[:] = data
        return piece

    def grow_ahead(self) -> None:
        """Have half a slab free if the budget has it, so that ``take`` finds room. Like ``filled``
        it may take as long as ``allocate`` does."""
        if self.free < self._slab // 2:
            self._grow()

    def _take_back(self) -> None:
        while self._back:
            self._holes.give(*self._back.popleft())

    def _grow(self) -> bool:
        """One slab more. False if there is none to be had."""
        with self._growing:
            left = self._budget - self.capacity
            size = min(self._slab, 1 << left.bit_length() >> 1)
            if size < max(self._slab // SHARE, ALIGN):
                return False
            try:
                memory = self._allocate(size)
            except MemoryError as error:
                log.warning(
                    "--store memory: %d of %d MiB are page-locked, then: %s; "
                    "the rest will be ordinary memory, and slower to copy",
                    self.capacity >> 20, self._budget >> 20, error,
                )  # fmt: skip
                self._budget = self.capacity
                return False
            with self._lock:
                self._holes.give(len(self._slabs) * self._slab, size)
                self._slabs.append(np.frombuffer(memory, np.uint8))
                self.capacity += size
            return True

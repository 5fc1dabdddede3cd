"""The host memory tier: bytes in a dictionary. Its catalog keeps it within its budget."""

from __future__ import annotations

from collections.abc import Sequence

from merestone.store.slabs import Slabs


class MemoryTier:
    """Implements ``tier.Tier``. Dictionary operations are atomic: no lock is needed.

    ``slabs``: memory that a GPU copies from and to by itself, for as much as goes in there.
    """

    name = "memory"
    boundaries = True

    def __init__(self, slabs: Slabs | None = None) -> None:
        self.slabs = slabs
        self.kept: dict[str, bytes | memoryview] = {}
        if slabs is not None:
            slabs.grow_ahead()

    def room(self, size: int) -> memoryview | None:
        return None if self.slabs is None else self.slabs.take(size)

    def put(self, name: str, data: bytes | memoryview) -> None:
        if self.slabs is None:
            self.kept[name] = bytes(data)
            return
        if isinstance(data, bytes):
            data = self.slabs.filled(data) or data
        self.kept[name] = data
        self.slabs.grow_ahead()

    def get(self, name: str) -> bytes | memoryview | None:
        return self.kept.get(name)

    def has(self, names: Sequence[str]) -> list[bool]:
        return [name in self.kept for name in names]

    def erase(self, names: Sequence[str]) -> None:
        for name in names:
            self.kept.pop(name, None)

    def close(self) -> None:
        self.kept.clear()

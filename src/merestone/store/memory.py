"""The host memory tier: bytes in a dictionary. Its catalog keeps it within its budget."""

from __future__ import annotations

from collections.abc import Sequence


class MemoryTier:
    """Implements ``tier.Tier``. Dictionary operations are atomic: no lock is needed."""

    name = "memory"
    boundaries = True

    def __init__(self) -> None:
        self.kept: dict[str, bytes] = {}

    def put(self, name: str, data: bytes) -> None:
        self.kept[name] = data

    def get(self, name: str) -> bytes | None:
        return self.kept.get(name)

    def has(self, names: Sequence[str]) -> list[bool]:
        return [name in self.kept for name in names]

    def erase(self, names: Sequence[str]) -> None:
        for name in names:
            self.kept.pop(name, None)

    def close(self) -> None:
        self.kept.clear()

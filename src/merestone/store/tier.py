"""The contract of a tier: named bytes, somewhere. Every call may block; threads make them.

Must not know checkpoints: what names and bytes mean is decided elsewhere.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol


class Tier(Protocol):
    """Segments and manifests under names of [0-9a-f.]; calls of several threads may overlap.

    Every method raises ``StoreFault`` with a reason ("full", "read_only", "unreachable",
    "timeout", "failed") when the tier cannot do what it is asked.
    """

    name: str
    """What metrics and logs call it."""
    boundaries: bool
    """Whether it keeps whole checkpoints at any token count. Without, retention is aligned."""

    def room(self, size: int) -> memoryview | None:
        """Memory of the tier's own, to be filled and then put, which copies nothing; None: put
        bytes. Never waits."""
        ...

    def put(self, name: str, data: bytes | memoryview) -> None:
        """Keep ``data``, bytes or a filled ``room``; whoever reads it then sees all of it or none.
        Durable on return where the tier outlives the process."""
        ...

    def get(self, name: str) -> bytes | memoryview | None:
        """What is kept under ``name``; None if nothing is. A view is of memory that ``room`` may
        give: it stays as it is, erased or not, while it is held. To be read only."""
        ...

    def has(self, names: Sequence[str]) -> list[bool]:
        """Whether something is kept under each name."""
        ...

    def erase(self, names: Sequence[str]) -> None:
        """Keep them no longer; names of nothing are nothing."""
        ...

    def close(self) -> None:
        """No call follows."""
        ...


class Recovered(Protocol):
    """What a tier that this process owns held when it was opened: how its catalog is rebuilt."""

    def manifests(self) -> Iterator[tuple[str, bytes]]:
        """(address, bytes) of every manifest, least recently used first."""
        ...

    def segments(self) -> dict[str, int]:
        """Bytes of every segment by its name."""
        ...

    def touch(self, address: str) -> None:
        """Remember across restarts that a checkpoint was used now."""
        ...


def segment_name(address: str, rank: int) -> str:
    """The name of one rank's part of a segment."""
    return f"{address}.{rank}"


def manifest_name(address: str) -> str:
    return f"{address}.m"

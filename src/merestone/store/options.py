"""What stores an engine is asked to have: ``memory:SIZE``, ``disk:DIR:SIZE``, ``redis://...``.

Knows the spelling. Must not know what a store does.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12,
         "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}  # fmt: skip


@dataclass(frozen=True, slots=True)
class StoreSpec:
    """``kind`` "memory", "disk" or "redis"; ``place`` a directory or an address; ``budget`` bytes
    (None where the store keeps its own)."""

    kind: str
    place: str = ""
    budget: int | None = None


def parse_store(text: str) -> StoreSpec:
    """The store that ``text`` names.

    Raises:
        ValueError: it names none.
    """
    kind, _, rest = text.partition(":")
    if kind in ("redis", "rediss", "unix"):
        return StoreSpec("redis", text)
    place, _, size = rest.rpartition(":")
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmgt]i?)?b?", size.strip().lower())
    if found is None or kind not in ("memory", "disk") or bool(place) != (kind == "disk"):
        raise ValueError(
            f"--store {text!r} is not memory:SIZE, disk:DIR:SIZE or redis://HOST:PORT/DB"
        )
    return StoreSpec(kind, place, int(float(found[1]) * UNITS[found[2] or ""]))

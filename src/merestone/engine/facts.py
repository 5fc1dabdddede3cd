"""What the deciding side must know of the doing side. Plain values, no torch."""

from __future__ import annotations

from dataclasses import dataclass

from merestone.core.geometry import GroupSpec


@dataclass(frozen=True, slots=True)
class Facts:
    """What an engine must know of the device that runs its plans.

    They also travel here from the process of a rank. Lengths in tokens; ``notes`` are lines for
    the start-up log; ``drafts``: tokens proposed in a step, at most.
    """

    vocab_size: int
    max_length: int
    eos_ids: tuple[int, ...]
    dtype: str
    device: str
    frames: int
    frame_bytes: int
    groups: tuple[GroupSpec, ...]
    anchor_frames: int
    hidden_rows: int
    notes: tuple[str, ...]
    drafts: int = 0
    layout: str = ""
    """Every field of the state and the number of threads, in words: what two engines must share
    to read each other's rows."""

"""What an arena is divided into, and how many frames a request can come to need.

Knows geometry. Must not know which frames are whose.
"""

from __future__ import annotations

from dataclasses import dataclass

from merestone.core.geometry import GroupSpec
from merestone.core.policy import DEFAULT_COST, Cost


@dataclass(frozen=True)
class CacheSpec:
    """The arena and what lies in it.

    ``frames`` of ``frame_bytes`` bytes; ``chunk`` tokens between possible anchors, each of
    ``anchor_frames`` frames; ``hidden_rows`` saved hidden rows to a frame; ``drafts``: tokens under
    verification in one step, at most; ``cost`` of computing what is not cached; ``mark_share``: the
    part of the frames that checkpoints spared by a time to live may hold together.

    Raises:
        ValueError: a page of an open group would straddle an anchor, or a size makes no sense.
    """

    frames: int
    frame_bytes: int
    groups: tuple[GroupSpec, ...]
    chunk: int
    anchor_frames: int
    hidden_rows: int
    drafts: int = 0
    cost: Cost = DEFAULT_COST
    mark_share: float = 0.25

    def __post_init__(self) -> None:
        if min(self.frames, self.frame_bytes, self.chunk, self.hidden_rows) < 1:
            raise ValueError("frames, frame_bytes, chunk and hidden_rows must be positive")
        if self.anchor_frames < 0:
            raise ValueError(f"an anchor of {self.anchor_frames} frames")
        if not 0 <= self.mark_share <= 1:
            raise ValueError(f"a share of {self.mark_share} of the pool")
        if not 0 <= self.drafts < self.chunk:
            raise ValueError(f"{self.drafts} drafts do not fit into a chunk of {self.chunk} tokens")
        if len({group.name for group in self.groups}) < len(self.groups):
            raise ValueError("two groups of one name")
        for group in self.groups:
            if group.open and self.chunk % group.span:
                raise ValueError(
                    f"group {group.name}: a page of {group.span} tokens straddles the anchors,"
                    f" {self.chunk} tokens apart"
                )

    def frames_needed(self, tokens: int, origin: tuple[int, int] | None = None) -> int:
        """Frames that a request of ``tokens`` rows, alone, may need at most.

        Its pages before and after a step, two anchors and a frame of hidden rows. From ``origin``,
        (tokens, anchor) of a checkpoint: besides what that holds. Without: wherever it starts, a
        restored origin's frames included.
        """
        chunk, drafts = self.chunk, self.drafts
        anchors = min(2, tokens // chunk - (origin[1] // chunk if origin else 0))
        pages = sum(group.most_pages(tokens, chunk, origin, drafts) for group in self.groups)
        return pages + max(0, anchors) * self.anchor_frames + 1

    def capacity(self) -> int:
        """The most tokens of a request that always finds room when it runs alone."""
        low, high = 0, 1
        while high < 2**31 and self.frames_needed(high) <= self.frames:
            low, high = high, 2 * high
        while low + 1 < high:
            middle = (low + high) // 2
            if self.frames_needed(middle) <= self.frames:
                low = middle
            else:
                high = middle
        return low

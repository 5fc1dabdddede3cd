"""The nouns of the cache: checkpoints, leases, matches.

Knows who refers to which pages and frames. Must not know how they are counted, found or evicted.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from enum import StrEnum

import numpy as np

from merestone.core.frames import Frames

Root = Hashable
"""What two prompts must share besides tokens: (cache salt, adapter, media identity)."""

PageRun = tuple[int, Frames]
"""Consecutive pages of one group: the first one's number, and their frames (never written to)."""


class Kind(StrEnum):
    """Why a boundary is one."""

    INSTRUCTION = "instruction"
    TURN = "turn"
    TOOL = "tool"
    MESSAGE = "message"
    PROMPT = "prompt"
    REASONING = "reasoning"
    RESPONSE = "response"
    MARK = "mark"
    JUNCTION = "junction"
    ALIGNED = "aligned"


class State(StrEnum):
    """A checkpoint is sealed when planned, published when every rank has done its copies, and
    dropped by eviction, discard or reset."""

    SEALED = "sealed"
    PUBLISHED = "published"
    DROPPED = "dropped"


@dataclass(slots=True, eq=False)
class Checkpoint:
    """Everything needed to resume at ``at`` tokens.

    ``anchor`` is the anchor's token count, ``anchor_frames`` where it lies (none: the zero state).
    It is the multiple of the chunk below ``at``, or one before it: accepted drafts ran ahead of it.
    ``pages`` covers, for each group, exactly the rows that ``GroupSpec.rows(at, anchor)`` names.
    ``hidden`` is (frame, row) of the saved hidden row of position ``at - 1``. ``leases`` and
    ``protected`` count holds against eviction; ``born`` and ``used`` are steps, ``born_s`` seconds
    of the clock that ``Cache.tick`` tells. With a time to live ``ttl_s``, eviction spares it until
    ``until_s``; every hit begins it anew.
    """

    id: int
    root: Root
    at: int
    kind: Kind
    state: State
    anchor: int
    anchor_frames: tuple[int, ...]
    pages: dict[str, PageRun]
    hidden: tuple[int, int]
    born: int
    used: int
    leases: int = 0
    protected: int = 0
    hits: int = 0
    born_s: float = 0.0
    ttl_s: float = 0.0
    until_s: float = 0.0
    digest: tuple[bytes, ...] = ()
    """Checksums of its bytes, one a rank, if anybody asked for them when it was sealed."""
    base: float = 0.0
    """The inflation value of eviction when last used."""
    evictable: bool = False
    """Published, not leased, not protected (as last counted by the cache)."""
    doomed: bool = False
    """Sealed before a reset: found by nobody, dropped when it would be published."""

    def frames(self) -> Frames:
        """Frames of its pages and its anchor (not the slab of its hidden row)."""
        runs = [frames for _, frames in self.pages.values()]
        return np.concatenate([*runs, np.array(self.anchor_frames, np.int32)])


@dataclass(slots=True, eq=False)
class Lease:
    """A running request's hold on pages and frames.

    ``rows`` tokens are computed or planned for good, from the anchor at ``anchor`` on in
    ``pages``'s open group; the pages of drafts lie above, and have nothing in them that counts.
    ``retired`` holds what the steps in flight still read, until they settle. While the anchor
    stays, ``room`` rows, those of drafts included, take no other pages, and the lease is the
    appender of those it has for them; 0: nobody knows.

        group          0 ........ floor(anchor) ...... rows - lag
        full           |  pages, shared below the origin   | drafts
        window, open              |         pages          | drafts
    """

    id: int
    root: Root
    rows: int
    anchor: int
    anchor_frames: tuple[int, ...]
    pages: dict[str, PageRun]
    origin: Checkpoint | None
    retired: list[Frames] = field(default_factory=list)
    room: int = 0
    live: bool = True

    def frames(self) -> Frames:
        """Every frame the lease refers to, retired ones included."""
        runs = [frames for _, frames in self.pages.values()]
        return np.concatenate([*runs, *self.retired, np.array(self.anchor_frames, np.int32)])

    @property
    def held(self) -> int:
        """How many frames those are."""
        pages = sum(frames.size for _, frames in self.pages.values())
        return pages + sum(frames.size for frames in self.retired) + len(self.anchor_frames)


@dataclass(frozen=True, slots=True)
class Match:
    """What the cache knows of a prompt. Finding it changes nothing.

    ``checkpoint``: the deepest published one whose tokens begin the prompt, within the limit.
    ``known``: tokens that the prompt shares with any sequence in the index. ``pending``: the
    deepest sealed, not yet published checkpoint, if deeper. ``lost`` says why less than ``known``
    was restored: "unknown" (nothing shared), "not_published", "limit" (a deeper one lies past the
    limit), "no_boundary"; empty when nothing was lost.
    """

    checkpoint: Checkpoint | None
    known: int
    pending: Checkpoint | None
    lost: str

    @property
    def at(self) -> int:
        """Restored tokens."""
        return self.checkpoint.at if self.checkpoint else 0

"""What a layer keeps between steps, and how a step hands it over.

A layer declares fields; the arena lays them out and gives views. Knows tensors and tables; must
not know how frames are shared or who owns them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from merestone.parallel.tokens import Shards


@dataclass(frozen=True, slots=True)
class Field:
    """One tensor of a layer's state.

    ``home``: the group whose pages hold it ("full", "open", ...) or "anchor". ``shape`` is that of
    one row (paged homes: one row every ``every`` tokens) or of the whole tensor (anchors, where
    dimension 0 counts cells that must not be cut by a frame's end).
    """

    layer: int
    name: str
    home: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    every: int = 1

    @property
    def bytes(self) -> int:
        count = 1
        for extent in self.shape:
            count *= extent
        return count * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class Homes:
    """The groups of an attention layer: of its ``rows``, and of the ``raw`` index rows of which the
    pools to come are made."""

    rows: str = "full"
    raw: str = "open"


@dataclass(slots=True)
class Segment:
    """One sequence's part of a step: rows [start, end), at batch rows [row, row + end - start).

    ``pages[group]`` maps page numbers to frames, int64 (-1 where none). Anchors as in a Work:
    an empty ``anchor_frames`` is the zero state, an empty ``advance_frames`` writes none.
    """

    row: int
    start: int
    end: int
    pages: dict[str, Tensor]
    anchor: int
    anchor_frames: Tensor
    advance: int
    advance_frames: Tensor


class StateViews(Protocol):
    """The arena as layers see it."""

    def page(self, group: str) -> int:
        """Rows that a page of ``group`` holds on this rank."""
        ...

    def shards(self, group: str) -> Shards:
        """Which rows of ``group`` this rank holds."""
        ...

    def rows(self, layer: int, name: str) -> Tensor:
        """[num_frames, rows of a page, *shape]: a strided view into the arena, for reading and
        writing rows of a paged field. (A field with ``every`` = k has page // k rows.)"""
        ...

    def read_anchor(self, layer: int, name: str, frames: Tensor) -> Tensor:
        """[N, *shape] from the anchors whose frames are ``frames`` [N, frames per anchor]."""
        ...

    def write_anchor(self, layer: int, name: str, frames: Tensor, value: Tensor) -> None:
        """Write ``value`` [N, *shape] into the anchors ``frames`` [N, frames per anchor]."""
        ...


@dataclass(slots=True)
class Batch:
    """The rows of one step, sequence after sequence.

    ``tokens`` [N] and ``positions`` [N], int64. ``chunk`` is C. A model may cache index tensors
    that all its layers share in ``scratch``, built once a step. It fills ``features`` [N, hidden]
    for each layer of ``taps``: the residual after that layer (averaged, if it has streams).
    """

    tokens: Tensor
    positions: Tensor
    segments: tuple[Segment, ...]
    chunk: int
    scratch: dict[str, object]
    taps: tuple[int, ...] = ()
    features: dict[int, Tensor] = field(default_factory=dict)

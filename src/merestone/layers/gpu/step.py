"""What a step is to a layer on a GPU: tables on the device, of sizes that a graph can be keyed by.

Knows rows, sequences and which operator reads which table. Must not know requests, nor how the
tables come to the device. Shapes hold upper bounds; what is not used is padding: rows and a last
sequence that own a slot and a frame of nobody else. Nothing that a step computes may depend on a
value that only the host knows, or a captured graph would keep it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from merestone.layers.gpu.ranks import Held
from merestone.ops.triton.kda import Pass
from merestone.ops.triton.rows import Cells, Sequences


@dataclass(frozen=True, slots=True)
class SlotField:
    """A cache that a layer keeps for each slot, derived from pages and never part of a checkpoint:
    [slots, *shape]."""

    layer: int
    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class Step:
    """The rows of one step, int32 tables all.

    Rows [N]: ``tokens``, ``row_sequence``, ``row_position`` and ``seen`` (how many tokens a row
    sees; 0 for padding). Sequences [S], the last of them padding: ``sequences``; ``full_pages``
    [S, n]; ``floor``, from which position on open rows are kept (the anchor after the step);
    ``slot``.

    ``passes``: launches of the recurrence, one after another; ``advance`` [S] and
    ``advance_frames`` [S, n] (-1: none): where anchors stand after them all. ``pools``: sequence
    and number of each pool that the step completes, [2, n] (number -1: none). ``work``: items of
    attention, as :func:`merestone.ops.triton.attention.items` describes them, for ``split`` or not,
    or the ``wide`` ones of :mod:`merestone.ops.triton.attention_wide`; ``longest``: an upper bound
    of the tokens that a row sees. ``held``: what differs where ranks share tokens.
    """

    tokens: Tensor
    row_sequence: Tensor
    row_position: Tensor
    seen: Tensor
    sequences: Sequences
    full_pages: Tensor
    floor: Tensor
    slot: Tensor
    passes: tuple[tuple[Sequences, Pass], ...]
    advance: Tensor
    advance_frames: Tensor
    pools: Tensor
    work: Tensor
    split: bool
    wide: bool
    longest: int
    held: Held | None = None

    @property
    def own_position(self) -> Tensor:
        """[N]: where a row goes among the attention rows held here, -1 if it does not."""
        return self.row_position if self.held is None else self.held.position


@dataclass(frozen=True, slots=True)
class Rebuild:
    """Old rows whose caches are to be made again, from open pages: ``row_sequence`` and
    ``row_position`` [R]; for each of the sequences [S] all rows from its anchor on. ``found`` says
    where rows lie (none is new), ``sequences`` and ``again`` give them to the recurrence as new."""

    row_sequence: Tensor
    row_position: Tensor
    found: Sequences
    sequences: Sequences
    again: Pass


class DeviceState(Protocol):
    """The arena and the slots, as layers on a GPU see them."""

    def rows(self, layer: int, name: str) -> Tensor:
        """[frames, rows of a page, *shape]: a strided view into the arena of a paged field."""
        ...

    def cells(self, layer: int, name: str) -> Cells:
        """Where the cells of an anchor's field lie."""
        ...

    def slot_field(self, layer: int, name: str) -> Tensor:
        """[slots, *shape]: a cache of every slot."""
        ...

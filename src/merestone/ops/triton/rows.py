"""Where the rows of a step's sequences lie, as tables on the device.

Knows positions, pages and batch rows. Must not know what a row holds. The rows of a sequence that
a layer may read come from three places:

    anchor's tail | open pages        | the step's own rows
    .... anchor)  | [anchor, first)   | [first, ...
"""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Sequences:
    """Tables of int32, [S] unless said otherwise; padding is a sequence with pages of its own.

    ``first``: position of a sequence's first row in the step's tensors, ``row``: which row that
    is, ``anchor``: position of its anchor (at most ``first``). ``open_pages`` [S, n]: frames of
    the open group. ``anchor_frames`` [S, n]: frames of its anchor, -1 where it is the zero state.
    """

    first: Tensor
    row: Tensor
    anchor: Tensor
    open_pages: Tensor
    anchor_frames: Tensor

    def __post_init__(self) -> None:
        count = self.first.shape[0]
        for table in (self.first, self.row, self.anchor, self.open_pages, self.anchor_frames):
            assert table.dtype == torch.int32, table.dtype
            assert table.shape[0] == count, table.shape
            assert table.is_contiguous()


@dataclass(frozen=True, slots=True)
class Cells:
    """Where the cells of one anchor field lie: ``memory``, the arena as elements [frames, n], and
    ``places`` [cells, 2] int64: number of the anchor's frame, element offset in it."""

    memory: Tensor
    places: Tensor

    def __post_init__(self) -> None:
        assert self.memory.is_contiguous()
        assert self.places.dtype == torch.int64
        assert self.places.is_contiguous()

"""A group of ranks and what passes between them: data is moved, and summed here, in rank order.

Knows torch.distributed. Must not know layers. A library's all-reduce adds in an order of its own,
which changes with the size of the message; gathering and exchanging do no arithmetic, so every bit
of a sum is decided here: fp32, from rank 0 upwards, whatever the size.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, distributed
from torch.nn.functional import pad

# torch 2.13 renamed the first of its two plain moves.
_GATHER: Callable[..., Any] = getattr(
    distributed, "all_gather_single", distributed.all_gather_into_tensor
)
_EXCHANGE: Callable[..., Any] = distributed.all_to_all_single

SMALL = 1 << 21
"""Bytes that a rank may receive to sum whole messages; above, each rank sums a part, and the sums
are gathered. Time alone depends on it: an element is added in the same order either way."""


class CollectiveError(RuntimeError):
    """A rank did not take part in time, or is gone."""


class Group:
    """Ranks that exchange tensors; ``rank`` is this one's place among ``size``.

    Every method must be called by all of them, in the same order, with tensors of one shape. A
    group of one copies nothing. ``handle`` None: only the numbers of a group, to plan with.
    ``device``: where tensors are. ``staged``: messages pass through host memory.

    Raises (all methods):
        CollectiveError: a rank was lost, or did not come within the time-out of ``handle``.
    """

    def __init__(
        self,
        name: str = "alone",
        rank: int = 0,
        size: int = 1,
        handle: distributed.ProcessGroup | None = None,
        *,
        device: str = "cpu",
        staged: bool = False,
    ) -> None:
        self.name = name
        self.rank = rank
        self.size = size
        self.moves = 0
        """Collectives begun so far: equal on all ranks of the group between two passes."""
        self._handle = handle
        self._device = device
        self.staged = staged

    def part(self, name: str, rank: int, size: int, handle: distributed.ProcessGroup) -> Group:
        """A group of some of these ranks."""
        return Group(name, rank, size, handle, device=self._device, staged=self.staged)

    def gather(self, x: Tensor) -> Tensor:
        """[*shape] of each rank -> [size, *shape], in rank order, the same on all."""
        if self.size == 1:
            return x[None]
        return self._move(x, (self.size, *x.shape), _GATHER)

    def exchange(self, parts: Tensor) -> Tensor:
        """[size, *shape], part j for rank j -> [size, *shape], part i from rank i."""
        assert parts.shape[0] == self.size, parts.shape
        if self.size == 1:
            return parts
        return self._move(parts, tuple(parts.shape), _EXCHANGE)

    def sum(self, x: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
        """The sum of fp32 [*shape] over the ranks, in rank order, rounded once to ``dtype``: the
        same bits on all."""
        assert x.dtype == torch.float32, x.dtype
        if self.size == 1:
            return x.to(dtype)
        if x.numel() * x.itemsize * (self.size - 1) <= SMALL:
            return in_rank_order(self.gather(x)).to(dtype)
        flat = pad(x.flatten(), (0, -x.numel() % self.size))
        mine = in_rank_order(self.exchange(flat.view(self.size, -1))).to(dtype)
        return self.gather(mine).flatten()[: x.numel()].view(x.shape)

    def barrier(self) -> None:
        """Returns when every rank has come here."""
        self.gather(torch.zeros(1, device=self._device))

    def _move(self, x: Tensor, shape: tuple[int, ...], call: Callable[..., Any]) -> Tensor:
        assert self._handle is not None, f"{self.name}: a group to plan with exchanges nothing"
        self.moves += 1
        home = x.device
        x = (x.cpu() if self.staged else x).contiguous()
        out = x.new_empty(shape)
        try:
            # Flat: a backend may have its own idea of the shapes.
            call(out.view(-1), x.view(-1), group=self._handle)
        except RuntimeError as error:
            raise CollectiveError(
                f"{self.name} group, rank {self.rank} of {self.size}: "
                f"a rank is lost, or later than the time-out ({call.__name__})"
            ) from error
        return out.to(home)


def in_rank_order(parts: Tensor) -> Tensor:
    """The definition of every sum over ranks: [size, *shape] -> [*shape], from the first on."""
    if parts.shape[0] == 1:
        return parts[0]
    total = parts[0] + parts[1]
    for part in parts[2:]:
        total += part
    return total

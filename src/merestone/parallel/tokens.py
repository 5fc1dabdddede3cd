"""Decode context parallelism: which rank holds which of a sequence's rows, and how the ranks'
attention over their own rows becomes that over all of them.

Knows a group's geometry. Must not know layers. Rows are dealt in runs: run 0 to rank 0, run 1 to
rank 1, and so on, round and round. So the rows of one rank, in order, lie in the group's pages as
those of a whole, shorter sequence would: every operator that reads pages works on them unchanged.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from merestone.core.geometry import GroupSpec
from merestone.parallel.group import Group, in_rank_order


@dataclass(frozen=True, slots=True)
class Shards:
    """The rows of a paged group that rank ``rank`` of its ``spec.shard`` holds.

    Rows are counted from the sequence's first token; *own* rows are those held here, counted from
    the first of them. All tensors int64, of any shape.
    """

    spec: GroupSpec
    rank: int = 0

    @property
    def whole(self) -> bool:
        """Does this rank hold every row?"""
        return self.spec.shard == 1

    def mine(self, rows: Tensor) -> Tensor:
        """Which of ``rows`` are held here."""
        return rows // self.spec.interleave % self.spec.shard == self.rank

    def own(self, rows: Tensor) -> Tensor:
        """The own rows that ``rows``, all of them held here, are."""
        run = self.spec.interleave
        return rows // (run * self.spec.shard) * run + rows % run

    def rows(self, own: Tensor) -> Tensor:
        """The rows that own rows are: the inverse of :meth:`own`."""
        run = self.spec.interleave
        return (own // run * self.spec.shard + self.rank) * run + own % run

    def held(self, count: Tensor) -> Tensor:
        """How many of the first ``count`` rows are held here."""
        run = self.spec.interleave
        rest = count % (run * self.spec.shard) - self.rank * run
        return count // (run * self.spec.shard) * run + rest.clamp(0, run)

    def select(self, rows: Tensor, counts: Tensor, multiple: int) -> tuple[Tensor, Tensor]:
        """Of the first ``counts`` [R, 1] of ``rows`` [R, W] those held here, as own rows.

        Returns them in the order of their places, [R, V] and 0 after them, V the next ``multiple``
        of the most that a row has; and how many each has, [R, 1]. ``rows`` ascend.
        """
        width = rows.shape[1]
        mine = (torch.arange(width) < counts) & self.mine(rows)
        held = mine.sum(1, keepdim=True)
        most = -(-max(int(held.max()), 1) // multiple) * multiple
        own = self.own(rows).masked_fill(~mine, torch.iinfo(torch.int64).max)
        own = own.sort(1).values[:, :most]
        return own.masked_fill(torch.arange(own.shape[1]) >= held, 0), held


def join(x: Tensor, group: Group) -> Tensor:
    """Every rank's columns side by side, in rank order: [N, C, ...] -> [N, size C, ...], dense."""
    # Of one column reshape would be a view of what lies by ranks.
    return group.gather(x).transpose(0, 1).reshape(x.shape[0], -1, *x.shape[2:]).contiguous()


def merge(parts: Tensor, group: Group) -> Tensor:
    """Attention over all rows from each rank's over its own.

    parts [N, size H, D + 1] fp32: for all ranks' heads the mean over this rank's rows and, in the
    last column, its log-sum-exp (zeros and -inf where it has none) -> [N, H, D] of this rank's
    heads over all rows.
    """
    rows, heads, width = parts.shape
    by_rank = parts.view(rows, group.size, heads // group.size, width).transpose(0, 1)
    parts = group.exchange(by_rank.contiguous())
    return merge_parts(parts[..., :-1], parts[..., -1].contiguous())


def merge_parts(mixed: Tensor, lse: Tensor) -> Tensor:
    """The definition: parts' means [size, ..., D], weighted by exp(lse) [size, ...], in rank order.

    A row without any part (``lse`` -inf everywhere: padding) is zero; a NaN reaches its own row
    alone.
    """
    highest = lse.amax(0)
    weights = (lse - highest.masked_fill(highest == float("-inf"), 0.0)).exp_()
    total = in_rank_order(weights)
    total = total.masked_fill(total == 0.0, 1.0)
    return in_rank_order(mixed * weights[..., None]).div_(total[..., None])

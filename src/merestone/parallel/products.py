"""Products whose inner dimension the ranks share."""

from __future__ import annotations

from torch import Tensor

from merestone.ops.gemm import linear
from merestone.parallel.world import World


def summed_linear(x: Tensor, weight: Tensor, world: World) -> Tensor:
    """x [N, K] times the transpose of weight [M, K] -> [N, M], the same on every rank.

    Each rank has its part of K. Partial products are fp32, summed in rank order, and rounded once
    to ``x``'s dtype. One rank alone rounds as :func:`merestone.ops.gemm.linear` does.
    """
    if world.tp == 1:
        return linear(x, weight)
    return world.ranks.sum(linear(x.float(), weight.float()), x.dtype)

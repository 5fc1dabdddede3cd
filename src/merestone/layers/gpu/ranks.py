"""What ranks share, on GPUs: products over a divided inner dimension, and the vocabulary.

Knows worlds and their sums in rank order. One rank alone pays nothing.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from merestone.layers.vocabulary import Vocabulary
from merestone.ops.triton.gemm import linear
from merestone.parallel.world import World


def summed_linear(x: Tensor, weight: Tensor, world: World) -> Tensor:
    """x [N, K] times the transpose of weight [M, K] -> [N, M], the same on every rank.

    Each rank has its part of K. Partial products are fp32, summed in rank order, and rounded once.
    """
    if world.tp == 1:
        return linear(x, weight)
    return world.ranks.sum(linear(x, weight, out_dtype=torch.float32), x.dtype)


class GpuVocabulary:
    """Both ends of a model; the weights of ``vocabulary`` on ``device``."""

    def __init__(self, vocabulary: Vocabulary, device: str) -> None:
        self._world = vocabulary.world
        self._size = vocabulary.size
        self._embedding = vocabulary.embedding.to(device)
        tied = vocabulary.head is vocabulary.embedding
        self._head = self._embedding if tied else vocabulary.head.to(device)

    def embed(self, ids: Tensor) -> Tensor:
        """[N] ids -> [N, hidden], the same on every rank."""
        world = self._world
        if world.tp == 1:
            return self._embedding.index_select(0, ids)
        part = world.part(self._size)
        outside = (ids < part.start) | (ids >= part.stop)
        rows = self._embedding.index_select(0, (ids - part.start).masked_fill(outside, 0))
        # One rank has the row, the others add zeros: the sum is exact.
        rows = rows.float().masked_fill(outside[:, None], 0.0)
        return world.ranks.sum(rows, self._embedding.dtype)

    def logits(self, hidden: Tensor) -> Tensor:
        """[M, hidden] -> [M, size] fp32, the same on every rank."""
        own = linear(hidden, self._head, out_dtype=torch.float32)
        world = self._world
        if world.tp == 1:
            return own
        widest = world.widest(self._size)
        parts = world.ranks.gather(pad(own, (0, widest - own.shape[1])))  # [tp, M, widest]
        return parts.transpose(0, 1).reshape(hidden.shape[0], -1)[:, : self._size].contiguous()

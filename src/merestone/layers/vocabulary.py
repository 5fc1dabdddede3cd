"""The two ends of a model: ids to rows, and rows to logits. Ranks share the vocabulary.

Knows the embedding and the head. Must not know their names, nor tokenizers.
"""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import pad

from merestone.layers.weights import Weights
from merestone.ops.gemm import linear
from merestone.parallel.tokens import join
from merestone.parallel.world import World


class Vocabulary:
    """``size`` ids of ``hidden`` numbers; ``head`` None: the embedding serves as the head too."""

    def __init__(
        self, size: int, hidden: int, embedding: str, head: str | None, weights: Weights
    ) -> None:
        self.size = size
        self.world: World = weights.world
        self.embedding = weights.take(embedding, (size, hidden), split=0)
        self.head = self.embedding if head is None else weights.take(head, (size, hidden), split=0)

    def embed(self, ids: Tensor) -> Tensor:
        """[N] ids -> [N, hidden], the same on every rank."""
        world = self.world
        if world.tp == 1:
            return self.embedding[ids]
        part = world.part(self.size)
        outside = (ids < part.start) | (ids >= part.stop)
        rows = self.embedding[(ids - part.start).masked_fill(outside, 0)]
        # One rank has the row, the others add zeros: the sum is exact.
        rows = rows.float().masked_fill(outside[:, None], 0.0)
        return world.ranks.sum(rows, self.embedding.dtype)

    def logits(self, hidden: Tensor) -> Tensor:
        """[M, hidden] -> [M, size] fp32, the same on every rank."""
        own = linear(hidden, self.head).float()
        world = self.world
        if world.tp == 1:
            return own
        widest = world.widest(self.size)
        own = pad(own, (0, widest - own.shape[1]))
        return join(own, world.ranks)[:, : self.size].contiguous()

"""What ranks share, on GPUs: products over a divided inner dimension, the vocabulary, and the rows
that attention reads.

Knows worlds, tables and products. Must not know layers. One rank alone pays nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from merestone.layers.vocabulary import Vocabulary
from merestone.ops.triton.gemm import linear
from merestone.ops.triton.index import choose
from merestone.ops.triton.tokens import select_own
from merestone.parallel.group import Group
from merestone.parallel.tokens import Shards, join, merge
from merestone.parallel.world import World


@dataclass(frozen=True, slots=True)
class Held:
    """The part of a step that concerns the attention rows held here, int32 tables.

    ``position`` [N]: which own row each row of the batch is, -1 if another rank holds it. ``seen``
    [N]: own rows that it sees, at most ``longest``. ``pools`` [n]: which own pool each pool that
    the step completes is, -1 if another's.
    """

    shards: Shards
    position: Tensor
    seen: Tensor
    pools: Tensor
    longest: int

    def select(self, tokens: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
        """A selection ([R, width] and [R]) cut down to the tokens held here, as own rows."""
        spec = self.shards.spec
        return select_own(
            tokens, counts, run=spec.interleave, ranks=spec.shard, rank=self.shards.rank
        )


def hold(
    shards: Shards, position: Tensor, seen: Tensor, pools: Tensor, pool: int, longest: int
) -> Held | None:
    """Of rows at ``position`` [N] that see ``seen`` [N] <= ``longest``, and of ``pools`` [n] by
    number (-1: none) of ``pool`` tokens; None where this rank holds every row."""
    if shards.whole:
        return None
    first = pools * pool
    own = shards.own(first) // pool if pool else pools
    spec = shards.spec
    rounds = -(-longest // (spec.interleave * spec.shard))
    return Held(
        shards,
        shards.own(position).masked_fill(~shards.mine(position), -1),
        shards.held(seen),
        own.masked_fill((pools < 0) | ~shards.mine(first), -1),
        rounds * spec.interleave,
    )


def choose_of_all(
    scores: Tensor, complete: Tensor, k: int, pool: int, shards: Shards, group: Group
) -> Tensor:
    """The ``k`` best of all ranks' pools, [R, k] int32 ascending, from this rank's own scores [R,
    P], of which the first ``complete`` [R] count. As :func:`merestone.ops.index.candidates`."""
    best = choose(scores, complete, k)
    beyond = torch.arange(k, device=best.device) >= complete[:, None]
    best = best.masked_fill(beyond, 0)
    damaged = best[:, :1] < 0
    index = best.clamp(min=0)
    values = scores.gather(1, index.long()).masked_fill(beyond, float("-inf"))
    values = values.masked_fill(damaged, float("nan"))
    names = shards.rows(index * pool) // pool
    names = names.masked_fill(beyond, torch.iinfo(torch.int32).max)
    values, names = join(values, group), join(names, group)
    # Numbers are distinct, but for those of nobody: any way of sorting gives this.
    names, order = names.sort(1)
    every = torch.full_like(complete, names.shape[1])
    place = choose(values.gather(1, order).contiguous(), every, k)
    found = names.gather(1, place.clamp(min=0).long())
    return found.masked_fill(place < 0, -1)


def merge_ranks(mixed: Tensor, lse: Tensor, group: Group, dtype: torch.dtype) -> Tensor:
    """Parts of attention, mixed [N, size H, L] and lse [N, size H] fp32, of all ranks' heads over
    this rank's rows -> [N, H, L] in ``dtype``, of this rank's heads over all."""
    return merge(torch.cat([mixed, lse[:, :, None]], 2), group).to(dtype)


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
        own = pad(own, (0, widest - own.shape[1]))
        return join(own, world.ranks)[:, : self._size].contiguous()

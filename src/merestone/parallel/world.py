"""The ranks of one engine: how many, which one this is, and its share of everything.

Knows how ranks find each other. Must not know what they compute. Tensor parallelism shares heads,
columns and the vocabulary over all ``tp`` ranks. Decode context parallelism shares cached tokens
over ``dcp`` neighbouring ranks of those: ranks 0 .. dcp - 1, then the next ones, and so on.
"""

from __future__ import annotations

import gc
from dataclasses import dataclass, field
from datetime import timedelta

import torch
from torch import distributed

from merestone.parallel.group import CollectiveError, Group

TIMEOUT_S = 60.0
"""Seconds that a rank waits for the others in one collective."""


@dataclass(frozen=True, slots=True)
class World:
    """Rank ``rank`` of ``tp``, of which each ``dcp`` neighbours share the cached tokens.

    ``ranks``: all of them. ``neighbours``: those that share tokens with this one. As constructed
    without groups it is a world of one rank, which exchanges nothing; :func:`connect` makes others.
    """

    rank: int = 0
    tp: int = 1
    dcp: int = 1
    device: str = "cpu"
    ranks: Group = field(default_factory=Group)
    neighbours: Group = field(default_factory=Group)

    def __post_init__(self) -> None:
        assert (self.ranks.size, self.neighbours.size) == (self.tp, self.dcp), self

    def part(self, count: int) -> slice:
        """This rank's part of ``count`` things in a row, as :func:`part_of` cuts it."""
        return part_of(count, self.rank, self.tp)

    def widest(self, count: int) -> int:
        """The size of the first rank's part, which no other exceeds."""
        return -(-count // self.tp)

    def heads(self, count: int, what: str) -> int:
        """Heads that every rank has of ``count``.

        Raises:
            ValueError: they cannot be shared evenly; ``what`` names them.
        """
        if count % self.tp:
            raise ValueError(f"--tp {self.tp} does not divide the {count} heads of {what}")
        return count // self.tp

    @property
    def collectives(self) -> int:
        """How many this rank has begun: equal on all ranks between two passes."""
        return self.ranks.moves + self.neighbours.moves

    def least(self, count: int) -> int:
        """The least ``count`` of all ranks."""
        if self.tp == 1:
            return count
        return int(self.ranks.gather(torch.tensor([count], device=self.device)).min())

    def close(self) -> None:
        """Leave the groups; neither the world nor a CUDA graph that exchanges something may be used
        afterwards, and the latter must not be referred to any more: NCCL waits for their end."""
        if self.tp > 1:
            gc.collect()
            distributed.destroy_process_group()


SINGLE = World()


def part_of(count: int, rank: int, tp: int) -> slice:
    """Part ``rank`` of ``tp`` of ``count`` things in a row: equal parts, the last ones shorter."""
    size = -(-count // tp)
    return slice(min(rank * size, count), min((rank + 1) * size, count))


def check_layout(tp: int, dcp: int) -> None:
    """Raises ValueError, naming the option, unless ``tp`` ranks can be ``dcp`` by ``dcp``."""
    if tp < 1:
        raise ValueError(f"--tp {tp}: at least one rank is needed")
    if dcp < 1 or tp % dcp:
        raise ValueError(f"--dcp {dcp} does not divide --tp {tp}")


def connect(
    rank: int,
    tp: int,
    dcp: int = 1,
    *,
    rendezvous: str,
    device: str = "cpu",
    backend: str | None = None,
    timeout_s: float = TIMEOUT_S,
) -> World:
    """Meet the other ranks; returns when all are there. One world a process at a time.

    Args:
        rendezvous: the same for all ranks: "tcp://host:port" (rank 0 listens there) or
            "file:///path" of a file that does not exist yet, on one machine.
        device: of this rank's tensors ("cpu", "cuda:1").
        backend: "nccl" or "gloo"; None takes the device's own. gloo carries tensors of a GPU
            through host memory: slow, but several ranks may then share one GPU.
        timeout_s: the longest that any collective waits for a rank.

    Raises:
        ValueError: ``dcp`` does not divide ``tp``.
        CollectiveError: a rank did not come.
    """
    check_layout(tp, dcp)
    home = torch.device(device)
    if tp == 1:
        return World(device=device)
    if home.type == "cuda":
        torch.cuda.set_device(home)
    backend = backend or ("nccl" if home.type == "cuda" else "gloo")
    staged = backend == "gloo" and home.type != "cpu"
    limit = timedelta(seconds=timeout_s)
    try:
        distributed.init_process_group(
            backend, init_method=rendezvous, rank=rank, world_size=tp, timeout=limit
        )
        handle = distributed.group.WORLD
        ranks = Group("tensor parallel", rank, tp, handle, device=device, staged=staged)
        neighbours = _neighbours(ranks, dcp, limit)
        ranks.barrier()
    except (RuntimeError, ValueError) as error:
        raise CollectiveError(
            f"rank {rank} of {tp}: not all ranks came to {rendezvous} within {timeout_s:g} s"
        ) from error
    return World(rank, tp, dcp, device, ranks, neighbours)


def _neighbours(ranks: Group, dcp: int, limit: timedelta) -> Group:
    """The group of this rank among the groups of ``dcp`` neighbours."""
    own = Group()
    if dcp == 1:
        return own
    for first in range(0, ranks.size, dcp):
        # Every rank takes part in making every group.
        handle = distributed.new_group(list(range(first, first + dcp)), timeout=limit)
        if first <= ranks.rank < first + dcp:
            place = ranks.rank - first
            own = ranks.part("context parallel", place, dcp, handle)
    return own

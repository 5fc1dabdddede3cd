"""What ranks do in the tests of collectives."""

from __future__ import annotations

import time
from pathlib import Path

import torch
from torch import Tensor

from merestone.parallel.group import SMALL, CollectiveError, in_rank_order
from merestone.parallel.tokens import join
from merestone.parallel.world import World

# Around the size at which two, three and four ranks go another way.
TURNS = [SMALL // 4 // others for others in (3, 2, 1)]
COUNTS = (1, 3, 1000, *(turn + more for turn in TURNS for more in (0, 1)), SMALL // 4 + 1002)


def of_rank(rank: int, count: int) -> Tensor:
    """Numbers of very different size, so that another order of a sum gives other bits."""
    source = torch.Generator().manual_seed(rank)
    return torch.randn(count, generator=source) * 10.0 ** torch.randint(
        -4, 5, (count,), generator=source
    )


def sums(world: World) -> None:
    """One definition at every size, and an element's bits do not depend on its message."""
    largest = max(COUNTS)
    every = torch.stack([of_rank(rank, largest) for rank in range(world.tp)])
    wanted = in_rank_order(every)
    if world.tp > 2:
        assert not torch.equal(wanted, in_rank_order(every.flip(0)))
    for count in COUNTS:
        mine = every[world.rank, :count].clone()
        assert torch.equal(world.ranks.sum(mine), wanted[:count]), count
        rounded = world.ranks.sum(mine, torch.bfloat16)
        assert torch.equal(rounded, wanted[:count].bfloat16()), count
        assert torch.equal(mine, every[world.rank, :count])
    square = every[world.rank, :1000].view(10, 4, 25).transpose(0, 1)
    assert torch.equal(world.ranks.sum(square), wanted[:1000].view(10, 4, 25).transpose(0, 1))


def moves(world: World) -> None:
    for group, first in (
        (world.ranks, 0),
        (world.neighbours, world.rank // world.dcp * world.dcp),
    ):
        names = torch.arange(first, first + group.size)
        own = torch.full((2, 3), world.rank, dtype=torch.bfloat16)
        gathered = group.gather(own)
        assert gathered.dtype == torch.bfloat16
        assert torch.equal(gathered[:, 1, 2].long(), names)
        # Part j of rank i is 100 i + j.
        parts = (100 * world.rank + names).view(-1, 1).expand(-1, 5)
        got = group.exchange(parts)
        assert torch.equal(got[:, 3], 100 * names + world.rank)
        # Kernels read rows behind each other, of one column a rank, too.
        for count in (1, 2):
            joined = join(own[:, :count, None].expand(2, count, 5), group)
            assert joined.is_contiguous()
            assert torch.equal(joined[1, :, 4].long(), names.repeat_interleave(count))


def late(world: World, place: str) -> tuple[float, str]:
    """Rank 1 comes when the others have given it up; their wait, and what they were told."""
    words = {rank: Path(place) / str(rank) for rank in range(world.tp) if rank != 1}
    if world.rank == 1:
        while not all(word.exists() for word in words.values()):
            time.sleep(0.02)
        return 0.0, ""
    begin, told = time.monotonic(), "nothing"
    try:
        world.ranks.sum(torch.ones(2))
    except CollectiveError as error:
        told = str(error)
    waited = time.monotonic() - begin
    words[world.rank].touch()
    return waited, told


def least(world: World) -> int:
    return world.least(7 - world.rank)


def heads(world: World, count: int) -> int | str:
    try:
        return world.heads(count, "KDA")
    except ValueError as error:
        return str(error)

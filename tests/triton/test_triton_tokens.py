"""The cut of a selection to a rank's own tokens is that of the definition."""

from __future__ import annotations

import pytest
import torch

from merestone.core.geometry import GroupSpec
from merestone.ops.triton.tokens import select_own
from merestone.parallel.tokens import Shards


@pytest.mark.parametrize("width", [64, 2112])
@pytest.mark.parametrize(("run", "ranks"), [(4, 2), (1, 4), (8, 3)])
def test_every_rank_keeps_its_own_in_order(
    device: torch.device, width: int, run: int, ranks: int
) -> None:
    source = torch.Generator().manual_seed(width)
    counts = torch.tensor([0, 1, 7, width, width // 2], dtype=torch.int32)
    rows = [torch.randperm(4 * width, generator=source)[:width].sort().values for _ in counts]
    tokens = torch.stack(rows).to(torch.int32)
    tokens[4] = -4  # could not choose
    for rank in range(ranks):
        own, held = select_own(
            tokens.to(device), counts.to(device), run=run, ranks=ranks, rank=rank
        )
        shards = Shards(GroupSpec("full", 64, ranks, run), rank)
        wanted, kept = shards.select(tokens[:4].long(), counts[:4, None].long(), 1)
        assert held[:4].tolist() == kept.flatten().tolist()
        for i, count in enumerate(held[:4].tolist()):
            assert own[i, :count].tolist() == wanted[i, :count].tolist()
        assert int(held[4]) == 1
        assert int(own[4, 0]) < 0

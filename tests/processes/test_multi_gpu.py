"""Collectives over NCCL: the bits of a sum are those of its definition, whatever the size."""

from __future__ import annotations

import pytest
import torch
from bench.collectives import exact, over_ranks

pytestmark = pytest.mark.multi_gpu


def findings(world) -> list[str]:
    return [exact(world, rows, width) for rows in (1, 3, 64, 1024) for width in (48, 4096)]


def test_sums_in_rank_order_over_nccl() -> None:
    for answer in over_ranks(findings, 2, "cuda"):
        assert not any(answer), answer


def test_more_ranks_than_gpus_pass_through_host_memory() -> None:
    for answer in over_ranks(findings, 2 * torch.cuda.device_count(), "cuda"):
        assert not any(answer), answer

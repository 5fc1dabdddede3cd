"""Copies on the memory of a GPU, byte for byte those of the CPU's arena: the same grids."""

from __future__ import annotations

import pytest
import torch

from gpu.machine import CUDA, DEVICE
from merestone.core.geometry import GroupSpec
from merestone.core.orders import CopyRows, LoadHidden, Order, SaveHidden
from merestone.device.arena import Arena
from merestone.device.gpu_state import RING, GpuState
from merestone.device.layout import Layout
from merestone.layers.state import Field

ENDS = (1, 8, 9, 16, 17, 32, 33)
# Under the interpreter a part of the grid.
SHARDS, PAGES = ((1, 2, 4), (2, 8)) if CUDA else ((1, 2), (8,))
FIELD = Field(0, "latent", "full", (3,), torch.float32)
FRAMES, SLOTS = 5, 2


def layout(page: int, shard: int) -> Layout:
    return Layout(
        frame_bytes=-(-page * 12 // 64) * 64, groups=(GroupSpec("full", page=page, shard=shard),),
        anchor_frames=0, hidden_rows=1, hidden_bytes=16, offsets={(0, "latent"): 0}, cells={},
        row_bytes={"full": 12}, anchor_bytes=0,
    )  # fmt: skip


def state(page: int, shard: int, rank: int) -> GpuState:
    made = GpuState(
        layout(page, shard), (FIELD,), (), frames=FRAMES, slots=SLOTS, longest=64, hidden=4,
        hidden_dtype=torch.float32, device=DEVICE, rank=rank,
    )  # fmt: skip
    drawn = torch.Generator().manual_seed(1)
    for memory in (made.arena.memory, made.ring.view(torch.uint8)):
        memory.copy_(torch.randint(0, 255, memory.shape, dtype=torch.uint8, generator=drawn))
    return made


def ordered(on: GpuState, *orders: Order) -> None:
    on.copier.run(on.copier.encode(orders, len(orders) + 2).to(DEVICE))


@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("page", PAGES)
@pytest.mark.parametrize("shard", SHARDS)
def test_part_filled_pages(shard: int, page: int, end: int) -> None:
    """Each rank's own rows and nothing else."""
    for rank in range(shard):
        gpu = state(page, shard, rank)
        cpu = Arena(gpu.layout, (FIELD,), FRAMES + 1, hidden_dtype=torch.float32, rank=rank)
        cpu.memory.copy_(gpu.arena.memory)
        before = cpu.memory.clone()
        order = CopyRows("full", source=1, target=3, rows=(end - 1) % (page * shard) + 1)
        cpu.copy_rows(order)
        ordered(gpu, order)
        found = gpu.arena.memory.cpu()
        assert torch.equal(found[:FRAMES], cpu.memory[:FRAMES])
        assert torch.equal(found[[0, 1, 2, 4]], before[[0, 1, 2, 4]])


@pytest.mark.parametrize("at", [1, RING // 2, RING + RING // 4])
@pytest.mark.parametrize("frame", [0, 1, 4])
@pytest.mark.parametrize("slot", [0, 1])
def test_hidden_rows_of_slots(slot: int, frame: int, at: int) -> None:
    """Slots 0 and 1, which a compiler likes to make constants, saved and loaded: 18 cases."""
    gpu = state(8, 1, 0)
    memory, ring = gpu.arena.memory.cpu(), gpu.ring.cpu()
    ordered(gpu, SaveHidden(slot=slot, at=at, frame=frame, row=0))
    memory[frame, :16] = ring[slot, (at - 1) % RING].view(torch.uint8)
    assert torch.equal(gpu.arena.memory.cpu()[:FRAMES], memory[:FRAMES])
    gpu.ring[slot, (at - 1) % RING] = 0.0
    ordered(gpu, LoadHidden(slot=slot, at=at, frame=frame, row=0))
    assert torch.equal(gpu.ring.cpu()[:SLOTS].view(torch.uint8), ring[:SLOTS].view(torch.uint8))

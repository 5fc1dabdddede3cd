"""Copy orders move exactly their bytes: the whole arena and all slots are compared, every time."""

import pytest
import torch
from torch import Tensor

from merestone.core.geometry import GroupSpec
from merestone.core.orders import CopyRows, LoadHidden, Order, SaveHidden
from merestone.ops.triton.copy import Copier, Region, copy_naive

FRAME, HIDDEN = 1024, 48
PADDING = (7, 3)


def world(device: str, dcp: int = 1, page: int = 8):
    source = torch.Generator().manual_seed(page * dcp)
    arena = torch.randint(256, (8, FRAME), dtype=torch.uint8, generator=source).to(device)
    slots = torch.randint(256, (4, 5, HIDDEN), dtype=torch.uint8, generator=source).to(device)
    # Rows of one, of several and of no whole number of vectors, and one row for two tokens.
    regions = [Region(0, 32), Region(256, 2), Region(320, 50), Region(768, 16, every=2)]
    groups = {
        "full": (GroupSpec("full", page=page, shard=dcp), regions),
        "open": (GroupSpec("open", page=page, open=True), [Region(64, 80)]),
    }
    return arena, slots, groups


def check(device: str, orders: tuple[Order, ...], *, capacity: int, dcp: int = 1, page: int = 8):
    """Every rank's copy against the definition, over all memory."""
    for rank in range(dcp):
        arena, slots, groups = world(device, dcp, page)
        expected, live = arena.clone(), slots.clone()
        copy_naive(expected, live, groups, orders, rank)
        copier = Copier(arena, slots, groups, padding=PADDING, rank=rank)
        copier.run(copier.encode(orders, capacity).to(device))
        assert torch.equal(arena, expected)
        assert torch.equal(slots, live)


@pytest.mark.parametrize("endpoint", [1, 8, 9, 16, 17, 32, 33])
@pytest.mark.parametrize("page", [2, 8])
@pytest.mark.parametrize("dcp", [1, 2, 4])
def test_part_filled_page(device: str, dcp: int, page: int, endpoint: int) -> None:
    """A boundary at ``endpoint`` copies the part of its last page that this rank holds."""
    rows = (endpoint - 1) % (page * dcp) + 1
    check(device, (CopyRows("full", 1, 4, rows),), capacity=2, dcp=dcp, page=page)


@pytest.mark.parametrize("row", [0, 1, 2])
@pytest.mark.parametrize("frame", [0, 1, 2])
@pytest.mark.parametrize("slot", [0, 1])
def test_hidden_rows(device: str, slot: int, frame: int, row: int) -> None:
    """Small integers as indices: Triton must not make constants of them."""
    other = (frame + 1) % 3
    orders = (
        SaveHidden(slot=slot, at=1, frame=frame, row=row),
        LoadHidden(slot=1 - slot, at=7, frame=other, row=row),
    )
    check(device, orders, capacity=3)


def test_many_orders_of_all_kinds(device: str) -> None:
    orders = (
        CopyRows("full", 0, 1, 7),
        CopyRows("open", 2, 3, 8),
        SaveHidden(slot=0, at=12, frame=4, row=1),
        LoadHidden(slot=1, at=3, frame=5, row=0),
    )
    check(device, orders, capacity=4)
    check(device, orders, capacity=16)


def test_padding_touches_nothing(device: str) -> None:
    check(device, (), capacity=5)
    check(device, (), capacity=0)


def test_a_launch_refuses_orders_that_meet(device: str) -> None:
    arena, slots, groups = world(device)
    copier = Copier(arena, slots, groups, padding=PADDING)
    with pytest.raises(AssertionError, match="another's source"):
        copier.encode((CopyRows("full", 0, 1, 1), CopyRows("full", 1, 2, 1)), 2)


@pytest.mark.gpu
def test_large_frames_scattered(device: str) -> None:
    """136 MiB in frames of 2 MiB, whose offsets do not fit 31 bits."""
    frames, size = 1600, 2 << 20
    arena = torch.empty(frames, size, dtype=torch.uint8, device=device)
    arena.view(torch.int32).random_()
    slots = torch.zeros(2, 2, 8192, dtype=torch.uint8, device=device)
    groups = {"full": (GroupSpec("full", page=2048), [Region(0, 1024)])}
    copier = Copier(arena, slots, groups, padding=(frames - 1, 1))
    places = torch.randperm(frames - 1)[:136].tolist()
    orders = tuple(
        CopyRows("full", a, b, 2047) for a, b in zip(places[:68], places[68:], strict=True)
    )
    before: Tensor = arena[places[68:], 2047 * 1024 :].clone()
    copier.run(copier.encode(orders, 68).to(device))
    assert torch.equal(arena[places[68:], : 2047 * 1024], arena[places[:68], : 2047 * 1024])
    assert torch.equal(arena[places[68:], 2047 * 1024 :], before)

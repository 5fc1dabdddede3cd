"""The layout of frames and the arena's copies, byte for byte."""

from __future__ import annotations

import pytest
import torch

from engine.real import tiny
from merestone.core.geometry import GroupSpec
from merestone.core.orders import CopyRows
from merestone.device.arena import POISON, Arena
from merestone.device.layout import Layout, plan_layout
from merestone.layers.state import Field

FIELDS = (
    Field(0, "state", "anchor", (4, 16, 16), torch.float32),
    Field(0, "conv", "anchor", (3, 24), torch.bfloat16),
    Field(0, "r", "open", (40,), torch.bfloat16),
    Field(1, "latent", "full", (24,), torch.bfloat16),
    Field(1, "pool", "full", (8,), torch.float32, every=4),
    Field(1, "kk", "open", (8,), torch.float32),
)


def arena(page: int | None = None, frames: int = 40) -> Arena:
    layout = plan_layout(FIELDS, hidden_bytes=128, chunk=64, page_multiple=4, full_page=page)
    return Arena(layout, FIELDS, frames, hidden_dtype=torch.bfloat16, poison=True)


@pytest.mark.parametrize("page", [None, 4, 16, 64, 2048])
def test_fields_do_not_overlap(page: int | None) -> None:
    """Write every field of every page in turn: none changes what another one holds."""
    a = arena(page, frames=6)
    for home in ("full", "open"):
        a.memory.fill_(0)
        views = [view for key, view in a._views.items() if a.fields[key].home == home]
        for number, view in enumerate(views):
            view.fill_(number + 1)
        for number, view in enumerate(views):
            assert (view == number + 1).all()


@pytest.mark.parametrize("page", [None, 16, 64])
def test_anchors_come_back_whole(page: int | None) -> None:
    a = arena(page)
    count = a.layout.anchor_frames
    frames = torch.arange(2 * count).flip(0).view(2, count)
    written = {}
    for field in FIELDS:
        if field.home == "anchor":
            value = torch.randn(2, *field.shape).to(field.dtype)
            a.write_anchor(field.layer, field.name, frames, value)
            written[field.layer, field.name] = value
    for key, value in written.items():
        assert torch.equal(a.read_anchor(*key, frames), value)
    assert a.anchor_finite(frames[0])
    a.memory[frames[1, 0]] = POISON
    assert not a.anchor_finite(frames[1])
    assert a.anchor_finite(frames[0])


def test_a_cell_is_never_cut_by_a_frames_end() -> None:
    layout = plan_layout(FIELDS, hidden_bytes=128, chunk=64, page_multiple=4, full_page=16)
    for (layer, name), runs in layout.cells.items():
        field = next(f for f in FIELDS if (f.layer, f.name) == (layer, name))
        cell = field.bytes // field.shape[0]
        assert [run.first for run in runs] == [0] + [run.last for run in runs[:-1]]
        assert runs[-1].last == field.shape[0]
        for run in runs:
            assert run.offset + (run.last - run.first) * cell <= layout.frame_bytes


@pytest.mark.parametrize("shard", [1, 2, 4])
@pytest.mark.parametrize("page", [2, 8])
@pytest.mark.parametrize("end", [1, 8, 9, 16, 17, 32, 33])
def test_copy_on_write_follows_the_groups_geometry(shard: int, page: int, end: int) -> None:
    """42 cases on real arenas, one a rank: exactly the rank's rows, neighbours untouched."""
    group = GroupSpec("full", page=page, shard=shard)
    field = Field(0, "latent", "full", (3,), torch.float32)
    within = (end - 1) % group.span + 1
    for rank in range(shard):
        layout = Layout(
            frame_bytes=-(-page * 12 // 64) * 64, groups=(group,), anchor_frames=0, hidden_rows=1,
            hidden_bytes=12, offsets={(0, "latent"): 0}, cells={}, row_bytes={"full": 12},
            anchor_bytes=0,
        )  # fmt: skip
        a = Arena(layout, (field,), 5, hidden_dtype=torch.float32, rank=rank)
        a.memory.copy_(torch.randint(0, 255, a.memory.shape, dtype=torch.uint8))
        before = a.memory.clone()
        a.copy_rows(CopyRows("full", source=1, target=3, rows=within))
        mine = [group.local_row(row) for row in range(within) if group.owner(row) == rank]
        expected = before.clone()
        for row in mine:
            expected[3, row * 12 : row * 12 + 12] = before[1, row * 12 : row * 12 + 12]
        assert torch.equal(a.memory, expected)


def test_a_pool_below_the_boundary_is_copied_only_when_complete() -> None:
    a = arena(16)
    a.memory.fill_(1)
    a.rows(1, "pool")[2] = 7.0
    a.rows(1, "pool")[3] = 5.0
    a.copy_rows(CopyRows("full", source=2, target=3, rows=11))
    assert (a.rows(1, "pool")[3, :2] == 7.0).all()
    assert (a.rows(1, "pool")[3, 2:] == 5.0).all()


def test_page_sizes_that_do_not_fit_are_named() -> None:
    for page, words in ((24, "power of two"), (2, "multiple of the index pool")):
        with pytest.raises(ValueError, match=words):
            arena(page)


def test_the_tiny_models_layout_wastes_little() -> None:
    model = tiny()
    layout = plan_layout(
        model.fields(), hidden_bytes=256, chunk=64, page_multiple=model.info.page_multiple
    )
    for group in layout.groups:
        assert group.page * layout.row_bytes[group.name] >= 0.5 * layout.frame_bytes
    assert layout.anchor_frames * layout.frame_bytes < 1.3 * layout.anchor_bytes

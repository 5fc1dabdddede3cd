"""Pages and frames of the published sizes, for each number of ranks that share tokens or heads."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor

from merestone.device.arena import Arena
from merestone.device.layout import Layout, plan_layout
from merestone.layers.state import Field
from merestone.models.config import Glm5NextConfig
from merestone.models.glm5_next import Glm5Next
from merestone.models.interface import CHUNK
from merestone.parallel.group import Group
from merestone.parallel.world import World
from merestone.spec.interface import DraftGroup
from parallel.passes import GLM

# GLM-5.3-Flash, with experts too small to matter: nothing of their state is kept.
FLASH = dataclasses.replace(
    GLM,
    vocab_size=154880,
    hidden_size=4096,
    num_layers=45,
    layer_types=tuple("mla" if i % 4 == 3 else "kda" for i in range(45)),
    mlp_types=("dense",) * 45,
    indexer_types=("full",) * 45,
    intermediate_size=64,
    num_heads=64,
    q_lora_rank=1536,
    kv_lora_rank=512,
    qk_nope_head_dim=256,
    v_head_dim=256,
    index_heads=32,
    index_head_dim=128,
    index_topk=2048,
    kda_heads=64,
    kda_head_dim=128,
    max_length=1048576,
)
LATENTS = 11 * (512 * 2 + 128 * 2 // 4)
"""Bytes a token of the attention cache: latents, and a pooled key for four tokens."""
ANCHOR = 34 * (64 * 128 * 128 * 4 + 3 * 3 * 64 * 128 * 2)


class Shapes:
    """A source of weights that have a shape only."""

    def draw(self, name: str, shape: tuple[int, ...]) -> Tensor:
        return torch.empty(shape, device="meta")


def fields(config: Glm5NextConfig, tp: int, dcp: int) -> tuple[Field, ...]:
    # A rank's numbers without its groups: nothing is exchanged here.
    world = World(0, tp, dcp, "cpu", Group("planned", 0, tp), Group("planned", 0, dcp))
    return Glm5Next(config, Shapes(), torch.bfloat16, world).fields()


def flash(tp: int, dcp: int) -> Layout:
    return plan_layout(
        fields(FLASH, tp, dcp), hidden_bytes=8192, chunk=CHUNK, page_multiple=4, dcp=dcp
    )


@pytest.mark.parametrize(("tp", "dcp"), [(1, 1), (2, 2), (4, 1), (4, 4), (8, 2), (8, 8)])
def test_sizes_of_the_lead_model(tp: int, dcp: int) -> None:
    layout = flash(tp, dcp)
    groups = {group.name: group for group in layout.groups}
    full, raw = groups["full"], groups["open"]
    assert layout.row_bytes["full"] == LATENTS
    assert layout.anchor_bytes * tp == ANCHOR
    # Heads are shared by all ranks, tokens by those of a context group: pages of recurrent layers
    # cover no more tokens for it.
    assert (full.shard, full.span, full.interleave) == (dcp, dcp * full.page, 4 if dcp > 1 else 1)
    assert (raw.shard, raw.span) == (1, raw.page)
    assert full.page * LATENTS > 0.9 * layout.frame_bytes
    assert layout.anchor_frames * layout.frame_bytes < 1.3 * layout.anchor_bytes
    lines = "\n".join(layout.explain())
    assert f"page {full.page} tokens x {LATENTS:,} B" in lines
    dealt = f"on each of {dcp} ranks, dealt in runs of 4: {dcp * full.page:,} tokens"
    assert (dealt in lines) == (dcp > 1)


def test_a_million_tokens_take_a_ranks_share_of_frames() -> None:
    tokens = 1 << 20
    frames = {}
    for dcp in (1, 2, 4, 8):
        layout = flash(8, dcp)
        full = layout.groups[0]
        frames[dcp] = -(-tokens // full.span) * layout.frame_bytes
        assert frames[dcp] < 1.1 * tokens * LATENTS / dcp
    assert frames[1] > 7 * frames[8]


@pytest.mark.parametrize("rank", range(4))
def test_windows_are_whole_on_every_rank(rank: int) -> None:
    drafts = (
        Field(9, "key", "window", (16,), torch.bfloat16),
        Field(8, "latent", "mtp", (16,), torch.bfloat16),
    )
    groups = (DraftGroup("window", window=40), DraftGroup("mtp", multiple=4, dealt=True))
    layout = plan_layout(
        (*fields(GLM, 4, 4), *drafts),
        hidden_bytes=96,
        chunk=CHUNK,
        page_multiple=4,
        draft_groups=groups,
        lag=1,
        dcp=4,
    )
    every = (*fields(GLM, 4, 4), *drafts)
    arena = Arena(layout, every, 4, hidden_dtype=torch.bfloat16, rank=rank)
    rows = torch.arange(200)
    for name in ("window", "open"):
        assert arena.shards(name).mine(rows).all()
        assert torch.equal(arena.shards(name).own(rows), rows)
    for name in ("full", "mtp"):
        assert torch.equal(arena.shards(name).mine(rows), rows // 4 % 4 == rank)

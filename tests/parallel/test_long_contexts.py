"""Long contexts over ranks that share tokens: page tables of every group reach their end."""

from __future__ import annotations

import pytest

from engine.harness import Harness
from merestone.core.cache import CacheSpec
from merestone.core.geometry import GroupSpec

LIMIT = 65536


@pytest.mark.parametrize("dcp", [4, 16])
def test_a_prompt_near_the_limit_is_restored_whole(dcp: int) -> None:
    """Recurrent state is not shared by position: its pages cover no more tokens for it."""
    spec = CacheSpec(
        frames=3 * LIMIT // (64 * dcp) + 200,
        frame_bytes=4096,
        groups=(GroupSpec("full", 64, dcp, 4), GroupSpec("open", 8, open=True)),
        chunk=64,
        anchor_frames=3,
        hidden_rows=8,
    )
    harness = Harness(spec, budget=16384, context=LIMIT)
    for length in (16387, 32771, 49153, 60000):
        prompt = tuple((17 * i + length) % 50 for i in range(length))
        assert harness.ask(prompt, 3).restored == 0
        assert harness.ask(prompt, 3).restored == length

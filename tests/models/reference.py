"""What comparisons with transformers share: one checkpoint in both, prefill and decode logits."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

from models.plain_loop import PlainLoop, Run

os.environ.setdefault("HF_HUB_OFFLINE", "1")
transformers = pytest.importorskip("transformers")
transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()

TOLERANCE = 1e-4
LENGTHS = (1, 15, 16, 17, 63, 64, 65, 129)
LONG = 1000


@dataclass(frozen=True)
class Pair:
    """One checkpoint loaded by both."""

    ours: PlainLoop
    theirs: Any

    def reference(self, ids: list[int]) -> Tensor:
        """[len, V] of one full forward."""
        with torch.inference_mode():
            return self.theirs(input_ids=torch.tensor([ids]), use_cache=False).logits[0]

    def reference_steps(self, ids: list[int], prompt: int) -> Tensor:
        """[len - prompt + 1, V]: the prompt's last row, then one row a decoded token."""
        rows = []
        cache = None
        for part in (ids[:prompt], *([token] for token in ids[prompt:])):
            with torch.inference_mode():
                out = self.theirs(
                    input_ids=torch.tensor([part]), past_key_values=cache, use_cache=True
                )
            cache = out.past_key_values
            rows.append(out.logits[0, -1])
        return torch.stack(rows)

    def steps(self, ids: list[int], prompt: int) -> Tensor:
        run = Run(self.ours.model, len(ids))
        parts = (ids[:prompt], *([token] for token in ids[prompt:]))
        return self.ours.model.logits(torch.cat([run.feed(part)[-1:] for part in parts]))


def tokens(count: int, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (count,), generator=generator).tolist()


def assert_near(ours: Tensor, theirs: Tensor) -> None:
    assert ours.shape == theirs.shape
    # The reference spreads its logits, or nearness would mean nothing.
    assert theirs.std() > 0.5
    worst = (ours - theirs).abs().max().item()
    assert worst < TOLERANCE, f"logits differ by {worst:.2e}"


def check(pair: Pair, long: int = LONG) -> None:
    ids = tokens(long)
    for length in (*LENGTHS, long):
        assert_near(pair.ours.logits(ids[:length]), pair.reference(ids[:length]))
    # Decoding across an anchor, and from every phase of a pool.
    for start, end in ((1, 8), (60, 70), (125, 131)):
        assert_near(pair.steps(ids[:end], start), pair.reference_steps(ids[:end], start))


@dataclass(frozen=True)
class Variant:
    name: str
    options: dict[str, Any] = field(default_factory=dict)

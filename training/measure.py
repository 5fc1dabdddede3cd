"""Which replies a model gets right.

A reply is right if every one of its tokens is the most likely one after the true tokens before
it, which is the same as greedy decoding giving exactly this reply.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from training.rows import Examples

Predict = Callable[[Tensor], Tensor]
"""ids [B, L] -> the most likely next token at each place, [B, L]."""
DEPTHS = 5


@dataclass(slots=True)
class Score:
    """Right replies and all replies, by kind and, for records, by depth (fifths of the text)."""

    right: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    asked: dict[str, int] = field(default_factory=lambda: defaultdict(int))

    def add(self, key: str, right: bool) -> None:
        self.right[key] += right
        self.asked[key] += 1

    def share(self, key: str) -> float:
        """NaN if nothing was asked."""
        return self.right[key] / self.asked[key] if self.asked[key] else float("nan")

    def line(self) -> str:
        keys = sorted(key for key in self.asked if "@" not in key)
        parts = [f"{key} {100 * self.share(key):.1f}% of {self.asked[key]}" for key in keys]
        depths = [f"{100 * self.share(f'@{d}'):.0f}" for d in range(DEPTHS)]
        return "; ".join(parts) + "; by depth " + "/".join(depths)


def score(predict: Predict, examples: Examples, device: torch.device, into: Score) -> None:
    """Add one batch's replies to ``into``."""
    ids = torch.from_numpy(examples.ids.astype(np.int64)).to(device)
    best = predict(ids[:, :-1]).cpu().numpy()
    good: NDArray[np.bool_] = best == examples.ids[:, 1:]
    for row, spans in enumerate(examples.spans):
        for span in spans:
            right = bool(good[row, span.start - 1 : span.end - 1].all())
            into.add(span.kind, right)
            if span.kind in ("record", "record_short"):
                into.add("retrieval", right)
                if span.depth >= 0:
                    into.add(f"@{min(int(span.depth * DEPTHS), DEPTHS - 1)}", right)


def shares(score_: Score) -> Mapping[str, float]:
    return {key: score_.share(key) for key in score_.asked}

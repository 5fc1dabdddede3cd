"""When which lengths are trained, and how fast.

Retrieval is learned at short lengths first, where it takes the fewest tokens, and then carried to
longer ones; a length that was never trained is not promised. Attention is dense until the index
has had time to learn from it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from random import Random


@dataclass(frozen=True, slots=True)
class Stage:
    """Holds ``until`` a share of the run; ``lengths``: tokens a row -> share of the batches."""

    until: float
    lengths: Mapping[int, float]
    sparse: bool


STAGES = (
    Stage(0.15, {256: 1.0}, sparse=False),
    Stage(0.28, {256: 0.35, 512: 0.65}, sparse=False),
    Stage(0.45, {256: 0.15, 512: 0.3, 1024: 0.55}, sparse=False),
    Stage(0.62, {256: 0.05, 512: 0.15, 1024: 0.35, 2048: 0.45}, sparse=True),
    Stage(0.80, {512: 0.1, 1024: 0.2, 2048: 0.3, 4096: 0.4}, sparse=True),
    Stage(1.00, {512: 0.05, 1024: 0.15, 2048: 0.2, 4096: 0.3, 8192: 0.3}, sparse=True),
)


def stage_at(share: float, stages: tuple[Stage, ...] = STAGES) -> Stage:
    return next((stage for stage in stages if share < stage.until), stages[-1])


def draw_length(stage: Stage, seed: int, number: int) -> int:
    rng = Random(f"length:{seed}:{number}")
    return rng.choices(list(stage.lengths), list(stage.lengths.values()))[0]


def rate(share: float, step: int, peak: float, warm_up: int = 100, cool_down: float = 0.3) -> float:
    """The learning rate: a short warm-up, a plateau, a linear way down to a fiftieth."""
    warm = min(1.0, (step + 1) / warm_up)
    left = min(1.0, (1.0 - share) / cool_down)
    return peak * warm * max(left, 0.02)

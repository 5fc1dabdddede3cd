"""Power: an equality test counts only where a wrong past would have changed the answer.

A random recurrent model usually forgets within a few tokens; then a cache that restores the wrong
state passes every test. These tests show that tiny checkpoints do not: not when the whole head of a
prompt is another, and not when the recurrent state alone is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch

from merestone.models.interface import Model
from merestone.models.loader import load_model
from merestone.models.tiny import write_tiny
from models.plain_loop import PlainLoop, Run, greedy

TRIALS = 8


def text(count: int, generator: torch.Generator) -> list[int]:
    """Random printable bytes."""
    return torch.randint(32, 127, (count,), generator=generator).tolist()


def measure_power(run: Callable[[list[int]], Sequence[int]], head: int, tail: int = 64) -> int:
    """How many of ``TRIALS`` wrong heads of ``head`` tokens before the right last ``tail`` tokens
    change the output of ``run`` (prompt ids -> output ids)."""
    generator = torch.Generator().manual_seed(head)
    last = text(tail, generator)
    right = run(text(head, generator) + last)
    return sum(run(text(head, generator) + last) != right for _ in range(TRIALS))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    directory = tmp_path_factory.mktemp("tiny")
    write_tiny(directory)
    return load_model(directory)


@pytest.mark.parametrize("head", [64, 448, 1984])
def test_wrong_head_changes_the_output(model: Model, head: int) -> None:
    loop = PlainLoop(model)
    assert measure_power(lambda prompt: loop.generate(prompt, 16)[0], head) == TRIALS


@pytest.mark.parametrize("seed", [1, 2])
def test_other_seeds_have_power_too(tmp_path: Path, seed: int) -> None:
    write_tiny(tmp_path, seed=seed)
    loop = PlainLoop(load_model(tmp_path))
    assert measure_power(lambda prompt: loop.generate(prompt, 16)[0], 448) == TRIALS


def continue_with(model: Model, past: Run, ids: list[int], n: int) -> list[int]:
    """Feed ``ids`` after ``past`` and generate ``n`` greedy tokens."""
    row = model.logits(past.feed(ids)[-1:])[0]
    out = [greedy(row)]
    while len(out) < n:
        out.append(greedy(model.logits(past.feed(out[-1:])[-1:])[0]))
    return out


def run_to(model: Model, prompt: list[int], room: int) -> Run:
    run = Run(model, len(prompt) + room)
    run.feed(prompt)
    return run


@pytest.mark.parametrize("wrong", ["zero", "another head's"])
def test_wrong_anchor_changes_the_output(model: Model, wrong: str) -> None:
    """Attention sees the right head; only the recurrent anchor at 1024 tokens is wrong."""
    generator = torch.Generator().manual_seed(5)
    changed = 0
    for _ in range(TRIALS):
        head, other, last = text(1024, generator), text(1024, generator), text(64, generator)
        right = continue_with(model, run_to(model, head, 96), last, 16)
        damaged = run_to(model, head, 96)
        donor = run_to(model, other, 96)
        assert damaged.anchor_frame is not None
        assert donor.anchor_frame is not None
        for key, value in damaged.state.anchors.items():
            row = donor.state.anchors[key][donor.anchor_frame]
            value[damaged.anchor_frame] = 0.0 if wrong == "zero" else row
        changed += continue_with(model, damaged, last, 16) != right
    assert changed == TRIALS

"""Drawing on the device: the CPU sampler's cuts, the softmax's frequencies, one token for a key."""

from __future__ import annotations

import pytest
import torch

from gpu.machine import CUDA, DEVICE
from merestone.ops.sampler import truncate
from merestone.ops.triton.draw import draw, draws
from merestone.sched.plan import SamplingParams

WIDTH = 40
COUNT = 4000 if CUDA else 5


def row(seed: int, ties: bool = False) -> torch.Tensor:
    values = torch.randn(WIDTH, generator=torch.Generator().manual_seed(seed)) * 2
    return (values * 2).round() / 2 if ties else values


def tokens(logits: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    wanted = draws([(0, params, position, 0) for position in range(COUNT)], WIDTH)
    return draw(logits[None].to(DEVICE), wanted).cpu()


@pytest.mark.parametrize("ties", [False, True] if CUDA else [True])
@pytest.mark.parametrize(
    "cuts",
    [
        {},
        {"top_k": 3},
        {"top_p": 0.6},
        {"top_k": 7, "top_p": 0.8},
        {"min_p": 0.2},
        {"top_k": 9, "top_p": 0.95, "min_p": 0.1},
        {"top_k": 1},
        {"top_p": 1e-9},
    ],
)
def test_only_what_the_cpu_keeps(cuts: dict, ties: bool) -> None:
    logits = row(3, ties)
    params = SamplingParams(temperature=0.8, seed=5, **cuts)
    kept = truncate((logits - logits.max()).double() / 0.8, params) > -float("inf")
    found = tokens(logits, params)
    assert kept[found.long()].all()
    if CUDA:
        shares = torch.bincount(found, minlength=WIDTH) / COUNT
        scores = (logits / 0.8).double().masked_fill(~kept, -float("inf"))
        assert (shares - scores.softmax(0)).abs().max() < 0.03


def test_keys_choose_the_noise() -> None:
    logits = row(4).to(DEVICE)
    how = [SamplingParams(temperature=1.0, seed=seed) for seed in (1, 2, -1, 2**64 - 1)]

    def many(params: SamplingParams, choice: int) -> list[int]:
        wanted = draws([(1, params, position, choice) for position in range(12)], WIDTH)
        return draw(torch.stack([logits.flip(0), logits]), wanted).tolist()

    first, other, negative, large = (many(params, 0) for params in how)
    assert first != other
    assert negative == large, "a seed counts modulo 2^64"
    assert first != many(how[0], 1)
    # Alone, and where the row and its key lie elsewhere: the same tokens.
    wanted = draws([(0, how[0], position, 0) for position in range(11, 7, -1)], WIDTH)
    assert draw(logits[None], wanted).tolist() == first[:7:-1]


def test_a_tiny_temperature_is_greedy() -> None:
    logits = row(6)
    found = tokens(logits, SamplingParams(temperature=1e-30, seed=3, top_p=0.9))
    assert set(found.tolist()) == {int(logits.argmax())}

"""The next step started before the result of the last: the device feeds itself the same ids."""

from __future__ import annotations

import pytest

from engine.harness import Reply
from gpu.machine import DEVICE, GpuReal
from gpu.test_thin import CASES, answer, prompt
from merestone.models.gpu import on_gpu
from merestone.sched.plan import SamplingParams

DRAWN = SamplingParams(temperature=0.9, top_p=0.9, seed=5)


def conversation(real: GpuReal, length: int, count: int) -> tuple[list[list[int]], list]:
    """A greedy and a drawn answer side by side, one longer than the other; then a turn after the
    shorter, with log probabilities, from its response boundary."""
    heads = [prompt(length + place, 3 + place) for place in range(2)]
    kinds = [SamplingParams(), DRAWN]
    replies: list[Reply] = []
    for place, (head, params) in enumerate(zip(heads, kinds, strict=True)):
        replies.append(real.send(head, count + place, params=params))
    real.drain()
    ids = [reply.ids() for reply in replies]
    turn = real.ask((*heads[0], *ids[0], 9), 1)
    assert turn.restored == len(heads[0]) + count - 1
    return ids, answer(turn)


@pytest.mark.parametrize(
    ("case", "length", "count", "graphs"),
    [
        ("kimi", 3, 5, False),
        *(
            pytest.param(case, 50, 150, graphs, marks=pytest.mark.gpu)
            for case in CASES
            for graphs in (False, True)
        ),
    ],
)
def test_the_same_bits_with_and_without(case: str, length: int, count: int, graphs: bool) -> None:
    found = []
    for overlap in (False, True):
        real = GpuReal(
            on_gpu(CASES[case](), DEVICE), frames=900, max_running=2, token_budget=256,
            overlap=overlap, graphs=graphs,
        )  # fmt: skip
        found.append(conversation(real, length, count))
        ahead = real.engine.scheduler.counters["ahead"]
        # One sits out where a chunk is completed, and both where the shorter one ends.
        assert ahead >= count - 2 - count // 10 if overlap else ahead == 0
    assert found[0] == found[1]
    # With power: the device had to feed different ids.
    assert len({token for ids in found[0][0] for token in ids}) > 3

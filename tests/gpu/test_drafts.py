"""With drafts = without, bit for bit: the scenarios of the CPU engine, verified on the device."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import torch

import spec_engine.test_equal as scenarios
from gpu.machine import DEVICE, GpuReal, cold, tiny
from gpu.test_thin import SPARSE, answer, prompt
from layers.test_glm5_next import build
from merestone.device.gpu_passes import Sampled
from merestone.device.gpu_sampling import GpuSlot, Sampling
from merestone.engine.api import TokenEvent
from merestone.models.gpu import GpuModel, on_gpu
from merestone.sched.plan import SamplingParams, Work
from spec_engine.parrot import Parrot
from spec_engine.spoken import KINDS, Spoken


def ids_of(model: GpuModel, tokens: tuple[int, ...], count: int) -> tuple[list[int]]:
    """As `engine.real.cold`, as far as the scenarios read it."""
    return ([token for token, _ in cold(model, tokens, count)],)


class GpuSpoken(GpuReal):
    """As :class:`spec_engine.spoken.Spoken`, over the device path."""

    proposals, accepted = Spoken.proposals, Spoken.accepted

    def __init__(self, kind: str = "lag", accuracy: float = 0.7, depth: int = 3, **options) -> None:
        self.parrot = Parrot(depth, accuracy, KINDS[kind])
        super().__init__(tiny(), self.parrot, **options)

    def say(self, tokens, count: int, **options):
        seed = hash(tuple(tokens)) % 10**6
        (ids,) = ids_of(self.model, tuple(tokens), max(count, 1))
        self.parrot.book[seed, 0] = (*tokens, *ids)
        params = SamplingParams(logprobs=5, seed=seed, **options.pop("params", {}))
        return self.send(tokens, count, params=params, **options)


@pytest.fixture
def on_device(monkeypatch: pytest.MonkeyPatch, graphs: bool) -> None:
    monkeypatch.setattr(scenarios, "Spoken", partial(GpuSpoken, graphs=graphs))
    monkeypatch.setattr(scenarios, "cold", ids_of)


BOTH = pytest.mark.parametrize("graphs", [False, True], ids=["eager", "graphs"])


@BOTH
@pytest.mark.gpu
@pytest.mark.usefixtures("on_device")
@pytest.mark.parametrize(
    ("kind", "accuracy"), [("lag", 0.0), ("lag", 0.7), ("lag", 1.0), ("window", 0.7)]
)
def test_replays(kind: str, accuracy: float) -> None:
    scenarios.test_replays_equal_the_plain_loop_and_draft_as_before(kind, accuracy)


@BOTH
@pytest.mark.gpu
@pytest.mark.usefixtures("on_device")
@pytest.mark.parametrize("at", [33, 64])
def test_two_readers_beside_a_live_producer(at: int) -> None:
    scenarios.test_two_readers_beside_a_live_producer("lag", at)


@BOTH
@pytest.mark.gpu
@pytest.mark.usefixtures("on_device")
@pytest.mark.parametrize("kind", KINDS)
def test_aborted_and_preempted(kind: str) -> None:
    scenarios.test_aborted_and_preempted_in_the_middle_of_a_block(kind, 0.7)


@BOTH
@pytest.mark.gpu
@pytest.mark.usefixtures("on_device")
@pytest.mark.parametrize("kind", KINDS)
def test_turns_with_stops_inside_blocks(kind: str) -> None:
    scenarios.test_turns_with_stops_inside_blocks(kind)


def test_a_block_of_drafts_has_the_plain_bits() -> None:
    model = on_gpu(build(SPARSE), DEVICE)
    ids = prompt(9, 4)
    plain = GpuReal(model, frames=300, max_running=1, token_budget=64).ask(ids, 4)
    parrot = Parrot(2, 1.0)
    tokens = [event.token for event in plain.events if isinstance(event, TokenEvent)]
    # The second draft is wrong: it is rolled back, and others take its place.
    parrot.book[0, 0] = (*ids, *tokens[:2], tokens[2] ^ 1, *tokens[3:])
    real = GpuReal(model, parrot, frames=300, max_running=1, token_budget=64)
    assert answer(real.ask(ids, 4)) == answer(plain)
    assert sum(real.engine.scheduler.depth.tally.accepted) == 1
    # Restored whole: the first step runs no layer, and drafts are made for the next all the same.
    again = real.ask(ids, 2)
    assert again.restored == len(ids)
    assert answer(again) == answer(plain)[:2]


def test_rows_that_are_not_finite_mark_their_slot() -> None:
    """Whatever the device found in them: no id of such a row is used, nor looked up."""
    greedy, drawn = SamplingParams(logprobs=2), SamplingParams(temperature=1.0)
    slots = {
        i: GpuSlot(np.array([1, 2], np.int32), 2, 0, how)
        for i, how in enumerate((greedy, greedy, drawn))
    }
    works = [Work(i, 1, 2, (2,), (), 0, (), 0, (), True) for i in slots]
    sampling = Sampling(works, slots)
    logits = torch.randn(3, 8, device=DEVICE)
    sampling.launch(Sampled(logits, *torch.zeros(2, 3, device=DEVICE)))
    bad_slots: set[int] = set()
    # Ids, then which rows are bad, then the token that was drawn.
    results = sampling.results([8, 5, 0, 1, 0, 1, 8], bad_slots)
    assert bad_slots == {0, 2}
    assert results[1].tokens == (5,)
    assert slots[0].output == slots[2].output == []

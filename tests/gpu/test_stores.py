"""Checkpoints go out of the device's frames and come back: under the interpreter a thin thread."""

from __future__ import annotations

import time

import pytest

from engine.real import stream
from gpu.machine import GpuReal, tiny
from gpu.test_thin import CASES, DEVICE, prompt
from merestone.engine.outside import give_stores
from merestone.models.gpu import GpuModel, on_gpu
from merestone.store.desk import Identity, StoreSettings


def storing(model: GpuModel, **options) -> GpuReal:
    real = GpuReal(model, **options)
    settings = StoreSettings(wait_s=30.0)
    give_stores(
        real.engine.device, real.engine, ["memory:1GiB"], Identity("test", "a test"), settings
    )
    return real


def settle(real: GpuReal) -> None:
    """Until stores have what memory has; then memory has nothing."""
    while real.engine.scheduler.outside.rest() is not None:
        real.step()
        time.sleep(0.001)
    assert real.engine.cache.reset() > 0


def said(reply) -> list[object]:
    return [event.logprob for event in reply.events if hasattr(event, "logprob")]


def test_what_comes_back_has_its_bits() -> None:
    model = on_gpu(CASES["sparse"](), DEVICE)
    real = storing(model, frames=300, max_running=2, token_budget=256)
    ids = prompt(14, 3)
    first = real.ask(ids, 2)
    settle(real)
    again = real.ask(ids, 2)
    assert (first.restored, again.restored) == (0, 14)
    assert said(again) == said(first)
    real.engine.stop()


@pytest.mark.gpu
@pytest.mark.parametrize("graphs", [False, True], ids=["eager", "graphs"])
@pytest.mark.parametrize("length", [255, 256, 257, 513])
def test_edges_of_chunks(length: int, graphs: bool) -> None:
    real = storing(tiny("bfloat16"), frames=1500, max_running=4, token_budget=256, graphs=graphs)
    ids = stream(length, length)
    first = real.ask(ids, 6)
    longer = (*ids, *first.ids(), 1, 2)
    settle(real)
    assert real.ask(ids, 6).restored == length
    settle(real)
    reply = real.ask(longer, 4)
    assert reply.restored == length + 5
    real.check(longer, reply)
    real.engine.stop()

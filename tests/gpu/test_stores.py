"""Checkpoints go out of the device's frames and come back: under the interpreter a thin thread."""

from __future__ import annotations

import time

import pytest
import torch

from engine.real import stream
from gpu.machine import GpuReal, tiny
from gpu.test_thin import CASES, DEVICE, prompt
from merestone.engine.outside import give_stores
from merestone.models.gpu import GpuModel, on_gpu
from merestone.store.desk import Identity, StoreSettings
from merestone.store.memory import MemoryTier


def storing(model: GpuModel, **options) -> GpuReal:
    real = GpuReal(model, **options)
    settings = StoreSettings(wait_s=30.0)
    give_stores(
        real.engine.device, real.engine, ["memory:1GiB"], Identity("test", "a test"), settings
    )
    return real


def tier_of(real: GpuReal) -> MemoryTier:
    (tier,) = real.engine.device.porter.tiers
    assert isinstance(tier, MemoryTier)
    return tier


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


LONG = 200_000_000
"""Cycles, a tenth of a second: whatever is ordered behind them has not begun when it returns."""


@pytest.mark.gpu
def test_the_memory_tier_is_page_locked_and_no_copy_is_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    real = storing(tiny("bfloat16"), frames=1500, max_running=2, token_budget=256)
    porter, tier = real.engine.device.porter, tier_of(real)
    export, carried, waited = porter._export, 0, 0.0

    def late(order) -> None:
        nonlocal carried, waited
        torch.cuda._sleep(LONG)
        began = time.perf_counter()
        export(order)
        waited, carried = waited + time.perf_counter() - began, carried + 1

    monkeypatch.setattr(porter, "_export", late)
    ids = stream(513, 5)
    first = real.ask(ids, 6)
    settle(real)
    assert carried
    assert waited / carried < 0.05, "the engine has waited for a copy"
    kept = [data for name, data in tier.kept.items() if not name.endswith(".m")]
    assert len(kept) > 5
    assert all(torch.frombuffer(data, dtype=torch.uint8).is_pinned() for data in kept)
    assert tier.slabs.capacity == 64 << 20
    again = real.ask(ids, 6)
    assert again.restored == 513
    assert said(again) == said(first)
    real.check(ids, again)
    real.engine.stop()


@pytest.mark.gpu
def test_an_eviction_during_an_import_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    real = storing(tiny("bfloat16"), frames=1500, max_running=2, token_budget=256)
    porter, tier = real.engine.device.porter, tier_of(real)
    ids = stream(300, 6)
    real.ask(ids, 6)
    settle(real)
    carry, early = porter._import, 0

    def evicted(order) -> None:
        nonlocal early
        torch.cuda._sleep(LONG)
        carry(order)
        tier.erase(list(tier.kept))
        filled = []
        for size in (1 << 20, 1 << 16, 1 << 12, 64):
            while (room := tier.room(size)) is not None:
                room[:] = b"\xff" * size
                filled.append(room)
        early += not porter._ferry._held[-1][0].over

    monkeypatch.setattr(porter, "_import", evicted)
    reply = real.ask(ids, 6)
    assert reply.restored == 300
    assert early, "the copies were over before anything was evicted"
    real.check(ids, reply)
    tier.erase(list(tier.kept))
    real.engine.stop()
    assert tier.slabs.free == tier.slabs.capacity

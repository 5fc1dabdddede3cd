"""Slabs and the memory tier over them: what is held stays, what nobody holds is used again."""

from __future__ import annotations

import logging
import random
from collections import deque
from ctypes import string_at

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

import merestone.engine.outside as stores
from engine.real import stream
from merestone.device.crossing import Crossing, Ferry
from merestone.store.memory import MemoryTier
from merestone.store.slabs import ALIGN, Slabs
from store.stored import Stored

SLAB = 4096


def ordinary(size: int) -> memoryview:
    return memoryview(bytearray(b"\xff" * size))


class Tier(RuleBasedStateMachine):
    """Against a plain dictionary. ``held``: views that readers keep, and what they must say."""

    @initialize(budget=st.integers(0, 5 * SLAB), seed=st.integers(0, 99))
    def build(self, budget: int, seed: int) -> None:
        self.budget = budget
        self.taken = 0
        self.random = random.Random(seed)
        self.slabs = Slabs(self.allocate, budget, SLAB)
        self.tier = MemoryTier(self.slabs)
        self.kept: dict[str, bytes] = {}
        self.held: list[tuple[object, bytes]] = []

    def allocate(self, size: int) -> memoryview:
        assert size & (size - 1) == 0
        self.taken += size
        return ordinary(size)

    @rule(name=st.integers(0, 12), size=st.integers(0, SLAB + 1), direct=st.booleans())
    def put(self, name: int, size: int, direct: bool) -> None:
        data = self.random.randbytes(size)
        room = self.tier.room(size) if direct else None
        if room is not None:
            assert len(room) == size
            room[:] = data
        self.tier.put(f"{name}.0", data if room is None else room)
        self.kept[f"{name}.0"] = data

    @rule(size=st.integers(1, SLAB))
    def room_for_nothing(self, size: int) -> None:
        """A copy that something else was faster than: its room is given back."""
        room = self.tier.room(size)
        if room is not None:
            room[:] = b"\xee" * size

    @rule(name=st.integers(0, 12), cut=st.integers(0, 9))
    def read(self, name: int, cut: int) -> None:
        found, wanted = self.tier.get(f"{name}.0"), self.kept.get(f"{name}.0")
        assert (found is None) == (wanted is None)
        if found is not None:
            self.held.append((memoryview(found)[cut:], wanted[cut:]))

    @rule(names=st.sets(st.integers(0, 12)))
    def erase(self, names: set[int]) -> None:
        self.tier.erase([f"{name}.0" for name in names])
        for name in names:
            self.kept.pop(f"{name}.0", None)

    @rule(count=st.integers(0, 5))
    def finish_reading(self, count: int) -> None:
        del self.held[:count]

    @invariant()
    def every_byte_is_there(self) -> None:
        if hasattr(self, "tier"):
            assert all(bytes(view) == wanted for view, wanted in self.held)
            assert {name: bytes(data) for name, data in self.tier.kept.items()} == self.kept
            assert self.taken == self.slabs.capacity <= self.budget

    def teardown(self) -> None:
        if hasattr(self, "tier"):
            self.held.clear()
            self.tier.close()
            assert self.slabs.free == self.slabs.capacity
            whole = self.slabs.capacity // SLAB
            views = [self.slabs.take(SLAB) for _ in range(whole)]
            assert None not in views, "neighbours have not become one again"


TestTier = Tier.TestCase
TestTier.settings = settings(
    max_examples=100, stateful_step_count=40, derandomize=True, database=None
)


def test_slabs_are_taken_one_by_one_and_used_again() -> None:
    slabs = Slabs(ordinary, 10 * SLAB, SLAB)
    tier = MemoryTier(slabs)
    assert slabs.capacity == SLAB
    for number in range(100):
        tier.put(f"{number}.0", bytes(1024))
        tier.erase([f"{number - 4}.0"])
    assert slabs.capacity <= 2 * SLAB
    assert all(isinstance(data, memoryview) for data in tier.kept.values())


def test_the_end_of_a_budget_is_used_too() -> None:
    """A slab is a power of two, and so are the smaller ones behind the last whole one."""
    slabs = Slabs(ordinary, 2 * SLAB + SLAB // 2 + SLAB // 64 + 1, SLAB)
    pieces = []
    while (piece := slabs.filled(bytes(ALIGN))) is not None:
        pieces.append(piece)
    assert len(pieces) * ALIGN == slabs.capacity == 2 * SLAB + SLAB // 2 + SLAB // 64


def test_without_more_memory_to_lock_there_is_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    gives = deque([ordinary])

    def allocate(size: int) -> memoryview:
        if not gives:
            raise MemoryError("no more")
        return gives.popleft()(size)

    caplog.set_level(logging.WARNING)
    slabs = Slabs(allocate, 100 * SLAB, SLAB)
    tier = MemoryTier(slabs)
    wanted = {f"{number}.0": bytes([number]) * 1500 for number in range(9)}
    for name, data in wanted.items():
        tier.put(name, data)
    assert slabs.capacity == SLAB
    assert {name: bytes(data) for name, data in tier.kept.items()} == wanted
    assert [type(data) for data in tier.kept.values()].count(memoryview) == 2
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "no more" in caplog.text


def test_holes_that_nothing_fits_in_are_few() -> None:
    """Checkpoints of whole frames, part-filled ones and small rows come and go: what the slabs of
    a budget cannot take of that budget is below 5 %."""
    rng = random.Random(1)
    frame, row, budget = 24 << 10, 22, 32 << 20  # all of it a 64th of a large model's
    slabs = Slabs(ordinary, budget, 1 << 20)
    kept: deque[list[tuple[int, memoryview | None]]] = deque()
    total = 0
    for _ in range(400):
        sizes = [frame] * rng.randint(0, 12) + [frame - 2048] * rng.randint(0, 32)
        sizes += [frame - rng.choice([0, 448, 640]) for _ in range(30)]
        sizes += [rng.randint(1, 1023) * row, 128, rng.randint(300, 3000)]
        while total + sum(sizes) > budget:
            total -= sum(size for size, _ in kept.popleft())
        kept.append([(size, slabs.filled(bytes(size))) for size in sizes])
        total += sum(sizes)
        outside = sum(size for pieces in kept for size, view in pieces if view is None)
        assert outside < 0.05 * budget
    assert slabs.capacity == budget


@pytest.fixture
def slabs_of(monkeypatch: pytest.MonkeyPatch):
    """Memory tiers will be over slabs of so many bytes, as on a GPU."""

    def use(slab: int) -> None:
        monkeypatch.setattr(stores, "locking", lambda device: ordinary)
        monkeypatch.setattr(stores, "Slabs", lambda allocate, budget: Slabs(allocate, budget, slab))

    return use


def tier_of(real: Stored) -> MemoryTier:
    tier = real.outside.desks[0].clerk.tier
    assert isinstance(tier, MemoryTier)
    return tier


def test_an_engine_over_slabs_restores_with_equal_bits(slabs_of) -> None:
    slabs_of(1 << 20)
    real = Stored("memory:32MiB")
    prompt = list(stream(300, 1))
    first = real.served(prompt, 20)
    kept = tier_of(real).kept
    views = [isinstance(data, memoryview) for data in kept.values()]
    assert sum(views) > len(views) // 2
    real.engine.cache.reset()
    assert real.served(prompt, 20).restored == 300
    real.engine.cache.reset()
    assert real.served([*prompt, *first.ids(), 1, 2], 8).restored == 319
    real.stop()


def test_an_eviction_during_an_import_changes_nothing(
    slabs_of, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Copies here read addresses, as a GPU does, long after they were ordered: meanwhile the tier
    has lost everything, and has filled whatever room it has with something else."""
    slabs_of(1 << 20)
    real = Stored("memory:32MiB")
    prompt = list(stream(200, 2))
    real.served(prompt, 4)
    real.engine.cache.reset()
    porter, tier = real.engine.device.porter, tier_of(real)
    ordered: list[tuple[int, int, int, list[tuple[int, int]]]] = []
    copy, carry = Ferry.back, porter._import
    copied = 0

    def order(self, view, frame, runs) -> None:
        address = np.frombuffer(view, np.uint8).ctypes.data
        ordered.append((address, len(view), frame, list(runs)))

    def late(imported) -> None:
        nonlocal copied
        monkeypatch.setattr(Crossing, "over", False)
        carry(imported)
        tier.erase(list(tier.kept))
        while (room := tier.room(ALIGN)) is not None:
            room[:] = b"\xff" * ALIGN
            tier.kept[f"{len(tier.kept)}.9"] = room
        porter._ferry.let_go()
        for address, size, frame, runs in ordered:
            data = memoryview(bytearray(string_at(address, size)))
            copy(porter._ferry, data, frame, runs)
            copied += 1
        ordered.clear()
        monkeypatch.setattr(Crossing, "over", True)

    monkeypatch.setattr(Ferry, "back", order)
    monkeypatch.setattr(porter, "_import", late)
    assert real.served(prompt, 4).restored == 200
    assert copied > 5
    tier.erase(list(tier.kept))
    real.stop()
    assert tier.slabs.free == tier.slabs.capacity, "something is held for ever"

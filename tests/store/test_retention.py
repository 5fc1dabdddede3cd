"""What a store promises decides what is kept."""

from __future__ import annotations

import pytest

from engine.real import stream
from merestone.engine.outside import declared
from merestone.store.memory import MemoryTier
from merestone.store.options import StoreSpec, parse_store
from store.stored import Stored


def test_a_store_without_boundaries_gets_aligned_states(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MemoryTier, "boundaries", False)
    engine = Stored("memory:1GiB", token_budget=256)
    assert engine.engine.info.retention == "aligned:512"
    assert "does not declare support" in engine.engine.info.retention_reason
    prompt = list(stream(600, 1))
    engine.served(prompt, 1)
    engine.engine.cache.reset()
    assert engine.served(prompt, 1).restored == 512
    with pytest.raises(ValueError, match="does not declare support"):
        Stored("memory:1GiB", retention="boundaries")


def test_spellings() -> None:
    assert parse_store("memory:2GiB") == StoreSpec("memory", "", 2 << 30)
    assert parse_store("disk:/a/b:c:1.5gb") == StoreSpec("disk", "/a/b:c", 1_500_000_000)
    assert parse_store("redis://host:1/2") == StoreSpec("redis", "redis://host:1/2")
    for wrong in ("memory", "memory:", "memory:/a:1GB", "disk:1GB", "disk:/a", "tape:1GB", ""):
        with pytest.raises(ValueError, match="--store"):
            parse_store(wrong)
    assert declared([]) == "none"
    assert declared(["memory:1", "disk:/a:1"]) == "boundaries"

"""Stores around an engine: whose checkpoints are whose, which tiers there are, what is written."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from engine.harness import Harness
from merestone.core.checkpoint import Kind
from merestone.core.geometry import GroupSpec
from merestone.engine import outside
from merestone.engine.facts import Facts
from merestone.engine.outside import declared, identity_of, keep_outside, open_tiers
from merestone.store.desk import StoreSettings
from merestone.store.disk import BLOCK
from merestone.store.lane import Bell
from merestone.store.network import NetworkTier

FACTS = Facts(
    vocab_size=50, max_length=100, eos_ids=(), dtype="float32", device="cpu", frames=64,
    frame_bytes=1024, groups=(GroupSpec("full", 4),), anchor_frames=2, hidden_rows=4, notes=(),
    layout="latent 64 float32, 1 thread",
)  # fmt: skip
OURS = identity_of("w", FACTS, 1)


@pytest.mark.parametrize(
    "facts",
    [
        replace(FACTS, dtype="bfloat16"),
        replace(FACTS, layout="latent 64 float32, 2 threads"),
        replace(FACTS, groups=(GroupSpec("full", 8),)),
        replace(FACTS, groups=(GroupSpec("full", 4, shard=2),)),
    ],
    ids=str,
)
def test_whatever_bits_depend_on_makes_others_of_checkpoints(facts: Facts) -> None:
    assert identity_of("w", facts, 1).digest != OURS.digest


def test_so_do_the_weights_the_ranks_the_versions_and_the_device(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = [OURS.digest, identity_of("v", FACTS, 1).digest, identity_of("w", FACTS, 2).digest]
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "one")
    found.append(identity_of("w", replace(FACTS, device="cuda"), 1).digest)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "two")
    found.append(identity_of("w", replace(FACTS, device="cuda"), 1).digest)
    for module, name, value in (
        (outside, "__version__", "0"),
        (torch, "__version__", "0"),
        (torch.backends.cpu, "get_cpu_capability", lambda: "none"),
        (outside.platform, "machine", lambda: "abacus"),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(module, name, value)
            found.append(identity_of("w", FACTS, 1).digest)
    assert len(set(found)) == len(found) == 9


def test_pools_of_any_size_read_each_others_checkpoints() -> None:
    other = replace(FACTS, frames=7, max_length=9, notes=("what the log says",))
    assert identity_of("w", other, 1) == OURS
    assert (OURS.ranks, identity_of("w", FACTS, 4).ranks) == (1, 4)
    assert OURS.about == "float32 on 1 rank(s) of cpu, weights w"


def test_one_store_without_boundaries_is_enough_to_keep_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stores = ["memory:1", "redis://nowhere:1/2"]
    assert declared(stores) == "boundaries"
    monkeypatch.setattr(NetworkTier, "boundaries", False)
    assert declared(stores) == "aligned"


def test_tiers_are_opened_in_the_order_of_their_names(tmp_path: Path) -> None:
    """And a directory has one owner, whom its ranks do not ask."""
    stores = ["redis://nowhere:1/2", f"disk:{tmp_path}:1MiB", "memory:1MiB"]
    tiers = open_tiers(stores)
    assert [tier.name for tier in tiers] == ["network", "disk", "memory"]
    with pytest.raises(ValueError, match="disk"):
        open_tiers(stores)
    for rank in open_tiers(stores, owner=False):
        rank.close()
    for tier in tiers:
        tier.close()


def test_ranks_share_the_memory_of_a_tier(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each locks its part, to be copied from and to. Who has no arena keeps plain bytes."""
    given: list[int] = []
    monkeypatch.setattr(outside, "Slabs", lambda allocate, budget: given.append(budget))
    monkeypatch.setattr(outside, "locking", lambda device: device)
    arena = SimpleNamespace(memory=torch.zeros(1))
    for ranks in (1, 4):
        open_tiers(["memory:1MiB"], arena=arena, ranks=ranks)
    open_tiers(["memory:1MiB"], arena=arena)
    open_tiers(["memory:1MiB"])
    assert given == [1 << 20, 1 << 18, 1 << 20]


@pytest.mark.parametrize("retention", ["boundaries", "aligned:8"])
def test_what_an_aborted_prefill_left_is_not_written_unless_nothing_else_is_kept(
    retention: str, tmp_path: Path
) -> None:
    h = Harness(retention=retention)
    stores = ["memory:1MiB", f"disk:{tmp_path}:2MiB"]
    tiers = open_tiers(stores)
    kept = keep_outside(h.engine, stores, tiers, OURS, StoreSettings(), Bell())
    kept.closing += [tier.close for tier in tiers]
    assert h.scheduler.outside is kept
    assert (Kind.ALIGNED in kept._kinds) == (retention != "boundaries")
    assert kept._kinds | {Kind.ALIGNED} == set(Kind)
    catalogs = [desk.catalog for desk in kept.desks]
    assert [catalog.budget for catalog in catalogs] == [1 << 20, 2 << 20]
    assert [catalog.grain for catalog in catalogs] == [1, BLOCK], "what a file takes"
    assert [desk.index for desk in kept.desks] == [0, 1]
    kept.close()

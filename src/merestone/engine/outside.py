"""Putting stores around an engine: tiers, what they held, desks, and the porter of a rank.

Knows every tier by name. Must not know HTTP.
"""

from __future__ import annotations

import itertools
import logging
import platform
from collections.abc import Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Protocol

import torch

from merestone import __version__
from merestone.core.checkpoint import Kind
from merestone.device.arena import Arena
from merestone.device.crossing import locking
from merestone.device.porter import Porter
from merestone.engine.device import Device
from merestone.engine.engine import LocalEngine
from merestone.engine.facts import Facts
from merestone.store.catalog import Catalog
from merestone.store.clerk import Clerk
from merestone.store.desk import Desk, Identity, StoreSettings
from merestone.store.disk import BLOCK, DiskTier
from merestone.store.lane import Bell
from merestone.store.memory import MemoryTier
from merestone.store.network import NetworkTier
from merestone.store.options import parse_store
from merestone.store.recovery import recover
from merestone.store.slabs import Slabs
from merestone.store.stores import Stores
from merestone.store.tier import Tier

log = logging.getLogger("merestone.store")


class StoringDevice(Device, Protocol):
    """A device in this process, to which stores can be given."""

    arena: Arena
    porter: Porter | None


TIERS: dict[str, type[MemoryTier] | type[DiskTier] | type[NetworkTier]] = {
    "memory": MemoryTier,
    "disk": DiskTier,
    "redis": NetworkTier,
}


def declared(stores: Sequence[str]) -> str:
    """What stores promise, as the retention gate calls it.

    Raises:
        ValueError: no store has such a name.
    """
    if not stores:
        return "none"
    whole = all(TIERS[parse_store(text).kind].boundaries for text in stores)
    return "boundaries" if whole else "aligned"


def open_tiers(
    stores: Sequence[str], owner: bool = True, arena: Arena | None = None, ranks: int = 1
) -> list[Tier]:
    """The tiers asked for, fastest first as they were named. One process of all ranks is the
    ``owner`` of those that can have one. ``arena``: what this process's tiers are copied from and
    to, one of ``ranks``.

    Raises:
        ValueError: one cannot be opened.
    """
    tiers: list[Tier] = []
    for spec in map(parse_store, stores):
        match spec.kind:
            case "memory":
                allocate = locking(arena.memory.device) if arena else None
                budget = (spec.budget or 0) // ranks
                tiers.append(MemoryTier(Slabs(allocate, budget) if allocate else None))
            case "disk":
                tiers.append(DiskTier(Path(spec.place), owner))
            case _:
                tiers.append(NetworkTier(spec.place))
    return tiers


def identity_of(weights: str, facts: Facts, ranks: int) -> Identity:
    """Whatever the bits of a checkpoint depend on. ``weights``: the model's fingerprint."""
    runs_with = {
        "weights": weights,
        "merestone": __version__,
        "torch": torch.__version__,
        "device": _device(facts.device),
        "dtype": facts.dtype,
        "layout": facts.layout,
        "groups": repr(facts.groups),
        "ranks": str(ranks),
    }
    text = "\n".join(f"{key}={value}" for key, value in sorted(runs_with.items()))
    about = f"{facts.dtype} on {ranks} rank(s) of {facts.device}, weights {weights}"
    return Identity(blake2b(text.encode(), digest_size=16).hexdigest(), about, ranks)


def _device(kind: str) -> str:
    if kind == "cpu":
        return f"cpu {platform.machine()} {torch.backends.cpu.get_cpu_capability()}"
    return f"{kind} {torch.cuda.get_device_name()}"


def give_stores(
    runner: StoringDevice,
    engine: LocalEngine,
    stores: Sequence[str],
    identity: Identity,
    settings: StoreSettings,
) -> None:
    """Have ``engine`` over ``runner``, a device in this process, keep its checkpoints in stores.

    Raises:
        ValueError: one cannot be opened.
    """
    tiers, bell = open_tiers(stores, arena=runner.arena), Bell()
    runner.porter = porter = Porter(runner.arena, tiers, 0, bell.ring)
    kept = keep_outside(engine, stores, tiers, identity, settings, bell)
    kept.closing += [porter.close, *(tier.close for tier in tiers)]


def keep_outside(
    engine: LocalEngine,
    stores: Sequence[str],
    tiers: Sequence[Tier],
    identity: Identity,
    settings: StoreSettings,
    bell: Bell,
) -> Stores:
    """Have an engine keep its checkpoints in tiers, too. What an owned tier held is taken stock
    of, and cleaned up.

    All boundaries are written but what aborted prefills left, unless aligned states are all that
    is kept.
    """
    kinds = frozenset(Kind) if engine.retention.grid else frozenset(Kind) - {Kind.ALIGNED}
    tickets = itertools.count(1)
    desks = []
    for index, (spec, tier) in enumerate(zip(map(parse_store, stores), tiers, strict=True)):
        disk = tier if isinstance(tier, DiskTier) else None
        catalog = Catalog(spec.budget, BLOCK if disk else 1)
        if disk is not None:
            counts = recover(catalog, disk, disk)
            log.info("store disk:%s: %s", spec.place, counts)
        shared = tier if isinstance(tier, NetworkTier) else None
        clerk = Clerk(tier, bell.call, shared, disk)
        desks.append(Desk(index, engine.cache, catalog, clerk, identity, settings, tickets))
    kept = Stores(engine.cache, desks, identity, settings, kinds, bell, tickets)
    engine.attach(kept)
    return kept

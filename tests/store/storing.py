"""An engine over the device double whose plans' store orders are obeyed, without threads."""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass, field
from types import SimpleNamespace

import msgspec

from engine.harness import Harness
from fake_device import FakeDevice
from merestone.core.checkpoint import Kind
from merestone.core.orders import Erase, Export, Fetch, Forget, Import, Segment
from merestone.sched.plan import StepPlan, StepResult, StoreReport
from merestone.store.catalog import Catalog
from merestone.store.chain import Chain
from merestone.store.desk import Desk, Identity, StoreSettings
from merestone.store.lane import Bell
from merestone.store.manifest import Manifest, checksum, decode, encode
from merestone.store.stores import Stores

SIZE = 100
"""Bytes of every segment."""


@dataclass
class Vault:
    """What a tier holds: cells by address, manifests as bytes. ``fault`` fails every call."""

    name: str
    cells: dict[str, dict[object, object]] = field(default_factory=dict)
    manifests: dict[str, bytes] = field(default_factory=dict)
    fault: str = ""
    puts: int = 0


class FakeClerk:
    """A clerk whose calls come back when the bell is answered."""

    def __init__(self, vault: Vault, bell: Bell, shared: bool) -> None:
        self.tier = SimpleNamespace(name=vault.name)
        self.vault, self.bell = vault, bell
        self.shared = self if shared else None

    def write(self, manifest: Manifest, done) -> None:
        fault = self.vault.fault
        if not fault:
            self.vault.manifests[manifest.address] = encode(manifest)
        self.bell.call(lambda: done(fault))

    def erase(self, addresses) -> None:
        for address in addresses:
            self.vault.manifests.pop(address, None)

    def find(self, chain: Chain, above: int, done) -> None:
        fault, found = self.vault.fault, None
        if not fault:
            for at in range(chain.size, above, -1):
                if chain.at(at) in self.vault.manifests:
                    found = decode(self.vault.manifests[chain.at(at)], chain.at(at))
                    break
        self.bell.call(lambda: done(found, fault))

    def touch(self, address: str) -> None: ...

    def close(self) -> None: ...


class StoringDevice(FakeDevice):
    """Reports come in random order, ``lag`` of them at most held back at a time."""

    vaults: list[Vault]
    ranks = 1
    reports_held = False

    def keep(self, vaults: list[Vault], ranks: int, seed: int) -> None:
        self.vaults, self.ranks = vaults, ranks
        self.rng = random.Random(seed)
        self.fetched: dict[int, list[dict[object, object]]] = {}
        self.reports: list[StoreReport] = []

    def run(self, plan: StepPlan) -> StepResult:
        result = super().run(plan)
        targets = [s.frame for o in plan.stores if isinstance(o, Import) for s in o.segments]
        pages = [s.frame for o in plan.stores if isinstance(o, Import) for s in o.segments
                 if s.part != "hidden"]  # fmt: skip
        assert len(set(pages)) == len(pages), "two segments are written into one frame"
        sources = {s.frame for o in plan.stores if isinstance(o, Export) for s in o.segments
                   if s.part != "hidden"}  # fmt: skip
        assert not sources & set(targets), "a frame is both read and written"
        for order in plan.stores:
            self._obey(order)
        self.rng.shuffle(self.reports)
        count = 0 if self.reports_held else self.rng.randint(0, len(self.reports))
        ready, self.reports = self.reports[:count], self.reports[count:]
        return msgspec.structs.replace(result, reports=tuple(ready))

    def _obey(self, order) -> None:
        match order:
            case Export():
                self._export(order)
            case Fetch():
                self._fetch(order)
            case Import():
                for segment in order.segments:
                    self._write(segment, self.fetched[order.ticket].pop(0))
                assert bool(self.fetched[order.ticket]) != order.last
                if order.last:
                    del self.fetched[order.ticket]
            case Forget():
                self.fetched.pop(order.ticket, None)
            case Erase():
                vault = self.vaults[order.tier]
                for address in order.addresses:
                    vault.cells.pop(address, None)

    def _report(self, ticket: int, **more) -> None:
        for rank in range(self.ranks):
            self.reports.append(StoreReport(ticket, rank, **more))

    def _keys(self, segment: Segment) -> list[object]:
        if segment.part == "anchor":
            return ["anchor"]
        if segment.part == "hidden":
            return [("hidden", segment.first)]
        return [(segment.part, row) for row in range(segment.first, segment.last)]

    def _export(self, order: Export) -> None:
        vault = self.vaults[order.tier]
        if vault.fault:
            self._report(order.ticket, error=vault.fault)
            return
        sums = []
        for segment in order.segments:
            cells = {}
            for key in self._keys(segment):
                assert (segment.frame, key) in self.memory, f"{segment}: {key} was never written"
                cells[key] = self.memory[segment.frame, key]
            if segment.part == "hidden":
                cells = {"hidden": cells["hidden", segment.first]}
            if segment.address not in vault.cells:
                vault.cells[segment.address] = cells
                vault.puts += 1
            there = vault.cells[segment.address]
            assert "damaged" in there or there == cells, "one address, two contents"
            sums.append(_sum(cells))
        count = len(sums)
        self._report(order.ticket, sums=tuple(sums), sizes=(SIZE // self.ranks,) * count)

    def _fetch(self, order: Fetch) -> None:
        vault, found = self.vaults[order.tier], []
        if vault.fault:
            self._report(order.ticket, error=vault.fault)
            return
        for segment, wanted in zip(order.segments, order.sums[0], strict=True):
            cells = vault.cells.get(segment.address)
            if cells is None or _sum(cells) != wanted:
                error = "missing" if cells is None else "damaged"
                self._report(order.ticket, error=error, broken=(segment.address,))
                return
            found.append(cells)
        self.fetched[order.ticket] = found
        self._report(order.ticket)

    def _write(self, segment: Segment, cells: dict[object, object]) -> None:
        if segment.part != "hidden":
            for key in [key for key in self.memory if key[0] == segment.frame]:
                del self.memory[key]
        else:
            cells = {("hidden", segment.first): cells["hidden"]}
        for key, value in cells.items():
            self.memory[segment.frame, key] = value


def _sum(cells: dict[object, object]) -> bytes:
    return checksum(repr(sorted(cells.items(), key=repr)).encode())


class StoringHarness(Harness):
    """A harness with tiers ``vaults``; those named in ``shared`` have no catalog here."""

    def __init__(
        self,
        spec,
        vaults: list[Vault],
        *,
        budgets: tuple[int | None, ...] = (),
        shared: frozenset[str] = frozenset(),
        ranks: int = 1,
        seed: int = 0,
        settings: StoreSettings | None = None,
        **options,
    ) -> None:
        super().__init__(spec, **options)
        self.device = StoringDevice(self.spec, options.get("accuracy", 0.5))
        self.device.keep(vaults, ranks, seed)
        self.engine.device = self.device
        identity = Identity(f"test {ranks}", "a test", ranks)
        settings = settings or StoreSettings(wait_s=1.0, step_bytes=3 * 1024, queue=8)
        bell, tickets = Bell(), itertools.count(1)
        self.vaults = vaults
        self.desks = []
        for index, vault in enumerate(vaults):
            catalog = Catalog(budgets[index] if budgets else None)
            clerk = FakeClerk(vault, bell, vault.name in shared)
            if vault.name not in shared:
                for address, data in vault.manifests.items():
                    catalog.add(decode(data, address))
            desk = Desk(index, self.cache, catalog, clerk, identity, settings, tickets)
            self.desks.append(desk)
        self.stores = Stores(
            self.cache, self.desks, identity, settings, frozenset(Kind) - {Kind.ALIGNED},
            bell, tickets,
        )  # fmt: skip
        self.engine.attach(self.stores)

    def drain(self, limit: int = 5000) -> None:
        """To rest, stores included (but for what waits for a tier that has failed)."""
        for _ in range(limit):
            self.step()
            idle = not self.scheduler.busy and not self.engine.inbox
            if idle and self.stores.rest() in (None, 0.5):
                return
        raise AssertionError("the engine does not come to rest")

    def audit(self) -> None:
        super().audit()
        for desk in self.desks:
            if not desk.clerk.shared:
                audit_catalog(desk.catalog)

    def check_vaults(self) -> None:
        """At rest: what is kept is what the catalogs refer to."""
        for desk, vault in zip(self.desks, self.vaults, strict=True):
            if not desk.clerk.shared:
                assert set(vault.cells) == set(desk.catalog.segments), vault.name
                assert set(vault.manifests) == set(desk.catalog.stored), vault.name
                assert not desk.catalog.writing


def audit_catalog(catalog: Catalog) -> None:
    """Re-derive every count of a catalog from its manifests."""
    manifests = [*catalog.stored.values(), *catalog.writing.values()]
    refs: dict[str, int] = {}
    for manifest in manifests:
        for entry in manifest.segments:
            refs[entry.address] = refs.get(entry.address, 0) + 1
    assert {a: held.refs for a, held in catalog.segments.items()} == refs
    for manifest in catalog.stored.values():
        for entry in manifest.segments:
            held = catalog.segments[entry.address]
            assert (held.size, held.sums) == (entry.size, entry.sums)
    ranks = manifests[0].ranks if manifests else 1
    total = sum(catalog.cost(held.size, ranks) for held in catalog.segments.values())
    total += sum(catalog.cost(len(encode(manifest))) for manifest in manifests)
    assert catalog.total == total
    assert catalog.budget is None or total <= catalog.budget or not catalog.stored

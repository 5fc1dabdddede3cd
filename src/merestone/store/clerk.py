"""The clerk of a tier: reads and writes manifests, apart from the engine's thread.

Knows a tier and a lane. What it is done with comes back through ``back``, which runs a call on the
engine's thread.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from merestone.store.chain import Chain
from merestone.store.lane import Lane
from merestone.store.manifest import Manifest, encode
from merestone.store.tier import Recovered, Tier, manifest_name

Back = Callable[[Callable[[], None]], None]


class Shared(Protocol):
    """What a tier offers that others write to as well: nobody has a catalog of it."""

    def announce(self, manifest: Manifest) -> None:
        """Let a written manifest be found."""
        ...

    def find(self, chain: Chain, above: int) -> Manifest | None:
        """The deepest checkpoint of ``chain``'s tokens that is deeper than ``above``."""
        ...


class Clerk:
    """Manifests of one tier. ``shared``: the tier, if others write to it too; ``recovered``: the
    tier, if it remembers across restarts what was used."""

    def __init__(
        self, tier: Tier, back: Back, shared: Shared | None, recovered: Recovered | None
    ) -> None:
        self.tier = tier
        self.shared = shared
        self._recovered = recovered
        self._back = back
        self._lane = Lane(f"merestone-{tier.name}-clerk")

    def write(self, manifest: Manifest, done: Callable[[str], None]) -> None:
        """Write a manifest whose segments are written; ``done`` gets the reason of a failure."""

        def job() -> None:
            self.tier.put(manifest_name(manifest.address), encode(manifest))
            if self.shared is not None:
                self.shared.announce(manifest)

        self._lane.post(job, lambda _, error: self._back(lambda: done(error)))

    def find(self, chain: Chain, above: int, done: Callable[[Manifest | None, str], None]) -> None:
        """Ask a shared tier; ``done`` gets what it has, or why that is not known."""
        shared = self.shared
        assert shared is not None
        self._lane.post(
            lambda: shared.find(chain, above),
            lambda found, error: self._back(lambda: done(found, error)),
        )

    def erase(self, addresses: Sequence[str]) -> None:
        names = [manifest_name(address) for address in addresses]
        if names:
            self._lane.post(lambda: self.tier.erase(names), lambda _, error: None, proof=False)

    def touch(self, address: str) -> None:
        recovered = self._recovered
        if recovered is not None:
            self._lane.post(lambda: recovered.touch(address), lambda _, error: None, proof=False)

    def close(self) -> None:
        self._lane.close()

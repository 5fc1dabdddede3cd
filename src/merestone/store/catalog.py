"""The catalog of a tier: which checkpoints it holds, what they share, and what must go for more.

Decides only: addresses and bytes, no files and no threads. A checkpoint being written holds its
segments like one that is stored, so nothing that it relies on is erased under it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

import msgspec

from merestone.store.chain import Chain
from merestone.store.manifest import SUM, Entry, Manifest, encode


@dataclass(slots=True)
class Held:
    """A segment: bytes over all ranks, checksums once written, checkpoints that consist of it."""

    size: int
    sums: tuple[bytes, ...]
    refs: int = 0


@dataclass(slots=True)
class Waste:
    """What nothing refers to any more: manifests and segments to be erased."""

    manifests: list[str] = field(default_factory=list)
    segments: list[str] = field(default_factory=list)


class Catalog:
    """Checkpoints of one tier, least recently used first, within ``budget`` bytes (None: any).

    ``grain``: every piece, on each rank, takes a multiple of so many bytes.
    """

    def __init__(self, budget: int | None = None, grain: int = 1) -> None:
        self.budget = budget
        self.grain = grain
        self.total = 0
        self.stored: dict[str, Manifest] = {}
        self.writing: dict[str, Manifest] = {}
        self.segments: dict[str, Held] = {}
        self.evicted = 0
        # By the address of the tokens up to the anchor: the token counts of boundaries behind it.
        self._buckets: dict[str, Counter[int]] = {}
        self._lengths: dict[str, int] = {}

    def __contains__(self, address: str) -> bool:
        return address in self.stored or address in self.writing

    def find(self, chain: Chain, above: int) -> Manifest | None:
        """The deepest stored checkpoint of ``chain``'s tokens that is deeper than ``above``."""
        for _, address in self.boundaries(chain, above):
            return self.stored[address]
        return None

    def boundaries(self, chain: Chain, above: int) -> Iterator[tuple[int, str]]:
        """Stored (token count, address) of ``chain``'s tokens, deepest first, above ``above``."""
        for anchor in range(chain.size // chain.chunk * chain.chunk, -1, -chain.chunk):
            if anchor + chain.chunk <= above:
                return
            counts = self._buckets.get(chain.at(anchor)) if self._buckets else None
            for at in sorted(counts or (), reverse=True):
                if above < at <= chain.size and chain.at(at) in self.stored:
                    yield at, chain.at(at)

    def touch(self, address: str) -> None:
        """Note a use."""
        if address in self.stored:
            self.stored[address] = self.stored.pop(address)

    def begin(self, draft: Manifest) -> tuple[set[str], Waste] | None:
        """Start to write a checkpoint that is not here: (segments that are missing, what goes).

        None if it does not fit, even if all that is stored went; nothing goes then.
        """
        assert draft.address not in self
        if self.budget is not None and self._unmovable(draft) > self.budget:
            return None
        missing = {e.address for e in draft.segments if e.address not in self.segments}
        self._hold(draft)
        self.writing[draft.address] = draft
        waste = Waste()
        while self.budget is not None and self.total > self.budget:
            oldest = next(iter(self.stored))
            waste.manifests.append(oldest)
            waste.segments += self.remove(oldest)
            self.evicted += 1
        return missing, waste

    def complete(
        self, draft: Manifest, written: Mapping[str, tuple[int, tuple[bytes, ...]]]
    ) -> Manifest:
        """All segments of ``draft`` are there, ``written`` ones (address to size and sums) now.
        Returns the manifest to write."""
        for address, (size, sums) in written.items():
            held = self.segments[address]
            self.total += self.cost(size, len(sums)) - self.cost(held.size, len(sums))
            held.size, held.sums = size, sums
        entries = tuple(
            Entry(entry.address, held.size, held.sums)
            for entry in draft.segments
            for held in [self.segments[entry.address]]
        )
        manifest = self.writing[draft.address] = msgspec.structs.replace(draft, segments=entries)
        self._measure(manifest)
        return manifest

    def commit(self, address: str) -> None:
        """Its manifest is written: it is found from now on."""
        self._index(self.writing.pop(address))

    def cancel(self, address: str) -> list[str]:
        """It could not be written: give its segments up, and return those to erase."""
        return self._drop(self.writing.pop(address))

    def add(self, manifest: Manifest) -> None:
        """A checkpoint that the tier was found to hold."""
        assert manifest.address not in self
        self._hold(manifest)
        self._index(manifest)

    def remove(self, address: str) -> list[str]:
        """Forget a stored checkpoint; returns the segments to erase."""
        manifest = self.stored.pop(address)
        counts = self._buckets[manifest.bucket]
        counts[manifest.at] -= 1
        if not counts[manifest.at]:
            del counts[manifest.at]
        if not counts:
            del self._buckets[manifest.bucket]
        return self._drop(manifest)

    def lose(self, segments: Iterable[str]) -> Waste:
        """Some segments are not there, or not whole: what consists of them goes too."""
        lost = set(segments)
        waste = Waste()
        for address, manifest in list(self.stored.items()):
            if any(entry.address in lost for entry in manifest.segments):
                waste.manifests.append(address)
                waste.segments += self.remove(address)
        return waste

    def clear(self) -> Waste:
        """Forget all that is stored."""
        waste = Waste()
        for address in list(self.stored):
            waste.manifests.append(address)
            waste.segments += self.remove(address)
        return waste

    def _index(self, manifest: Manifest) -> None:
        self.stored[manifest.address] = manifest
        self._buckets.setdefault(manifest.bucket, Counter())[manifest.at] += 1

    def _unmovable(self, draft: Manifest) -> int:
        """Bytes of ``draft`` and of what is being written."""
        manifests = [*self.writing.values(), draft]
        sizes = {entry.address: entry.size for m in manifests for entry in m.segments}
        whole = sum(self.cost(size, draft.ranks) for size in sizes.values())
        return whole + sum(self.cost(len(encode(manifest))) for manifest in manifests)

    def cost(self, size: int, pieces: int = 1) -> int:
        """Bytes that ``size`` bytes take, in equal ``pieces``."""
        return -(-size // (pieces * self.grain)) * pieces * self.grain

    def _hold(self, manifest: Manifest) -> None:
        self._measure(manifest)
        for entry in manifest.segments:
            held = self.segments.get(entry.address)
            if held is None:
                held = self.segments[entry.address] = Held(entry.size, entry.sums)
                self.total += self.cost(entry.size, manifest.ranks)
            held.refs += 1

    def _measure(self, manifest: Manifest) -> None:
        """Count the bytes of a manifest, as it stands now."""
        length = self.cost(len(encode(manifest)))
        self.total += length - self._lengths.get(manifest.address, 0)
        self._lengths[manifest.address] = length

    def _drop(self, manifest: Manifest) -> list[str]:
        self.total -= self._lengths.pop(manifest.address)
        gone = []
        for entry in manifest.segments:
            held = self.segments[entry.address]
            held.refs -= 1
            if not held.refs:
                del self.segments[entry.address]
                self.total -= self.cost(held.size, manifest.ranks)
                gone.append(entry.address)
        return gone


def blank(entries: Iterable[tuple[str, int]], ranks: int) -> tuple[Entry, ...]:
    """Entries of a draft: addresses and the most bytes that each may take, no checksums yet."""
    return tuple(Entry(address, size, (bytes(SUM),) * ranks) for address, size in entries)

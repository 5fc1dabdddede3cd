"""Recovery: from what a tier was found to hold to its catalog, and nothing else left behind.

Knows manifests and names. Must not know where they are kept.
"""

from __future__ import annotations

from collections import Counter

from merestone.store.catalog import Catalog
from merestone.store.manifest import StoreFault, decode
from merestone.store.tier import Recovered, Tier, manifest_name


def recover(catalog: Catalog, tier: Tier, held: Recovered) -> Counter[str]:
    """Fill an empty catalog; erase what is broken, incomplete, too much or nobody's.

    Checkpoints of other models and layouts count like all others: they are never found, and go
    when they are the least recently used. Returns counts by what became of what was found.
    """
    counts: Counter[str] = Counter()
    sizes: Counter[str] = Counter()
    found = held.segments()
    for name, size in found.items():
        sizes[name.rpartition(".")[0]] += size
    broken = []
    for address, data in held.manifests():
        try:
            manifest = decode(data, address)
        except StoreFault as fault:
            counts[fault.reason] += 1
            broken.append(address)
            continue
        if any(sizes.get(entry.address) != entry.size for entry in manifest.segments):
            counts["incomplete"] += 1
            broken.append(address)
            continue
        catalog.add(manifest)
        counts["checkpoints"] += 1
    while catalog.budget is not None and catalog.total > catalog.budget:
        oldest = next(iter(catalog.stored))
        catalog.remove(oldest)
        counts["over_budget"] += 1
        broken.append(oldest)
    garbage = [name for name in found if name.rpartition(".")[0] not in catalog.segments]
    counts["garbage"] = len(garbage)
    try:
        # Manifests first: what is left of a crash here is garbage again.
        tier.erase([manifest_name(address) for address in broken])
        tier.erase(garbage)
    except StoreFault as fault:
        counts[fault.reason] += 1
    return counts
